"""``asyncllm chat``: from a pipe, at a terminal, against a server."""

from __future__ import annotations

import io
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Generator

import pytest

from asyncllm.__main__ import main
from asyncllm.cli.commands.chat import Conversation, Messages
from asyncllm.errors import EngineDead
from asyncllm.types import SamplingParams, TokenDelta
from tests.support.server.echo_llm import EchoLLM, echo_class
from tests.support.server.serving import serving


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> type[EchoLLM]:
    """Puts the fake engine in the place of AsyncLLM."""
    echo = echo_class()
    monkeypatch.setattr("asyncllm.llm.async_llm.AsyncLLM", echo)
    return echo


def chat(monkeypatch: pytest.MonkeyPatch, text: str, *options: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    return main(["chat", *options])


def test_each_line_is_a_message_in_one_conversation(
    echo: type[EchoLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "one\n\n  two  \n") == 0
    first = "user: one\nassistant: "
    second = f"user: one\nassistant: {first}\nuser: two\nassistant: "
    captured = capsys.readouterr()
    assert captured.out == f"{first}\n{second}\n"
    assert captured.err == ""
    assert not echo.made[0].healthy, "it is closed"


def test_commands(
    echo: type[EchoLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["a", "/reset", "b", "/system be kind", "c", "/reset", "d", "/what", "/exit", "e"]
    assert chat(monkeypatch, "\n".join(lines), "--system", "be brief") == 0
    prompts = [
        "system: be brief\nuser: a\nassistant: ",
        "system: be brief\nuser: b\nassistant: ",
        "system: be kind\nuser: c\nassistant: ",
        "system: be kind\nuser: d\nassistant: ",
    ]
    out = capsys.readouterr().out
    assert out.startswith("\n".join(prompts))
    assert out.count("/system TEXT") == 1, "an unknown command shows the known ones"
    assert "user: e" not in out


def test_sampling_options(
    echo: type[EchoLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, "hi\n", "--max-tokens", "4", "--top-k", "2") == 0
    assert capsys.readouterr().out == "user\n"
    assert echo.made[0].params == [SamplingParams(temperature=0.7, max_tokens=4, top_k=2)]


def test_a_message_that_fails_is_forgotten(
    echo: type[EchoLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chat(monkeypatch, f"{'x' * 5000}\nhi\n") == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("asyncllm: error: This model's maximum context length is 4096")
    assert captured.out.strip() == "user: hi\nassistant:"


def test_a_dead_engine_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "asyncllm.llm.async_llm.AsyncLLM", echo_class(step_error=EngineDead("it is dead"))
    )
    assert chat(monkeypatch, "a\nb\n") == 1
    assert capsys.readouterr().err == "asyncllm: error: it is dead\n"


def test_an_interrupted_answer_is_cancelled_and_kept() -> None:
    closed = []

    def answer(_: Messages) -> Generator[TokenDelta, None, None]:
        try:
            yield TokenDelta("so ")
            yield TokenDelta("far")
            raise KeyboardInterrupt
        finally:
            closed.append(True)

    conversation = Conversation(answer)
    conversation.say("go")
    assert closed == [True]
    assert conversation.messages[1:] == [{"role": "assistant", "content": "so far"}]


def test_chat_with_a_server_at_a_url(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving() as server:
        assert chat(monkeypatch, "hi\n", "--url", server.url, "--max-tokens", "8") == 0
    assert capsys.readouterr().out == "user: hi\n"
    assert chat(monkeypatch, "hi\nho\n", "--url", server.url) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(line.startswith(f"asyncllm: error: {server.url}: ") for line in errors)


PROGRAM = """
import sys
import asyncllm.llm.async_llm
from asyncllm.__main__ import main
from tests.support.server.echo_llm import echo_class
asyncllm.llm.async_llm.AsyncLLM = echo_class(step_seconds=0.01)
sys.exit(main(["chat"]))
"""


def test_at_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_leaves() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    try:
        read_until(ours, b"> ")
        os.write(ours, b"x" * 900 + b"\n")
        read_until(ours, b"user: xxxx")
        os.kill(process.pid, signal.SIGINT)
        read_until(ours, b"> ")
        os.kill(process.pid, signal.SIGINT)
        while not select.select([ours], [], [], 0.3)[0]:
            # input() misses a signal between its prompt and its waiting.
            os.kill(process.pid, signal.SIGINT)
        read_until(ours, b"> ")
        os.write(ours, b"\x04")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def read_until(terminal: int, wanted: bytes) -> None:
    seen = b""
    while wanted not in seen:
        readable, _, _ = select.select([terminal], [], [], 15)
        assert readable, f"{wanted!r} did not come after {seen!r}"
        seen += os.read(terminal, 1024)
