"""Errors about names of models, routes and choices say what there is instead."""

from __future__ import annotations

import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.system.suggest import suggest_path
from tests.support.server.serving import Server, serving

CHAT = {"messages": [{"role": "user", "content": "a"}]}


def test_an_unknown_model_is_told_which_there_are() -> None:
    with serving(config=ServerConfig(served_model_name=("small", "also-small"))) as server:
        answer = server.post("/v1/chat/completions", {**CHAT, "model": "gpt-4o"})
    assert answer.status == 404
    said = answer.json["error"]["message"]
    assert said == "the model 'gpt-4o' does not exist; this server has 'small', 'also-small'"


@pytest.mark.parametrize(
    ("path", "near"),
    [
        # A base URL without /v1, with it twice, or with the whole route.
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/embeddings", "/v1/embeddings"),
        ("/v1/v1/messages", "/v1/messages"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/v1/api/chat", "/api/chat"),
        # A letter too few.
        ("/v1/chat/completion", "/v1/chat/completions"),
    ],
)
def test_an_unknown_route_is_told_the_nearest(server: Server, path: str, near: str) -> None:
    answer = server.post(path, {})
    assert answer.status == 404
    said = answer.json["error"]
    message = said if isinstance(said, str) else said["message"]
    assert message == f"unknown route: POST {path}; did you mean {near}?"


@pytest.mark.parametrize("path", ["/v1/audio/speech", "/v1/files", "/nowhere", "/api/pull", "//"])
def test_routes_that_are_like_none_get_no_advice(server: Server, path: str) -> None:
    assert "did you mean" not in server.post(path, {}).body.decode()


def test_a_long_path_is_not_compared() -> None:
    assert suggest_path("/x" * 4000 + "/v1/messages", ["/v1/messages"]) == ""


def test_a_wrong_method_is_told_the_right_ones(server: Server) -> None:
    answer = server.get("/v1/chat/completions")
    assert answer.status == 405
    expected = "method not allowed: GET /v1/chat/completions; allowed: POST"
    assert answer.json["error"]["message"] == expected


@pytest.mark.parametrize(
    ("change", "param", "choices"),
    [
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]},
            "messages[1].role",
            "assistant, developer, function, system, tool, user",
        ),
        (
            {"response_format": {"type": "json"}},
            "response_format.type",
            "json_object, json_schema, structural_tag, text",
        ),
        ({"tool_choice": "any"}, "tool_choice", "auto, none, required"),
    ],
)
def test_a_wrong_choice_is_told_the_right_ones(
    server: Server, change: dict[str, object], param: str, choices: str
) -> None:
    answer = server.post("/v1/chat/completions", {**CHAT, **change})
    assert answer.status == 400
    error = answer.json["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: Invalid enum value ")
    assert error["message"].endswith(f": it is one of {choices}")


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_called_empty(server: Server, body: bytes) -> None:
    answer = server.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.json["error"]["message"] == "the body is empty; it must be a JSON object"
