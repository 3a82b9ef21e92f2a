"""Penalties and masks, which change the scores of tokens before they are sampled."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def penalise_reference(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    penalties: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
) -> Tensor:
    """See ``kernels.sampling.penalise``."""
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


def mask_scores_reference(logits: Tensor, rows: Tensor, slots: Tensor, masks: Tensor) -> Tensor:
    """See ``kernels.sampling.mask_scores``."""
    scores = logits.index_select(0, rows).float()
    octets = masks.index_select(0, slots).view(torch.uint8).view(-1).int()
    terms = _terms_of_octets(scores.device).index_select(0, octets).view(len(rows), -1)
    return scores.add_(terms[:, : scores.shape[1]])


@cache
def _terms_of_octets(device: torch.device) -> Tensor:
    """float32 [256, 8]: for each value of eight bits, 0 where they are 1, else -inf.

    Looking up eight tokens at a time takes half as long as shifting bits apart.
    """
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(bits == 0, -torch.inf)
