"""Masks: a bit for each token, whether a sequence may have it next."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from asyncllm.kernels.support import in_triton


def mask_width(vocab: int) -> int:
    """int32 words of the mask of one row."""
    return -(-vocab // 32)


@in_triton("sampling.masks")
def mask_scores(logits: Tensor, rows: Tensor, slots: Tensor, masks: Tensor) -> Tensor:
    """Scores of some rows of a batch, with -inf for the tokens that their masks ban.

    A banned token whose score is NaN or infinite becomes NaN, so that the row still counts as bad.

    Args:
        logits: [m, vocab], any floating dtype, the last dimension contiguous; not modified.
        rows: int64 [r], which rows of the logits. slots: int64 [r], whose masks they get.
        masks: int32 [slots, mask_width(vocab)]: bit i % 32 of word i // 32 is 1 if token i may be
            sampled. Bits beyond the vocabulary mean nothing.

    Returns:
        float32 [r, vocab].
    """
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
