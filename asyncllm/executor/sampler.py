"""From logits to tokens: every slot's sampling parameters, and the order in which they act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.draw import (
    MAX_SELECT,
    cut_offs,
    keep_from,
    pick,
    stream_of,
    uniforms,
    weigh,
)
from asyncllm.executor.logprobs import Logprobs
from asyncllm.executor.penalties import PenaltyTable
from asyncllm.upload import upload
from asyncllm.wire.messages import BAD_TOKEN

if TYPE_CHECKING:
    from asyncllm.wire.messages import RowParams

# Columns of the float table, float32 [slots, 6].
_TEMPERATURE, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION = range(6)
# Columns of the integer table, int64 [slots, 2].
_TOP_K, _STREAM = range(2)
# What a slot needs beyond the likeliest token, as bits. _SELECT and _SORT are the two ways to find
# the cut-offs of top-k and top-p.
_DRAW, _SELECT, _SORT, _MIN_WEIGHT, _BAN, _PENALISE, _LOGPROBS = (1 << i for i in range(7))

_SMALLEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one call of ``sample`` yields, on the device.

    Attributes:
        tokens: int64 [m]; BAD_TOKEN where the logits were not finite.
        logprobs: of the rows that asked for them, if any did.
    """

    tokens: Tensor
    logprobs: Logprobs | None


