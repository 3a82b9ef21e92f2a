"""What a request may leave out: docs/http.md, /openapi.json and the server say the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from asyncllm import LLM, AsyncLLM
from asyncllm.types.sampling_defaults import RAW_MAX_TOKENS

if TYPE_CHECKING:
    from tests.support.server.serving import Answer, Server

PAGE: Final = Path(__file__).parents[3] / "docs" / "http.md"
#: The fake model repeats its prompt and ends there.
PROMPT: Final = "x" * 700
CHAT: Final = {"messages": [{"role": "user", "content": PROMPT}]}
#: A request to each route that generates, with what it must have.
REQUESTS: Final[dict[str, dict[str, Any]]] = {
    "/v1/completions": {"prompt": PROMPT},
    "/generate": {"prompt": PROMPT},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/responses": {"input": PROMPT},
    "/api/chat": CHAT,
    "/api/generate": {"prompt": PROMPT},
}


def documented() -> dict[str, str]:
    """What the table of the page says of each route."""
    section = PAGE.read_text("utf-8").partition("## How long an answer becomes")[2]
    rows = re.findall(r"^\| (`/.*?) \| (.*) \|$", section.partition("\n## ")[0], re.MULTILINE)
    return {route: text for routes, text in rows for route in re.findall(r"`(/\S+)`", routes)}


def num_generated(answer: Answer) -> int:
    """From the usage of whatever API, streamed in lines of JSON or not."""
    last = json.loads(answer.body.splitlines()[-1])
    usage = last.get("usage", last)
    names = ("completion_tokens", "output_tokens", "eval_count")
    [count] = [usage[name] for name in names if name in usage]
    return int(count)


def test_the_page_names_every_route_that_generates(document: dict[str, Any]) -> None:
    assert documented().keys() == REQUESTS.keys()
    schemas = document["components"]["schemas"]
    limits = {"max_tokens", "options"}
    generating = set()
    for path, operations in document["paths"].items():
        body = operations.get("post", {}).get("requestBody")
        if body is not None:
            name = body["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
            if (
                limits & schemas[name]["properties"].keys()
                and "stream" in schemas[name]["properties"]
            ):
                generating.add(path)
    no_answers = {
        "/v1/messages/count_tokens",
        "/v1/chat/completions/render",
        "/v1/responses/compact",  # a summary
    }
    assert generating - no_answers == REQUESTS.keys()


@pytest.mark.parametrize("route", REQUESTS)
@pytest.mark.parametrize("given", [{}, {"max_tokens": None}], ids=["left out", "null"])
def test_an_answer_is_as_long_as_the_page_says(
    server: Server, route: str, given: dict[str, Any]
) -> None:
    said = documented()[route]
    answer = server.post(route, {**REQUESTS[route], **given, "stream": False})
    if "400" in said:
        assert answer.status == 400
        return
    assert answer.status == 200, answer.body
    count = num_generated(answer)
    if (number := re.search(r"after (\d+) tokens", said)) is not None:
        assert count == int(number[1])
    else:
        assert count > len(PROMPT)  # until the model ends it


def test_generate_minds_min_tokens(server: Server) -> None:
    answer = server.post("/generate", {"prompt": PROMPT, "min_tokens": 300})
    assert num_generated(answer) == 300


@pytest.mark.parametrize(
    "documented_in", [AsyncLLM.generate, LLM.generate], ids=["AsyncLLM", "LLM"]
)
def test_the_library_says_the_same(documented_in: Any) -> None:
    said = re.findall(r"after (\d+) tokens", documented_in.__doc__)
    assert said == [str(RAW_MAX_TOKENS)]
    assert f"after {RAW_MAX_TOKENS} tokens" in documented()["/generate"]


def test_a_default_of_the_description_is_the_servers(
    server: Server, document: dict[str, Any]
) -> None:
    """A request that spells every default out gets the answer of one that leaves them out."""
    schemas = document["components"]["schemas"]
    found = set()
    for route, body in REQUESTS.items():
        post = document["paths"][route]["post"]
        schema = post["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        properties = schemas[schema.rpartition("/")[2]]["properties"]
        defaults = {
            name: value["default"]
            for name, value in properties.items()
            if value.get("default") is not None and name not in body
        }
        found |= {(route, name) for name in defaults}
        if defaults:
            left_out = server.post(route, body)
            spelt_out = server.post(route, {**body, **defaults})
            assert left_out.status == spelt_out.status == 200
            assert left_out.headers["Content-Type"] == spelt_out.headers["Content-Type"]
            assert num_generated(left_out) == num_generated(spelt_out)
    assert {("/v1/completions", "max_tokens"), ("/api/chat", "stream")} <= found
