"""POST /v1/embeddings: what may be asked, in which order answers come, and what is refused."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai
import pytest

from asyncllm import Client, EmbeddingParams, SchedulingParams
from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.pooling import PooledParams
from asyncllm.errors import BadRequest
from asyncllm.server.streaming.delivery import HIDDEN_SHARE, LARGE_ANSWER
from tests.http.http.test_errors import check
from tests.support.server.fake_llm import BOS, EMBEDDING_SIZE, MAX_LEN, hidden_of
from tests.support.server.serving import Server, serving

PATH = "/v1/embeddings"


def vector(tokens: Sequence[int], **fields: Any) -> np.ndarray:
    return EmbeddingParams(**fields).vector(hidden_of(tokens))


def vectors(server: Server, **body: Any) -> list[Any]:
    answer = server.post(PATH, body)
    assert answer.status == 200, answer.body
    data = answer.json["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("abc", [[BOS, 97, 98, 99]]),
        (["abc", "d", "é"], [[BOS, 97, 98, 99], [BOS, 100], [BOS, 0xC3, 0xA9]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
    ],
)
def test_inputs_of_every_form(server: Server, given: Any, prompts: list[list[int]]) -> None:
    found = vectors(server, input=given)
    assert found == [vector(prompt[-1:]).tolist() for prompt in prompts], "the last token's"
    found = vectors(server, input=given, pooling="mean", normalize=False)
    assert found == [vector(prompt, normalize=False).tolist() for prompt in prompts]


def test_an_answer(server: Server) -> None:
    answer = server.post(PATH, {"model": "fake", "input": ["ab", "c"], "user": "me"})
    assert answer.headers["Content-Type"].startswith("application/json")
    assert "X-Ignored-Parameters" not in answer.headers
    body = answer.json
    assert body.keys() == {"object", "data", "model", "usage"}
    assert (body["object"], body["model"]) == ("list", "fake")
    assert [entry["object"] for entry in body["data"]] == ["embedding"] * 2
    assert body["usage"] == {
        "prompt_tokens": 5,
        "total_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    params = server.llm.params[-1]
    assert isinstance(params, PooledParams)
    assert (params.max_tokens, params.pooling) == (0, "last")


def test_base64_is_float32(server: Server) -> None:
    fields = {"input": ["abc", "d"], "pooling": "mean", "dimensions": 5}
    plain = vectors(server, **fields)
    packed = vectors(server, **fields, encoding_format="base64")
    for numbers, text in zip(plain, packed, strict=True):
        assert isinstance(text, str)
        assert np.frombuffer(base64.b64decode(text), "<f4").tolist() == numbers


def test_dimensions_are_cut_and_then_scaled(server: Server) -> None:
    [whole] = vectors(server, input=[97, 98, 98], pooling="mean")
    [short] = vectors(server, input=[97, 98, 98], pooling="mean", dimensions=2)
    assert np.linalg.norm(whole) == pytest.approx(1)
    assert np.linalg.norm(short) == pytest.approx(1)
    assert short == pytest.approx(np.array(whole[:2]) / np.linalg.norm(whole[:2]))
    assert vectors(server, input=[98], dimensions=1) == [[0.0]], "nothing is left of it"


def test_prompts_are_cut(server: Server) -> None:
    fields = {"input": "abcd", "add_special_tokens": False}
    for cut, kept in (
        ({"truncate_prompt_tokens": 2}, "cd"),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, "ab"),
        ({"truncate_prompt_tokens": -1}, "abcd"),
    ):
        answer = server.post(PATH, fields | cut)
        assert answer.json["usage"]["prompt_tokens"] == len(kept)
        assert answer.json["data"][0]["embedding"] == vector(list(kept[-1:].encode())).tolist()
    whole = {"input": "a" * (MAX_LEN + 5), "truncate_prompt_tokens": -1}
    assert server.post(PATH, whole).json["usage"]["prompt_tokens"] == MAX_LEN


def test_scheduling(server: Server) -> None:
    fields = {"priority": 3, "deadline_ms": 60_000, "cache_salt": "s", "cache_ttl_s": 9.5}
    vectors(server, input=["a", "b"], **fields)
    wanted = SchedulingParams(priority=3, deadline_ms=60_000, cache_salt="s", cache_ttl_s=9.5)
    assert server.llm.scheduling[-2:] == [wanted] * 2


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": ""}, "input", None),
        ({"input": []}, "input", None),
        ({"input": ["a", ""]}, "input", None),
        ({"input": [[]]}, "input", None),
        ({"input": ["a", 5]}, "input", None),
        ({"input": [1000]}, "input", None),
        ({"input": [-1]}, "input[0]", None),
        ({"input": None}, "input", None),
        ({"input": ["a"] * 17}, "input", None),
        ({"input": "a" * (MAX_LEN + 1)}, "input", "context_length_exceeded"),
        ({"input": [97] * (MAX_LEN + 1)}, "input", "context_length_exceeded"),
        ({"dimensions": 0}, "dimensions", None),
        ({"dimensions": EMBEDDING_SIZE + 1}, "dimensions", None),
        ({"encoding_format": "int8"}, "encoding_format", None),
        ({"pooling": "max"}, "pooling", None),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", None),
        ({"truncation_side": "left"}, "truncation_side", None),
        ({"priority": 11}, "priority", None),
    ],
)
def test_what_is_refused(
    server: Server, fields: dict[str, Any], param: str, code: str | None
) -> None:
    before = len(server.llm.params)
    check(server.post(PATH, {"input": "a"} | fields), 400, param, code)
    server.until_idle()
    assert len(server.llm.params) - before <= len(fields.get("input") or ()), "none was left"


def test_the_limit_is_named(server: Server) -> None:
    answer = server.post(PATH, {"input": "a", "dimensions": 9})
    assert "at most 8" in answer.json["error"]["message"]
    check(server.post(PATH, {"input": "a", "model": "other"}), 404, "model", "model_not_found")
    check(server.post(PATH, {}), 400, "input")


def test_the_server_has_a_default() -> None:
    with serving(config=ServerConfig(pooling="mean", strict=True)) as server:
        assert vectors(server, input="ab") == [vector([BOS, 97, 98]).tolist()]
        assert vectors(server, input="ab", pooling="last") == [vector([98]).tolist()]
        check(server.post(PATH, {"input": "a", "inptu": 1}), 400, "inptu", "unknown_parameter")


@pytest.fixture
def held(server: Server) -> Iterator[Server]:
    """A server whose engine makes no step."""
    server.call(server.llm.hold)
    yield server
    server.call(server.llm.resume)


def test_aborting_ends_all_of_it(held: Server) -> None:
    aborted, before = len(held.llm.aborted), len(held.llm.params)
    with ThreadPoolExecutor() as threads:
        mine = {"X-Request-Id": "mine"}
        asking = threads.submit(held.post, PATH, {"input": ["a", "b", "c"]}, mine)
        held.until(lambda: len(held.llm.params) == before + 3)
        answer = held.post("/v1/requests/mine/abort", {})
        assert answer.json == {"id": "mine", "aborted": True}
        check(asking.result(), 400, None, "aborted")
    assert len(held.llm.aborted) == aborted + 3
    trace = held.get("/v1/requests/mine/trace").json
    assert [sequence["outcome"] for sequence in trace["sequences"]] == ["abort"] * 3


def test_a_client_that_leaves_ends_all_of_it(held: Server) -> None:
    aborted, before = len(held.llm.aborted), len(held.llm.params)
    with held.open(PATH, {"input": ["a", "b"]}):
        held.until(lambda: len(held.llm.params) == before + 2)
    held.until(lambda: len(held.llm.aborted) == aborted + 2)


def test_keys_guard_it() -> None:
    with serving(config=ServerConfig(api_key=("k",))) as server:
        check(server.post(PATH, {"input": "a"}), 401, None, "invalid_api_key")
        answer = server.post(PATH, {"input": "a"}, {"Authorization": "Bearer k"})
        assert answer.status == 200
        assert server.llm.scheduling[-1].tenant == "key-1"


def test_long_answers(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are written in a thread."""
    count = 14
    size = LARGE_ANSWER // (4 * HIDDEN_SHARE * count) + 1
    hidden = np.arange(size, dtype="<f4").tobytes()

    monkeypatch.setattr("tests.support.server.fake_llm.hidden_of", lambda _: hidden)
    found = vectors(server, input=["a"] * count, normalize=False)
    assert found == [list(range(size))] * count


