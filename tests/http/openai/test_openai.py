"""The two OpenAI routes: shapes on the wire, and the official client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import openai
import pytest

from asyncllm.config import EngineConfig
from asyncllm.version import __version__
from tests.support.server.fake_llm import EOS, FakeLLM
from tests.support.server.serving import serving

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletionMessageParam

    from tests.support.server.serving import Server

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "héllo 🙂"}]
ECHO = "user: héllo 🙂\nassistant: "


def test_chat_shape(server: Server) -> None:
    answer = server.post("/v1/chat/completions", {"messages": HELLO, "model": "fake"})
    body = answer.json
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert body.pop("id") == "chatcmpl-" + answer.headers["X-Request-Id"]
    assert isinstance(body.pop("created"), int)
    prompt, completion = len(ECHO.encode()), len(ECHO.encode()) + 1
    assert body == {
        "object": "chat.completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ECHO, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_answers_have_a_fingerprint_where_they_do_not_depend_on_others() -> None:
    llm = FakeLLM()
    llm.config = EngineConfig(deterministic=True, tp=2)
    with serving(lambda: llm) as server:
        for path in ("/v1/chat/completions", "/v1/completions"):
            body = {"messages": HELLO} if "chat" in path else {"prompt": "a b"}
            frames = server.post(path, body | {"stream": True}).frames
            found = {
                answer["system_fingerprint"] for answer in [server.post(path, body).json, *frames]
            }
            assert found == {f"asyncllm-{__version__}-deterministic-tp2"}


def test_chat_stream_shape(server: Server) -> None:
    body = {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}}
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-cache"
    assert answer.headers["X-Accel-Buffering"] == "no"
    first, *middle, last, usage = answer.frames
    for frame in answer.frames:
        assert frame["id"] == "chatcmpl-" + answer.headers["X-Request-Id"]
        assert frame["object"] == "chat.completion.chunk"
        assert frame["model"] == "fake"
    head = {"index": 0, "logprobs": None, "finish_reason": None}
    assert first["choices"] == [{**head, "delta": {"role": "assistant", "content": ""}}]
    for frame in middle:
        [choice] = frame["choices"]
        assert choice == {**head, "delta": {"content": choice["delta"]["content"]}}
    assert "".join(f["choices"][0]["delta"]["content"] for f in middle) == ECHO
    assert last["choices"] == [{**head, "delta": {}, "finish_reason": "stop", "stop_reason": None}]
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(ECHO.encode()) + 1
    assert [frame["usage"] for frame in [first, *middle, last]] == [None] * (len(middle) + 2)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_usage_comes_on_demand(server: Server, path: str) -> None:
    """Then every frame has the field: null, but for the last one."""
    body = {"messages": HELLO} if "chat" in path else {"prompt": "a b"}
    assert not any("usage" in frame for frame in server.post(path, body | {"stream": True}).frames)
    for more in ({}, {"return_token_ids": True}, {"echo": True} if "prompt" in body else {"n": 2}):
        options = {"stream": True, "stream_options": {"include_usage": True}}
        *frames, last = server.post(path, body | options | more).frames
        assert len(frames) > 2
        assert all(frame["usage"] is None for frame in frames)
        assert last["usage"]["total_tokens"] > 0


def test_chat_usage_in_every_frame(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    body = {"messages": HELLO, "stream": True, "stream_options": options}
    frames = server.post("/v1/chat/completions", body).frames
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts[0] == 0
    assert counts == sorted(counts)
    assert counts[-1] == len(ECHO.encode()) + 1


def test_chat_logprobs(server: Server) -> None:
    body = {"messages": HELLO, "logprobs": True, "top_logprobs": 2, "max_tokens": 8}
    whole = server.post("/v1/chat/completions", body).json["choices"][0]["logprobs"]
    assert [entry["token"] for entry in whole["content"][:2]] == ["u", "s"]
    assert whole["content"][0] == {
        "token": "u",
        "logprob": -0.5,
        "bytes": [117],
        "top_logprobs": [
            {"token": "u", "logprob": -0.5, "bytes": [117]},
            {"token": "v", "logprob": -9999.0, "bytes": [118]},
        ],
    }
    assert whole["content"][7]["token"] == "bytes:\\xc3"  # the first half of é
    frames = server.post("/v1/chat/completions", {**body, "stream": True}).frames
    streamed = [f["choices"][0]["logprobs"] for f in frames]
    assert [e for logprobs in streamed if logprobs for e in logprobs["content"]] == whole["content"]


def test_completions_shape(server: Server) -> None:
    body = server.post("/v1/completions", {"prompt": "abc", "add_special_tokens": False}).json
    assert body.pop("id").startswith("cmpl-")
    del body["created"]
    assert body == {
        "object": "text_completion",
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "text": "abc",
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


def test_completions_stream_shape(server: Server) -> None:
    frames = server.post("/v1/completions", {"prompt": "abc", "stream": True}).frames
    assert {frame["object"] for frame in frames} == {"text_completion"}
    head = {"index": 0, "logprobs": None, "finish_reason": None}
    assert [frame["choices"] for frame in frames] == [
        [{**head, "text": "a"}],
        [{**head, "text": "b"}],
        [{**head, "text": "c"}],
        [{**head, "text": "", "finish_reason": "stop", "stop_reason": None}],
    ]


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_completions_prompt_forms(
    server: Server, prompt: Any, texts: list[str], stream: bool, echo: bool
) -> None:
    """Choices come as i * n + j, whatever the form of the prompt."""
    body = {"prompt": prompt, "n": 2, "best_of": 2, "stream": stream, "echo": echo}
    answer = server.post("/v1/completions", body)
    choices = [frame["choices"][0] for frame in answer.frames] if stream else answer.json["choices"]
    got = [""] * len(texts) * 2
    for choice in choices:
        got[choice["index"]] += choice["text"]
    assert got == [text * (1 + echo) for text in texts for _ in range(2)]


def test_completions_logprobs(server: Server) -> None:
    body = {"prompt": "aé", "logprobs": 1}
    whole = server.post("/v1/completions", body).json["choices"][0]["logprobs"]
    assert whole["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", ""]
    assert whole["text_offset"] == [0, 1, 1, 2]
    assert whole["token_logprobs"] == [-0.5] * 4
    assert whole["top_logprobs"][0] == {"a": -0.5}
    assert all(t in top for t, top in zip(whole["tokens"], whole["top_logprobs"], strict=True))
    frames = server.post("/v1/completions", {**body, "stream": True}).frames
    for name, values in whole.items():
        assert [v for f in frames for v in f["choices"][0]["logprobs"][name]] == values


def test_token_ids(server: Server) -> None:
    body = {"prompt": "ab", "return_token_ids": True, "add_special_tokens": False}
    [choice] = server.post("/v1/completions", body).json["choices"]
    assert choice["prompt_token_ids"] == [97, 98]
    assert choice["token_ids"] == [97, 98, EOS]
    first, *rest = server.post("/v1/completions", {**body, "stream": True}).frames
    assert first["choices"][0]["prompt_token_ids"] == [97, 98]
    assert [t for f in rest for t in f["choices"][0]["token_ids"]] == [97, 98, EOS]
    chat = {"messages": HELLO, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", chat).json
    assert answer["prompt_token_ids"] == list(ECHO.encode())
    assert answer["choices"][0]["token_ids"] == [*ECHO.encode(), EOS]
    first, *rest = server.post("/v1/chat/completions", {**chat, "stream": True}).frames
    assert first["prompt_token_ids"] == list(ECHO.encode())
    streamed = [t for f in rest for t in f["choices"][0].get("token_ids", ())]
    assert streamed == [*ECHO.encode(), EOS]


def test_sampling_fields_reach_the_engine(server: Server) -> None:
    fields: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "seed": 2**63 - 1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    extra = {"stop": "x", "stop_token_ids": [3], "max_tokens": 9, "max_completion_tokens": 5}
    body = {"messages": HELLO, "n": 2, "top_logprobs": 3, "logprobs": True}
    server.post("/v1/chat/completions", body | fields | extra)
    first, second = server.llm.params[-2:]
    assert {name: getattr(first, name) for name in fields} == fields
    assert (first.stop, first.stop_token_ids) == (("x",), (3,))
    assert (first.max_tokens, first.logprobs) == (5, 3)
    assert second.seed == -(2**63)  # the next seed, which wraps around

    server.post("/v1/chat/completions", {"messages": HELLO})
    assert server.llm.params[-1] == server.llm.default_params
    server.post("/v1/completions", {"prompt": "a", "logprobs": 0, "stop": ["x", "y"]})
    params = server.llm.params[-1]
    assert (params.max_tokens, params.logprobs, params.stop) == (16, 0, ("x", "y"))


def test_chat_template_options(server: Server) -> None:
    template = server.llm.chat_template
    assert template is not None
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    body = {
        "messages": messages,
        "tools": tools,
        "tool_choice": "auto",
        "continue_final_message": True,
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert server.post("/v1/chat/completions", body).status == 200
    assert template.seen == (
        messages,
        {
            "tools": tools,
            "add_generation_prompt": False,
            "continue_final_message": True,
            "reasoning_effort": "low",
            "enable_thinking": False,
        },
    )


def test_allowed_tools(server: Server, client: openai.OpenAI) -> None:
    """Those that are not allowed the model does not even see."""
    named: list[Any] = [{"type": "function", "function": {"name": name}} for name in "abc"]
    allowed = {"mode": "auto", "tools": [named[2], named[1]]}
    choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
    fields: dict[str, Any] = {"messages": HELLO, "tools": named, "tool_choice": choice}
    client.chat.completions.create(model="fake", **fields)
    template: Any = server.llm.chat_template
    assert template.seen[1]["tools"] == named[1:]
    rendered = [
        server.post(f"{path}", fields | more).status
        for path in ("/v1/chat/completions/render", "/tokenize")
        for more in ({}, {"tools": named[:2]})
    ]
    assert rendered == [200, 400, 200, 400]


def test_client_chat(client: openai.OpenAI) -> None:
    completion = client.chat.completions.create(
        model="fake", messages=HELLO, n=2, logprobs=True, top_logprobs=1, stop=["l"]
    )
    for choice in completion.choices:
        assert choice.message.content == "user: hé"
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert choice.logprobs.content[0].top_logprobs[0].token == "u"
    assert completion.usage is not None
    assert completion.usage.total_tokens == len(ECHO.encode()) + 2 * 10


def test_client_chat_stream(client: openai.OpenAI) -> None:
    texts = ["", ""]
    usage = None
    for chunk in client.chat.completions.create(
        model="fake", messages=HELLO, n=2, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [ECHO, ECHO]
    assert usage is not None
    assert usage.completion_tokens == 2 * (len(ECHO.encode()) + 1)


def test_client_completions(client: openai.OpenAI) -> None:
    completion = client.completions.create(model="fake", prompt="abc", max_tokens=2, logprobs=1)
    assert completion.choices[0].text == "ab"
    assert completion.choices[0].finish_reason == "length"
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == ["a", "b"]
    stream = client.completions.create(model="fake", prompt=[[97, 98]], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "ab"


def test_client_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="other", prompt="a")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="fake", prompt="a" * 5000, stream=True)
    assert too_long.value.code == "context_length_exceeded"


async def test_async_client(server: Server) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0
    ) as client:
        completion = await client.chat.completions.create(model="fake", messages=HELLO)
        assert completion.choices[0].message.content == ECHO
        text = ""
        async for chunk in await client.chat.completions.create(
            model="fake", messages=HELLO, stream=True
        ):
            text += chunk.choices[0].delta.content or ""
        assert text == ECHO
