"""Gated delta nets: rows of one token and longer rows have kernels of their own."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.triton.recurrent.delta_chunks import chunks
from asyncllm.kernels.triton.recurrent.delta_decode import decode
from asyncllm.kernels.types.recurrent import DeltaNet, LayerState, StateRows


def gated_delta_net(
    x: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows
) -> Tensor:
    """See ``kernels.recurrent.delta.gated_delta_net``."""
    shape = len(x), net.value_heads * net.value_dim
    if rows.one_token:
        y = x.new_empty(shape)
    else:
        y = x.new_zeros(shape)
        chunks(x, gates, net, state, rows, y)
    decode(x, gates, net, state, rows, y)
    return y