# -- the official client, and ours -----------------------------------------------------------------


def test_the_official_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        for fields in ({}, {"encoding_format": "float"}):  # base64 is what it asks for by itself
            answer = client.embeddings.create(
                model="fake", input=["abc", "d"], dimensions=4, extra_body={"pooling": "mean"},
                **fields,  # type: ignore[arg-type]
            )  # fmt: skip
            right = [vector([BOS, *text], dimensions=4) for text in (b"abc", b"d")]
            assert [entry.embedding for entry in answer.data] == [v.tolist() for v in right]
            assert answer.usage.total_tokens == 6
        assert len(client.embeddings.create(model="fake", input=[[97], [98]]).data) == 2
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="fake", input="a", dimensions=9)
        assert caught.value.param == "dimensions"


async def test_our_client(server: Server) -> None:
    async with Client(server.url) as client:
        single = await client.embed("abc")
        assert single.dtype == np.float32
        np.testing.assert_array_equal(single, vector([99]))
        several = await client.embed(
            [[97, 98], [99]],
            EmbeddingParams(pooling="mean", dimensions=4, normalize=False),
            SchedulingParams(priority=2),
        )
        right = [vector(ids, normalize=False, dimensions=4) for ids in ([97, 98], [99])]
        np.testing.assert_array_equal(several, np.stack(right))
        assert server.llm.scheduling[-1].priority == 2
        assert (await client.embed([])).size == 0
        with pytest.raises(BadRequest, match="at most 8"):
            await client.embed("a", dimensions=9)
        with pytest.raises(BadRequest, match="chats"):
            await client.embed([{"role": "user", "content": "a"}])
