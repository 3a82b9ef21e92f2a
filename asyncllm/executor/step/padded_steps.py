"""Steps padded to a fixed size, for CUDA graphs: the layout of their input, and their forward.

A captured graph repeats the same kernels on the same addresses. So a step's rows are written to a
fixed buffer first, and kernels look everything else up on the device by slot: pages, last tokens
and sampling parameters. Padding rows belong to a slot that no sequence has.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from asyncllm.attention.base import (
    ForwardBatch,
    GraphBackend,
    GraphRows,
    LogitRows,
    count_decode_rows,
)
from asyncllm.executor.step.drafter import Taken, run_model
from asyncllm.executor.step.inputs import LAST_TOKEN, StepRows
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.kernels.tokens import locate_tokens
from asyncllm.kernels.types import PrefillRows
from asyncllm.models.base import CausalLM

#: Below about 256 tokens a matmul is bound by reading weights, so padding is free.
FREE_TOKENS = 256
#: Token counts of captured mixed steps, up to ``captured_tokens``.
MIXED_TOKENS: tuple[int, ...] = (
    *(32, 64, 128, 192, 256, 320, 384, 448, 512, 576, 640, 704, 768, 896, 1024, 1280, 1536),
    *range(2048, 8193, 512),
)
#: A step that takes less time a layer is worth a graph. Launching a layer's kernels one by one
#: takes about 0.8 ms while the event loop competes for the GIL. Meanwhile the step before is not
#: collected, so its tokens come late.
LAUNCH_SECONDS = 1.2e-3
#: Floating-point operations per second in matmuls of many rows.
FLOPS = 600e12
#: Row counts of captured mixed steps, besides the maximum. Padding costs logits, 0.1 ms for 200
#: rows of Qwen3-0.6B; each extra entry captures every token count again.
MIXED_ROWS = (32,)

#: The most rows after which drafting is captured. A step of more takes longer than launching the
#: head's kernels one by one.
DRAFTING_ROWS = 64
#: The most tokens of a step whose tokens are apart. Each reads K and V of its sequence, from cache
#: where it follows another one.
APART_TOKENS = 64

_NO_ROWS = np.empty((0, 3), dtype=np.int32)


class Size(NamedTuple):
    """What a step is padded to.

    In ``mixed`` steps rows may have several tokens or not sample. In those that are ``apart``, each
    token samples, and is a row of its own, also if it follows another one of its sequence.
    """

    tokens: int
    rows: int
    mixed: bool
    apart: bool = False

    @property
    def num_ints(self) -> int:
        """Length of the int32 input that ``PaddedSteps.pack`` makes and ``run`` takes."""
        return 3 * self.tokens + (8 * self.rows + 2 if self.mixed else 3 * self.rows)

    def split(self, flat: Any) -> Any:
        """entries [3, tokens], lengths, starts, state slots; for mixed steps also decode lengths,
        slots, last tokens, offsets of all rows, and offsets of prefill rows."""
        tokens, rows, mixed, _ = self
        entries = flat[: 3 * tokens].reshape(3, tokens)
        rest = flat[3 * tokens : self.num_ints]
        parts = [rest[i * rows : (i + 1) * rows] for i in range(6 if mixed else 3)]
        if not mixed:
            return entries, *parts
        offsets = rest[6 * rows :]
        return entries, *parts, offsets[: rows + 1], offsets[rows + 1 :]


class PaddedSteps:
    """The forward of every size, up to the logits of each row.

    Args:
        max_rows: of one step.
        max_tokens: of one mixed step; larger ones have no size.
    """

    def __init__(
        self,
        model: CausalLM,
        backend: GraphBackend,
        states: StatePool,
        table: SlotTable,
        page_size: int,
        max_rows: int,
        max_tokens: int,
    ):
        self._model = model
        self._backend = backend
        self._states = states
        self._table = table
        self._page_size = page_size
        self._decode_rows = row_buckets(max_rows)
        self._mixed_rows = [n for n in MIXED_ROWS if n < max_rows] + [max_rows]
        self._mixed_tokens = [n for n in MIXED_TOKENS if n <= max_tokens]
        #: A recurrent layer reads a row's tokens together.
        can_be_apart = not model.states and not backend.plans_on_host
        self._apart = [n for n in self._decode_rows if 1 < n <= APART_TOKENS] * can_be_apart

    @property
    def decode_sizes(self) -> list[Size]:
        """Rising."""
        return [Size(rows, rows, False) for rows in self._decode_rows]

    @property
    def mixed_sizes(self) -> list[Size]:
        """Rising; first those that are apart, if there are any."""
        mixed = [Size(tokens, n, True) for tokens in self._mixed_tokens for n in self._mixed_rows]
        return [Size(n, n, False, True) for n in self._apart] + mixed

    @property
    def drafting_sizes(self) -> list[tuple[int, int]]:
        """Tokens and rows of steps after which a head drafts, which differ in its kernels."""
        sizes = {(size.tokens, size.rows) for size in self.decode_sizes}
        return sorted(sizes | {(size.tokens, self._decode_rows[0]) for size in self.mixed_sizes})

    def drafting_rows(self, size: Size, most_drafts: int) -> list[int]:
        """Numbers of rows for which a head's drafts are captured after a step of this size.

        Those of steps that are padded to this size, as a row may verify so many drafts.
        """
        if not size.mixed and not size.apart:
            return [n for n in self._decode_rows if size.rows // 4 < n <= size.rows] * (
                size.rows <= DRAFTING_ROWS
            )
        tokens = self._apart if size.apart else self._mixed_tokens
        smaller = max((n for n in tokens if n < size.tokens), default=0)
        least = max((n for n in self._mixed_rows if n < size.rows), default=0)
        least = max(0 if size.apart else least, smaller // (most_drafts + 1))
        most = min(size.rows, size.tokens - size.mixed, DRAFTING_ROWS)
        return [n for n in self._decode_rows if least < n <= most]

    @property
    def max_ints(self) -> int:
        """The largest ``Size.num_ints``."""
        return max(size.num_ints for size in self.decode_sizes + self.mixed_sizes)

    def sizes_of(self, step: StepRows) -> Iterator[Size]:
        """The sizes that the step can be padded to, the smallest first; none if it is too large."""
        num_rows, num_tokens = len(unfolded(step)), step.entries.shape[1]
        if step.each_samples_its_only_token:
            for rows in _at_least(num_rows, self._decode_rows):
                yield Size(rows, rows, False)
            return
        if num_rows == num_tokens == len(step.sampling) <= max(self._apart, default=0):
            for tokens in _at_least(num_tokens, self._apart):
                yield Size(tokens, tokens, False, True)
        for tokens in _at_least(num_tokens, self._mixed_tokens):
            for rows in _at_least(num_rows, self._mixed_rows):
                yield Size(tokens, rows, True)

    def pack(self, size: Size, step: StepRows | None) -> np.ndarray:
        """The step's input, int32 [num_ints]; None is a step of padding only."""
        flat = np.zeros(size.num_ints, dtype=np.int32)
        entries, lengths, row_starts, states, *mixed = size.split(flat)
        entries[:] = [[LAST_TOKEN], [self._table.dummy_slot], [-1]]
        if mixed:
            mixed[1][:] = self._table.dummy_slot
        if step is None:
            return flat
        rows = unfolded(step)
        slots, starts, q_lens = rows.T
        entries[:, : step.entries.shape[1]] = step.entries
        count = len(slots)
        lengths[:count] = starts + q_lens
        row_starts[:count] = starts
        states[:count] = step.state_slots if count == len(step.rows) else 0
        if step.drafts is not None:
            lengths[columns_of(step)] = step.lengths
        if mixed:
            decode_lengths, row_slots, last, offsets, prefill_offsets = mixed
            row_slots[:count] = slots
            ends = q_lens.cumsum()
            last[:count] = ends - 1
            if step.drafts is not None:
                last[columns_of(step)] = step.sample_at
            offsets[1 : count + 1] = ends
            offsets[count + 1 :] = ends[-1]
            decodes = count_decode_rows(step.rows)
            decode_lengths[:decodes] = lengths[:decodes]
            prefill_offsets[:] = np.maximum(offsets, decodes)
        return flat

    def fixes(self, size: Size, step: StepRows, flat: np.ndarray) -> np.ndarray:
        """What the device corrects in a step's input: see ``kernels.tokens.settle_input``.

        Args:
            flat: from ``pack``.
        """
        rows, parts = step.rows, []
        if step.most_behind is not None:
            # What changes as a row moves is its position, somewhere.
            numbers = np.where(step.most_behind > 0, np.arange(1, len(rows) + 1), 0)
            change = self.pack(size, step.moved(numbers)) - flat
            where = np.flatnonzero(change)
            row = change[where] - 1
            parts.append([where, *rows[row, :2].T, step.most_behind[row]])
        unknown = np.flatnonzero(step.unknown_drafts)
        if len(unknown):
            where, slots = step.sample_at[unknown] + 1, rows[step.sampling[unknown], 0]
            parts.append([where, slots, -1 - step.places[unknown], np.zeros_like(where)])
        return np.concatenate(parts, axis=1).T.astype(np.int32, order="C")

    @property
    def plans_on_host(self) -> bool:
        """See ``GraphBackend``."""
        return self._backend.plans_on_host

    def plan(self, size: Size, flat: Tensor) -> Any:
        """The backend's plan for steps of this size in this buffer, int32 [num_ints]."""
        entries, lengths, starts, _, *mixed = size.split(flat)
        rows = GraphRows(size.tokens, entries[1], lengths, None, size.apart)
        if mixed:
            decode_lengths, slots, _, _, offsets = mixed
            prefill = PrefillRows(slots, starts, offsets)
            rows = GraphRows(size.tokens, slots, decode_lengths, prefill)
        return self._backend.graph_plan(rows, self._table.block_table)

    def before_replay(self, plan: Any, step: StepRows | None) -> None:
        """Prepare the plan for a step; None is a step of padding only."""
        self._backend.before_replay(plan, _NO_ROWS if step is None else step.rows)

    def run(self, size: Size, flat: Tensor, plan: Any) -> tuple[Tensor, LogitRows, Taken | None]:
        """Logits of each row's last token, [rows, vocab], the rows, and what a head takes.

        Args:
            flat: int32 [num_ints], from ``pack``.
            plan: of ``plan`` for this buffer.
        """
        entries, lengths, starts, state_slots, *mixed = size.split(flat)
        table = self._table
        tokens = locate_tokens(entries, table.last_token, table.block_table, self._page_size)
        slots, last, offsets = mixed[1:4] if mixed else (entries[1], None, None)
        rows = LogitRows(slots, lengths)
        states = self._states.of_slots(state_slots, starts, offsets)
        batch = ForwardBatch(*tokens, last, self._backend, plan, rows, states)
        hidden, taken = run_model(self._model, batch)
        return self._model.logits(hidden), rows, taken


