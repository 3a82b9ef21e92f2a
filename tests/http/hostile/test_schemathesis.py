"""Requests made from /openapi.json, right and wrong: no 5xx, no hang, and answers as described.

Of two servers: the fake, which answers at once, and the demo model.
"""

from __future__ import annotations

import json
import os
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from asyncllm import AsyncLLM
from asyncllm.server.app import ROUTES
from asyncllm.server.chat.requests import GeneratingFields
from tests.support.server.openapi import CHAT
from tests.support.server.serving import Server, serving

#: What the answers to any request must keep.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
#: Requests for each operation that has a body, and each way to make them.
EXAMPLES = {"fake": 25, "demo": 8}

#: Bodies of which each field is sent alone.
BODIES = {"fake": 8, "demo": 1}

#: Fields that are the same in all routes that generate.
SHARED = frozenset(GeneratingFields.__struct_fields__)

#: Operations that have something to get wrong.
CASES = [
    (route.method, route.path, mode)
    for route in ROUTES
    for mode in GenerationMode
    if mode is GenerationMode.POSITIVE or route.body is not None or route.query
]


@pytest.fixture(scope="module", params=EXAMPLES)
def api(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The description of a running server, its URL, its model, and how many requests to make."""
    if request.param == "fake":
        with serving() as fake, no_file_is_left(fake):
            yield load(fake.url), fake.url, "fake", EXAMPLES["fake"]
    else:
        with (
            serving(lambda: AsyncLLM(device="cpu", cpu_threads=1, max_model_len=40)) as demo,
            no_file_is_left(demo),
        ):
            yield load(demo.url), demo.url, "asyncllm-demo", EXAMPLES["demo"]


@contextmanager
def no_file_is_left(server: Server) -> Iterator[None]:
    """Afterwards, no request has a slot, a page or a place, and no connection is open."""
    before = len(os.listdir("/proc/self/fd"))
    yield
    server.until_idle()
    # Of hundreds of connections; a few files may be opened once and stay.
    server.until(lambda: len(os.listdir("/proc/self/fd")) <= before + 4)


def load(url: str) -> Any:
    return schemathesis.openapi.from_dict(described(url))


def described(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/openapi.json", timeout=10) as answer:
        document: dict[str, Any] = json.load(answer)
    return document


def likely(
    kind: type[msgspec.Struct], body: dict[str, Any], names: frozenset[str], model: str
) -> Any:
    """A body with what it must have and ``names`` of the rest: one that may well be right.

    As bodies are made, nearly all break a rule that is not of one field alone, or name a model that
    is not there. The description also takes 1.0 for an integer.
    """
    required = required_of(kind)
    kept = (names | required | {"prompt", "messages"}) - {"model"}
    fields = {name: value for name, value in body.items() if name in kept}
    if "model" in required:
        fields["model"] = model
    return with_integers(fields)


@cache
def required_of(kind: type[msgspec.Struct]) -> frozenset[str]:
    fields = msgspec.structs.fields(kind)
    return frozenset(field.encode_name for field in fields if field.required)


def repeatably(examples: int) -> settings:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@pytest.mark.parametrize(("method", "path", "mode"), CASES, ids=str)
def test_requests(api: Any, method: str, path: str, mode: GenerationMode) -> None:
    document, url, model, examples = api
    [route] = (route for route in ROUTES if (route.method, route.path) == (method, path))
    operation = document[path.replace(":.+", "")][method]
    seen: Counter[int] = Counter()

    @repeatably(examples)
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def run(case: Any, data: st.DataObject) -> None:
        if mode is GenerationMode.POSITIVE and route.body and isinstance(case.body, dict):
            optional = st.sampled_from(sorted(case.body) or ["-"])
            names = data.draw(st.none() | st.frozensets(optional, max_size=2))
            if names is not None:
                case.body = likely(route.body, case.body, names, model)
        with requests.Session() as session:
            response = case.call(base_url=url, session=session, timeout=20)
        seen[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    run()
    if mode is GenerationMode.POSITIVE and route.event is not None and route.body is not None:
        assert seen[200], "no request was right, so nothing much was tried"


@pytest.mark.parametrize("path", [route.path for route in ROUTES if route.body is not None])
def test_each_field_alone(api: Any, path: str) -> None:
    """Among many fields one that is wrong hides what the others would have done.

    Those that all routes of texts share are tried with one route.
    """
    _, url, model, _ = api
    [kind] = (route.body for route in ROUTES if route.path == path)
    assert kind is not None
    names = {field.encode_name for field in msgspec.structs.fields(kind)}
    document = described(url)
    # What is made has them all: left to choice, most of them would never be there.
    schema = document["components"]["schemas"][kind.__name__]
    assert schema["properties"].keys() == names
    schema |= {"required": sorted(names), "additionalProperties": False}
    operation = schemathesis.openapi.from_dict(document)[path]["POST"]

    @repeatably(BODIES["fake" if model == "fake" else "demo"])
    @given(case=operation.as_strategy(generation_mode=GenerationMode.POSITIVE))
    def run(case: Any) -> None:
        body = case.body
        assert body.keys() == names
        with requests.Session() as session:
            for name in names if path == CHAT else names - SHARED:
                case.body = likely(kind, body, frozenset({name}), model)
                response = case.call(base_url=url, session=session, timeout=20)
                case.validate_response(response, checks=CHECKS)

    run()
