"""The short causal convolution of recurrent layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.recurrent.states import StateRows


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    rows: StateRows,
    *,
    silu: bool,
) -> Tensor:
    """Convolve each channel of each row over its last tokens, earlier steps' included.

    Args:
        x: [tokens, channels]; the last dimension is contiguous.
        weight: [channels, width + 1]; the last column is that of the token itself.
        bias: [channels], or None.
        inputs: see ``LayerState``; the rows' are read, and then replaced by their last inputs.
        silu: activate the sums.

    Returns:
        [tokens, channels]; zeros for padding.
    """
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    width = inputs.shape[1]
    kernel = weight.float().t().unsqueeze(1)  # [width + 1, 1, channels]
    for slot, start, first, end in rows.on_host():
        before = inputs[slot] if start > 0 else torch.zeros_like(inputs[slot])
        whole = torch.cat((before, x[first:end]))
        inputs[slot] = whole[len(whole) - width :]
        parts = [whole[i : i + end - first].float() * kernel[i] for i in range(width + 1)]
        total = torch.stack(parts).sum(0)
        total = total if bias is None else total + bias.float()
        out[first:end] = F.silu(total) if silu else total
    return out
