"""Masks: one bit of each token, which says whether a sequence may have it next."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from asyncllm.kernels.native import has_triton_kernels


def mask_width(vocab: int) -> int:
    """How many int32 words the mask of one row has."""
    return -(-vocab // 32)


def mask_scores(logits: Tensor, rows: Tensor, slots: Tensor, masks: Tensor) -> Tensor:
    """Scores of some rows of a batch, -inf of the tokens that their masks leave out.

    What is not finite stays so: a left-out token that is NaN or infinite becomes NaN, and so the
    row is noticed all the same.

    Args:
        logits: [m, vocab], any floating dtype, the last dimension contiguous; not modified.
        rows: int64 [r], which rows of the logits. slots: int64 [r], whose masks they get.
        masks: int32 [slots, mask_width(vocab)]: bit i % 32 of word i // 32 is 1 if token i may be
            sampled. Bits beyond the vocabulary mean nothing.

    Returns:
        float32 [r, vocab].
    """
    if has_triton_kernels(logits):
        from asyncllm.kernels.triton.sampling.masks import mask_scores as launch
    else:
        launch = mask_scores_reference
    return launch(logits, rows, slots, masks)


def mask_scores_reference(logits: Tensor, rows: Tensor, slots: Tensor, masks: Tensor) -> Tensor:
    """``mask_scores`` in plain torch."""
    scores = logits.index_select(0, rows).float()
    octets = masks.index_select(0, slots).view(torch.uint8).view(-1).int()
    terms = _terms_of_octets(scores.device).index_select(0, octets).view(len(rows), -1)
    return scores.add_(terms[:, : scores.shape[1]])


@cache
def _terms_of_octets(device: torch.device) -> Tensor:
    """float32 [256, 8]: for each value of eight bits, 0 where they are 1, else -inf.

    Looked up in one go, eight tokens at a time: shifting bits apart takes twice as long.
    """
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(bits == 0, -torch.inf)


__all__ = ["mask_scores", "mask_scores_reference", "mask_width"]
