"""Mamba-2 (Dao and Gu, arXiv 2405.21060), as in Granite 4."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.recurrent.convolution import short_convolution
from asyncllm.kernels.recurrent.delta import CHUNK
from asyncllm.kernels.support import in_triton
from asyncllm.kernels.types.recurrent import LayerState, Mamba, StateRows


@in_triton("recurrent.mamba")
def mamba(x: Tensor, net: Mamba, state: LayerState, rows: StateRows) -> Tensor:
    """From a layer's projection to the input of its norm, in float32 in between.

    Values, keys and queries go through a short convolution with SiLU. A head has a matrix S
    [key_dim, value_dim] for each sequence. A token with query q, key k, value v and the number a
    has the step t = softplus(a + step_bias), within limits, and makes

        S <- exp(-exp(decay) t) S + t k v^T

    of it. S^T q + skip v, multiplied by SiLU of the token's gate, is its result.

    Args:
        x: [tokens, 2 * net.inner + 2 * groups * key_dim + heads]: gates, values, keys, queries, a.
        state: what the rows' slots have is read and replaced.

    Returns:
        [tokens, net.inner]; undefined but finite for padding.
    """
    assert state.matrices is not None
    shared = net.groups * net.key_dim
    gate, xkq, a = x.split((net.inner, net.inner + 2 * shared, net.heads), dim=1)
    convolving = xkq, net.convolution, net.bias, state.inputs, rows
    xkq = short_convolution.reference(*convolving, silu=True).float()
    v = xkq[:, : net.inner].unflatten(1, (net.heads, net.value_dim))
    k, q = (
        part.unflatten(1, (net.groups, net.key_dim)).repeat_interleave(net.heads // net.groups, 1)
        for part in xkq[:, net.inner :].split(shared, 1)
    )
    step = F.softplus(a.float() + net.step_bias).clamp(*net.limits)
    g = -net.decay.exp() * step
    out = torch.zeros_like(v)
    for slot, start, first, end in rows.on_host():
        before = state.matrices[slot].float()
        before = before if start > 0 else torch.zeros_like(before)
        queries, keys, values, decays = (
            part[first:end].transpose(0, 1) for part in (q, k, v * step.unsqueeze(2), g)
        )
        out[first:end], state.matrices[slot] = _scan(queries, keys, values, decays, before)
    out += net.skip.unsqueeze(1) * v
    return (out.flatten(1) * F.silu(gate.float())).to(x.dtype)


@in_triton("recurrent.ordered")
def ordered_mamba(x: Tensor, net: Mamba, state: LayerState, rows: StateRows) -> Tensor:
    """``mamba``, of which a token and the state after it have the same bits in any step; in plain
    torch they may not."""
    return mamba.reference(x, net, state, rows)


def _scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence of one row, CHUNK tokens at a time, as in ``delta.delta_rule``."""
    results = []
    for first in range(0, q.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        total = g[:, part].cumsum(1)
        queries, keys, values = q[:, part], k[:, part], v[:, part]
        decays = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
        grown = queries * total.exp().unsqueeze(2)
        results.append(grown @ state + (queries @ keys.mT * decays) @ values)
        last = total[:, -1:]
        kept = keys * (last - total).exp().unsqueeze(2)
        state = last.exp().unsqueeze(2) * state + kept.mT @ values
    return torch.cat(results, dim=1).transpose(0, 1), state
