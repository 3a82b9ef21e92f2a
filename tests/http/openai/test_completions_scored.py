"""Logprobs of prompts, echoed or on their own, over HTTP; and prompts that are cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.support.server.fake_llm import BOS, EOS

if TYPE_CHECKING:
    from tests.support.server.serving import Answer, Server


def choices_of(answer: Answer, count: int = 1) -> list[dict[str, Any]]:
    """What a client makes of an answer, be it streamed or not, by index."""
    assert answer.status == 200, answer.body
    if answer.headers["Content-Type"] == "application/json":
        choices: list[dict[str, Any]] = answer.json["choices"]
        return choices
    whole: list[dict[str, Any]] = [{} for _ in range(count)]
    for frame in answer.frames:
        for choice in frame["choices"]:
            into = whole[choice.pop("index")]
            into["text"] = into.get("text", "") + choice.pop("text")
            for name, values in (choice.pop("logprobs") or {}).items():
                lists = into.setdefault("logprobs", {})
                lists[name] = lists.get(name, []) + values
            into.update({name: value for name, value in choice.items() if value is not None})
    return whole


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_begins_with_the_prompt(server: Server, stream: bool) -> None:
    body = {"prompt": "aé", "echo": True, "logprobs": 2, "max_tokens": 2, "stream": stream}
    [choice] = choices_of(server.post("/v1/completions", body))
    assert choice["text"] == "aéa"  # the second token is half of é
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["", "a", "bytes:\\xc3", "bytes:\\xa9", "a", "bytes:\\xc3"]
    assert logprobs["token_logprobs"] == [None, -0.25, -0.25, -0.25, -0.5, -0.5]
    assert logprobs["text_offset"] == [0, 0, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][1] == {"a": -0.25, "b": -9999.0}
    assert len(logprobs["top_logprobs"]) == 6
    assert server.llm.params[-1].prompt_logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_only_score_the_prompt(server: Server, stream: bool) -> None:
    """What lm-evaluation-harness asks for."""
    body: dict[str, Any] = {"prompt": [[97, 98], [99]], "echo": True, "logprobs": 1}
    body |= {"max_tokens": 0, "stream": stream, "temperature": 0}
    first, second = choices_of(server.post("/v1/completions", body), 2)
    assert (first["text"], second["text"]) == ("ab", "c")
    assert first["finish_reason"] == second["finish_reason"] == "length"
    assert first["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [None, -0.25],
        "top_logprobs": [None, {"b": -0.25}],
        "text_offset": [0, 1],
    }
    assert second["logprobs"]["token_logprobs"] == [None]
    nothing = choices_of(server.post("/v1/completions", {"prompt": "ab", "max_tokens": 0}))
    assert nothing[0]["text"] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_is_scored_once_for_all_its_answers(server: Server, stream: bool) -> None:
    body = {"prompt": ["ab", "cde"], "n": 2, "echo": True, "logprobs": 0, "stream": stream}
    choices = choices_of(server.post("/v1/completions", body), 4)
    assert [params.prompt_logprobs for params in server.llm.params[-4:]] == [0, None, 0, None]
    assert [choice["text"] for choice in choices] == ["abab", "abab", "cdecde", "cdecde"]
    for choice in choices:
        assert choice["logprobs"]["token_logprobs"][:3] == [None, -0.25, -0.25]
        num_prompt = len(choice["text"]) // 2
        assert choice["logprobs"]["token_logprobs"][num_prompt + 1 :] == [-0.5] * (num_prompt + 1)


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_logprobs_have_the_shape_of_vllm(server: Server, stream: bool) -> None:
    body = {"prompt": "ab", "prompt_logprobs": 2, "add_special_tokens": False, "stream": stream}
    [choice] = choices_of(server.post("/v1/completions", body))
    expected = [
        None,
        {
            "98": {"logprob": -0.25, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": -9999.0, "rank": 2, "decoded_token": "c"},
        },
    ]
    assert choice["prompt_logprobs"] == expected
    assert choice["text"] == "ab"
    chat = {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 2, "stream": stream}
    answer = server.post("/v1/chat/completions", chat)
    bodies = answer.frames if stream else [answer.json]
    [scores] = [body["prompt_logprobs"] for body in bodies if "prompt_logprobs" in body]
    assert scores[0] is None
    assert scores[1]["115"] == {"logprob": -0.25, "rank": 1, "decoded_token": "s"}
    assert len(scores) == len("user: x\nassistant: ")


def test_too_many_logprobs_are_not_streamed(server: Server) -> None:
    body = {"prompt": "a" * 3000, "prompt_logprobs": 20, "max_tokens": 1, "stream": True}
    answer = server.post("/v1/completions", body)
    assert (answer.status, answer.json["error"]["param"]) == (400, "prompt_logprobs")
    assert server.post("/v1/completions", {**body, "stream": False}).status == 200


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_prompt_comes_back(server: Server, route: str, stream: bool) -> None:
    asked = {"return_prompt_text": True, "return_token_ids": True, "stream": stream}
    prompt = {"prompt": "ab", "messages": [{"role": "user", "content": "ab"}]}
    answer = server.post(route, {**asked, **prompt})
    body = answer.frames[0] if stream else answer.json
    if route == "/v1/completions":
        body = body["choices"][0]
        assert (body["prompt_text"], body["prompt_token_ids"]) == ("ab", [BOS, 97, 98])
    else:
        assert body["prompt_text"] == "user: ab\nassistant: "


@pytest.mark.parametrize(
    ("fields", "kept"),
    [
        ({"truncate_prompt_tokens": 2}, "fg"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "left"}, "fg"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ({"truncate_prompt_tokens": 7}, "abcdefg"),
        ({"truncate_prompt_tokens": -1}, "abcdefg"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 4094}, "fg"),
    ],
)
def test_prompts_are_cut(server: Server, fields: dict[str, Any], kept: str) -> None:
    body = {"prompt": "abcdefg", "add_special_tokens": False, "echo": True, "max_tokens": 3}
    answer = server.post("/v1/completions", {**body, **fields}).json
    [choice] = answer["choices"]
    assert choice["text"].startswith(kept)
    assert answer["usage"]["prompt_tokens"] == len(kept)


def test_texts_longer_than_the_context_are_cut(server: Server) -> None:
    text = "a" * 4096 + "xyz"
    body = {"prompt": text, "truncate_prompt_tokens": -1, "max_tokens": 6, "echo": True}
    answer = server.post("/v1/completions", body).json
    assert answer["usage"]["prompt_tokens"] == 4090
    assert answer["choices"][0]["text"][:4090] == text[-4090:]
    chat = {"messages": [{"role": "user", "content": text}], "truncate_prompt_tokens": 20}
    answer = server.post("/v1/chat/completions", {**chat, "return_prompt_text": True}).json
    assert answer["prompt_text"] == "aaaaaxyz\nassistant: "
    template = {"messages": chat["messages"], "chat_template_kwargs": {"any_length": True}}
    assert server.post("/v1/chat/completions", template).status == 400


def test_tokens_can_be_called_by_their_ids(server: Server) -> None:
    body = {"prompt": "a", "logprobs": 2, "return_tokens_as_token_ids": True}
    logprobs = server.post("/v1/completions", body).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:97", f"token_id:{EOS}"]
    assert logprobs["top_logprobs"][0] == {"token_id:97": -0.5, "token_id:98": -9999.0}
    chat: dict[str, Any] = {"messages": [{"role": "user", "content": "é"}], "max_tokens": 8}
    chat |= {"logprobs": True, "top_logprobs": 1, "return_tokens_as_token_ids": True}
    content = server.post("/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    assert content[6]["token"] == f"token_id:{0xC3}"
    assert content[6]["bytes"] == [0xC3]
    assert content[6]["top_logprobs"][0]["token"] == f"token_id:{0xC3}"


def test_bytes_of_half_a_character_are_its_own(server: Server) -> None:
    chat = {"messages": [{"role": "user", "content": "🙂"}], "logprobs": True, "max_tokens": 10}
    content = server.post("/v1/chat/completions", chat).json["choices"][0]["logprobs"]["content"]
    entries = content[6:10]
    assert [entry["bytes"] for entry in entries] == [[byte] for byte in "🙂".encode()]
    assert entries[0]["token"] == "bytes:\\xf0"


def test_the_official_client_reads_scores(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        scored = client.completions.create(
            model="fake", prompt="abc", echo=True, logprobs=1, max_tokens=0
        )
        logprobs = scored.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert list(logprobs.token_logprobs) == [None, -0.25, -0.25, -0.25]
        assert logprobs.text_offset == [0, 0, 1, 2]
        assert scored.usage is not None
        assert scored.usage.completion_tokens == 0