class Sampler:
    """Samples the next tokens of the sequences in ``num_slots`` slots.

    Parameters live on the device, by slot. What the host keeps of them decides what there is to
    compute, so ``sample`` never waits for the device. What a row yields depends on its own logits,
    parameters, seed and position alone, not on the rows beside it: batching, chunked prompts and
    preemption do not show in the text.

    Args:
        num_slots: slots are numbered 0 .. num_slots-1.
        vocab_size: number of logits of a row.
        device: where logits are and tokens go.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._num_slots = num_slots
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._floats = torch.zeros(num_slots, 6, device=self._device)
        self._ints = torch.zeros(num_slots, 2, dtype=torch.int64, device=self._device)
        self._needs = np.zeros(num_slots, dtype=np.int64)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._min_length = np.zeros(num_slots, dtype=np.int64)
        self._stop_ids = [np.empty(0, dtype=np.int64)] * num_slots
        self._num_logprobs = np.zeros(num_slots, dtype=np.int64)
        # Large (5 bytes x slots x vocabulary) and rarely needed: made when first asked for.
        self._penalties: PenaltyTable | None = None

    def admit(self, slot: int, params: RowParams, tokens: np.ndarray, num_prompt: int) -> None:
        """A sequence takes a slot.

        Args:
            tokens: int32 [n], all of the sequence that is known; the first ``num_prompt`` are the
                prompt, the others were generated before it was preempted.
        """
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else self._vocab_size
        stop_ids = np.array(params.stop_ids, dtype=np.int64)
        self._needs[slot] = _needs(params, top_k, self._vocab_size, num_prompt)
        self._top_k[slot] = top_k
        self._min_length[slot] = params.min_length
        self._stop_ids[slot] = stop_ids[stop_ids < self._vocab_size]
        self._num_logprobs[slot] = params.logprobs

        floats = np.empty(6, dtype=np.float32)
        floats[_TEMPERATURE] = max(params.temperature, _SMALLEST)
        floats[_TOP_P] = params.top_p
        floats[_MIN_P] = params.min_p
        floats[_PRESENCE] = params.presence_penalty
        floats[_FREQUENCY] = params.frequency_penalty
        floats[_REPETITION] = params.repetition_penalty
        self._floats[slot] = upload(floats, self._device)
        stream = stream_of(torch.tensor(params.seed)).item()
        self._ints[slot] = upload(np.array([top_k, stream]), self._device)
        if self._needs[slot] & _PENALISE:
            if self._penalties is None:
                self._penalties = PenaltyTable(self._num_slots, self._vocab_size, self._device)
            prompt, generated = tokens[:num_prompt], tokens[num_prompt:]
            self._penalties.admit(slot, self._upload_ids(prompt), self._upload_ids(generated))

    def sample(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray) -> Sampled:
        """Sample one token for each row.

        Args:
            logits: [m, vocab], m > 0, any floating dtype; not modified. -inf bans a token.
            slots: int64 [m] on the host, no slot twice.
            lengths: int64 [m] on the host; how many tokens the sequence has, which is the position
                of the new one.
        """
        needs = self._needs[slots]
        some = int(np.bitwise_or.reduce(needs))
        if not some:
            values, tokens = logits.max(dim=-1)
            return Sampled(_mark_bad(tokens, values), None)

        keys = upload(np.stack([slots, lengths]), self._device)
        batch = _Rows(slots, keys[0], keys[1], None)
        penalised = batch.part(needs & _PENALISE) if some & _PENALISE else None
        too_short = ((needs & _BAN) != 0) & (lengths < self._min_length[slots])
        scores = logits
        if penalised is not None or too_short.any():
            scores = logits.to(torch.float32, copy=True)
        if too_short.any():
            self._ban_stop_ids(scores, np.flatnonzero(too_short), slots[too_short])
        if penalised is not None:
            scores = self._penalise(scores, penalised)
        # NaN counts as the largest; of equal scores the first is taken.
        values, tokens = scores.max(dim=-1)
        if some & _DRAW:
            tokens = self._draw(scores, values, tokens, batch.part(needs & _DRAW))
        tokens = _mark_bad(tokens, values)
        if penalised is not None:
            self._count(tokens, penalised)
        if not some & _LOGPROBS:
            return Sampled(tokens, None)
        part = batch.part(needs & _LOGPROBS)
        rows, wanted = np.flatnonzero(needs & _LOGPROBS), self._num_logprobs[part.host_slots]
        return Sampled(tokens, Logprobs(part.take(logits), part.take(tokens), rows, wanted))

    def _ban_stop_ids(self, scores: Tensor, rows: np.ndarray, slots: np.ndarray) -> None:
        """Set the scores of these rows' stop tokens to -inf, in place."""
        ids = [self._stop_ids[slot] for slot in slots]
        where = np.stack([rows.repeat([i.size for i in ids]), np.concatenate(ids)])
        index = upload(where, self._device)
        # Added, not assigned: NaN stays NaN and so is noticed.
        minus_inf = scores.new_full((where.shape[1],), -torch.inf)
        scores.index_put_((index[0], index[1]), minus_inf, accumulate=True)

    def _penalise(self, scores: Tensor, rows: _Rows) -> Tensor:
        assert self._penalties is not None
        columns = self._floats.index_select(0, rows.slots).unsqueeze(2)
        penalties = columns[:, _REPETITION], columns[:, _PRESENCE], columns[:, _FREQUENCY]
        return rows.put(scores, self._penalties.apply(rows.take(scores), rows.slots, *penalties))

    def _count(self, tokens: Tensor, rows: _Rows) -> None:
        assert self._penalties is not None
        self._penalties.add(rows.slots, rows.take(tokens))

    def _draw(self, scores: Tensor, values: Tensor, best: Tensor, rows: _Rows) -> Tensor:
        """Replace the best tokens of ``rows`` by random ones."""
        floats = self._floats.index_select(0, rows.slots)
        ints = self._ints.index_select(0, rows.slots)
        weights = weigh(rows.take(scores), rows.take(values), floats[:, _TEMPERATURE])
        needs = self._needs[rows.host_slots]
        # The likeliest token weighs 1, so min_p is a weight as it stands.
        least = floats[:, _MIN_P].contiguous()
        for need in (_SELECT, _SORT):
            if not (needs & need).any():
                continue
            part = rows.part(needs & need)
            top_k, top_p = part.take(ints[:, _TOP_K]), part.take(floats[:, _TOP_P])
            depth = int(self._top_k[part.host_slots].max())
            cuts = cut_offs(part.take(weights), top_k, top_p, depth)
            least = part.put(least, torch.maximum(cuts, part.take(least)))
        if (needs & (_SELECT | _SORT | _MIN_WEIGHT)).any():
            weights = keep_from(weights, least)
        uniform = uniforms(ints[:, _STREAM], rows.positions)
        return rows.put(best, pick(weights, uniform, rows.take(best)))

    def _upload_ids(self, ids: np.ndarray) -> Tensor:
        """Token ids as int64, without those that have no logit."""
        return upload(ids[ids < self._vocab_size].astype(np.int64), self._device)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a batch.

    ``slots`` and ``positions``, int64 [n], are of these rows. ``index``, int64 [n], tells where the
    rows are in the batch that they are a part of; None is all of it, in order.
    """

    host_slots: np.ndarray
    slots: Tensor
    positions: Tensor
    index: Tensor | None

    def part(self, needed: np.ndarray) -> _Rows:
        """The rows where ``needed``, int64 [n], is not 0."""
        if needed.all():
            return _Rows(self.host_slots, self.slots, self.positions, None)
        rows = np.flatnonzero(needed)
        index = upload(rows, self.slots.device)
        slots, positions = (t.index_select(0, index) for t in (self.slots, self.positions))
        return _Rows(self.host_slots[rows], slots, positions, index)

    def take(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor of the batch."""
        return tensor if self.index is None else tensor.index_select(0, self.index)

    def put(self, tensor: Tensor, rows: Tensor) -> Tensor:
        """The batch's tensor with these rows replaced, in place unless all are."""
        return rows if self.index is None else tensor.index_copy_(0, self.index, rows)


def _needs(params: RowParams, top_k: int, vocab_size: int, num_prompt: int) -> int:
    """The bits of what these parameters need; ``top_k`` is ``vocab_size`` when it is off."""
    needs = 0
    # Of the likeliest token alone nothing is drawn.
    if params.temperature > 0 and top_k > 1:
        needs |= _DRAW
        if top_k <= MAX_SELECT and top_k < vocab_size:
            needs |= _SELECT
        elif top_k < vocab_size or params.top_p < 1:
            needs |= _SORT
        if params.min_p > 0:
            needs |= _MIN_WEIGHT
    if params.stop_ids and params.min_length > num_prompt:
        needs |= _BAN
    if params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1:
        needs |= _PENALISE
    if params.logprobs >= 0:
        needs |= _LOGPROBS
    return needs


def _mark_bad(tokens: Tensor, values: Tensor) -> Tensor:
    """BAD_TOKEN where the best score is NaN or infinite."""
    return tokens.masked_fill(~values.isfinite(), BAD_TOKEN)


__all__ = ["Sampled", "Sampler"]
