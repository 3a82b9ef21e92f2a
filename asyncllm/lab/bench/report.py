"""The figures of a run of ``asyncllm bench``, and their file."""

from __future__ import annotations

import platform
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.engine.stats import StepFigures
from asyncllm.errors import BadRequest
from asyncllm.version import __version__


class OfflineRow(msgspec.Struct, kw_only=True):
    """One offline case.

    Attributes:
        seconds: of each repetition; the best after the first counts.
        in_tokens, out_tokens: of one repetition.
        tok_s: generated tokens per second.
        ms_per_token: of the longest answer; for an answer of one token, the time of its prompt.
        ttft_ms: median time to the first token, of the repetition that counts.
        engine: the engine's own figures of that repetition.
    """

    case: str
    seconds: list[float]
    in_tokens: int
    out_tokens: int
    tok_s: float
    ms_per_token: float
    ttft_ms: float
    engine: StepFigures | None = None


class OnlineRow(msgspec.Struct, kw_only=True):
    """One online case; times in ms, as the clients see them.

    Attributes:
        requests, failed: sent requests; unanswered ones, which do not count.
        seconds: from the first request to the last token.
        tok_s: generated tokens per second.
        ttft_*: from sending a request to its first token.
        tpot_p50: a request's mean time per token after the first.
        itl_*: between two events of a stream.
        tokens_per_event: more than 1 if tokens share an event, or have no text; then ITL is not the
            time between tokens.
        long_ttft_*: of the requests that disturb the others; the other times are without them.
        clients, rate: the load: clients at once, or requests per second.
        client_busy: CPU share of the busiest load process.
        engine: the engine's own figures, if the server is ours.
    """

    case: str
    requests: int
    failed: int
    seconds: float
    tok_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    tpot_p50: float | None
    itl_p50: float | None
    itl_p99: float | None
    itl_max: float | None
    tokens_per_event: float | None = None
    long_ttft_p50: float | None = None
    long_ttft_p99: float | None = None
    clients: int | None = None
    rate: float | None = None
    client_busy: float
    engine: StepFigures | None = None


class Report(msgspec.Struct, kw_only=True):
    """The figures of one run.

    Attributes:
        machine: its GPUs, its CPU, or the server's address.
        model: its name on the server.
        settings: of the engine, as far as they are known.
        start_s: seconds to start the engine; None if it ran already.
        asyncllm: the version.
        created: local time, ISO 8601.
    """

    machine: str
    model: str
    settings: dict[str, Any] = {}
    start_s: float | None = None
    asyncllm: str = __version__
    created: str = msgspec.field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    offline: list[OfflineRow] = []
    online: list[OnlineRow] = []

    def write(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")


def short_name(model: str) -> str:
    """The last part of a hub id or path, by which figures of the same model are matched."""
    return model.rstrip("/").rsplit("/", 1)[-1]


def decode_report(content: bytes, path: Path) -> Report:
    """Raises BadRequest if ``content`` is not a file of ``Report.write``."""
    try:
        return msgspec.json.decode(content, type=Report)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{path} is not a file of asyncllm bench: {error}") from None


def describe(device: str) -> str:
    """The GPU models if ``device`` is "cuda", otherwise the CPU model."""
    names = _gpus() if device == "cuda" else []
    return ", ".join(dict.fromkeys(names)) or _cpu()


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        run = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return [line.strip() for line in run.stdout.splitlines() if line.strip()]
    return []


def _cpu() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
