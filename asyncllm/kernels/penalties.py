"""Penalties on tokens that have occurred."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.support import in_triton


@in_triton("sampling.penalties")
def penalise(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    penalties: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
) -> Tensor:
    """Scores of some rows of a batch after their penalties.

    Repetition comes first: scores of tokens that occur are divided by it where positive, else
    multiplied (Keskar et al. 2019, CTRL, in Hugging Face's form). Then OpenAI's two:
    count * frequency and (count > 0) * presence are subtracted.

    Args:
        logits: [m, vocab], any floating dtype, the last dimension contiguous; not modified.
        rows: int64 [r], which rows of the logits. slots: int64 [r], whose penalties they get.
        penalties: float32 [slots, 3]: repetition, presence, frequency.
        counts: int32 [slots, vocab], how often each token was generated.
        in_prompt: uint8 [slots, vocab], 1 for tokens that occur in the prompt, else 0.

    Returns:
        float32 [r, vocab].
    """
    scores = logits.index_select(0, rows).float()
    repetition, presence, frequency = penalties.index_select(0, slots).split(1, dim=1)
    # Sums and products of floats throughout: on CPUs masks take three times as long.
    times = counts.index_select(0, slots).float()
    prompt = in_prompt.index_select(0, slots).float()
    factor = torch.maximum(times, prompt).clamp_(max=1).mul_(repetition - 1).add_(1)
    negative = scores.clamp(max=0).mul_(factor)
    scores.clamp_(min=0).div_(factor).add_(negative)
    scores.addcmul_(times, frequency, value=-1)
    return scores.addcmul_(times.clamp_(max=1), presence, value=-1)
