"""From logits to tokens: every slot's sampling parameters, and the order in which they act."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.draw import MAX_SELECT, cut_offs, pick, uniforms, weigh
from asyncllm.executor.logprobs import Logprobs
from asyncllm.executor.penalties import PenaltyTable
from asyncllm.wire.messages import BAD_TOKEN

if TYPE_CHECKING:
    from asyncllm.wire.messages import RowParams

# Columns of the float32 table.
_TEMPERATURE, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION = range(6)
# Columns of the int64 table.
_TOP_K, _SEED = range(2)


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
    """Samples tokens of the sequences in ``num_slots`` slots.

    Parameters live on the device, by slot, and once more on the host, where they decide what there
    is to compute: ``sample`` never waits for the device. What a row yields depends on its own
    logits, parameters, seed and position, not on the rows beside it: batching, chunked prompts and
    preemption do not show in the text.

    Args:
        num_slots: slots are numbered 0 .. num_slots-1.
        vocab_size: number of logits of a row.
        device: where logits are and tokens go.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device | str) -> None:
        self._vocab_size = vocab_size
        self._num_slots = num_slots
        self._device = torch.device(device)
        self._floats = np.zeros((num_slots, 6), dtype=np.float32)
        self._ints = np.zeros((num_slots, 2), dtype=np.int64)
        self._device_floats = torch.zeros(num_slots, 6, device=self._device)
        self._device_ints = torch.zeros(num_slots, 2, dtype=torch.int64, device=self._device)
        self._logprobs = np.full(num_slots, -1, dtype=np.int64)
        self._min_length = np.zeros(num_slots, dtype=np.int64)
        self._stop_ids = [np.empty(0, dtype=np.int64)] * num_slots
        self._penalised = np.zeros(num_slots, dtype=bool)
        # Large (5 bytes x slots x vocabulary) and rarely needed: made when first asked for.
        self._penalties: PenaltyTable | None = None

    def admit(self, slot: int, params: RowParams, tokens: np.ndarray, num_prompt: int) -> None:
        """A sequence takes a slot.

        Args:
            tokens: int32 [n], all of the sequence that is known; the first ``num_prompt`` are the
                prompt, the others were generated before it was preempted.
        """
        # The likeliest token alone is what greedy sampling gives, and that is cheaper.
        greedy = params.temperature == 0 or params.top_k == 1
        floats = self._floats[slot]
        floats[_TEMPERATURE] = (
            0 if greedy else max(params.temperature, float(np.finfo(np.float32).tiny))
        )
        floats[_TOP_P] = params.top_p
        floats[_MIN_P] = params.min_p
        floats[_PRESENCE] = params.presence_penalty
        floats[_FREQUENCY] = params.frequency_penalty
        floats[_REPETITION] = params.repetition_penalty
        # Off is "as many as there are".
        in_range = 0 < params.top_k < self._vocab_size
        self._ints[slot] = params.top_k if in_range else self._vocab_size, params.seed
        self._device_floats[slot] = self._upload(floats)
        self._device_ints[slot] = self._upload(self._ints[slot])
        self._logprobs[slot] = params.logprobs
        stop_ids = np.array(params.stop_ids, dtype=np.int64)
        self._stop_ids[slot] = stop_ids[stop_ids < self._vocab_size]
        self._min_length[slot] = params.min_length if self._stop_ids[slot].size else 0
        self._penalised[slot] = (
            floats[_PRESENCE] != 0 or floats[_FREQUENCY] != 0 or floats[_REPETITION] != 1
        )
        if self._penalised[slot]:
            if self._penalties is None:
                self._penalties = PenaltyTable(self._num_slots, self._vocab_size, self._device)
            prompt, generated = tokens[:num_prompt], tokens[num_prompt:]
            self._penalties.admit(slot, self._upload_ids(prompt), self._upload_ids(generated))

    def sample(self, logits: Tensor, slots: np.ndarray, lengths: np.ndarray) -> Sampled:
        """Sample one token for each row.

        Args:
            logits: [m, vocab], m > 0, any floating dtype; not modified. -inf bans a token.
            slots: int64 [m] on the host, each slot at most once.
            lengths: int64 [m] on the host, tokens that the sequence has already; so the position
                of the new one.
        """
        penalised = np.flatnonzero(self._penalised[slots])
        banned = np.flatnonzero(lengths < self._min_length[slots])
        drawn = np.flatnonzero(self._floats[slots, _TEMPERATURE] > 0)
        scores = logits
        if banned.size or penalised.size:
            scores = logits.to(torch.float32, copy=True)
        if banned.size:
            self._ban_stop_ids(scores, banned, slots[banned])
        if penalised.size:
            scores = self._penalise(scores, penalised, slots[penalised])
        # NaN counts as the largest; of equal scores the first is taken.
        values, tokens = scores.max(dim=-1)
        if drawn.size:
            tokens = self._draw(scores, values, tokens, drawn, slots[drawn], lengths[drawn])
        tokens = tokens.masked_fill(~values.isfinite(), BAD_TOKEN)
        if penalised.size:
            self._count(tokens, penalised, slots[penalised])
        return Sampled(tokens, self._logprobs_of(logits, tokens, slots))

    def _ban_stop_ids(self, scores: Tensor, rows: np.ndarray, slots: np.ndarray) -> None:
        """Set the scores of stop tokens to -inf, in place."""
        ids = [self._stop_ids[slot] for slot in slots]
        index = self._upload(np.stack([rows.repeat([len(i) for i in ids]), np.concatenate(ids)]))
        # Added, not assigned: NaN stays NaN and so is noticed.
        minus_inf = scores.new_full((index.shape[1],), -torch.inf)
        scores.index_put_((index[0], index[1]), minus_inf, accumulate=True)

    def _penalise(self, scores: Tensor, rows: np.ndarray, slots: np.ndarray) -> Tensor:
        assert self._penalties is not None
        index = self._upload(np.stack([rows, slots]))
        columns = self._device_floats.index_select(0, index[1]).unsqueeze(2)
        penalties = columns[:, _REPETITION], columns[:, _PRESENCE], columns[:, _FREQUENCY]
        part = self._penalties.apply(_take(scores, rows, index[0]), index[1], *penalties)
        return part if len(part) == len(scores) else scores.index_copy_(0, index[0], part)

    def _count(self, tokens: Tensor, rows: np.ndarray, slots: np.ndarray) -> None:
        assert self._penalties is not None
        index = self._upload(np.stack([rows, slots]))
        self._penalties.add(index[1], tokens.index_select(0, index[0]))

    def _draw(
        self,
        scores: Tensor,
        values: Tensor,
        best: Tensor,
        rows: np.ndarray,
        slots: np.ndarray,
        lengths: np.ndarray,
    ) -> Tensor:
        """Replace the best tokens of ``rows`` by random ones."""
        index = self._upload(np.stack([rows, slots, lengths]))
        floats = self._device_floats.index_select(0, index[1])
        ints = self._device_ints.index_select(0, index[1])
        weights = weigh(
            _take(scores, rows, index[0]),
            _take(values, rows, index[0]),
            floats[:, _TEMPERATURE],
        )
        weights = self._filter(weights, floats, ints[:, _TOP_K], slots)
        uniform = uniforms(ints[:, _SEED], index[2])
        tokens = pick(weights, uniform, _take(best, rows, index[0]))
        return tokens if len(tokens) == len(best) else best.index_copy_(0, index[0], tokens)

    def _filter(self, weights: Tensor, floats: Tensor, top_k: Tensor, slots: np.ndarray) -> Tensor:
        """Set weights of tokens that top-k, top-p or min-p drop to 0; ``slots`` of the rows."""
        host_top_k = self._ints[slots, _TOP_K]
        by_rank = host_top_k < self._vocab_size
        by_share = self._floats[slots, _TOP_P] < 1
        selected = by_rank & (host_top_k <= MAX_SELECT)
        ordered = (by_rank | by_share) & ~selected
        by_weight = self._floats[slots, _MIN_P] > 0
        if not (selected.any() or ordered.any() or by_weight.any()):
            return weights
        # The best weighs 1, so min_p is a weight as it stands.
        least = floats[:, _MIN_P].clone()
        for rows in (np.flatnonzero(selected), np.flatnonzero(ordered)):
            if rows.size == 0:
                continue
            index = self._upload(rows)
            cuts = cut_offs(
                _take(weights, rows, index),
                _take(top_k, rows, index),
                _take(floats[:, _TOP_P], rows, index),
                depth=int(host_top_k[rows].max()),
            )
            least.index_copy_(0, index, torch.maximum(cuts, _take(least, rows, index)))
        return weights.masked_fill_(weights < least.unsqueeze(1), 0)

    def _logprobs_of(self, logits: Tensor, tokens: Tensor, slots: np.ndarray) -> Logprobs | None:
        wanted = self._logprobs[slots]
        rows = np.flatnonzero(wanted >= 0)
        if rows.size == 0:
            return None
        index = self._upload(rows)
        return Logprobs(_take(logits, rows, index), _take(tokens, rows, index), rows, wanted[rows])

    def _upload_ids(self, ids: np.ndarray) -> Tensor:
        """Token ids as int64, without those that have no logit."""
        return self._upload(ids[ids < self._vocab_size].astype(np.int64))

    def _upload(self, array: np.ndarray) -> Tensor:
        """Copy to the device without waiting for it."""
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def _take(tensor: Tensor, rows: np.ndarray, index: Tensor) -> Tensor:
    """Rows of a tensor; ``index`` is ``rows``, which are distinct and rising, on its device."""
    return tensor if len(rows) == len(tensor) else tensor.index_select(0, index)


__all__ = ["Sampled", "Sampler"]
