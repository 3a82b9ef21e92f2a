"""Sampling: from logits to tokens by temperature, top-k, top-p and min-p."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from asyncllm.kernels.reference.sampling import sample_tokens_reference
from asyncllm.kernels.support import has_triton_kernels

#: The parameters of a row. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.
#: On the device, a record is a row of int64 [slots, 3].
RECORD = np.dtype(
    [
        ("stream", "<i8"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("top_k", "<i4"),
    ]
)


def sample_tokens(
    logits: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    draws: bool,
    filters: bool,
    relay: Tensor | None = None,
) -> Tensor:
    """Sample one token for each row, without waiting for the device.

    The token of a row depends on its own logits, record and position alone. GPUs and CPUs round
    sums differently, so a draw at the border of two tokens may differ.

    Args:
        logits: [m, vocab], any floating dtype, the last dimension contiguous; -inf bans a token.
        table: int64 [slots, 3] of ``RECORD``.
        slots: int [m]; each row's record.
        positions: int [m]; the position in its stream of each row's random number.
        draws: False if the temperature of all rows is 0.
        filters: False if no row with a temperature above 0 has filters.
        relay: int64 [slots]; the row's token is also written there, 0 for BAD_TOKEN.

    Returns:
        int64 [m]; BAD_TOKEN where the best score is NaN or infinite. Of equal scores, the first
        token is the best.
    """
    if has_triton_kernels(logits):
        from asyncllm.kernels.triton.sampling.sampling import sample_tokens as launch
    else:
        launch = sample_tokens_reference
    return launch(logits, table, slots, positions, draws=draws, filters=filters, relay=relay)
