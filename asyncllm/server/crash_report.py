"""Crash reports: what is known when the engine stalls or dies, as files of a bounded size."""

from __future__ import annotations

import faulthandler
import logging
import os
import platform
import sys
import tempfile
import threading
import time
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.server.service import Service

log = logging.getLogger(__name__)

MAX_REPORTS: Final = 8
MAX_REPORT_BYTES: Final = 256 * 1024
MAX_STACK_CHARACTERS: Final = 96 * 1024
MAX_STEPS: Final = 64
MAX_REQUESTS: Final = 256
PREFIX: Final = "asyncllm-crash-"
#: Options that are about keys.
_KEYS: Final = frozenset(("api_key", "api_key_file", "admin_key"))


class CrashReports:
    """Writes reports to a folder, and removes the oldest when there are too many.

    A report has numbers, names of requests, options and stacks: no text of a prompt or an answer,
    and no key.

    Args:
        folder: is made if there is none; None for no reports.

    Raises:
        BadRequest: it cannot be written to.
    """

    def __init__(self, folder: str | None):
        self._folder = None if folder is None else Path(folder)
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=self._folder).close()
            except OSError as error:
                raise BadRequest(
                    f"crash_dir cannot be written to: {error}", param="crash_dir"
                ) from None

    def write(self, report: dict[str, Any]) -> Path | None:
        """Returns where it is; None if there is no folder, or it cannot be written."""
        if self._folder is None:
            return None
        try:
            for old in sorted(self._folder.glob(f"{PREFIX}*.json"))[: 1 - MAX_REPORTS or None]:
                old.unlink(missing_ok=True)
            name = f"{PREFIX}{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}.json"
            path = self._folder / name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                file.write(_bounded(report))
        except OSError as error:
            log.error("the crash report cannot be written: %s", error)
            return None
        return path


def describe(service: Service, cause: str, stacks: str) -> dict[str, Any]:
    """What is known now; from any thread, so parts that change meanwhile may be missing."""
    llm = service.llm
    vitals = llm.vitals
    report: dict[str, Any] = {
        "cause": cause,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "pid": os.getpid(),
    }
    parts: dict[str, Callable[[], Any]] = {
        "engine_config": lambda: msgspec.to_builtins(llm.config),
        "server_config": lambda: _without_keys(service),
        "stacks": lambda: stacks[:MAX_STACK_CHARACTERS],
    }
    if vitals is not None:
        parts |= {
            "limits": lambda: msgspec.to_builtins(llm.limits),
            "stats": lambda: _numbers(llm.stats),
            "operation": vitals.heartbeat.operation._asdict,
            "steps_in_flight": lambda: [step._asdict() for step in vitals.heartbeat.in_flight],
            "oldest_step": vitals.oldest_step,
            "now": time.monotonic,  # the clock of the three above
            "names": service.log.names,
            "steps": lambda: msgspec.to_builtins(vitals.latest_steps(MAX_STEPS)),
            "requests": lambda: _requests(service),
        }
    for name, part in parts.items():
        try:
            report[name] = part()
        except Exception as error:
            report[name] = f"not known: {type(error).__name__}"
    return report


def stacks_of_all_threads() -> str:
    """The names of the threads, and their stacks as ``faulthandler`` writes them."""
    names = "".join(f"0x{each.ident or 0:016x} {each.name}\n" for each in threading.enumerate())
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return names + "\n" + file.read().decode(errors="replace")


def place_of(thread: int) -> str:
    """Where a thread is: file, line and function."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return "nowhere"
    code = frame.f_code
    return f"{Path(code.co_filename).name}:{frame.f_lineno}, {code.co_name}"


def _without_keys(service: Service) -> dict[str, Any]:
    options: dict[str, Any] = msgspec.to_builtins(service.config)
    return {name: value for name, value in options.items() if name not in _KEYS}


def _numbers(stats: Any) -> dict[str, Any]:
    values = {each.name: getattr(stats, each.name) for each in fields(stats)}
    return {name: value for name, value in values.items() if isinstance(value, int | float | dict)}


def _requests(service: Service) -> list[dict[str, Any]]:
    """The live requests, in numbers."""
    assert service.llm.vitals is not None
    known = ("request_id", "outcome", "prompt_tokens", "completion_tokens", "cached_tokens")
    times = ("priority", "waited", "arrived", "started", "first_token")
    return [
        {name: getattr(trace, name) for name in (*known, *times)}
        for trace in service.llm.vitals.live_requests(MAX_REQUESTS)
    ]


def _bounded(report: dict[str, Any]) -> bytes:
    """In JSON, without the longest part if it is too large as a whole."""
    while len(data := msgspec.json.format(msgspec.json.encode(report))) > MAX_REPORT_BYTES:
        sizes = {name: len(msgspec.json.encode(part)) for name, part in report.items()}
        report = {**report, max(sizes, key=sizes.__getitem__): "left out: too large"}
    return data
