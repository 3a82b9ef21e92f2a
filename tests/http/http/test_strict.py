"""Fields that nobody knows: named in a header, or refused by a strict server; and double keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import msgspec
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from asyncllm import Client, SamplingParams
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.parse import ignored_header, parse, unknown_fields
from tests.support.server.serving import Answer, Server, serving

HEADER = "X-Ignored-Parameters"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/completions": {"prompt": "a"},
    "/generate": {"prompt": "a"},
    "/v1/embeddings": {"input": "a", "user": "me"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [97]},
}
GENERATING = tuple(BODIES)[:3]

#: What clients send beside the point; every server must take it, a strict one too.
HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {},
    "stream": True,
    "stream_options": {"include_usage": True, "include_obfuscation": False},
}
HARMLESS_IN_CHAT: dict[str, Any] = {
    "parallel_tool_calls": True,
    "modalities": ["text"],
    "prediction": {"type": "content", "content": "a"},
    "response_format": {"type": "text"},
}


@pytest.fixture(scope="module")
def strict() -> Iterator[Server]:
    with serving(config=ServerConfig(strict=True)) as running:
        yield running
        running.until_idle()


def refused(answer: Answer) -> str:
    """Which field a strict server says it does not know."""
    error = answer.json["error"]
    assert (answer.status, error["code"]) == (400, "unknown_parameter"), error
    assert error["param"] in error["message"]
    param: str = error["param"]
    return param


@pytest.mark.parametrize("path", BODIES)
def test_unknown_fields(server: Server, strict: Server, path: str) -> None:
    plain = server.post(path, BODIES[path])
    assert plain.status == 200
    assert HEADER not in plain.headers
    body = {"temprature": 1, **BODIES[path], "top_pp": None}
    answer = server.post(path, body)
    assert answer.status == 200
    assert answer.headers[HEADER] == "temprature, top_pp"
    assert refused(strict.post(path, body)) == "temprature"
    assert strict.post(path, BODIES[path]).status == 200


@pytest.mark.parametrize("path", GENERATING)
def test_streams_have_the_header_too(server: Server, path: str) -> None:
    answer = server.post(path, BODIES[path] | {"stream": True, "typo": 1})
    assert answer.headers[HEADER] == "typo"
    assert answer.frames


def test_errors_have_the_header_too(server: Server) -> None:
    answer = server.post("/generate", {"prompt": "a", "model": "other", "typo": 1})
    answer = server.post("/generate", {"prompt": "a", "model": "other", "typo": 1})
    assert (answer.status, answer.headers[HEADER]) == (404, "typo")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "typo": 1}}},
            "response_format.json_schema.typo",
        ),
    ],
)
def test_unknown_fields_of_objects_inside(
    server: Server, strict: Server, fields: dict[str, Any], name: str
) -> None:
    body = {"prompt": "a", **fields}
    assert server.post("/v1/completions", body).headers[HEADER] == name
    assert refused(strict.post("/v1/completions", body)) == name


@pytest.mark.parametrize("path", GENERATING[:2])
def test_harmless_fields_are_known(server: Server, strict: Server, path: str) -> None:
    body = BODIES[path] | HARMLESS | (HARMLESS_IN_CHAT if "chat" in path else {})
    for each in (server, strict):
        answer = each.post(path, body)
        assert answer.status == 200, answer.body
        assert HEADER not in answer.headers


@pytest.mark.parametrize(
    ("path", "params"),
    [
        ("/v1/chat/completions", chat_params.CompletionCreateParamsBase),
        ("/v1/completions", completion_params.CompletionCreateParamsBase),
    ],
)
def test_openai_client_fields_are_known(strict: Server, path: str, params: type) -> None:
    """All that its types name; null asks for nothing."""
    names = get_type_hints(params).keys() - BODIES[path].keys()
    assert len(names) > 15
    for name in names:
        answer = strict.post(path, BODIES[path] | {name: None})
        assert answer.status == 200, answer.body


#: Those that may change an answer.
TYPED = (
    "stream",
    "stream_options",
    "parallel_tool_calls",
    "modalities",
    "response_format",
    "prediction",
)


@pytest.mark.parametrize("field", TYPED)
def test_fields_that_change_an_answer_are_typed(server: Server, field: str) -> None:
    answer = server.post("/v1/chat/completions", BODIES["/v1/chat/completions"] | {field: 1.5})
    assert answer.status == 400
    assert answer.json["error"]["param"] == field


def test_other_harmless_fields_may_be_anything(server: Server, strict: Server) -> None:
    for path in GENERATING[:2]:
        names = (HARMLESS | HARMLESS_IN_CHAT if "chat" in path else HARMLESS).keys() - set(TYPED)
        for value in (1.5, "text", ["a", 1], {"a": {"b": None}}, True):
            for each in (server, strict):
                answer = each.post(path, BODIES[path] | dict.fromkeys(names, value))
                assert answer.status == 200, answer.body
                assert HEADER not in answer.headers


def test_known_fields_without_effect_are_named(server: Server, strict: Server) -> None:
    fields = {"verbosity": "of tomorrow", "web_search_options": {}}
    for each in (server, strict):
        answer = each.post("/v1/chat/completions", BODIES["/v1/chat/completions"] | fields)
        assert answer.status == 200
        assert answer.headers[HEADER] == "verbosity, web_search_options"


@pytest.mark.parametrize("path", GENERATING[:2])
def test_stream_options_without_a_stream_are_named(server: Server, path: str) -> None:
    for options in ({"include_usage": True}, {}):
        answer = server.post(path, BODIES[path] | {"stream_options": options})
        assert (answer.status, answer.headers[HEADER]) == (200, "stream_options")


def test_the_header_is_bounded_and_harmless(server: Server) -> None:
    names = ["a\r\nSet-Cookie: x", "é", "b" * 500, "c, d", ""]
    answer = server.post("/generate", {"prompt": "a", **dict.fromkeys(names, 1)})
    assert answer.headers[HEADER] == f"a??Set-Cookie??x, ?, {'b' * 64}, c??d, "
    assert "Set-Cookie" not in answer.headers
    many = {f"{i:01000d}": 1 for i in range(2000)}
    answer = server.post("/generate", {"prompt": "a", **many})
    assert len(answer.headers[HEADER]) < 2000
    assert answer.headers[HEADER].endswith("0, ...")


def test_a_strict_error_is_bounded(strict: Server) -> None:
    answer = strict.post("/generate", {"prompt": "a", "x" * 100_000: 1})
    assert answer.status == 400
    assert len(answer.body) < 10_000


async def test_our_own_client_sends_no_unknown_field(strict: Server) -> None:
    params = SamplingParams(seed=1, max_tokens=3, logprobs=1, stop=("x",), stop_token_ids=(5,))
    async with Client(strict.url) as client:
        for prompt in ("abc", [97, 98], [{"role": "user", "content": "a"}]):
            assert (await client.generate(prompt, params)).token_ids
            assert [delta async for delta in client.stream(prompt, params)]


class Inner(msgspec.Struct, tag="inner", tag_field="type"):
    given: int = msgspec.field(name="called", default=0)


class Other(msgspec.Struct, tag="other", tag_field="type"):
    thing: int = 0


class Outer(msgspec.Struct):
    one: Inner | None = None
    many: list[Inner | Other] | None = None
    free: dict[str, Any] | None = None


@pytest.mark.parametrize(
    ("given", "unknown"),
    [
        ({}, []),
        ({"a": 1, "one": None, "b": 2}, ["a", "b"]),
        ({"one": {"type": "inner", "called": 1}}, []),
        ({"one": {"type": "inner", "given": 1}}, ["one.given"]),
        (
            {"many": [{"type": "inner", "called": 1, "thing": 1}, {"type": "other", "thing": 1}]},
            ["many[0].thing"],
        ),
        ({"many": [], "free": {"x": {"y": 1}}}, []),
    ],
)
def test_unknown_fields_of_a_struct(given: dict[str, Any], unknown: list[str]) -> None:
    struct, fields = parse(bytearray(json.dumps(given).encode()), Outer)
    assert list(unknown_fields(fields, struct)) == unknown


def test_header_without_names() -> None:
    assert ignored_header([]) == ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"prompt": "a", "prompt": "b"}', "prompt"),
        (b'{"prompt":"a","prompt":"a"}', "prompt"),
        (b'{"prompt": "a", "pr\\u006fmpt": "b"}', "prompt"),
        (b'{"prompt": "a", "x": [{"k": 1, "k": 2}]}', "k"),
        (b'{"prompt": "\\"a\\":", "":0, "":0}', ""),
        # Hidden quotes must not make up for those that a key takes.
        (b'{"prompt": "\\u0022\\u0022", "x": 1, "x": 2}', "x"),
        (b'{"prompt": "\\u0022\\u0022\\u0022\\u0022", "x": "", "x": ""}', "x"),
    ],
)
def test_duplicate_keys(server: Server, body: bytes, param: str) -> None:
    answer = server.post("/generate", body)
    assert answer.status == 400
    assert answer.json["error"]["param"] == param


@pytest.mark.parametrize(
    "text",
    ['"', '\\"', 'say \\"a\\": 1', "\\u0022", "\\\\u0022", "\\\\.", 'é"ü', '{"a": 1, "a": 2}'],
)
def test_quotes_are_not_duplicate_keys(text: str) -> None:
    content = {"messages": [{"role": "user", "content": text}]}
    for ascii_only in (False, True):
        for separators in ((",", ":"), (" ,\n", "\t: ")):
            raw = json.dumps(content, ensure_ascii=ascii_only, separators=separators).encode()
            asked, _ = parse(bytearray(raw.replace(b'\\"', b"\\u0022")), ChatRequest)
            assert asked.messages == content["messages"]
            assert parse(bytearray(raw), ChatRequest)[0] == asked


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"[]", None),
        (b"1", None),
        (b'"prompt"', None),
        (b'{"messages": [{}], "temperature": 1e999}', "temperature"),
        (b'{"messages": [{}], "seed": ' + b"9" * 5000 + b"}", "seed"),
        (b'{"messages": [{}], "typo": 1e999}', None),
    ],
)
def test_values_that_are_refused_while_decoding(body: bytes, param: str | None) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(bytearray(body), ChatRequest)
    assert caught.value.param == param
