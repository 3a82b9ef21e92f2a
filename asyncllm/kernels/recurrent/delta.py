"""Gated delta nets (Yang et al., arXiv 2412.06464), as in Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.recurrent.convolution import short_convolution
from asyncllm.kernels.support import in_triton
from asyncllm.kernels.types.recurrent import UNIT_EPS, DeltaNet, LayerState, StateRows

#: Tokens of a prompt whose products are computed together.
CHUNK = 64


@in_triton("recurrent.delta")
def gated_delta_net(
    x: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows
) -> Tensor:
    """From a layer's projections to the input of its last one, in float32 in between.

    Queries, keys and values go through a short convolution with SiLU; queries and keys are then
    divided by their norms, and queries by the root of ``key_dim``. A head has a matrix S [key_dim,
    value_dim] for each sequence. A token with query q, key k, value v and the numbers b and a makes

        S <- exp(-exp(decay) softplus(a + step_bias)) S
        S <- S + k (sigmoid(b) (v - S^T k))^T

    of it, and S^T q is its result, which is normalised and multiplied by SiLU of its gate.

    Args:
        x: [tokens, net.channels + value_heads * value_dim]: queries, keys, values and gates.
        gates: [tokens, 2 * value_heads]: b of each head, then a.
        state: what the rows' slots have is read and replaced.

    Returns:
        [tokens, value_heads * value_dim]; undefined but finite for padding.
    """
    assert state.matrices is not None
    qkv, z = x[:, : net.channels], x[:, net.channels :]
    convolving = qkv, net.convolution, None, state.inputs, rows
    qkv = short_convolution.reference(*convolving, silu=True).float()
    size = net.key_heads * net.key_dim
    q, k = (part.unflatten(1, (net.key_heads, net.key_dim)) for part in qkv.split(size, 1)[:2])
    v = qkv[:, 2 * size :].unflatten(1, (net.value_heads, net.value_dim))
    group = net.value_heads // net.key_heads
    q, k = (_unit(part).repeat_interleave(group, dim=1) for part in (q, k))
    q = q * net.key_dim**-0.5
    b, a = gates.float().split(net.value_heads, dim=1)
    beta = b.sigmoid()
    g = -net.decay.float().exp() * F.softplus(a + net.step_bias.float())
    out = torch.zeros(v.shape, dtype=torch.float32, device=v.device)
    for slot, start, first, end in rows.on_host():
        before = state.matrices[slot].float()
        before = before if start > 0 else torch.zeros_like(before)
        queries, keys, values, weights, decays = (
            part[first:end].transpose(0, 1) for part in (q, k, v, beta, g)
        )
        row = delta_rule(queries, keys, values, weights, decays, before)
        out[first:end], state.matrices[slot] = row
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + net.eps) * net.norm.float()
    gated = normed * F.silu(z.float().unflatten(1, (net.value_heads, net.value_dim)))
    return gated.flatten(1).to(x.dtype)


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence of one row, CHUNK tokens at a time; see ``gated_delta_net``.

    Within a chunk, let G be the running sum of g, and D the lower triangle of exp(G_i - G_j). What
    each token adds is V' = (I + tril(beta K K^T D, -1))^-1 beta (V - (K exp(G)) S), so that the
    results are (Q exp(G)) S + (Q K^T D) V', and S becomes exp(G_C) S + (K exp(G_C - G))^T V'.

    Args:
        q, k: [heads, tokens, key_dim].
        v: [heads, tokens, value_dim].
        beta, g: [heads, tokens].
        state: [heads, key_dim, value_dim].

    Returns:
        Results [tokens, heads, value_dim], and the new state.
    """
    results = []
    for first in range(0, q.shape[1], CHUNK):
        part = slice(first, first + CHUNK)
        total = g[:, part].cumsum(1)
        queries, keys, values = q[:, part], k[:, part], v[:, part]
        weights = beta[:, part].unsqueeze(2)
        decays = (total.unsqueeze(2) - total.unsqueeze(1)).tril().exp().tril()
        mixed = (weights * (keys @ keys.mT) * decays).tril(-1)
        grown = total.exp().unsqueeze(2)
        wanted = weights * (values - (keys * grown) @ state)
        added = torch.linalg.solve_triangular(mixed, wanted, upper=False, unitriangular=True)
        results.append((queries * grown) @ state + (queries @ keys.mT * decays) @ added)
        last = total[:, -1:]
        kept = keys * (last - total).exp().unsqueeze(2)
        state = last.exp().unsqueeze(2) * state + kept.mT @ added
    return torch.cat(results, dim=1).transpose(0, 1), state


@in_triton("recurrent.ordered")
def ordered_delta_net(
    x: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows
) -> Tensor:
    """``gated_delta_net``, of which a token and the state after it have the same bits in any step;
    in plain torch they may not."""
    return gated_delta_net.reference(x, gates, net, state, rows)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + UNIT_EPS)
