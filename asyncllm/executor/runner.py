"""ModelRunner: one StepPlan in, one StepResult out, without waiting in between."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
from torch import Tensor

from asyncllm.executor.device import Device, Event, Span
from asyncllm.executor.memory.copies import PageCopier
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.drafter import HeadDrafter
from asyncllm.executor.step.eager import Samples, StepForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.executor.step.state_replay import StateReplay
from asyncllm.executor.step.verification import Verification
from asyncllm.wire.messages import (
    NO_TOKEN,
    PooledPrompt,
    RowLogprobs,
    ScoredPrompt,
    StepPlan,
    StepResult,
    unpack,
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Download = Callable[["Tensor"], np.ndarray]


class Packed(Protocol[T_co]):
    """Messages as one tensor on the device, ``packed``."""

    packed: Tensor

    def unpack(self, packed: np.ndarray) -> Iterable[T_co]:
        """The messages, from a copy of ``packed`` on the host."""


class Readback(Generic[T]):
    """The copy of messages to the host, ``packed``; None if there are no messages."""

    def __init__(self, messages: Packed[T] | None, download: Download) -> None:
        self._messages = messages
        self.packed = None if messages is None else download(messages.packed)

    def read(self) -> tuple[T, ...]:
        """The messages, once the copy is done."""
        if self._messages is None or self.packed is None:
            return ()
        return tuple(self._messages.unpack(self.packed))


@dataclass(frozen=True, slots=True)
class StepReadback:
    """Copies to the host of sampled tokens and of everything else a step yields.

    Attributes:
        step: the rows, and what each of them samples.
        verification: of drafts. right: how many of each row's were right; may still be copied.
        tokens, columns: see ``Samples``; the tokens' copy may still run.
        logprobs: one for each decode step, or none.
        prompts, pooled: of the prompts that are scored or pooled.
        failures: see ``Samples``.
    """

    step: StepRows
    verification: Verification | None
    right: np.ndarray | None
    tokens: np.ndarray
    columns: np.ndarray | None
    logprobs: tuple[Readback[RowLogprobs], ...]
    prompts: Readback[ScoredPrompt]
    pooled: Readback[PooledPrompt]
    failures: tuple[tuple[int, int, str], ...]

    @classmethod
    def of(
        cls,
        step: StepRows,
        samples: Samples,
        verification: Verification | None,
        right: Tensor | None,
        download: Download,
    ) -> StepReadback:
        """Begin the copies of a step whose kernels may still run."""
        return cls(
            step=step,
            verification=verification,
            right=None if right is None else download(right),
            tokens=download(samples.tokens),
            columns=samples.columns,
            logprobs=tuple(Readback(logprobs, download) for logprobs in samples.logprobs),
            prompts=Readback(samples.prompts, download),
            pooled=Readback(samples.pooled, download),
            failures=samples.failures,
        )

    def read(self) -> Sampled:
        """What was sampled, once the copies are done."""
        rows, num_rows = self.step.sampling, len(self.step.rows)
        tokens = self.tokens if self.columns is None else self.tokens[:, self.columns]
        places, wrong = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.int64)
        if self.verification is not None and self.right is not None:
            places, wrong = self.step.places, self.verification.wrong(self.step, self.right)
        by_row = np.full((len(tokens) + int(places.max()), num_rows), NO_TOKEN, dtype="<i4")
        if self.verification is None:
            by_row[:, rows] = tokens
        else:
            by_row[places, rows] = tokens[0]
            by_row[places[wrong], rows[wrong]] = NO_TOKEN

        def index(after: int, sample: int) -> int:
            place = after if self.verification is None else int(places[sample])
            return place * num_rows + int(rows[sample])

        logprobs = (
            msgspec.structs.replace(entry, row=index(after, entry.row))
            for after, part in enumerate(self.logprobs)
            for entry in part.read()
            if entry.row not in wrong
        )
        failures = ((index(after, sample), reason) for after, sample, reason in self.failures)
        return Sampled(by_row, tuple(logprobs), tuple(failures))


class Sampled(NamedTuple):
    """``tokens``, ``logprobs`` and ``failures`` of a ``StepResult``; int32 [k, n]."""

    tokens: np.ndarray
    logprobs: tuple[RowLogprobs, ...] = ()
    failures: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Ticket:
    """A launched step.

    Attributes:
        ends: the step is done when all of these are: the end of its rows or, if it has none, of
            all copies under way.
        rows: the rows' time on the device; None without rows.
        readback: None if there is nothing to read.
    """

    step: int
    num_rows: int
    decode_steps: int
    t_launch: float
    launch_seconds: float
    ends: list[Event]
    rows: Span | None = None
    readback: StepReadback | None = None

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return all(end.query() for end in self.ends)

    def wait(self) -> None:
        """Return when the step is done; the GIL is released meanwhile."""
        for end in self.ends:
            end.synchronize()


class ModelRunner:
    """Runs steps, and page copies concurrently with them, on one device.

    Owns the slot table and the sampler's state.
    """

    def __init__(
        self,
        forward: StepForward,
        sampler: Sampler,
        table: SlotTable,
        copier: PageCopier,
        states: StatePool,
        device: Device,
        drafter: HeadDrafter | None = None,
    ):
        self._forward = forward
        self._drafter = drafter
        self._replay = StateReplay(states, table, device)
        self._states = states
        self._sampler = sampler
        self._table = table
        self._copier = copier
        self._device = device
        self._previous_end: Event | None = None

    def launch(self, plan: StepPlan) -> Ticket:
        """Queue a step's kernels. Host work only, unless the device is the CPU itself.

        Raises:
            DeviceLost: copies cannot be launched. After any other error they are under way.
        """
        t_launch = time.perf_counter()
        # States first: copies from the host replace what these may read.
        self._states.copy(unpack(plan.state_copies, 2), self._device.upload)
        self._copier.launch(plan.step, unpack(plan.copies, 3))
        rows = unpack(plan.rows, 3)
        # The table first: if anything below fails, the rows of the next step, which may be planned
        # already, still write to their own pages.
        known = [self._table.admit(admit) for admit in plan.admits]
        self._table.add_pages(unpack(plan.new_pages, 3))
        for admit, tokens in zip(plan.admits, known, strict=True):
            self._sampler.admit(admit.slot, admit.params, tokens, admit.num_prompt)
        self._sampler.flush()
        if len(rows) == 0:
            return Ticket(plan.step, 0, 1, t_launch, 0.0, self._copier.ends())
        drafts, doubts = unpack(plan.drafts), unpack(plan.doubts, 3)
        step = StepRows.of(rows, self._table, unpack(plan.state_slots), drafts, doubts)
        verification = Verification.of(step)
        # No idle time is known behind a launch that fails.
        previous, self._previous_end = self._previous_end, None
        with self._device.exclusive():
            # Only now: waiting for another engine is no time of this step.
            begin = self._device.event()
            samples, right = self._forward(self._replay.set_apart(step), plan.decode_steps), None
            if verification is not None and samples is not None:
                sampled = samples.tokens[0], samples.columns
                right = verification.check(*sampled, self._table, self._device)
            if samples is not None and samples.taken is not None:
                checked = None
                if verification is not None and right is not None:
                    checked = verification.rows, right
                    self._replay.replay(step, samples.taken, *checked)
                if self._drafter is not None:
                    sampled = samples.tokens[0], samples.columns
                    self._drafter.draft(step, *sampled, samples.taken, checked, plan.ahead)
        readback = None
        if samples is not None:
            download = self._device.download
            readback = StepReadback.of(step, samples, verification, right, download)
        end = self._previous_end = self._device.event()
        return Ticket(
            plan.step,
            len(rows),
            plan.decode_steps,
            t_launch,
            time.perf_counter() - t_launch,
            [end],
            Span(begin, end, previous),
            readback,
        )

    def collect(self, ticket: Ticket) -> StepResult:
        """Read the outcome of a step that is done.

        Reports completed copies of this and earlier plans; only a plan without rows waits for them.
        """
        arrived = time.perf_counter()
        readback, rows = ticket.readback, ticket.rows
        sampled = Sampled(np.full(ticket.decode_steps * ticket.num_rows, NO_TOKEN, dtype="<i4"))
        if readback is not None:
            sampled = readback.read()
        return StepResult(
            step=ticket.step,
            tokens=sampled.tokens.tobytes(),
            logprobs=sampled.logprobs,
            error=None,
            t_launch=ticket.t_launch,
            seconds=0.0 if rows is None else rows.seconds(),
            launch_seconds=ticket.launch_seconds,
            idle_seconds=None if rows is None else rows.idle_seconds(),
            prompts=() if readback is None else readback.prompts.read(),
            pooled=() if readback is None else readback.pooled.read(),
            failures=sampled.failures,
            t_done=time.perf_counter(),
            collect_seconds=time.perf_counter() - arrived,
            # Last, because nothing may fail after it: each copy is reported once.
            copied=self._copier.completed(ticket.step),
        )
