"""HeadDrafter: after each step, a model's head guesses on the device what follows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import (
    AttentionBackend,
    ForwardBatch,
    GraphBackend,
    GraphRows,
    HiddenStates,
    LogitRows,
    Replay,
)
from asyncllm.executor.device import Device
from asyncllm.executor.step.capture import capturing
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.slots import SlotTable
from asyncllm.kernels.tokens import locate_tokens
from asyncllm.kernels.upload import pack_aligned
from asyncllm.models.base import CausalLM, DraftHead

A = TypeVar("A", np.ndarray, Tensor)


class Taken(NamedTuple):
    """What is taken from a step, whose tokens may end with padding.

    Attributes:
        positions, slot_mapping, plan: as in ``ForwardBatch``.
        features: [tokens, hidden]; see ``DraftHead``. None without a head.
        replays: what its recurrent layers did, if that was wanted.
    """

    positions: Tensor
    slot_mapping: Tensor
    plan: Any
    features: Tensor | None
    replays: tuple[Replay, ...] = ()

    def borrowed(self, borrow: Callable[[Tensor], Tensor]) -> Taken:
        """With tensors that keep no memory allocated, as captured steps have them."""
        positions, slot_mapping, plan, features, _ = self
        kept = None if features is None else borrow(features)
        return Taken(borrow(positions), borrow(slot_mapping), plan, kept)


def run_model(
    model: CausalLM, batch: ForwardBatch, *, replays: bool = False
) -> tuple[Tensor, Taken | None]:
    """Run a step: hidden states for ``logits``, and what is taken from it, if anything is.

    Args:
        replays: take what recurrent layers do.
    """
    head = model.head
    if head is None and not replays:
        return model(batch), None
    batch.hidden = None if head is None else HiddenStates(head.reads)
    batch.replays = [] if replays else None
    hidden: Tensor = model(batch)
    features = None
    if head is not None and batch.hidden is not None:
        features = head.features(batch.hidden.kept)
    parts = batch.positions, batch.slot_mapping, batch.plan, features
    return hidden, Taken(*parts, tuple(batch.replays or ()))


class _Rows(NamedTuple):
    """The rows that sample, on the device; ints [rows].

    Attributes:
        positions: of the last token of each.
        room: how many positions each has pages for; 0: it is padding.
    """

    slots: Tensor
    positions: Tensor
    room: Tensor


class _Parts(NamedTuple, Generic[A]):
    """The input of one run, int32 arrays on the host or tensors on the device.

    Attributes:
        following: [tokens]; the token after each, where the host knows it.
        source: [tokens]; which of the sampled tokens comes after it; -1: none does.
        at: [rows]; the token after which each row sampled first.
        slots, room: [rows]; see ``_Rows``.
        verified: [rows]; where the number of its right drafts is; 0: it had none.
    """

    following: A
    source: A
    at: A
    slots: A
    room: A
    verified: A


def _sizes(num_tokens: int, num_rows: int) -> tuple[int, ...]:
    """Those of ``_Parts``."""
    return num_tokens, num_tokens, num_rows, num_rows, num_rows, num_rows


class _Captured(NamedTuple):
    """A graph, its input, and what it reads of the step before."""

    graph: torch.cuda.CUDAGraph
    packed: Tensor
    taken: Taken


class HeadDrafter:
    """Drafts the next tokens of every row that has sampled, one after the other.

    A head has K and V of its own, in the same pages as the model. At each position they are of the
    model's state there and of the token after it. So the head first goes over all tokens of the
    step, with the tokens that were sampled; where a draft was wrong, the next step writes them
    again. Then it goes on from each row's last right token, with its own drafts for tokens.

    Nothing waits for the device, except where attention must be planned on the host.

    Args:
        max_length: of a sequence.
        sizes: numbers of rows, rising, to which steps are padded; none: they are not.
    """

    def __init__(
        self,
        head: DraftHead,
        backend: AttentionBackend,
        table: SlotTable,
        page_size: int,
        device: Device,
        max_length: int,
        sizes: Sequence[int] = (),
    ):
        self._head = head
        self._backend = backend
        self._table = table
        self._page_size = page_size
        self._device = device
        self._max_length = max_length
        self._sizes = sizes
        #: What was sampled, of which a step has no more than sequences and as many drafted tokens;
        #: and how many drafts of each row were right, after a 0.
        self._tokens = table.last_token.repeat(2)
        self._right = torch.zeros_like(table.last_token)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._pool: Any = None

    @property
    def most(self) -> int:
        """The most tokens that it drafts at a time."""
        return self._table.drafted.shape[1]

    def draft(
        self,
        step: StepRows,
        tokens: Tensor,
        columns: np.ndarray | None,
        taken: Taken,
        right: tuple[np.ndarray, Tensor] | None,
        count: int,
    ) -> None:
        """Keep drafts for the rows that sample, and the head's K and V of all tokens.

        Args:
            tokens: int64 [columns]; what was sampled.
            columns: int64 [samples]; that of each sample. None: the samples themselves.
            right: the rows whose drafts were verified, and how many were right: ints [m].
            count: tokens to draft. With 0, the head only goes over steps with prompts: its K and V
                of decode rows are not worth the time if nothing is drafted.
        """
        firsts = np.flatnonzero(step.places == 0)
        if not count and len(firsts) == len(step.rows):
            return
        slots, verified = step.slots[firsts], np.zeros(len(firsts), dtype=np.int64)
        if right is not None:
            verified[np.isin(step.sampling[firsts], right[0])] = 1 + np.arange(len(right[0]))
            self._right[1 : 1 + len(right[1])].copy_(right[1])
        self._tokens[: len(tokens)].copy_(tokens)
        num_rows = len(firsts) + self._padding(len(firsts))
        sizes = _sizes(len(taken.positions), num_rows)
        packed, places = pack_aligned([np.zeros(size) for size in sizes], np.int32)
        parts = _Parts(*(packed[place] for place in places))
        parts.slots[:] = self._table.dummy_slot
        parts.source[:] = -1
        following = self._following(step)
        parts.following[: len(following)] = following
        sampled = np.arange(len(step.sampling)) if columns is None else columns
        parts.source[step.sample_at] = sampled
        for part, values in (
            (parts.at, step.sample_at[firsts]),
            (parts.slots, slots),
            (parts.room, self._room(slots)),
            (parts.verified, verified),
        ):
            part[: len(firsts)] = values
        captured = self._captured.get((id(taken), num_rows)) if count else None
        if captured is not None:
            self._device.upload_into(captured.packed, packed)
            captured.graph.replay()
            return
        on_device = self._device.upload(packed)
        self._run(taken, _Parts(*(on_device[place] for place in places)), count)

    def warm_up(self, num_tokens: int, num_rows: int, dtype: torch.dtype) -> None:
        """Run all kernels of a step of this size, none of whose rows is a sequence's."""
        ids = self._table.last_token.new_zeros(num_tokens)
        _, parts = self._padding_only(num_tokens, num_rows)
        plan = self._single(ids[:1].expand(num_rows), _Rows(parts.slots, parts.at, parts.room)).plan
        features = torch.zeros(num_tokens, self._head.size, dtype=dtype, device=ids.device)
        taken = Taken(ids, ids - 1, plan, features)
        self._run(taken, parts, min(2, self.most))

    def capture(self, taken: Taken, num_rows: int) -> None:
        """Capture what drafts for so many rows after the captured step that this is taken from.

        Raises:
            RuntimeError: it cannot be captured.
        """
        packed, parts = self._padding_only(len(taken.positions), num_rows)
        self._run(taken, parts, self.most)
        torch.cuda.current_stream().synchronize()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with capturing(self._pool, packed.device) as graph:
            self._run(taken, parts, self.most)
        self._captured[id(taken), num_rows] = _Captured(graph, packed, taken)

    def _padding_only(self, num_tokens: int, num_rows: int) -> tuple[Tensor, _Parts[Tensor]]:
        """The input of a step without sequences, whole and in parts."""
        sizes = _sizes(num_tokens, num_rows)
        host, places = pack_aligned([np.zeros(size) for size in sizes], np.int32)
        packed = torch.zeros(len(host), dtype=torch.int32, device=self._tokens.device)
        parts = _Parts(*(packed[place] for place in places))
        parts.slots.fill_(self._table.dummy_slot)
        parts.source.fill_(-1)
        return packed, parts

    def _run(self, taken: Taken, parts: _Parts[Tensor], count: int) -> None:
        """The kernels."""
        tokens = self._tokens[parts.source.clamp(min=0)]
        ids = torch.where(parts.source < 0, parts.following.long(), tokens)
        at = parts.at + self._right[parts.verified]
        rows = _Rows(parts.slots, taken.positions[at], parts.room)
        lengths = torch.where(rows.room > 0, rows.positions + 1, 0).int()
        batch = ForwardBatch(
            ids,
            taken.positions,
            taken.slot_mapping,
            at,
            self._backend,
            taken.plan,
            LogitRows(rows.slots, lengths),
        )
        assert taken.features is not None
        states = self._head.predict(batch.for_last_layer(), taken.features)
        if len(at) and count:
            drafts = torch.stack([*self._go_on(states, rows, count)], dim=1)
            self._table.drafted[:, :count].index_copy_(0, rows.slots.long(), drafts)

    def _padding(self, num_rows: int) -> int:
        """How many rows to add, so that kernels need few variants."""
        at = bisect_left(self._sizes, num_rows)
        return self._sizes[at] - num_rows if num_rows and at < len(self._sizes) else 0

    def _room(self, slots: np.ndarray) -> np.ndarray:
        """The positions that sequences have pages for."""
        room: np.ndarray = self._table.num_pages(slots) * self._page_size
        return room.clip(max=self._max_length)

    def _following(self, step: StepRows) -> np.ndarray:
        """The token after each token of the step, where it is known: int32 [tokens]."""
        following: np.ndarray = np.empty_like(step.entries[0])
        following[:-1] = step.entries[0, 1:]
        ends = step.rows[:, 2].cumsum() - 1
        following[ends] = 0
        waits = np.ones(len(ends), dtype=bool)
        waits[step.sampling] = False
        for row in np.flatnonzero(waits):
            slot, start, q_len = step.rows[row]
            following[ends[row]] = self._table.known(slot, start + q_len, 1)[0]
        return following

    def _go_on(self, states: Tensor, rows: _Rows, count: int) -> Iterator[Tensor]:
        """The drafts of all rows, a token at a time: int64 [rows] each."""
        head = self._head
        drafts = head.drafts(states)
        yield drafts
        for _ in range(1, count):
            rows = rows._replace(positions=rows.positions + 1)
            states = head.predict(self._single(drafts, rows), head.carried(states))
            drafts = head.drafts(states)
            yield drafts

    def _single(self, ids: Tensor, rows: _Rows) -> ForwardBatch:
        """A step of one token for each row; rows that have no room for it are padding."""
        slots, positions, room = rows
        inside = positions < room
        entries = torch.stack([ids, slots.long(), torch.where(inside, positions, -1)]).int()
        table = self._table.block_table
        found = locate_tokens(entries, self._table.last_token, table, self._page_size)
        backend = self._backend
        if isinstance(backend, GraphBackend) and not backend.plans_on_host:
            lengths = torch.where(inside, positions + 1, 0).int()
            plan = backend.graph_plan(GraphRows(len(slots), slots, lengths, None), table)
        else:
            ones = torch.ones_like(positions)
            of_rows = torch.stack([slots.long(), positions * inside, ones], dim=1)
            on_host = self._device.download(of_rows)
            self._device.event().synchronize()
            plan = backend.plan(on_host.astype(np.int32), table)
        return ForwardBatch(*found, None, backend, plan)
