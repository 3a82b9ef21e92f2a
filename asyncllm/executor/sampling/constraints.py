"""Constraints on each slot's next token, as masks and biases on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.executor.sampling.dynamic_masks import DynamicMasks
from asyncllm.kernels.scores import mask_scores, mask_width
from asyncllm.kernels.upload import upload
from asyncllm.types import MAX_LOGIT_BIAS
from asyncllm.wire.messages import Constraints, RowParams, unpack


class MaskTable:
    """Masks by slot: fixed ones, which are written once, and dynamic ones."""

    def __init__(
        self, num_slots: int, vocab_size: int, device: Device, dynamic: DynamicMasks
    ) -> None:
        shape = num_slots, mask_width(vocab_size)
        self._masks = torch.zeros(shape, dtype=torch.int32, device=device.torch_device)
        self._device = device
        self._dynamic = dynamic

    def admit(self, slot: int, params: RowParams, generated: np.ndarray) -> None:
        """Start a slot anew; ``generated`` are its tokens from before a preemption, int32."""
        constraints = params.constraints or Constraints()
        if is_dynamic(constraints):
            self._dynamic.admit(slot, params, generated)
            return
        self._dynamic.drop(slot)
        # Not through the device's ring of buffers, as any number of slots may start at once.
        fixed = np.frombuffer(constraints.mask, dtype="<i4").copy()  # writable, for torch
        self._masks[slot].copy_(upload(fixed, self._masks.device))

    def refresh(self, slots: np.ndarray, lengths: np.ndarray) -> dict[int, str]:
        """Update the masks of dynamic slots; waits for the tokens sampled last.

        Args:
            slots, lengths: int64 [m] on the host, as for ``Sampler.sample``.

        Returns:
            Indices into ``slots`` where no token is allowed, and why.
        """
        masks, order, failures = self._dynamic.fill(slots, lengths)
        self._masks.index_copy_(0, self._device.upload(slots[order]), masks)
        return failures

    def track(self, slots: np.ndarray, tokens: Tensor) -> None:
        """Read back the tokens sampled for dynamic slots just refreshed; int64 [m], on device."""
        self._dynamic.track(slots, tokens)

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Masked scores of some rows of a batch; see ``ScoreTable``."""
        return mask_scores(logits, rows, slots, self._masks)


class BiasTable:
    """Logit biases by slot, on the device."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = num_slots, MAX_LOGIT_BIAS
        self._vocab_size = vocab_size
        self._device = device
        self._ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self._biases = torch.zeros(shape, device=device)
        self._counts = np.zeros(num_slots, dtype=np.int64)

    def admit(self, slot: int, params: RowParams) -> None:
        """Start a slot anew; ids beyond the vocabulary are ignored."""
        constraints = params.constraints or Constraints()
        ids = unpack(constraints.bias_ids)
        biases = np.frombuffer(constraints.biases, dtype="<f4")
        exist = ids < self._vocab_size
        count = self._counts[slot] = np.count_nonzero(exist)
        packed = np.stack([ids[exist], biases[exist].view(np.int32)])
        on_device = upload(packed, self._device)
        self._ids[slot].zero_()[:count].copy_(on_device[0])
        self._biases[slot].zero_()[:count].copy_(on_device[1].view(torch.float32))

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Biased scores of some rows of a batch; see ``ScoreTable``."""
        scores = logits.index_select(0, rows).float()
        # A slot with fewer biases than another adds zeros to token 0.
        most = int(self._counts.max())
        ids, biases = self._ids[:, :most], self._biases[:, :most]
        return scores.scatter_add_(1, ids.index_select(0, slots), biases.index_select(0, slots))


def is_masked(constraints: Constraints) -> bool:
    """Whether some tokens are masked at some time."""
    return bool(constraints.mask) or is_dynamic(constraints)


def is_dynamic(constraints: Constraints) -> bool:
    """Whether the mask depends on the previous tokens."""
    return bool(constraints.grammar or constraints.bad_words or constraints.reasoning)
