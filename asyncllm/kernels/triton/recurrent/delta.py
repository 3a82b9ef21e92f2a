"""Gated delta nets: rows of one token and longer rows have kernels of their own."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.triton.recurrent.delta_chunks import chunks, convolve_heads, normalize
from asyncllm.kernels.triton.recurrent.delta_decode import decode, step
from asyncllm.kernels.types.recurrent import DeltaNet, LayerState, StateRows


def gated_delta_net(
    x: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows
) -> Tensor:
    """See ``kernels.recurrent.delta.gated_delta_net``."""
    y = x.new_empty(len(x), net.value_heads * net.value_dim)
    if rows.one_token:
        decode(x, gates, net, state, rows, y)
        return y
    qkv = convolve_heads(x, net, state, rows)
    out = y.new_empty(y.shape)
    chunks(qkv, gates, net, state, rows, out)
    step(qkv, gates, net, state, rows, out)
    normalize(x, out, net, rows, y)
    return y
