"""A metric: its name, its meaning, and how to read it. Tables of them become Prometheus' text.

Writing the text takes 0.5 ms; with ``prometheus_client`` it took ten times as long, and gateways
ask many times a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Generic, Literal, TypeVar, cast

from asyncllm.engine.stats import Distribution, Histogram
from asyncllm.server.http.traffic import RECENT_SECONDS

S = TypeVar("S")

Kind = Literal["gauge", "counter", "histogram"]
#: One number, a number for each value of the label (or tuple of values of the labels), a histogram,
#: or nothing so far.
Value = float | Mapping[Any, float] | Histogram | None

#: The path of the attribute where the value is, or what reads it.
Read = str | Callable[[S], Any]

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_ESCAPES: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True)
class Metric(Generic[S]):
    """One family of samples.

    Attributes:
        name: whole; a counter's ends in ``_total``.
        meaning: one line, for people.
        read: the present value, of what the metric is about.
        labels: of each sample; those of a histogram have none but ``le``.
    """

    name: str
    kind: Kind
    meaning: str
    read: Read[S]
    labels: tuple[str, ...] = ()

    def value(self, source: S) -> Value:
        read = attrgetter(self.read) if isinstance(self.read, str) else self.read
        return cast(Value, read(source))


def gauge(name: str, meaning: str, read: Read[S]) -> Metric[S]:
    """What goes up and down."""
    return Metric(f"asyncllm_{name}", "gauge", meaning, read)


def counter(name: str, meaning: str, read: Read[S]) -> Metric[S]:
    """What only grows; ``name`` is without ``_total``."""
    return Metric(f"asyncllm_{name}_total", "counter", meaning, read)


def counters(name: str, label: str, meaning: str, read: Read[S]) -> Metric[S]:
    """A counter for each value of a label."""
    return Metric(f"asyncllm_{name}_total", "counter", meaning, read, (label,))


def histogram(name: str, meaning: str, read: Read[S]) -> Metric[S]:
    return Metric(f"asyncllm_{name}", "histogram", meaning, read)


def distribution(name: str, meaning: str, path: str) -> tuple[Metric[S], Metric[S]]:
    """A histogram, and the exact p99 of the latest observations; ``name`` ends in ``_seconds``."""
    short = name.removesuffix("_seconds")
    latest = f"{meaning} p99 of the latest {Distribution.KEPT}."
    of = attrgetter(path)
    return (
        histogram(name, meaning, f"{path}.histogram"),
        gauge(f"{short}_p99_seconds", latest, lambda source: of(source).recent_p99()),
    )


def waits(name: str, meaning: str, path: str) -> tuple[Metric[S], Metric[S], Metric[S]]:
    """A distribution, and the longest recent wait."""
    short = name.removesuffix("_seconds")
    longest = f"{meaning} The longest of the latest {RECENT_SECONDS:g} s or more."
    return (
        *distribution(name, meaning, f"{path}.distribution"),
        gauge(f"{short}_max_seconds", longest, f"{path}.longest"),
    )


def write(
    metrics: Iterable[Metric[S]], source: S, constant: Mapping[str, str] | None = None
) -> str:
    """Prometheus' text format.

    Args:
        constant: labels of every sample.
    """
    shared = _labels((constant or {}).items())
    lines: list[str] = []
    for metric in metrics:
        value = metric.value(source)
        if value is None:
            continue
        name = metric.name
        lines.append(f"# HELP {name} {metric.meaning}\n# TYPE {name} {metric.kind}")
        for suffix, own, number in _samples(metric, value):
            labels = f"{shared},{own}" if shared and own else shared or own
            braced = f"{{{labels}}}" if labels else ""
            lines.append(f"{name}{suffix}{braced} {float(number)!r}")
    lines.append("")
    return "\n".join(lines)


def _samples(
    metric: Metric[S], value: float | Mapping[Any, float] | Histogram
) -> Iterator[tuple[str, str, float]]:
    """What is added to the metric's name, the sample's own labels, and the number."""
    if isinstance(value, Histogram):
        count = 0
        for bound, count in value.cumulative():
            yield "_bucket", f'le="{bound}"', count
        yield "_count", "", count
        yield "_sum", "", value.total
    elif isinstance(value, Mapping):
        for values, number in value.items():
            given = (values,) if isinstance(values, str) else values
            yield "", _labels(zip(metric.labels, given, strict=True)), number
    else:
        yield "", "", value


def _labels(pairs: Iterable[tuple[str, str]]) -> str:
    return ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in pairs)
