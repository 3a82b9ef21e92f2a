"""Penalties on tokens that have occurred."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.reference.scores import penalise_reference
from asyncllm.kernels.support import has_triton_kernels


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
    if has_triton_kernels(logits):
        from asyncllm.kernels.triton.sampling.penalties import penalise as launch
    else:
        launch = penalise_reference
    return launch(logits, rows, slots, penalties, counts, in_prompt)
