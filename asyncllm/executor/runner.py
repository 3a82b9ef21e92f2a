"""ModelRunner: one StepPlan in, one StepResult out, without waiting in between."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from asyncllm.executor.device import Device, Mark, Span
from asyncllm.executor.memory.copies import PageCopier
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.eager import StepForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.readback import Landing, read
from asyncllm.executor.step.slots import SlotTable
from asyncllm.wire.messages import (
    NO_TOKEN,
    PooledPrompt,
    RowLogprobs,
    ScoredPrompt,
    StepPlan,
    StepResult,
    unpack,
)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step; launching took ``launch_seconds``. ``samples`` is None when nothing lands.

    ``end`` is that of the rows, or of the copies under way when there are no rows; ``rows`` tells
    how long rows ran.
    """

    step: int
    num_rows: int
    decode_steps: int
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
        sampled = self._forward(step, plan.decode_steps)
        samples = None if sampled is None else Landing.of(step, sampled, self._device.download)
        span = begun.end()
        seconds = time.perf_counter() - t_launch
        return Ticket(
            plan.step, len(rows), plan.decode_steps, t_launch, samples, span, span, seconds
        )

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a launched step, with the GIL released, and read its outcome.

        Copies of this and earlier plans are told of if they are done, which with rows is not
        waited for.
        """
        tokens = np.full((ticket.decode_steps, ticket.num_rows), NO_TOKEN, dtype="<i4")
        logprobs: tuple[RowLogprobs, ...] = ()
        prompts: tuple[ScoredPrompt, ...] = ()
        pooled: tuple[PooledPrompt, ...] = ()
        ticket.end.wait()
        landed = time.perf_counter()
        if ticket.samples is not None:
            tokens[:, ticket.samples.rows] = ticket.samples.sampled()
            logprobs = tuple(ticket.samples.row_logprobs(ticket.num_rows))
            prompts, pooled = read(ticket.samples.prompts), read(ticket.samples.pooled)
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
