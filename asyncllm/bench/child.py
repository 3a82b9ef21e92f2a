"""A server in a process of its own, for as long as it is measured."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, NoReturn, Self

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.errors import AsyncLLMError

#: Requests are over when it is stopped, so it should end at once.
END_SECONDS = 20.0

_READY = re.compile(r" is ready on (http://\S+) \(model .+, (\w+), \w+, context")


class ServerProcess:
    """``asyncllm serve`` on a free port of this machine; its log goes to our stderr.

    It does not outlive the context, also when a signal asks this program to end. For the main
    thread, where signals arrive.

    Attributes:
        url: where it serves.
        device: what it runs on, "cuda" or "cpu".
        start_s: from nothing to serving.
    """

    def __init__(self, config: EngineConfig):
        self.url = self.device = ""
        self.start_s = 0.0
        self._command = [
            *(sys.executable, "-m", "asyncllm", "serve", "--host", "127.0.0.1", "--port", "0"),
            *options(config),
        ]

    def __enter__(self) -> Self:
        """Returns when it serves.

        Raises:
            AsyncLLMError: it ended before; it has said why.
        """
        self._handler = signal.signal(signal.SIGTERM, _leave)
        started = time.perf_counter()
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        try:
            self.url, self.device = self._wait_until_ready()
        except BaseException:
            self._end()
            raise
        self.start_s = time.perf_counter() - started
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._end()

    def _wait_until_ready(self) -> tuple[str, str]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if ready := _READY.search(line):
                return ready[1], ready[2]
        raise AsyncLLMError(
            f"the server ended with status {self._process.wait()} before it was ready"
        )

    def _end(self) -> None:
        """Ask once, then again, then end it the hard way."""
        for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
            self._process.send_signal(number)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
                break
        assert self._process.stdout is not None
        self._process.stdout.close()
        signal.signal(signal.SIGTERM, self._handler)


def _leave(number: int, _frame: object) -> NoReturn:
    """By way of all contexts that are open."""
    sys.exit(128 + number)


def changed(config: EngineConfig) -> dict[str, Any]:
    """What differs from the defaults."""
    fields = {field.name: field.default for field in msgspec.structs.fields(EngineConfig)}
    values = {name: getattr(config, name) for name in fields}
    return {name: value for name, value in values.items() if value != fields[name]}


def options(config: EngineConfig) -> list[str]:
    """The command line of ``asyncllm serve`` for a configuration."""
    return [_option(name.replace("_", "-"), value) for name, value in changed(config).items()]


def _option(name: str, value: Any) -> str:
    if name == "model":
        return str(value)
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name}={value}"
