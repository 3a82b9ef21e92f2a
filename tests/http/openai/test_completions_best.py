"""``best_of``: the answers with the highest mean logprob."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from asyncllm.server.http.middleware import request_id
from asyncllm.server.openai.completions import CompletionReply
from asyncllm.server.openai.requests import CompletionRequest
from asyncllm.types import FinishReason, TokenDelta, TokenLogprob
from tests.support.server.fake_llm import FakeTokenizer

if TYPE_CHECKING:
    from tests.support.server.serving import Server

TOKENIZER: Any = FakeTokenizer()


def output(text: str, *logprobs: float) -> TokenDelta:
    tokens = list(text.encode())
    entries = [TokenLogprob(token, lp) for token, lp in zip(tokens, logprobs, strict=True)]
    return TokenDelta(text, tokens, entries, FinishReason.LENGTH, cached_tokens=len(text))


def answer(outputs: list[TokenDelta], **fields: Any) -> dict[str, Any]:
    request_id.set("1")
    asked = CompletionRequest(prompt=[[1, 2], [3]], **fields)
    reply = CompletionReply(asked, "m", [[1, 2], [3]], TOKENIZER, None)
    body: dict[str, Any] = json.loads(reply.body(outputs))
    return body


def test_the_mean_counts_and_not_the_sum() -> None:
    outputs = [
        output("aaa", -1.0, -1.0, -1.0),
        output("b", -1.5),
        output("cc", -0.5, -1.2),
        output("d", -9.0),
        output("ee", -2.0, -1.0),
        output("f", -3.0),
    ]
    body = answer(outputs, n=2, best_of=3)
    assert [choice["text"] for choice in body["choices"]] == ["cc", "aaa", "ee", "f"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 10, "all that was generated"
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 3, "not more than there are"


def test_as_many_as_asked_for_are_generated(server: Server) -> None:
    before = len(server.llm.params)
    body = {"prompt": ["ab", "c"], "n": 2, "best_of": 5, "temperature": 1, "seed": 7}
    answer = server.post("/v1/completions", body).json
    params = server.llm.params[before:]
    assert [p.seed for p in params] == [7, 8, 9, 10, 11] * 2
    assert all(p.logprobs == 0 for p in params), "they are needed to choose"
    assert [choice["text"] for choice in answer["choices"]] == ["ab", "ab", "c", "c"]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    assert answer["usage"]["completion_tokens"] == 5 * 3 + 5 * 2


def test_chat_has_it_too(server: Server) -> None:
    messages = [{"role": "user", "content": "a"}]
    answer = server.post("/v1/chat/completions", {"messages": messages, "best_of": 3}).json
    [choice] = answer["choices"]
    assert choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 3 * (len("user: a\nassistant: ") + 1)


def test_it_is_not_streamed(server: Server) -> None:
    body = {"prompt": "a", "n": 1, "best_of": 2, "stream": True}
    answer = server.post("/v1/completions", body)
    assert (answer.status, answer.json["error"]["param"]) == (400, "best_of")
    assert server.post("/v1/completions", {**body, "best_of": 1}).status == 200


def test_greedy_answers_may_be_several(server: Server) -> None:
    body = {"prompt": "ab", "n": 3, "temperature": 0}
    answer = server.post("/v1/completions", body).json
    assert [choice["text"] for choice in answer["choices"]] == ["ab"] * 3


def test_the_official_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        completion = client.completions.create(model="fake", prompt="abc", n=1, best_of=3)
        assert [choice.text for choice in completion.choices] == ["abc"]
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="fake", prompt="abc", n=3, best_of=2)
        assert caught.value.param == "best_of"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_beams_are_answers_like_others(server: Server, route: str, stream: bool) -> None:
    body: dict[str, Any] = {"prompt": ["ab", "c"], "messages": [{"role": "user", "content": "x"}]}
    body |= {"use_beam_search": True, "n": 2, "best_of": 3, "stream": stream}
    answer = server.post(route, body)
    assert answer.status == 200
    texts = {"/v1/completions": ["ab", "ab", "c", "c"]}.get(route, ["user: x\nassistant: "] * 2)
    got = [""] * len(texts)
    for part in answer.frames if stream else [answer.json]:
        for choice in part["choices"]:
            message = choice.get("delta") or choice.get("message") or choice
            got[choice["index"]] += message.get("content") or message.get("text") or ""
    assert got == texts