def unfolded(step: StepRows) -> np.ndarray:
    """The rows, int32 [n, 3], so that each has one sample at most.

    Before a row that verifies come rows without tokens, for its samples but the last. So each
    sample has a column of the logits, and attention sees the row itself.
    """
    if step.drafts is None:
        return step.rows
    counts = _columns_by_row(step)
    rows = step.rows.repeat(counts, axis=0)
    rows[:, 2] = 0
    rows[counts.cumsum() - 1, 2] = step.rows[:, 2]
    return rows


def columns_of(step: StepRows) -> np.ndarray:
    """The column of each sample, int64 [samples], among the logits of ``unfolded`` rows."""
    if step.drafts is None:
        return step.sampling
    counts = _columns_by_row(step)
    columns: np.ndarray = (counts.cumsum() - counts)[step.sampling] + step.places
    return columns


def _columns_by_row(step: StepRows) -> np.ndarray:
    return np.maximum(np.bincount(step.sampling, minlength=len(step.rows)), 1)


def captured_tokens(model: CausalLM) -> int:
    """The most tokens for which a mixed step is worth a graph.

    8,192 of Qwen3-0.6B, 1,582 of 8B, 5,179 of 30B-A3B, which has more layers and fewer weights for
    a token.

    A larger step runs longer than launching its kernels one by one takes, so padding it would only
    cost time.
    """
    launching = model.num_layers * LAUNCH_SECONDS
    return min(int(launching * FLOPS / (2 * model.weights_per_token())), MIXED_TOKENS[-1])


def step_sizes(largest: int) -> tuple[int, ...]:
    """``EngineLimits.step_sizes``, given the tokens of the largest captured mixed step."""
    return tuple(n for n in MIXED_TOKENS if FREE_TOKENS < n <= largest)


def row_buckets(max_rows: int) -> list[int]:
    """Row counts of captured decode steps, rising.

    Matmuls read weights in tiles of 16 rows, so padding to a multiple of 16 is nearly free.
    """
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, max_rows, 64)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def _at_least(count: int, buckets: list[int]) -> list[int]:
    return buckets[bisect_left(buckets, count) :]
