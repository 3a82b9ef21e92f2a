"""The short causal convolution of recurrent layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.support import in_triton
from asyncllm.kernels.types.recurrent import StateRows


@in_triton("recurrent.convolution")
def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, inputs: Tensor, rows: StateRows, *, silu: bool
) -> Tensor:
    """Convolve each channel of each row over its last tokens, earlier steps' included.

    Args:
        x: [tokens, channels]; the last dimension is contiguous.
        weight: [channels, width]; the last column is that of the token itself.
        bias: [channels], or None.
        inputs: see ``LayerState``; the rows' are read, and then replaced by their last inputs.
        silu: activate the sums.

    Returns:
        [tokens, channels]; zeros for padding.
    """
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    width = weight.shape[1]
    for slot, start, first, end in rows.on_host():
        earlier = torch.arange(start - width + 1, start)
        none = (earlier < 0).unsqueeze(1).to(x.device)  # leftovers there, which may be NaN
        before = inputs[slot, earlier % width].masked_fill(none, 0)
        latest = torch.arange(max(end - width, first), end)
        whole = torch.cat((before, x[first:end]))
        inputs[slot, (latest - first + start) % width] = x[latest]
        total = F.conv1d(whole.float().t(), weight.float().unsqueeze(1), groups=len(weight)).t()
        total = total if bias is None else total + bias.float()
        out[first:end] = F.silu(total) if silu else total
    return out
