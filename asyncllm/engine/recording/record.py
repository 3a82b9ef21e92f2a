"""Recording: a scheduler that writes its calls into a trace."""

from __future__ import annotations

from collections import deque
from zlib import crc32

import msgspec

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.policy import POLICIES, Policy
from asyncllm.engine.recording.page_ids import PageIds, Place
from asyncllm.engine.recording.trace_file import (
    MAX_BYTES,
    NEW_ROOT,
    Arrival,
    Finish,
    Header,
    Pages,
    Plan,
    PlanDigest,
    Result,
    TraceWriter,
)
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import FOREVER, SeqState, Sequence
from asyncllm.engine.scheduling.speculation.choice import Choice
from asyncllm.engine.scheduling.step import Applied, Planned
from asyncllm.types import FinishReason
from asyncllm.version import __version__
from asyncllm.wire.messages import BAD_TOKEN, StepPlan, StepResult, pack, unpack

_BAD = pack([BAD_TOKEN])


class RecordedScheduler(Scheduler):
    """A Scheduler whose calls are recorded between ``record_to`` and ``stop_recording``."""

    _recorder: Recorder | None = None
    _applying = False

    def record_to(self, path: str, *, max_bytes: int = MAX_BYTES) -> None:
        """Begin, before anything is added.

        Raises:
            TraceError: the file cannot be written.
        """
        header = Header(__version__, policy_name(self.policy), self.limits)
        writer = TraceWriter(path, header, max_bytes=max_bytes)
        self._recorder = Recorder(writer, self.limits, self.cache)

    def stop_recording(self, reason: str) -> None:
        """End the trace and close its file. Idempotent."""
        if self._recorder is not None:
            self._recorder.writer.close(reason)
            self._recorder = None

    def add(self, seq: Sequence, now: float) -> None:
        if self._recorder is not None:
            self._recorder.added(seq, now)
        super().add(seq, now)

    def finish(self, seq: Sequence, now: float) -> None:
        # apply() also calls this, for requests that its result ends.
        if self._recorder is not None and not self._applying:
            self._recorder.finished(seq, now)
        super().finish(seq, now)

    def plan(self, number: int, now: float) -> Planned | None:
        recorder = self._recorder
        if recorder is None:
            return super().plan(number, now)
        before = self.departures.num_preemptions
        try:
            planned = super().plan(number, now)
        except Exception as error:
            recorder.planned(number, now, None, self.choice, preempted=False)
            self.stop_recording(f"plan() raised {error!r}")
            raise
        preempted = self.departures.num_preemptions != before
        recorder.planned(number, now, planned, self.choice, preempted=preempted)
        self._forget_ended(recorder)
        return planned

    def apply(self, result: StepResult, now: float) -> Applied:
        recorder = self._recorder
        if recorder is None:
            return super().apply(result, now)
        before = len(self.batch.running)
        step = self.in_flight[0]
        self._applying = True
        try:
            applied = super().apply(result, now)
        except Exception as error:
            self.stop_recording(f"apply() raised {error!r}")
            raise
        finally:
            self._applying = False
        ended = len(self.batch.running) != before
        recorder.applied(result, now, applied, step.num_right(result), ended=ended)
        self._forget_ended(recorder)
        return applied

    def _forget_ended(self, recorder: Recorder) -> None:
        """Drop a recorder whose file is full or cannot be written."""
        if not recorder.writer.recording:
            self._recorder = None


class _LiveSequence(msgspec.Struct):
    """A sequence that may still fill pages, or has pages that have yet to enter the cache."""

    seq: Sequence
    place: Place
    num_pages: int = 0


