"""However the tokens of completions are cut into frames, the frames add up to the same answer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.server.http.middleware import request_id
from asyncllm.server.openai.completions import CompletionReply
from asyncllm.server.openai.requests import CompletionRequest
from asyncllm.types import FinishReason, PromptLogprob, TokenDelta, TokenLogprob
from tests.http.openai.test_chat_cuts import merged
from tests.support.server.fake_llm import FakeTokenizer

TOKENIZER: Any = FakeTokenizer()
PROMPTS = [list("aé".encode()), [120]]


def reply(fields: dict[str, Any]) -> CompletionReply:
    request_id.set("1")
    asked = CompletionRequest(prompt=list(PROMPTS), n=2, **fields)
    echo = [TOKENIZER.decode(prompt) for prompt in PROMPTS] if asked.echo else None
    return CompletionReply(asked, "m", PROMPTS, TOKENIZER, echo)


def scores_of(prompt: list[int]) -> list[PromptLogprob | None]:
    top = ((98, -0.5), (99, -1.5))
    return [None, *(PromptLogprob(token, -2.0, top, 7) for token in prompt[1:])]


def deltas_of(text: str, prompt: list[int] | None) -> list[TokenDelta]:
    """One token per byte; a character comes with its last byte. ``prompt`` is one that is scored,
    whose logprobs come before the first token or with it."""
    deltas = []
    for char in text:
        data = char.encode()
        for i, byte in enumerate(data, 1):
            entry = TokenLogprob(byte, -0.5, ((byte, -0.5), (98, -3.0)))
            deltas.append(TokenDelta(char if i == len(data) else "", [byte], [entry]))
    deltas[-1].finish_reason = FinishReason.LENGTH
    if prompt is not None:
        deltas.insert(0, TokenDelta(prompt_logprobs=scores_of(prompt)))
    return deltas


def add_up(frames: bytes) -> list[dict[str, Any]]:
    """What a client makes of a stream's frames."""
    choices: list[dict[str, Any]] = [{"text": "", "token_ids": [], "logprobs": {}} for _ in "1234"]
    for line in frames.decode().split("\n\n")[:-1]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            into = choices[choice["index"]]
            into["text"] += choice["text"]
            into["token_ids"] += choice.get("token_ids", [])
            for name, values in (choice["logprobs"] or {}).items():
                into["logprobs"].setdefault(name, []).extend(values)
            for name in ("prompt_logprobs", "prompt_token_ids", "prompt_text", "stop_reason"):
                if name in choice:
                    assert name not in into, "it comes once"
                    into[name] = choice[name]
            assert into.get("finish_reason") is None, "nothing comes after the end"
            into["finish_reason"] = choice["finish_reason"]
    return choices


FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "echo": st.just(True),
        "logprobs": st.integers(0, 2),
        "prompt_logprobs": st.integers(0, 2),
        "return_token_ids": st.just(True),
        "return_prompt_text": st.just(True),
        "return_tokens_as_token_ids": st.just(True),
    },
)


@settings(max_examples=300)
@given(
    data=st.data(),
    fields=FIELDS,
    texts=st.lists(st.text("aé🙂", min_size=1), min_size=4, max_size=4),
)
def test_any_cut_and_order_gives_the_same(
    data: st.DataObject, fields: Any, texts: list[str]
) -> None:
    scored = "prompt_logprobs" in fields or ("echo" in fields and "logprobs" in fields)
    parts = [
        deltas_of(text, PROMPTS[i // 2] if scored and i % 2 == 0 else None)
        for i, text in enumerate(texts)
    ]
    if "logprobs" not in fields:
        for part in parts:
            for delta in part:
                delta.logprobs = None
    whole = json.loads(reply(fields).body([merged(part) for part in parts]))["choices"]
    streaming = reply({**fields, "stream": True})
    frames = streaming.opening()
    # Deltas of the choices come in any order; those of one that wait for each other merge.
    waiting = list(range(4))
    while waiting:
        index = data.draw(st.sampled_from(waiting))
        count = data.draw(st.integers(1, len(parts[index])))
        frames += streaming.frames(index, merged(parts[index][:count]))
        del parts[index][:count]
        if not parts[index]:
            waiting.remove(index)
    expected = [
        {
            **{name: value for name, value in choice.items() if name != "index"},
            "logprobs": choice["logprobs"] or {},
            "token_ids": choice.get("token_ids", []),
        }
        for choice in whole
    ]
    assert add_up(frames) == expected


def test_a_choice_that_is_aborted_before_its_prompt_is_scored_ends() -> None:
    streaming = reply({"stream": True, "echo": True, "logprobs": 1})
    frames = streaming.opening()
    assert frames == b""
    for index in range(4):
        frames += streaming.frames(index, TokenDelta(finish_reason=FinishReason.ABORT))
    choices = add_up(frames)
    assert [choice["finish_reason"] for choice in choices] == ["abort"] * 4
    assert [choice["text"] for choice in choices] == ["aé", "aé", "x", "x"]
