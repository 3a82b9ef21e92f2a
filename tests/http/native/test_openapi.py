"""/openapi.json is true: every route is in it, with its bounds, its keys and its refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import msgspec
import pytest
from schemathesis.specs.openapi.definitions import OPENAPI_31

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest, DeadlineExceeded, StepError
from asyncllm.server.app import ROUTES, create_app
from asyncllm.types import SamplingParams, SchedulingParams
from tests.support.server.fake_llm import FakeLLM
from tests.support.server.openapi import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    VALID,
    check,
    operation,
    validate,
)
from tests.support.server.serving import Server, serving

KEYS = ServerConfig(api_key=("k",), max_body_bytes=100_000, request_seconds=0.3)


def test_every_route_is_described(document: dict[str, Any]) -> None:
    app = create_app(FakeLLM(), ServerConfig())
    served = {
        (re.sub(r"\{(\w+):[^}]*\}", r"{\1}", route.resource.canonical), route.method.lower())
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    described = {
        (path, method) for path, methods in document["paths"].items() for method in methods
    }
    assert served - described == {("/openapi.json", "get"), ("/page/{name}", "get")}
    assert described <= served


def test_the_document_is_openapi(document: dict[str, Any]) -> None:
    """By the schema that OpenAPI 3.1 comes with, and no reference leads nowhere."""
    assert document["openapi"].startswith("3.1.")
    jsonschema.Draft202012Validator(OPENAPI_31).validate(document)
    ids = [o["operationId"] for methods in document["paths"].values() for o in methods.values()]
    assert len(ids) == len(set(ids))
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    references = set(re.findall(r'"\$ref":"#/components/(\w+)/([\w-]+)"', json_of(document)))
    assert references == {
        (kind, name) for kind in ("schemas", "headers") for name in document["components"][kind]
    }


def json_of(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def test_bounds_are_those_of_the_parameters(document: dict[str, Any]) -> None:
    """What the description allows the library takes, and no more."""
    properties = document["components"]["schemas"]["GenerateRequest"]["properties"]
    kinds: dict[str, type[msgspec.Struct]] = {}
    for kind in (SamplingParams, SchedulingParams):
        kinds |= dict.fromkeys(kind.__struct_fields__, kind)
    tried = 0
    # Of max_tokens 0, which only scores the prompt, this route has no use.
    for name in (properties.keys() & kinds.keys()) - {"max_tokens"}:
        for number in properties[name].get("anyOf", ()):
            step = 1 if number.get("type") == "integer" else 1e-6
            for bound, excluded, sign in (
                ("minimum", "exclusiveMinimum", -1),
                ("maximum", "exclusiveMaximum", 1),
            ):
                if bound not in number and excluded not in number:
                    continue
                last = number[bound] if bound in number else number[excluded] - sign * step
                kinds[name](**{name: last})
                with pytest.raises(BadRequest):
                    kinds[name](**{name: last + sign * step})
                tried += 1
    assert tried > 15


def test_a_strict_server_says_so(document: dict[str, Any]) -> None:
    with serving(config=ServerConfig(strict=True)) as strict:
        schemas = strict.get("/openapi.json").json["components"]["schemas"]
    for name in ("ChatRequest", "StreamOptions", "TokenizeRequest"):
        assert schemas[name]["additionalProperties"] is False
        assert "additionalProperties" not in document["components"]["schemas"][name]


def test_the_address_of_a_mounted_server(document: dict[str, Any]) -> None:
    assert document["servers"] == [{"url": "/"}]
    with serving(prefix="/llm") as mounted:
        assert mounted.get("/openapi.json").json["servers"] == [{"url": "/llm"}]


def test_keys_are_described(guarded: Server, document: dict[str, Any]) -> None:
    assert guarded.get("/openapi.json").status == 401
    with_keys = guarded.get("/openapi.json", {"Authorization": "Bearer k"}).json
    schemes = with_keys["components"]["securitySchemes"]
    assert schemes == {"key": {"type": "http", "scheme": "bearer"}}
    assert "securitySchemes" not in document["components"]
    for path, methods in with_keys["paths"].items():
        for described in methods.values():
            free = path in ("/", "/health", "/ready", "/ping")
            assert ("security" in described) != free
            assert ("401" in described["responses"]) != free
    assert "401" not in document["paths"][CHAT]["post"]["responses"]


def not_ready(server: Server) -> None:
    server.llm.ready = False


def broken(server: Server) -> None:
    server.llm.fail = StepError("planted")


def late(server: Server) -> None:
    server.llm.fail = DeadlineExceeded("planted")


def full(server: Server) -> None:
    server.llm.limits = msgspec.structs.replace(server.llm.limits, max_waiting=0)


def fine(server: Server) -> None:
    pass


#: Why a request is refused: the state of the server, the body, the headers.
REFUSALS: dict[int, tuple[Callable[[Server], None], Any, dict[str, str]]] = {
    400: (fine, {"model": 1}, {}),
    401: (fine, {}, {"Authorization": "Bearer other"}),
    404: (fine, {"model": "other"}, {}),
    408: (late, None, {}),
    413: (fine, b"x" * 100_001, {}),
    415: (fine, None, {"Content-Encoding": "secret"}),
    429: (full, None, {}),
    500: (broken, None, {}),
    503: (not_ready, None, {}),
}


@pytest.fixture(scope="module")
def guarded() -> Iterator[Server]:
    with serving(config=KEYS) as running:
        yield running
        running.until_idle()


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (route.path, status)
        for route in ROUTES
        if route.body is not None
        for status in (*route.refusals, 401)
        # Other routes give 408 only for a body that is late, which test_server_fuzz.py has.
        if status != 408 or route.event is not None
    ],
)
def test_refusals(guarded: Server, path: str, status: int) -> None:
    """Each that is described is given, and looks as described."""
    key = {"Authorization": "Bearer k"}
    document = guarded.get("/openapi.json", key).json
    plant, body, headers = REFUSALS[status]
    if body is None:
        body = VALID[path]
    elif isinstance(body, dict) and body:
        body = VALID[path] | body
    llm = guarded.llm
    limits = llm.limits
    guarded.call(lambda: plant(guarded))
    try:
        answer = guarded.post(path, body, key | headers)
    finally:
        guarded.call(lambda: restore(llm, limits))
    assert answer.status == status, answer.body
    check(document, "POST", path, answer)


def restore(llm: FakeLLM, limits: Any) -> None:
    llm.ready, llm.fail, llm.limits = True, None, limits


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
def test_a_failing_stream(
    server: Server, path: str, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last event is an error, whose shape is that of the refusals."""
    monkeypatch.setattr(server.llm, "fail", StepError("planted"))
    answer = server.post(path, VALID[path] | {"stream": True})
    responses = operation(document, "POST", path)["responses"]
    validate(document, responses["500"]["content"]["application/json"]["schema"], answer.frames[-1])