class Recorder:
    """Turns calls into events."""

    def __init__(self, writer: TraceWriter, limits: EngineLimits, cache: KVCacheManager):
        self.writer = writer
        self._page_size = limits.page_size
        room = 2 * (limits.num_pages + limits.host_pages)
        self._ids = PageIds(limits.page_size, room, cache.has)
        self._tenants: dict[str, int] = {}
        self._live: dict[int, _LiveSequence] = {}
        #: Admitted at least once; and of these, preempted with steps in flight.
        self._started: dict[int, _LiveSequence] = {}
        self._preempted: dict[int, _LiveSequence] = {}
        #: Ended, but their pages may still enter the cache.
        self._leaving: deque[_LiveSequence] = deque()

    def added(self, seq: Sequence, now: float) -> None:
        place, new = self._ids.enter(seq.kv.salt)
        live = self._live[seq.id] = _LiveSequence(seq, place)
        known, num_new = self._extend(live)
        tenant: int | str | None = self._tenants.get(seq.service.tenant)
        if tenant is None:
            self._tenants[seq.service.tenant] = len(self._tenants)
            # JSON lets lone surrogates through.
            tenant = seq.service.tenant.encode("utf-8", "backslashreplace").decode()
        event = Arrival(
            now=now,
            id=seq.id,
            tenant=tenant,
            node=NEW_ROOT if new else known,
            new_pages=num_new,
            num_prompt=seq.num_prompt,
            max_length=seq.output.max_length,
            priority=seq.service.priority,
            surely_full=seq.output.surely_full,
            arrival=None if seq.service.arrival == now else seq.service.arrival,
            deadline=None if seq.service.deadline == FOREVER else seq.service.deadline,
            scored=seq.reads.pending,
            cache_ttl=seq.kv.ttl,
            shared=seq.kv.shared,
        )
        self.writer.write(event, now)

    def finished(self, seq: Sequence, now: float) -> None:
        if seq.state is not SeqState.FINISHED:
            self._end(seq, now)
            self.writer.write(Finish(now, seq.id), now)
            self._release_ended()

    def planned(
        self, number: int, now: float, planned: Planned | None, choice: Choice, *, preempted: bool
    ) -> None:
        """``preempted``: some sequence was."""
        if preempted:
            for id, live in self._started.items():
                if live.seq.state is not SeqState.RUNNING:
                    self._preempted[id] = live
        for seq in planned.admitted if planned is not None else ():
            live = self._started.setdefault(seq.id, self._live[seq.id])
            self._note_pages(live, now)
            self._preempted.pop(seq.id, None)
        self._note_preempted(now)
        digest = None if planned is None else digest_of(planned.message)
        held = tuple(seq.id for seq in choice.held)
        drafts = tuple((draft.seq.id, len(draft.tokens)) for draft in choice.drafts)
        self.writer.write(Plan(number, now, digest, held, drafts, choice.ahead), now)

    def applied(
        self,
        result: StepResult,
        now: float,
        applied: Applied,
        right: tuple[int, ...],
        *,
        ended: bool,
    ) -> None:
        """``ended``: some running sequence was."""
        stopped: list[int] = []
        # Most steps end nothing, and then the rows need not be read.
        if ended or self._preempted:
            for seq, row, token, finish in applied.emitted:
                if finish is not None or token == BAD_TOKEN:
                    self._end(seq, now)
                if finish is FinishReason.STOP:
                    stopped.append(row)
            for seq in applied.failed:
                self._end(seq, now)
        bad: list[int] = []
        if _BAD in result.tokens:
            bad = (unpack(result.tokens) == BAD_TOKEN).nonzero()[0].tolist()
        self._note_preempted(now)
        failed = result.error is not None
        unmet = tuple(row for row, _ in result.failures)
        event = Result(
            now, result.seconds, tuple(stopped), tuple(bad), result.copied, failed, unmet, right
        )
        self.writer.write(event, now)
        self._release_ended()

    def _note_preempted(self, now: float) -> None:
        """Their pages may be in the cache already, and steps in flight still fill more."""
        if self._preempted:
            for live in self._preempted.values():
                self._note_pages(live, now)
            slots = {id: live.seq.slot for id, live in self._preempted.items()}
            self._preempted = {id: self._started[id] for id, slot in slots.items() if slot >= 0}

    def _note_pages(self, live: _LiveSequence, now: float) -> None:
        """Record the pages that have become full, if any."""
        if len(live.seq.tokens) // self._page_size > live.num_pages:
            known, num_new = self._extend(live)
            self.writer.write(Pages(live.seq.id, known, num_new), now)

    def _extend(self, live: _LiveSequence) -> tuple[int, int]:
        """Number the full pages that have no number yet; the last known page, and the new ones."""
        size, tokens = self._page_size, live.seq.tokens
        num_pages = len(tokens) // size
        data = tokens[live.num_pages * size : num_pages * size].tobytes()
        live.place, known, num_new = self._ids.extend(live.place, data)
        live.num_pages = num_pages
        return known.node, num_new

    def _end(self, seq: Sequence, now: float) -> None:
        live = self._live.pop(seq.id)
        self._started.pop(seq.id, None)
        self._preempted.pop(seq.id, None)
        self._note_pages(live, now)
        self._leaving.append(live)

    def _release_ended(self) -> None:
        while self._leaving and self._leaving[0].seq.kv.node is None:
            live = self._leaving.popleft()
            self._ids.leave(live.place, live.num_pages)


def digest_of(plan: StepPlan) -> PlanDigest:
    """Equal for two plans of the same work."""
    admits = crc32(b"")
    if plan.admits:
        flat: list[int] = []
        for admit in plan.admits:
            flat += (admit.slot, len(admit.tokens), admit.num_prompt)
        admits = crc32(pack(flat))
    rows = crc32(plan.state_slots, crc32(plan.rows, plan.decode_steps - 1))
    copies = crc32(plan.state_copies, crc32(plan.copies))
    return PlanDigest(rows, crc32(plan.new_pages), copies, admits)


def policy_name(policy: Policy) -> str:
    """Its name in the configuration, or the module and class of a user's own."""
    for name, kind in POLICIES.items():
        if type(policy) is kind:
            return name
    return f"{type(policy).__module__}.{type(policy).__qualname__}"
