"""What Ollama's routes say of models, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ollama
import pytest

from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import StepError
from tests.support.server.fake_llm import MAX_LEN, FakeLLM
from tests.support.server.ollama_client import (
    CHAT,
    ECHO,
    GENERATE,
    HELLO,
    client,
    say,
    speaker,
    tool,
)
from tests.support.server.serving import Answer, Server, serving


@pytest.fixture(scope="module")
def speaking() -> Iterator[Server]:
    with serving(speaker) as running:
        yield running
        running.until_idle()


# -- refusals --------------------------------------------------------------------------------------


def error_of(answer: Answer) -> tuple[int, str]:
    assert list(answer.json) == ["error"], answer.body
    return answer.status, answer.json["error"]


@pytest.mark.parametrize(
    ("path", "fields", "part"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images"),
        (CHAT, {"messages": [{"role": "nobody"}]}, "messages[0].role"),
        (CHAT, {"messages": [], "format": "xml"}, "format"),
        (CHAT, {"options": {"temperature": -1}}, "temperature"),
        (CHAT, {"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
        (CHAT, {"options": {"num_predict": "many"}}, "options.num_predict"),
        (CHAT, {"tools": [tool("add")]}, "fake does not support tools"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT, {"think": True}, "fake does not support thinking"),
        (CHAT, {"think": "low"}, "fake does not support thinking"),
        (CHAT, {"think": "deep"}, "think"),
        (CHAT, {"top_logprobs": 1}, "top_logprobs needs logprobs"),
        (GENERATE, {"suffix": "b"}, "suffix"),
        (GENERATE, {"images": ["aGk="]}, "images"),
        (GENERATE, {"template": "x"}, "template"),
        (GENERATE, {"context": [1]}, "context"),
        (GENERATE, {"raw": True, "system": "x"}, "raw mode does not support"),
        (GENERATE, {"prompt": "a" * 5000}, "your messages resulted in at least"),
    ],
)
def test_bad_requests(server: Server, path: str, fields: dict[str, Any], part: str) -> None:
    body = HELLO if path == CHAT else {"model": "fake", "prompt": "aé"}
    status, message = error_of(server.post(path, body | fields))
    assert status == 400
    assert part in message


def test_an_unknown_model(server: Server) -> None:
    for path in (CHAT, GENERATE, "/api/show"):
        answer = server.post(path, {"model": "other", "prompt": "a"})
        assert error_of(answer) == (404, "model 'other' not found")
    with client(server) as ours, pytest.raises(ollama.ResponseError) as caught:
        ours.chat("other", HELLO["messages"])
    assert (caught.value.status_code, caught.value.error) == (404, "model 'other' not found")


def test_no_name_means_the_model_that_there_is(server: Server) -> None:
    answer = server.post(GENERATE, {"prompt": "a", "raw": True, "stream": False}).json
    assert (answer["model"], answer["response"]) == ("fake", "a")


def test_a_full_queue_is_503() -> None:
    with serving(lambda: FakeLLM(max_running=1)) as full:
        full.call(full.llm.hold)
        sockets = [full.open(CHAT, HELLO) for _ in range(17)]
        full.until(lambda: full.llm.stats.waiting >= 16)
        answer = full.post(CHAT, HELLO)
        for each in sockets:
            each.close()
    assert error_of(answer) == (503, "16 requests with 336 prompt tokens are waiting already")
    assert answer.headers["Retry-After"] == "3"


def test_keys() -> None:
    with serving(config=ServerConfig(api_key=("k",))) as guarded:
        assert error_of(guarded.get("/api/tags"))[0] == 401
        assert error_of(guarded.post(CHAT, HELLO))[0] == 401
        with client(guarded, headers={"Authorization": "Bearer k"}) as ours:
            assert ours.chat("fake", HELLO["messages"]).message.content == ECHO


def test_a_stream_that_fails(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.llm, "fail", StepError("planted"))
    assert server.post(CHAT, HELLO).lines == [{"error": "planted"}]
    assert error_of(server.post(CHAT, HELLO | {"stream": False})) == (500, "planted")
    with client(server) as ours, pytest.raises(ollama.ResponseError, match="planted"):
        list(ours.generate("fake", "a", stream=True))


# -- models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_alive", "reason"),
    [
        *((None, "load"), (-1, "load"), ("5m", "load"), ("0m10s", "load"), ("0.5s", "load")),
        *((0, "unload"), ("0", "unload"), ("0s", "unload"), ("0h0m", "unload")),
    ],
)
def test_loading_is_done(server: Server, keep_alive: Any, reason: str) -> None:
    fields = {"model": "fake", "keep_alive": keep_alive}
    chat = server.post(CHAT, fields | {"messages": []}).json
    assert (chat["done"], chat["done_reason"]) == (True, reason)
    assert chat["message"] == {"role": "assistant", "content": ""}
    generate = server.post(GENERATE, fields).json
    assert (generate["done"], generate["done_reason"], generate["response"]) == (True, reason, "")


def test_models_by_the_official_client(speaking: Server) -> None:
    with client(speaking) as ours:
        [model] = ours.list().models
        [running] = ours.ps().models
        shown = ours.show("fake:latest")
        assert ours.chat(f"{model.model}:latest", say("x")["messages"]).message.content == "x"
    assert (model.model, running.model) == ("fake", "fake")
    assert model.digest == running.digest
    assert len(model.digest or "") == 64
    assert running.context_length == MAX_LEN
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert shown.modelinfo is not None
    family = shown.modelinfo["general.architecture"]
    assert family == "fake"
    assert shown.modelinfo[f"{family}.context_length"] == MAX_LEN
    assert "temperature 0.7" in (shown.parameters or "").splitlines()
    assert shown.modified_at == model.modified_at


def test_a_model_that_can_only_talk(server: Server) -> None:
    assert server.post("/api/show", {"name": "fake"}).json["capabilities"] == ["completion"]
    assert server.post("/api/show", {}).json["capabilities"] == ["completion"]


def test_the_way_of_ollamas_cli(speaking: Server) -> None:
    """``ollama run``, ``list`` and ``ps``: what they ask, and what they cannot do without."""
    beat = speaking.request("HEAD", "/")
    assert (beat.status, beat.body) == (200, b"")
    assert speaking.post("/api/show", {"model": "nobody"}).status == 404  # it would pull it then
    shown = speaking.post("/api/show", {"model": "fake", "name": "", "verbose": False})
    assert shown.status == 200
    loaded = speaking.post(GENERATE, {"model": "fake", "prompt": "", "stream": None}).json
    assert loaded["done"] is True
    chat = {"model": "fake", "messages": say("x")["messages"], "format": "", "options": {}}
    *_, last = speaking.post(CHAT, chat | {"keep_alive": "5m0s"}).lines
    assert last["done_reason"] == "stop"
    unloaded = speaking.post(GENERATE, {"model": "fake", "keep_alive": "0s"})  # ollama stop
    assert unloaded.status == 200
    for path in ("/api/tags", "/api/ps"):
        assert speaking.request("HEAD", path).status == 200
        [model] = speaking.get(path).json["models"]
        assert len(model["digest"]) > 12  # that much is shown
        assert isinstance(model["size"], int)


@pytest.mark.parametrize("prefix", ["", "/llm"])
def test_what_some_clients_look_for_first(prefix: str) -> None:
    with serving(config=ServerConfig(api_key=("secret",)), prefix=prefix) as server:
        answer = server.get("/")  # they have no key yet
        assert (answer.status, answer.body) == (200, b"Ollama is running")
        assert answer.headers.get_content_type() == "text/plain"
        server.call(lambda: setattr(server.llm, "ready", False))
        assert server.get("/").status == 200
        server.call(lambda: setattr(server.llm, "healthy", False))
        assert error_of(server.get("/"))[0] == 503


def test_the_version_is_one_of_ollamas(server: Server) -> None:
    version = server.get("/api/version").json["version"]
    assert [int(part) for part in version.split(".")] >= [0, 6, 4]
