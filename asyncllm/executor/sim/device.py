"""The simulated device: it checks every plan and samples its tokens.

A real device computes garbage from a wrong page. This one remembers the tokens whose KV each page
holds, and refuses a plan that would read any others.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.executor.sim.drafts import SimDrafts, settled
from asyncllm.executor.sim.pages import OPEN, BrokenPlan, SimPages, SimStates, fingerprint
from asyncllm.executor.sim.sampler import SimPooling, SimSampler
from asyncllm.wire.messages import (
    NO_TOKEN,
    STATE_TO_DEVICE,
    STATE_TO_HOST,
    Admit,
    PooledPrompt,
    RowLogprobs,
    ScoredPrompt,
    StepPlan,
    unpack,
)

# Rows of ``SimDevice._slots``.
_KNOWN, _NEXT, _ROOM = range(3)
#: In ``_slots[_NEXT]``: no row since the admission.
_FRESH = -1


class Rows(NamedTuple):
    """A step's rows, int64 [n] each; row i computes positions start .. end-1 of its slot."""

    slots: np.ndarray
    starts: np.ndarray
    ends: np.ndarray


class Computed(NamedTuple):
    """A step's rows and results; ``tokens`` is int32 [n] as in ``StepResult``."""

    rows: Rows
    num_samples: int
    tokens: bytes
    logprobs: tuple[RowLogprobs, ...]
    prompts: tuple[ScoredPrompt, ...] = ()
    pooled: tuple[PooledPrompt, ...] = ()


