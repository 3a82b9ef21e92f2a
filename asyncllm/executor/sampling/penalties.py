"""Which tokens each slot's sequence holds, and the penalties on repeating them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.kernels.penalties import penalise
from asyncllm.kernels.upload import upload


class Penalties(NamedTuple):
    """Factors and terms, as in ``SamplingParams``; 1, 0 and 0 do nothing."""

    repetition: float
    presence: float
    frequency: float


class PenaltyTable:
    """Penalties and token counts by slot, on the device.

    Generated tokens are counted (presence and frequency penalties act on them alone); of prompt
    tokens it matters only whether they occur (for the repetition penalty).
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = num_slots, vocab_size
        self._vocab_size = vocab_size
        self._device = device
        self._penalties = torch.zeros(num_slots, 3, device=device)
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(shape, dtype=torch.uint8, device=device)

    def admit(
        self, slot: int, penalties: Penalties, prompt: np.ndarray, generated: np.ndarray
    ) -> None:
        """Start a slot anew from token ids, int32; those that have no logit are ignored."""
        prompt, generated = (ids[ids < self._vocab_size] for ids in (prompt, generated))
        bits = np.array(penalties, dtype=np.float32).view(np.int32)
        # Not one of the device's few buffers for steps: any number of slots may start at once.
        packed = upload(np.concatenate([bits, prompt, generated]), self._device)
        there = packed.split([len(bits), len(prompt), len(generated)])
        self._penalties[slot] = there[0].view(torch.float32)
        counts = self._counts[slot].zero_()
        counts.index_add_(0, there[2], torch.ones_like(there[2]))
        self._in_prompt[slot].zero_().index_fill_(0, there[1].long(), 1)

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count sampled tokens, int64 [m]; negative ones are none."""
        where = slots * self._vocab_size + tokens.clamp(min=0)
        self._counts.view(-1).index_add_(0, where, (tokens >= 0).to(torch.int32))

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Scores of some rows of a batch after their penalties; see ``penalise``."""
        return penalise(logits, rows, slots, self._penalties, self._counts, self._in_prompt)
