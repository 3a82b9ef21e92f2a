"""Penalties on repeating tokens: parameters and token counts by slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.kernels.scores import penalise
from asyncllm.kernels.upload import upload


class Penalties(NamedTuple):
    """As in ``SamplingParams``; 1, 0 and 0 have no effect."""

    repetition: float
    presence: float
    frequency: float


class PenaltyTable:
    """Penalties and token counts by slot, on the device.

    Presence and frequency penalties act on counts of generated tokens; the repetition penalty also
    on tokens that occur in the prompt.
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
        """Start a slot anew from token ids, int32; ids beyond the vocabulary are ignored."""
        prompt, generated = (ids[ids < self._vocab_size] for ids in (prompt, generated))
        bits = np.array(penalties, dtype=np.float32).view(np.int32)
        # Not through the device's ring of buffers, as any number of slots may start at once.
        packed = upload(np.concatenate([bits, prompt, generated]), self._device)
        on_device = packed.split([len(bits), len(prompt), len(generated)])
        self._penalties[slot] = on_device[0].view(torch.float32)
        counts = self._counts[slot].zero_()
        if len(generated):
            counts.index_add_(0, on_device[2], torch.ones_like(on_device[2]))
        self._in_prompt[slot].zero_().index_fill_(0, on_device[1].long(), 1)

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count sampled tokens, int64 [m]; negative ones are ignored."""
        where = slots * self._vocab_size + tokens.clamp(min=0)
        self._counts.view(-1).index_add_(0, where, (tokens >= 0).to(torch.int32))

    def scores(self, logits: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        """Penalised scores of some rows of a batch; see ``ScoreTable``."""
        return penalise(logits, rows, slots, self._penalties, self._counts, self._in_prompt)
