"""logit_bias, allowed_token_ids and bad_words as clients send them, to the demo model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import aiohttp
import openai
import pytest

from asyncllm import Client, SamplingParams
from asyncllm.errors import BadRequest
from tests.support.server.serving import Server

MODEL = "asyncllm-demo"
COUNT: Any = [{"role": "user", "content": "Count from 1 to 9."}]


@pytest.fixture
def client(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="unused", max_retries=0) as made:
        yield made


async def post(demo: Server, path: str, body: Any) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{demo.url}{path}", json=body) as response,
    ):
        return response.status, await response.json()


async def tokens_of(demo: Server, text: str) -> list[int]:
    _, answer = await post(demo, "/tokenize", {"prompt": text, "add_special_tokens": False})
    tokens: list[int] = answer["tokens"]
    return tokens


def chat(client: openai.OpenAI, **options: Any) -> str:
    answer = client.chat.completions.create(
        model=MODEL, messages=COUNT, temperature=0, max_tokens=24, **options
    )
    return answer.choices[0].message.content or ""


async def test_a_bias_bans_and_forces(demo: Server, client: openai.OpenAI) -> None:
    free = chat(client)
    [comma] = await tokens_of(demo, ",")
    assert "," in free
    assert "," not in chat(client, logit_bias={str(comma): -100})
    assert set(chat(client, logit_bias={str(comma): 100})) == {","}
    streamed = client.chat.completions.create(
        model=MODEL, messages=COUNT, max_tokens=5, logit_bias={str(comma): 100}, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed)
    assert text == ",,,,,"
    assert chat(client, logit_bias={}) == free


async def test_allowed_tokens_are_all_there_is(demo: Server, client: openai.OpenAI) -> None:
    allowed = [token for word in (" yes", " no") for token in (await tokens_of(demo, word))[:1]]
    for n in (1, 3):
        answer = client.completions.create(
            model=MODEL, prompt="Is it?", max_tokens=6, n=n, seed=4,
            extra_body={"allowed_token_ids": allowed, "return_token_ids": True},
        )  # fmt: skip
        for choice in answer.choices:
            assert choice.model_extra is not None
            assert set(choice.model_extra["token_ids"]) <= set(allowed)
            assert choice.finish_reason == "length"


def test_bad_words_do_not_come(client: openai.OpenAI) -> None:
    assert "3" in chat(client)
    for bad in (["3"], [" 3", "5"], ["2, 3", "4, 5"]):
        text = chat(client, extra_body={"bad_words": bad})
        assert text
        assert not any(word.strip() in text for word in bad)
    assert chat(client, extra_body={"bad_words": []}) == chat(client)


def test_constraints_with_a_seed_repeat(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL, messages=COUNT, max_tokens=12, n=3, seed=seed, temperature=1.5,
            logit_bias={"300": 4, "301": 4}, extra_body={"bad_words": ["1, 2", "the"], "top_k": 50},
        )  # fmt: skip
        return [choice.message.content or "" for choice in answer.choices]

    assert draw(5) == draw(5) != draw(6)


async def test_the_client_asks_for_the_same(demo: Server) -> None:
    params = SamplingParams(
        temperature=0.0,
        max_tokens=8,
        logit_bias={300: 2.5},
        allowed_token_ids=tuple(range(250, 600)),
        bad_words=("one", "1, 2", (301,)),
    )
    async with Client(f"{demo.url}/v1") as client:
        completion = await client.generate("Once", params)
        assert set(completion.token_ids) <= {*range(250, 301), *range(302, 600)}
        with pytest.raises(BadRequest) as caught:
            await client.generate("Once", SamplingParams(logit_bias={10**6: 1.0}))
        assert caught.value.param == "logit_bias"


async def test_what_leaves_no_token_is_told(demo: Server) -> None:
    body = {"prompt": "Once", "max_tokens": 9, "allowed_token_ids": [300]}
    status, answer = await post(demo, "/v1/completions", body | {"bad_words": [[300, 300]]})
    assert (status, answer["error"]["code"]) == (400, "constraint_failed")
    status, answer = await post(demo, "/v1/completions", body)
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")


BAD: list[tuple[str, Any]] = [
    ("logit_bias", {"1": 101}),
    ("logit_bias", {"1": -100.5}),
    ("logit_bias", {"one": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"1.5": 1}),
    ("logit_bias", {"99999999": 1}),
    ("logit_bias", {"99999999999999999999": 1}),
    ("logit_bias", {"1": None}),
    ("logit_bias", [1]),
    ("logit_bias", {str(token): 1 for token in range(1025)}),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [-1]),
    ("allowed_token_ids", [10**6]),
    ("allowed_token_ids", ["a"]),
    ("bad_words", "word"),
    ("bad_words", [""]),
    ("bad_words", [1]),
    ("bad_words", [[10**6]]),
    ("bad_words", ["w"] * 257),
    ("bad_words", ["\ud800"]),
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
async def test_bad_values_are_named(demo: Server, path: str) -> None:
    body: dict[str, Any] = {"max_tokens": 2}
    body |= {"messages": COUNT} if "chat" in path else {"prompt": "Once"}
    for name, value in BAD:
        status, answer = await post(demo, path, {**body, name: value})
        error = answer.get("error")
        assert status == 400, (name, value, answer)
        assert error["type"] == "invalid_request_error"
        assert str(error["param"]).startswith(name) or value == ["\ud800"], (value, error)


def test_fields_reach_the_engine(server: Server) -> None:
    fields = {"logit_bias": {"5": 1}, "allowed_token_ids": [5, 6], "bad_words": ["x", [1, 2]]}
    for path, prompt in (
        ("/v1/chat/completions", {"messages": COUNT}),
        ("/v1/completions", {"prompt": "a"}),
        ("/generate", {"prompt": "a"}),
    ):
        assert server.post(path, {**prompt, **fields}).status == 200
        params = server.llm.params[-1]
        assert params.logit_bias == {5: 1.0}
        assert params.allowed_token_ids == (5, 6)
        assert params.bad_words == ("x", (1, 2))
