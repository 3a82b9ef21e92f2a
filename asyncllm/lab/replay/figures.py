"""Latency and throughput of a run, recorded or simulated."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

Outcome = Literal["", "finished", "dropped", "refused"]


class Record(msgspec.Struct):
    """What happened to one request. Times are seconds of the run's clock; -1.0: not yet.

    Attributes:
        id: of the request.
        group: of the workload; "" if it has no groups.
        started: of its first step.
        num_cached: prompt tokens found in the prefix cache at the first admission.
        num_prefilled: tokens that prompt chunks computed; more than the rest of the prompt if it
            was preempted.
        num_admissions: times it entered the batch.
        tokens: the time of each generated token, by the results of the steps.
        num_rows: decode rows.
        num_drafts, num_drafted, num_right, num_failed: of these, rows that verified a draft; their
            drafted tokens, those that were right, and the drafts of which some were wrong.
        outcome: "dropped" if it was ended from outside, "" if the run ended first.
    """

    id: int
    group: str
    arrival: float
    deadline: float
    num_prompt: int
    started: float = -1.0
    num_cached: int = 0
    num_prefilled: int = 0
    num_admissions: int = 0
    tokens: array[float] = msgspec.field(default_factory=lambda: array("d"))
    num_rows: int = 0
    num_drafts: int = 0
    num_drafted: int = 0
    num_right: int = 0
    num_failed: int = 0
    outcome: Outcome = ""

    def verified(self, num_drafted: int, num_right: int) -> None:
        """A draft was verified."""
        self.num_drafts += 1
        self.num_drafted += num_drafted
        self.num_right += num_right
        self.num_failed += num_right < num_drafted

    @property
    def met(self) -> bool:
        """Whether its last token came before its deadline."""
        return self.outcome == "finished" and (not self.tokens or self.tokens[-1] <= self.deadline)


class Figures:
    """Collected during a run. Times in seconds.

    Attributes:
        records: of all requests, in order of arrival.
        num_steps, num_preemptions: of the run.
        begun, ended: times of the first and the last event.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.num_steps = 0
        self.num_preemptions = 0
        self.begun = 0.0
        self.ended = 0.0

    @property
    def num_requests(self) -> int:
        return len(self.records)

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return sum(len(record.tokens) for record in self.records)

    @property
    def ttft(self) -> array[float]:
        """From arrival to the first token, of each request that has one."""
        return array("d", [r.tokens[0] - r.arrival for r in self.records if r.tokens])

    @property
    def itl(self) -> array[float]:
        """Between consecutive tokens of a request, by the results of their steps."""
        gaps = [np.diff(record.tokens) for record in self.records if len(record.tokens) > 1]
        return array("d", np.concatenate(gaps).tobytes() if gaps else b"")

    @property
    def queue_wait(self) -> array[float]:
        """From arrival to the first step, of each request that has one."""
        return array("d", [r.started - r.arrival for r in self.records if r.num_admissions])

    @property
    def prompt_tokens(self) -> int:
        """Of admitted requests."""
        return sum(record.num_prompt for record in self.records if record.num_admissions)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens of admitted requests that were found in the prefix cache."""
        return sum(record.num_cached for record in self.records)

    @property
    def tokens_per_draft(self) -> float | None:
        """What a row with a draft yields: its tokens that are right, and one more."""
        count = sum(record.num_drafts for record in self.records)
        return 1 + sum(record.num_right for record in self.records) / count if count else None

    @property
    def makespan(self) -> float:
        """Seconds from the first event to the last."""
        return self.ended - self.begun

    @property
    def throughput(self) -> float:
        """Generated tokens per second; 0.0 when no time passed."""
        return self.num_tokens / self.makespan if self.makespan else 0.0

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def groups(self) -> list[str]:
        """The names of the requests' groups, in order of arrival."""
        return list(dict.fromkeys(record.group for record in self.records))

    def of_group(self, group: str) -> Figures:
        """The figures of one group's requests, from the first arrival to the last token.

        ``num_steps`` is 0; a preemption counts when the request enters again.
        """
        found = Figures()
        found.records = records = [record for record in self.records if record.group == group]
        found.begun = min((record.arrival for record in records), default=0.0)
        found.ended = max((r.tokens[-1] for r in records if r.tokens), default=found.begun)
        found.num_preemptions = sum(max(0, record.num_admissions - 1) for record in records)
        return found

    def arrived(self, record: Record, now: float) -> None:
        if not self.records:
            self.begun = now
        self.records.append(record)


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float | None:
    """None when there are no values."""
    return float(np.percentile(values, percent)) if len(values) else None
