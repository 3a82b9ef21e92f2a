"""Recurrent states of running sequences: their slots, and where copies of them are kept."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.cache.node import NO_STATE, Checkpoint, Kind
from asyncllm.engine.cache.state_slots import StateSlots
from asyncllm.engine.scheduling.batch import Ints
from asyncllm.engine.scheduling.sequence import FOREVER, Sequence
from asyncllm.engine.scheduling.states import StatePlan
from asyncllm.wire.messages import pack, unpack

#: Checkpoints of a path are at least this many pages apart: with pages of 16 tokens, a sequence
#: that goes on from one computes at most some 64 tokens that it could have found.
SPACING = 4
#: A checkpoint of a prompt leaves out this many tokens at its end. A chat's next turn often differs
#: there: the template asks for an answer in other words than it prints one.
OPEN_END = 8
#: Answers' checkpoints go first while those of prompts are used more than this many times as often:
#: templates leave reasoning out of earlier turns.
RARELY = 8
#: Of a prompt, the state is kept at no more places than these where others that wait leave it.
MOST_EXPECTED = 2
#: No position: where a sequence needs nothing kept.
NOWHERE = 2**31 - 1


@dataclass(slots=True)
class _Kept:
    """What a running sequence keeps of its state.

    Attributes:
        positions: in its prompt, where its state is still to be kept, falling.
        last: the deepest position on its path where it is kept.
        promised: by position, checkpoints that others may wait for.
        placed: checkpoints that it has put into the tree.
        num_expected: how many of the positions are where others that wait leave its path.
        trail: the latest state of its output. The tree has no node for it yet.
        trail_at: its position.
    """

    positions: list[int]
    last: int
    promised: dict[int, Checkpoint] = field(default_factory=dict)
    placed: list[Checkpoint] = field(default_factory=list)
    num_expected: int = 0
    trail: Checkpoint = field(default_factory=Checkpoint)
    trail_at: int = 0

    def place(self, checkpoint: Checkpoint, position: int) -> None:
        self.placed.append(checkpoint)
        self.last = position


class RecurrentStates:
    """Gives each sequence in the batch a state slot, and keeps checkpoints for later ones.

    The state is kept at the end of a prompt, and where its path leaves one that is known, or that
    of others that wait. A chunk ends there, and the plan of the sequence's next row copies the
    state before that row goes on. Until then the checkpoint is promised, and others wait for it. Of
    the output, the latest state at some page boundary is kept; the tree gets it when the sequence
    leaves.

    A checkpoint is ready when the step that wrote the state and the one that copied it are done
    without an error. So nobody begins with the state of a step that failed.
    """

    def __init__(self, limits: EngineLimits, cache: KVCacheManager, slots: StateSlots):
        assert limits.num_states >= limits.max_num_seqs, "each sequence has a state"
        self._cache = cache
        self._slots = slots
        self._page_size = limits.page_size
        self._spacing = SPACING * limits.page_size
        #: By slot in the batch: the state slot, and the next position where the state is kept.
        self._of = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self._next = np.full(limits.max_num_seqs, NOWHERE, dtype=np.int32)
        self._kept: dict[int, _Kept] = {}
        self._uses = [0] * len(Kind)  # how often sequences began with a checkpoint of each kind
        self._copies: list[int] = []
        #: Checkpoints that the present plan copies; by step, those of plans in flight.
        self._copied: list[tuple[Sequence, Checkpoint]] = []
        self._in_flight: dict[int, list[tuple[Sequence, Checkpoint]]] = {}

    # -- planning --------------------------------------------------------------------------------

    def enter(self, seq: Sequence, start: int) -> None:
        found, source = None, NO_STATE
        if start:
            assert seq.kv.node is not None, "it holds what it found"
            found = seq.kv.node.checkpoint
            assert found is not None and found.ready, "a match ends with a checkpoint"  # noqa: PT018
            source = found.slot
            assert source != NO_STATE, "which is on the device"
            self._slots.use(found)
            self._uses[found.kind] += 1
        self._cache.begun(seq.kv)  # from here on its slot may be taken
        slot = self._slots.take()
        assert slot is not None, "there are enough for all sequences"
        if source not in (NO_STATE, slot):  # the same if that was the last checkpoint
            self._copies += (source, slot)
        self._of[seq.slot] = slot
        # It computes known tokens again, as it found them without their state.
        cache = self._cache
        cache.join(seq.kv, cache.num_pages - cache.pages_for(seq.output.max_length))
        kept = self._kept[seq.slot] = _Kept(self._positions(seq, start), start)
        for position in kept.positions:
            self._promise(seq, kept, position)
        self._set_next(seq, kept)

    def limit_chunk(self, seq: Sequence, start: int, q_len: int) -> int:
        end = int(self._next[seq.slot])
        if end == start:  # the state is kept before this chunk
            end = next(reversed(self._kept[seq.slot].positions), NOWHERE)
        return min(q_len, end - start)

    def end_of_page(self, start: int, q_len: int) -> int:
        whole = (start + q_len) // self._page_size * self._page_size - start
        return whole if whole > 0 else q_len

    def expect(self, seq: Sequence, start: int, other: Sequence) -> None:
        kept, spacing, known = self._kept[seq.slot], self._spacing, other.tokens
        if kept.num_expected == MOST_EXPECTED or seq.tokens[:spacing] != known[:spacing]:
            return
        least = max(kept.last, start) + spacing
        if not self._cache.prefix_caching or seq.kv.salt != other.kv.salt:
            return
        end = self._prompt_end(seq)
        fork = min(_common(seq, other) // self._page_size * self._page_size, end)
        planned = {p for p in (*kept.positions, int(self._next[seq.slot])) if p <= end}
        if fork < least or any(abs(fork - p) < spacing for p in planned if p < end or p == fork):
            return
        kept.num_expected += 1
        if end - fork < spacing:
            planned.discard(end)
            if (promised := kept.promised.pop(end, None)) is not None:
                self._slots.drop(promised)
        kept.positions = sorted({*planned, fork}, reverse=True)
        self._set_next(seq, kept)
        # Those that are no more urgent wait for it from now on, not only while a step computes it.
        ours, theirs = seq.service, other.service
        alike = ours.tenant == theirs.tenant and theirs.deadline == FOREVER
        if alike and ours.priority <= theirs.priority:
            self._cache.begin(seq.kv, fork)
            self._promise(seq, kept, fork)

    def chunk_planned(self, seq: Sequence, start: int, end: int) -> None:
        kept = self._kept[seq.slot]
        if start == self._next[seq.slot]:
            self._keep(seq, kept, start)
            self._set_next(seq, kept)
        if end == self._next[seq.slot]:
            self._promise(seq, kept, end)

    def allow_multi_step(self, slots: Ints, starts: Ints, decode_steps: int) -> bool:
        left = self._next[slots] - starts
        return not ((left > 0) & (left < decode_steps)).any()

    def decodes_planned(self, slots: Ints, starts: Ints) -> None:
        due = self._next[slots] == starts
        if due.any():
            for slot, start in zip(slots[due].tolist(), starts[due].tolist(), strict=True):
                self._follow(self._kept[slot], slot, start)
                self._next[slot] = start + self._spacing

    def positions(self) -> Ints:
        return self._next

    def plan(self, step: int, rows: bytes) -> StatePlan:
        copies, self._copies = self._copies, []
        if self._copied:
            self._in_flight[step], self._copied = self._copied, []
        return StatePlan(pack(copies), self._of[unpack(rows, 3)[:, 0]].tobytes())

    # -- results ---------------------------------------------------------------------------------

    def step_done(self, step: int, *, good: bool) -> None:
        for seq, checkpoint in self._in_flight.pop(step, ()):
            if not good or seq.kv.corrupt:
                self._slots.drop(checkpoint)
            elif checkpoint.slot != NO_STATE:
                self._slots.set_ready(checkpoint)

    def leave(self, seq: Sequence, computed: int, *, cold: bool) -> None:
        kept, slot = self._kept.pop(seq.slot), int(self._of[seq.slot])
        self._next[seq.slot] = NOWHERE
        if not seq.kv.corrupt:
            self._cache.forget_beyond(seq.kv, computed)
        if not (seq.kv.corrupt or cold):
            num_known = min(computed, len(seq.tokens))
            self._cache.commit(seq.kv, num_known)
            if computed == num_known and self._gives(seq, kept, computed, slot):
                slot = NO_STATE
            elif kept.trail_at <= num_known:
                self._place_trail(seq, kept)
        for checkpoint in (*kept.promised.values(), kept.trail):
            if checkpoint.node is None or not checkpoint.ready:
                self._slots.drop(checkpoint)
        for checkpoint in kept.placed:
            if seq.kv.corrupt:
                self._slots.drop(checkpoint)
            elif cold:
                self._slots.dispense_with(checkpoint)
        if slot != NO_STATE:
            self._slots.give_back(slot)

    # -- inside ----------------------------------------------------------------------------------

    def _positions(self, seq: Sequence, start: int) -> list[int]:
        """Where the state of a prompt is kept: where others may leave it, and at its end."""
        if not self._cache.prefix_caching:
            return []
        size, known, end = self._page_size, seq.kv.known, self._prompt_end(seq)
        forks = {min(end, seq.kv.shared // size * size)}
        if known is not None and known.linked:
            forks.add(min(end, known.depth * size))
        positions = [start]
        # The end comes last: rather only where others may go on than only where this one does.
        for position in (*sorted(forks), end):
            if position - positions[-1] >= self._spacing:
                positions.append(position)
        return positions[:0:-1]

    def _prompt_end(self, seq: Sequence) -> int:
        """Where the state of all tokens known at admission is kept."""
        size = self._page_size
        return max(0, len(seq.tokens) - 1 - OPEN_END) // size * size

    def _set_next(self, seq: Sequence, kept: _Kept) -> None:
        """In the prompt, or the first one in its output."""
        position = NOWHERE
        if kept.positions:
            position = kept.positions.pop()
        elif self._cache.prefix_caching and seq.kv.ttl != 0:
            size = self._page_size
            position = max(kept.last + self._spacing, (len(seq.tokens) // size + 1) * size)
        self._next[seq.slot] = position

    def _promise(self, seq: Sequence, kept: _Kept, position: int) -> bool:
        """Promise a checkpoint; False if the tree has no node for it."""
        node = seq.kv.node_at(position // self._page_size, self._page_size)
        if node is None:
            return False
        if checkpoint := self._slots.promise(node):
            kept.promised[position] = checkpoint
        return True

    def _keep(self, seq: Sequence, kept: _Kept, position: int) -> None:
        """Copy the state of a prompt, unless the tree has it already."""
        if not self._promise(seq, kept, position):
            self._follow(kept, seq.slot, position)  # others have pages of the same tokens
            return
        checkpoint = kept.promised.pop(position, None)
        if checkpoint is None:
            return
        slot = self._slots.take() if checkpoint.node is not None else None
        if slot is None:
            self._slots.drop(checkpoint)
            return
        self._copies += (int(self._of[seq.slot]), slot)
        self._slots.keep(checkpoint, slot)
        self._copied.append((seq, checkpoint))
        checkpoint.kind = Kind.PROMPT if position == self._prompt_end(seq) else Kind.FORK
        kept.place(checkpoint, position)

    def _follow(self, kept: _Kept, batch_slot: int, position: int) -> None:
        """Copy the state to where the sequence keeps it until it leaves."""
        trail = kept.trail
        if trail.slot == NO_STATE:
            slot = self._slots.take()
            if slot is None:
                return
            self._slots.keep(trail, slot)
        else:
            self._slots.touch(trail)
        self._copies += (int(self._of[batch_slot]), trail.slot)
        kept.trail_at = position

    def _gives(self, seq: Sequence, kept: _Kept, position: int, slot: int) -> bool:
        """Whether the tree takes the slot itself: it has a state that is to be kept."""
        checkpoint = kept.promised.pop(position, None)
        if checkpoint is None and position - kept.last >= self._spacing:
            node = None
            if position % self._page_size == 0 and self._cache.prefix_caching:
                node = seq.kv.node_at(position // self._page_size, self._page_size)
            checkpoint = self._slots.promise(node) if node is not None else None
        if checkpoint is None or checkpoint.node is None:
            return False
        self._slots.keep(checkpoint, slot)
        self._slots.set_ready(checkpoint)
        return True

    def _place_trail(self, seq: Sequence, kept: _Kept) -> None:
        """The tree has pages of the output now."""
        if kept.trail.slot == NO_STATE:
            return
        node = seq.kv.node_at(kept.trail_at // self._page_size, self._page_size)
        if node is not None and self._slots.attach(kept.trail, node):
            self._slots.set_ready(kept.trail)
            kept.trail.kind = Kind.ANSWER
            if self._uses[Kind.PROMPT] > RARELY * (1 + self._uses[Kind.ANSWER]):
                self._slots.dispense_with(kept.trail)


def _common(a: Sequence, b: Sequence) -> int:
    """How many tokens two sequences have in common from the beginning on, without their last."""
    most = min(len(a.tokens), len(b.tokens)) - 1
    ours, theirs = (np.frombuffer(seq.tokens, dtype=np.int32, count=most) for seq in (a, b))
    differ = ours != theirs
    return int(differ.argmax()) if differ.any() else most
