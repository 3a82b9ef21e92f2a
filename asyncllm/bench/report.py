"""What a run of ``asyncllm bench`` found, as a file."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.engine.stats import StepFigures
from asyncllm.errors import BadRequest
from asyncllm.version import __version__


class OfflineRow(msgspec.Struct, kw_only=True):
    """One offline case.

    Attributes:
        seconds: of each repetition; the best but the first counts.
        in_tokens, out_tokens: of one repetition.
        tok_s: generated tokens per second.
        ms_per_token: of the longest answers; for an answer of one token, the time of its prompt.
        ttft_ms: median time to the first token, from the beginning of the repetition that counts.
        engine: what the engine says of that repetition.
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
        requests, failed: how many were sent; how many of them were not answered, and do not count.
        seconds: from the first request to the last token.
        tok_s: generated tokens per second.
        ttft_*: from sending a request to its first token.
        tpot_p50: a request's mean time per token after the first.
        itl_*: between two events of a stream.
        tokens_per_event: more than 1 where tokens share an event, or have none, as they have no
            text: then no ITL is that of tokens.
        long_ttft_*: of the requests that are there to disturb the others, which are not part of the
            other times.
        clients, rate: the load: so many at once, or so many per second.
        client_busy: CPU share of the busiest process that made the load.
        engine: what the engine says of that time, if the server is one of ours.
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
    """All of one run.

    Attributes:
        machine: its GPUs, or its CPU, or where the server is.
        model: how the server calls it.
        settings: of the engine, as far as they were chosen or are known.
        start_s: from nothing to a model that serves; None when it was there already.
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
    """Raises BadRequest when ``content`` is not what ``Report.write`` writes."""
    try:
        return msgspec.json.decode(content, type=Report)
    except msgspec.DecodeError as error:
        raise BadRequest(f"{path} is not a file of asyncllm bench: {error}") from None
