"""Gated delta nets: rows of one token and longer rows have kernels of their own."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.triton.recurrent.delta_chunks import chunks, convolve_heads, normalize
from asyncllm.kernels.triton.recurrent.delta_decode import decode, step
from asyncllm.kernels.types.recurrent import DeltaNet, LayerState, StateRows

#: Heads of all rows from which on several launches are faster than one: none that was measured. One
#: takes 84 us of 64 rows with 32 heads, whose states are 62 us of traffic.
MANY = 1 << 20


def gated_delta_net(
    x: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows
) -> Tensor:
    """See ``kernels.recurrent.delta.gated_delta_net``."""
    y = x.new_empty(len(x), net.value_heads * net.value_dim)
    if rows.one_token and len(rows.slots) * net.value_heads < MANY:
        decode(x, gates, net, state, rows, y)
        return y
    qkv = convolve_heads(x, net, state, rows)
    out = y.new_empty(y.shape)
    if not rows.one_token:
        chunks(qkv, gates, net, state, rows, out)
    step(qkv, gates, net, state, rows, out)
    normalize(x, out, net, rows, y)
    return y
