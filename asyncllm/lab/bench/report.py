"""The figures of a run of asyncllm bench, their file, and earlier ones to compare with."""

from __future__ import annotations

import platform
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from asyncllm.engine.stats import StepFigures
from asyncllm.errors import BadRequest
from asyncllm.version import __version__

#: The metrics that are compared, and whether more is better.
METRICS: Final = {
    "tok_s": True,
    **dict.fromkeys(("ttft_ms", "ttft_p50", "ttft_p99", "tpot_p50"), False),
    **dict.fromkeys(("itl_p50", "itl_p99", "itl_max"), False),
    **dict.fromkeys(("long_ttft_p50", "long_ttft_p99", "start_s"), False),
}
#: The case that ``start_s`` counts as.
START: Final = "start"
_ONLINE: Final = "online_"


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


class Figure(NamedTuple):
    """The values of one engine in one case, by metric."""

    engine: str
    model: str
    online: bool
    case: str
    values: dict[str, float]


class Comparison(NamedTuple):
    """One value and an earlier one; ``ratio`` is above 1 if ours is better."""

    case: str
    metric: str
    ours: float
    theirs: float
    engine: str
    ratio: float


class _PeerRow(msgspec.Struct):
    engine: str
    model: str
    case: str
    out_tok_s: float


class Earlier:
    """The figures of a file."""

    def __init__(self, path: Path, figures: list[Figure]):
        self.path = path
        self.figures = figures

    @classmethod
    def read(cls, path: Path) -> Earlier:
        """A file of ``asyncllm bench --json``, or a table of peers.

        Such a table is an object with a list ``offline`` of rows ``{engine, model, case,
        out_tok_s}``, and for each engine an object ``online_ENGINE`` of ``{model: {case: {metric:
        number}, "start_s": number}}``.

        Raises:
            BadRequest: it is neither; the message says where.
            OSError: it cannot be read.
        """
        content = path.read_bytes()
        try:
            raw = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError as error:
            raise BadRequest(f"{path} is not a JSON object: {error}") from None
        if "asyncllm" in raw:
            report = decode_report(content, path)
            return cls(path, _of_report(report))
        try:
            figures = _of_peers(raw)
        except msgspec.ValidationError as error:
            raise BadRequest(f"{path} is not a table of peers: {error}") from None
        if not figures:
            raise BadRequest(f"{path} has no figures: neither 'offline' nor 'online_ENGINE'")
        return cls(path, figures)

    def select(self, model: str, peer: str | None = None) -> Earlier:
        """The figures of one model, and of one engine if it is named.

        Raises:
            BadRequest: there are none; the message lists the others.
        """
        chosen = [figure for figure in self.figures if figure.model == short_name(model)]
        if not chosen:
            models = sorted({figure.model for figure in self.figures})
            raise BadRequest(
                f"{self.path} has figures of {', '.join(models)}; not of {short_name(model)}"
            )
        if peer is not None:
            engines = sorted({figure.engine for figure in chosen})
            chosen = [figure for figure in chosen if figure.engine == peer]
            if not chosen:
                raise BadRequest(f"{self.path} has figures of {', '.join(engines)}; not of {peer}")
        return Earlier(self.path, chosen)

    def compare(self, report: Report) -> list[Comparison]:
        """Compare each value with the engine that has the most tokens per second in the case."""
        found: list[Comparison] = []
        for ours in _of_report(report):
            same = [f for f in self.figures if (f.online, f.case) == (ours.online, ours.case)]
            if not same:
                continue
            best = max(same, key=_goodness)
            for metric, value in ours.values.items():
                other = best.values.get(metric)
                if other and value:
                    ratio = value / other if METRICS[metric] else other / value
                    found.append(Comparison(ours.case, metric, value, other, best.engine, ratio))
        return found


def _of_report(report: Report) -> list[Figure]:
    rows: list[OfflineRow | OnlineRow] = [*report.offline, *report.online]
    model = short_name(report.model)
    figures = [
        Figure("asyncllm", model, isinstance(row, OnlineRow), row.case, _values(row))
        for row in rows
    ]
    if report.start_s is not None:
        started = {"start_s": report.start_s}
        figures.append(Figure("asyncllm", model, bool(report.online), START, started))
    return figures


def _goodness(figure: Figure) -> tuple[float, float]:
    return figure.values.get("tok_s", 0.0), -figure.values.get("start_s", 0.0)


def _values(row: OfflineRow | OnlineRow) -> dict[str, float]:
    fields = msgspec.structs.asdict(row)
    return {name: fields[name] for name in METRICS if fields.get(name) is not None}


def _of_peers(raw: dict[str, Any]) -> list[Figure]:
    figures = [
        Figure(row.engine, row.model, False, row.case, {"tok_s": row.out_tok_s})
        for row in msgspec.convert(raw.get("offline", []), list[_PeerRow])
    ]
    for key, value in raw.items():
        if not key.startswith(_ONLINE):
            continue
        models = msgspec.convert(value, dict[str, dict[str, float | dict[str, float]]])
        for model, cases in models.items():
            for case, numbers in cases.items():
                if isinstance(numbers, float):  # of no case, such as start_s
                    case, numbers = START, {case: numbers}
                values = {name: numbers[name] for name in METRICS if name in numbers}
                if values:
                    engine = key.removeprefix(_ONLINE)
                    figures.append(Figure(engine, model, True, case, values))
    return figures
