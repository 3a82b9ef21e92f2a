"""Masks: a bit for each token, whether a sequence may have it next."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.reference.scores import mask_scores_reference
from asyncllm.kernels.support import has_triton_kernels


def mask_width(vocab: int) -> int:
    """int32 words of the mask of one row."""
    return -(-vocab // 32)


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
    if has_triton_kernels(logits):
        from asyncllm.kernels.triton.sampling.masks import mask_scores as launch
    else:
        launch = mask_scores_reference
    return launch(logits, rows, slots, masks)
