"""Which tokens each slot's sequence holds, and the penalties on repeating them."""

from __future__ import annotations

import torch
from torch import Tensor


class PenaltyTable:
    """Token counts by slot, on the device.

    Generated tokens are counted (presence and frequency penalties act on them alone); of prompt
    tokens it matters only whether they occur (for the repetition penalty).
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        shape = num_slots, vocab_size
        self._counts = torch.zeros(shape, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(shape, dtype=torch.uint8, device=device)

    def admit(self, slot: int, prompt: Tensor, generated: Tensor) -> None:
        """Start a slot anew from token ids, int64, all of them in the vocabulary."""
        counts = self._counts[slot].zero_()
        counts.index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))
        self._in_prompt[slot].zero_().index_fill_(0, prompt, 1)

    def add(self, slots: Tensor, tokens: Tensor) -> None:
        """Count sampled tokens, int64 [m]; negative ones are none. No slot occurs twice."""
        self._counts.index_put_(
            (slots, tokens.clamp(min=0)), (tokens >= 0).to(torch.int32), accumulate=True
        )

    def apply(
        self,
        scores: Tensor,
        slots: Tensor,
        repetition: Tensor,
        presence: Tensor,
        frequency: Tensor,
    ) -> Tensor:
        """Penalise scores, in place.

        Repetition comes first: scores of tokens that occur are divided by it where positive, else
        multiplied (Keskar et al. 2019, CTRL, in Hugging Face's form). Then OpenAI's two:
        count * frequency and (count > 0) * presence are subtracted.

        Args:
            scores: float32 [m, vocab]. slots: int64 [m].
            repetition, presence, frequency: float32 [m, 1].
        """
        # Sums and products of floats throughout: on CPUs masks take three times as long.
        counts = self._counts.index_select(0, slots).float()
        prompt = self._in_prompt.index_select(0, slots).float()
        factor = torch.maximum(counts, prompt).clamp_(max=1).mul_(repetition - 1).add_(1)
        negative = scores.clamp(max=0).mul_(factor)
        scores.clamp_(min=0).div_(factor).add_(negative)
        scores.addcmul_(counts, frequency, value=-1)
        scores.addcmul_(counts.clamp_(max=1), presence, value=-1)
        return scores


__all__ = ["PenaltyTable"]