class SimDevice:
    """State by slot and by page. Steps and copies are in flight until they are reported."""

    def __init__(self, limits: EngineLimits, synthetic_rate: float | None = None):
        slots, max_len = limits.max_num_seqs, limits.max_model_len
        max_pages = -(-max_len // limits.page_size)
        self._limits = limits
        self._page_size = limits.page_size
        self._pages = SimPages(limits.num_pages, limits.host_pages)
        self._states: SimStates | None = None
        if limits.num_states:
            self._states = SimStates(limits.num_states, slots, limits.state_pages, self._pages.host)
        self._sampler = SimSampler(slots, limits.vocab_size, limits.eos_token_ids)
        self._drafts = partial(SimDrafts, self._sampler, synthetic_rate)
        self._pooling = SimPooling(limits.embedding_size)
        #: Tokens known at admission, start of the next row, positions that have pages.
        self._slots = np.full((3, slots), _FRESH, dtype=np.int64)
        # full(), because zeros() would allocate the memory only during the first admissions.
        self._tokens = np.full((slots, max_pages * limits.page_size + 1), 0, dtype=np.int32)
        self._block_table = np.full((slots, max_pages), 0, dtype=np.int64)
        #: The content of a sequence's full pages.
        self._expected = np.full((slots, max_pages), 0, dtype=np.int64)
        self._admitted: set[int] = set()
        self._fresh: set[int] = set()
        self._in_flight: deque[Rows] = deque()
        self._next_step = 0

    def take(self, plan: StepPlan) -> Computed:
        """Execute a plan, in no time.

        Raises:
            BrokenPlan: it is wrong; the message says how.
        """
        if plan.step != self._next_step:
            raise BrokenPlan(f"step {self._next_step} was due")
        self._next_step += 1
        of_pages, of_states = self._copies(unpack(plan.copies, 3))
        if plan.copies:
            self._pages.begin(of_pages)
            for rows in self._in_flight:
                self._check_copies(rows)
        for admit in plan.admits:
            self._admit(admit)
        if plan.new_pages:
            self._add_pages(*unpack(plan.new_pages, 3).T)
        if plan.state_copies and self._states is not None:
            self._states.copy(unpack(plan.state_copies, 2))
        if len(of_states) and self._states is not None:
            self._states.begin_copies(of_states)
        promised, states = unpack(plan.rows, 3), unpack(plan.state_slots)
        if int(promised[:, 2].sum()) > self._limits.max_num_batched_tokens:
            raise BrokenPlan(f"{promised[:, 2].sum()} tokens are more than a step has room for")
        packed, misled = settled(promised, unpack(plan.doubts, 3), *self._slots[_NEXT:])
        if len(drafts := unpack(plan.drafts)):
            computed = self._verify(packed, misled, drafts, states)
        else:
            computed = self._compute_steps(packed, states, plan.decode_steps)
        self._in_flight.append(computed.rows)
        return computed

    def report(self, copies: list[np.ndarray]) -> None:
        """The oldest step is done, and these copies with it, [k, 3] each."""
        self._in_flight.popleft()
        for moved in copies:
            of_pages, of_states = self._copies(moved)
            self._pages.end(of_pages)
            if self._states is not None:
                self._states.end_copies(of_states)

    def _copies(self, copies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Copies of pages, and of states."""
        if self._states is None:
            return copies, copies[:0]
        is_state = np.isin(copies[:, 0], (STATE_TO_HOST, STATE_TO_DEVICE))
        return copies[~is_state], copies[is_state]

    # -- slots -----------------------------------------------------------------------------------

    def _admit(self, admit: Admit) -> None:
        tokens = unpack(admit.tokens)
        known = len(tokens)
        if not 0 <= admit.slot < self._limits.max_num_seqs:
            raise BrokenPlan(f"there is no slot {admit.slot}")
        if not 1 <= admit.num_prompt <= known <= self._limits.max_model_len:
            raise BrokenPlan(
                f"slot {admit.slot} is given {known} tokens, {admit.num_prompt} of them prompt"
            )
        if tokens.min() < 0 or tokens.max() >= self._limits.vocab_size:
            raise BrokenPlan(f"slot {admit.slot} is given tokens that are not in the vocabulary")
        self._slots[:, admit.slot] = (known, _FRESH, 0)
        self._tokens[admit.slot, :known] = tokens
        self._sampler.admit(admit.slot, admit.params)
        self._sampler.score(admit.slot, admit.num_prompt, admit.prompt_logprobs)
        self._pooling.admit(admit.slot, admit.pool_from)
        self._admitted.add(admit.slot)
        self._fresh.add(admit.slot)

    def _add_pages(self, slots: np.ndarray, indices: np.ndarray, pages: np.ndarray) -> None:
        """New entries of block tables; those of one sequence, in order, are taken at once."""
        jumps = (np.diff(slots) != 0) | (np.diff(indices) != 1)
        firsts = [0, *(jumps.nonzero()[0] + 1).tolist()]
        for first, behind in pairwise([*firsts, len(slots)]):
            self._add_run(int(slots[first]), int(indices[first]), pages[first:behind])

    def _add_run(self, slot: int, index: int, pages: np.ndarray) -> None:
        if slot not in self._admitted:
            raise BrokenPlan(f"slot {slot} is given a page, but has no sequence")
        missing = (pages < 0) | (pages >= self._limits.num_pages)
        if np.count_nonzero(missing):
            page = pages[missing.argmax()]
            raise BrokenPlan(f"slot {slot} is given page {page}, which does not exist")
        given, most = int(self._slots[_ROOM, slot]) // self._page_size, self._block_table.shape[1]
        end = index + len(pages)
        if not 0 <= index <= min(given, most - 1):
            raise BrokenPlan(f"slot {slot} is given a page at index {index}, after {given} pages")
        if end > most:
            raise BrokenPlan(f"slot {slot} is given a page at index {most}, after {most} pages")
        self._block_table[slot, index:end] = pages
        if end > given:
            self._slots[_ROOM, slot] = end * self._page_size
            if slot not in self._fresh:
                self._pages.device.content[pages[given - index :]] = OPEN

    # -- rows ------------------------------------------------------------------------------------

    def _compute_steps(self, packed: np.ndarray, states: np.ndarray, decode_steps: int) -> Computed:
        """The rows, and then ``decode_steps - 1`` further tokens of each."""
        first = self._compute(packed, states)
        if decode_steps == 1:
            return first
        if first.num_samples < len(packed) or (packed[:, 2] != 1).any():
            raise BrokenPlan("several decode steps, and rows that are not decode rows")
        step = np.array([0, 1, 0], dtype=packed.dtype)
        more = (self._compute(packed + after * step, states) for after in range(1, decode_steps))
        parts = [first, *more]
        logprobs = tuple(
            msgspec.structs.replace(entry, row=entry.row + after * len(packed))
            for after, part in enumerate(parts)
            for entry in part.logprobs
        )
        slots, starts, _ = first.rows
        rows = Rows(slots, starts, parts[-1].rows.ends)
        tokens = b"".join(part.tokens for part in parts)
        return Computed(rows, decode_steps * len(packed), tokens, logprobs)

    def _verify(
        self, packed: np.ndarray, misled: np.ndarray, drafts: np.ndarray, states: np.ndarray
    ) -> Computed:
        """A step with rows that verify drafts: each goes on as far as its draft is right."""
        known, _, room = self._slots[:, packed[:, 0]]
        verified = self._drafts(packed, misled, drafts, known, room)
        for slot, start, right in verified.right:
            self._tokens[slot, start : start + len(right)] = right
        computed = self._compute(verified.rows, states, verifies=True)
        samples = computed.num_samples + len(drafts)
        tokens, logprobs = verified.results(unpack(computed.tokens), computed.logprobs)
        return computed._replace(num_samples=samples, tokens=tokens, logprobs=logprobs)

    def _compute(
        self, packed: np.ndarray, states: np.ndarray, *, verifies: bool = False
    ) -> Computed:
        slots, starts, q_lens = packed.T.astype(np.int64)
        rows = Rows(slots, starts, starts + q_lens)
        if len(slots) == 0:
            return Computed(rows, 0, b"", ())
        begun = self._begin_fresh(rows) if self._fresh else []
        known = self._check_rows(rows, q_lens, verifies=verifies)
        if self._states is not None:
            self._advance_states(self._states, rows, states)
        if self._pages.num_copies:
            self._check_copies(rows)
        for slot, end in self._fill_pages(rows) + begun:
            self._check_content(slot, end)
        sampling = (rows.ends >= known).nonzero()[0]
        sampled_slots, lengths = slots[sampling], rows.ends[sampling]
        sampled = self._sampler.sample(sampled_slots, lengths)
        self._tokens[sampled_slots, lengths] = sampled
        tokens = np.full(len(slots), NO_TOKEN, dtype=np.int32)
        tokens[sampling] = sampled
        logprobs = self._sampler.logprobs(sampling, sampled_slots, sampled)
        prompts = self._sampler.prompts(*rows)
        pooled = self._pooling.sums(*rows, self._tokens)
        return Computed(rows, len(sampling), tokens.tobytes(), logprobs, prompts, pooled)

    def _check_rows(self, rows: Rows, q_lens: np.ndarray, *, verifies: bool) -> np.ndarray:
        """Refuse invalid rows; returns the number of tokens that each was admitted with."""
        slots, starts, ends = rows
        listed = slots.tolist()
        distinct = set(listed)
        if len(distinct) < len(listed):
            raise BrokenPlan("a slot has two rows")
        if not distinct <= self._admitted:
            raise BrokenPlan(
                f"slots {sorted(distinct - self._admitted)} have rows, but no sequence"
            )
        known: np.ndarray
        known, due, room = self._slots.take(slots, axis=1)
        wrong = (starts != due) | (ends > room) | (q_lens < 1)
        wrong |= (q_lens > 1) & (ends > known) & ((starts < known) | (not verifies))
        if np.count_nonzero(wrong):
            row = wrong.argmax()
            raise BrokenPlan(
                f"row (slot {slots[row]}, start {starts[row]}, length {q_lens[row]}) does not fit "
                f"a slot admitted with {known[row]} tokens, with pages for {room[row]}, whose next "
                f"position is {due[row]}"
            )
        self._slots[_NEXT, slots] = ends
        return known

    def _advance_states(self, memory: SimStates, rows: Rows, states: np.ndarray) -> None:
        memory.check(states, rows.slots)
        columns = (states, *rows)
        for state, slot, start, end in zip(*(c.tolist() for c in columns), strict=True):
            memory.take_in(state, slot, self._tokens[slot, start:end].tobytes())

    def _begin_fresh(self, rows: Rows) -> list[tuple[int, int]]:
        """The first rows of sequences, which may start after or in the last of their cached pages.

        Returns:
            (slot, number of cached pages).
        """
        begun = []
        for slot, start in zip(rows.slots.tolist(), rows.starts.tolist(), strict=True):
            if slot not in self._fresh:
                continue
            known, _, room = self._slots[:, slot].tolist()
            if not 0 <= start < min(known, room):
                continue  # refused with the other rows
            self._fresh.remove(slot)
            self._slots[_NEXT, slot] = start
            full, given = -(-start // self._page_size), room // self._page_size
            self._expect(slot, 0, full)
            if self._states is not None:
                self._states.begin(slot, self._tokens[slot, :start].tobytes())
            if start % self._page_size:  # only if all is cached, and the last token is recomputed
                self._check_content(slot, full)
            self._pages.device.content[self._block_table[slot, full:given]] = OPEN
            begun.append((slot, full))
        return begun

    # -- pages -----------------------------------------------------------------------------------

    def _fill_pages(self, rows: Rows) -> list[tuple[int, int]]:
        """(slot, number of its full pages) of rows that fill a page."""
        first, last = rows.starts // self._page_size, rows.ends // self._page_size
        filled = []
        for row in (last > first).nonzero()[0].tolist():
            slot, begin, end = int(rows.slots[row]), int(first[row]), int(last[row])
            self._expect(slot, begin, end)
            pages = self._block_table[slot, begin:end]
            self._pages.device.content[pages] = self._expected[slot, begin:end]
            filled.append((slot, end))
        return filled

    def _check_content(self, slot: int, num_pages: int) -> None:
        """Refuse a sequence whose first pages hold other tokens."""
        pages = self._block_table[slot, :num_pages]
        wrong = self._pages.device.content[pages] != self._expected[slot, :num_pages]
        if np.count_nonzero(wrong):
            index = wrong.argmax()
            raise BrokenPlan(
                f"slot {slot} has page {pages[index]} at index {index}, which holds other tokens"
            )

    def _expect(self, slot: int, begin: int, end: int) -> None:
        """Compute the expected content of pages ``begin .. end-1`` of a sequence."""
        size = self._page_size
        tokens = self._tokens[slot, begin * size : end * size].tobytes()
        content = int(self._expected[slot, begin - 1]) if begin else 0
        contents: list[int] = []
        step = size * self._tokens.itemsize
        for start in range(0, len(tokens), step):
            content = fingerprint(content, tokens[start : start + step])
            contents.append(content)
        self._expected[slot, begin:end] = contents

    def _check_copies(self, rows: Rows) -> None:
        """Refuse rows that use a page which a copy is moving."""
        if len(rows.slots) == 0:
            return
        first = rows.starts[:, None] // self._page_size
        behind = -(-rows.ends[:, None] // self._page_size)
        index = np.arange(int(behind.max()))
        pages = self._block_table[rows.slots, : len(index)]
        used = index < behind
        device = self._pages.device
        clash = used & (device.written[pages] > 0)
        clash |= used & (index >= first) & (device.read[pages] > 0)
        if np.count_nonzero(clash):
            raise BrokenPlan(
                f"slot {rows.slots[clash.any(axis=1).argmax()]} uses page "
                f"{pages[clash][0]} while a copy is at it"
            )
