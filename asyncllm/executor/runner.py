"""ModelRunner: one StepPlan in, one StepResult out, without waiting in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from asyncllm.executor.copies import PageCopier
from asyncllm.executor.device import Device, Mark, Span
from asyncllm.executor.eager import Samples, StepForward
from asyncllm.executor.inputs import StepRows
from asyncllm.executor.sampler import Sampler
from asyncllm.executor.slots import SlotTable
from asyncllm.wire.messages import (
    NO_TOKEN,
    PooledPrompt,
    RowLogprobs,
    ScoredPrompt,
    StepPlan,
    StepResult,
    unpack,
)

if TYPE_CHECKING:
    from asyncllm.executor.logprobs import Logprobs
    from asyncllm.executor.pooling import PooledSums
    from asyncllm.executor.prompt_logprobs import PromptLogprobs


@dataclass(frozen=True, slots=True)
class Landing:
    """Sampled tokens and logprobs on their way to the host.

    Attributes:
        rows: int64 [samples]; the rows of the plan they belong to.
        tokens: int64 [burst, samples], landing.
        logprobs: of each token of the burst, and what is landing of them; None when no row asked.
        prompts: of the prompts that are scored, and what is landing of them; None without any.
        pooled: of those that are pooled, likewise.
        failures: as in ``StepResult``.
    """

    rows: np.ndarray
    tokens: np.ndarray
    logprobs: tuple[tuple[Logprobs, np.ndarray] | None, ...]
    prompts: tuple[PromptLogprobs, np.ndarray] | None = None
    pooled: tuple[PooledSums, np.ndarray] | None = None
    failures: tuple[tuple[int, str], ...] = ()

    def row_logprobs(self, num_rows: int) -> Iterator[RowLogprobs]:
        """By place in ``StepResult.tokens``; waits for them."""
        for after, part in enumerate(self.logprobs):
            if part is None:
                continue
            logprobs, packed = part
            for entry in logprobs.unpack(packed):
                row = after * num_rows + int(self.rows[entry.row])
                yield msgspec.structs.replace(entry, row=row)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step; launching took ``launch_seconds``. ``samples`` is None when nothing lands.

    ``end`` is that of the rows, or of the copies under way when there are no rows; ``rows`` tells
    how long rows ran.
    """

    step: int
    num_rows: int
    burst: int
    t_launch: float
    samples: Landing | None
    end: Mark
    rows: Span | None
    launch_seconds: float = 0.0

    def done(self) -> bool:
        """Whether ``collect`` would return without waiting."""
        return self.end.done()


class ModelRunner:
    """Runs steps, and page copies beside them, on one device.

    Owns the slot table and the sampler's state.
    """

    def __init__(
        self,
        forward: StepForward,
        sampler: Sampler,
        table: SlotTable,
        copier: PageCopier,
        device: Device,
    ):
        self._forward = forward
        self._sampler = sampler
        self._table = table
        self._copier = copier
        self._device = device

    def launch(self, plan: StepPlan) -> Ticket:
        """Queue a step's kernels. Host work only, unless the device is the CPU itself.

        Raises:
            DeviceLost: copies cannot be launched. After any other error they are under way.
        """
        t_launch = time.perf_counter()
        self._copier.launch(plan.step, unpack(plan.copies, 3))
        rows = unpack(plan.rows, 3)
        # The table first: should anything below fail, rows of the next step, which is on its way
        # already, still go to their own pages.
        known = [self._table.admit(admit) for admit in plan.admits]
        self._table.add_pages(unpack(plan.new_pages, 3))
        for admit, tokens in zip(plan.admits, known, strict=True):
            self._sampler.admit(admit.slot, admit.params, tokens, admit.num_prompt)
        self._sampler.flush()
        if len(rows) == 0:
            return Ticket(plan.step, 0, 1, t_launch, None, self._copier.mark(), None)
        step = StepRows.of(rows, self._table)
        begun = self._device.begin()
        sampled = self._forward(step, plan.burst)
        samples = None if sampled is None else self._download(step, sampled)
        span = begun.end()
        seconds = time.perf_counter() - t_launch
        return Ticket(plan.step, len(rows), plan.burst, t_launch, samples, span, span, seconds)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a launched step, with the GIL released, and read its outcome.

        Copies of this and earlier plans are told of if they are done, which with rows is not
        waited for.
        """
        tokens = np.full((ticket.burst, ticket.num_rows), NO_TOKEN, dtype="<i4")
        logprobs: tuple[RowLogprobs, ...] = ()
        prompts: tuple[ScoredPrompt, ...] = ()
        pooled: tuple[PooledPrompt, ...] = ()
        ticket.end.wait()
        landed = time.perf_counter()
        if ticket.samples is not None:
            tokens[:, ticket.samples.rows] = ticket.samples.tokens
            logprobs = tuple(ticket.samples.row_logprobs(ticket.num_rows))
            if ticket.samples.prompts is not None:
                scored, packed = ticket.samples.prompts
                prompts = tuple(scored.unpack(packed))
            if ticket.samples.pooled is not None:
                sums, totals = ticket.samples.pooled
                pooled = tuple(sums.unpack(totals))
        return StepResult(
            step=ticket.step,
            tokens=tokens.tobytes(),
            logprobs=logprobs,
            error=None,
            t_launch=ticket.t_launch,
            t_done=time.perf_counter(),
            seconds=0.0 if ticket.rows is None else ticket.rows.seconds(),
            launch_seconds=ticket.launch_seconds,
            collect_seconds=time.perf_counter() - landed,
            idle_seconds=None if ticket.rows is None else ticket.rows.idle_seconds(),
            prompts=prompts,
            pooled=pooled,
            failures=() if ticket.samples is None else ticket.samples.failures,
            # Last, as nothing may fail any more: each is told once.
            copied=self._copier.landed(ticket.step),
        )

    def _download(self, step: StepRows, samples: Samples) -> Landing:
        download = self._device.download
        logprobs = tuple(
            None if part is None else (part, download(part.packed)) for part in samples.logprobs
        )
        scored, sums = samples.prompts, samples.pooled
        prompts = None if scored is None else (scored, download(scored.packed))
        pooled = None if sums is None else (sums, download(sums.packed))
        failures = tuple(
            (after * len(step.rows) + int(step.sampling[row]), reason)
            for after, row, reason in samples.failures
        )
        tokens = download(samples.tokens)
        return Landing(step.sampling, tokens, logprobs, prompts, pooled, failures)
