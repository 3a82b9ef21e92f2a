"""One page of metrics of several replicas' pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from asyncllm.supervise.crowd import FileLimit

#: Gauges that gateways read, by names of another server, without labels of ours: added up.
_ADDED: Final = frozenset(("vllm:num_requests_running", "vllm:num_requests_waiting"))
#: The same, of which they get the mean.
_AVERAGED: Final = frozenset(("vllm:kv_cache_usage_perc",))

_Samples = dict[str, float]


def labelled(pages: Mapping[str, str]) -> str:
    """All samples with the label ``replica``, for pages of replicas that come and go.

    Args:
        pages: by the replica's name.
    """
    families: dict[str, _Family] = {}
    for replica, page in pages.items():
        _read(replica, page, families)
    return "".join(
        f"{line}\n"
        for name, family in families.items()
        for line in (*family.lines, *_told_apart(name, family))
    )


class _Family:
    """Samples of one name, as the page says it."""

    def __init__(self) -> None:
        self.kind = "untyped"
        self.lines: list[str] = []
        self.samples: list[tuple[int | str, str, float]] = []


class Totals:
    """Adds counters and histograms up; gauges get the label ``replica``.

    What a replica had counted before it died stays in the sums: they never go down, which
    Prometheus would take for a restart of all.
    """

    def __init__(self, num_replicas: int):
        self._latest: list[_Samples] = [{} for _ in range(num_replicas)]
        self._before: _Samples = {}

    def lost(self, replica: int) -> None:
        """It will count from 0 again."""
        for sample, value in self._latest[replica].items():
            self._before[sample] = self._before.get(sample, 0.0) + value
        self._latest[replica] = {}

    def merged(self, pages: Sequence[str | None]) -> str:
        """
        Args:
            pages: of each replica; None of one that has not answered: its latest counts stand.
        """
        families: dict[str, _Family] = {}
        for replica, page in enumerate(pages):
            if page is not None:
                self._latest[replica] = _read(replica, page, families)
        lines: list[str] = []
        for name, family in families.items():
            lines += family.lines
            if family.kind in ("counter", "histogram"):
                lines += self._summed(family)
            else:
                lines += _told_apart(name, family)
        return "".join(f"{line}\n" for line in lines)

    def _summed(self, family: _Family) -> list[str]:
        names = dict.fromkeys(sample for _, sample, _ in family.samples)
        known = (*self._latest, self._before)
        return [f"{name} {sum(page.get(name, 0.0) for page in known)!r}" for name in names]


def _read(replica: int | str, page: str, families: dict[str, _Family]) -> _Samples:
    """Add a page to the families; returns what is to be summed."""
    summed: _Samples = {}
    family = _Family()
    for line in page.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ", 3)[2]
            family = families.setdefault(name, _Family())
            is_new = not family.lines
        if line.startswith("#"):
            if is_new:
                family.lines.append(line)
            if line.startswith("# TYPE "):
                family.kind = line.rpartition(" ")[2]
                is_new = False
        elif line:
            sample, _, number = line.rpartition(" ")
            value = float(number)
            family.samples.append((replica, sample, value))
            if family.kind in ("counter", "histogram"):
                summed[sample] = value
    return summed


def _told_apart(name: str, family: _Family) -> list[str]:
    """Each replica's, but for what gateways read."""
    if name in _ADDED or name in _AVERAGED:
        return _together(name, family, name in _AVERAGED)
    return [f"{_labelled(sample, replica)} {value!r}" for replica, sample, value in family.samples]


def _together(name: str, family: _Family, is_mean: bool) -> list[str]:
    """Of all replicas, with the labels of the first."""
    values = [value for _, _, value in family.samples]
    total = sum(values) / len(values) if is_mean else sum(values)
    return [f"{family.samples[0][1]} {total!r}"] if values else []


def _labelled(sample: str, replica: int | str) -> str:
    name, brace, rest = sample.partition("{")
    if not brace:
        return f'{name}{{replica="{replica}"}}'
    return f'{name}{{replica="{replica}",{rest}'


#: What the front counts itself: name, kind, meaning, and the field of ``Own``.
OWN: Final = (
    ("asyncllm_replicas_ready", "gauge", "Replicas that take requests.", "ready"),
    ("asyncllm_replica_deaths_total", "counter", "Replicas that have ended.", "deaths"),
    (
        "asyncllm_requests_moved_total",
        "counter",
        "Requests given to another replica because theirs had died.",
        "moved",
    ),
    ("asyncllm_front_connections_open", "gauge", "Clients' connections.", "connections"),
    (
        "asyncllm_front_open_files_limit",
        "gauge",
        "How many files the front may have open; each connection is one.",
        "files",
    ),
)


class Own:
    """The front's own numbers."""

    def __init__(self) -> None:
        self.ready = self.deaths = self.moved = self.connections = 0
        self.files = FileLimit.now().files

    def page(self) -> str:
        return "".join(
            f"# HELP {name} {meaning}\n# TYPE {name} {kind}\n{name} {getattr(self, field)}.0\n"
            for name, kind, meaning, field in OWN
        )
