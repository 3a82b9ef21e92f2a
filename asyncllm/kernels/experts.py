"""Mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.activation import gated
from asyncllm.kernels.quantized import dequantize_fp8, dequantize_int4, unpack_mxfp4
from asyncllm.kernels.support import in_triton
from asyncllm.kernels.types import (
    ExpertWeight,
    Fp8Matrix,
    Gated,
    GatedExperts,
    Mxfp4Matrix,
    Routing,
)

#: Bytes of matrices that are gathered at once where there is no grouped product.
_GATHERED = 1 << 28


@in_triton("experts.routing")
def choose_experts(
    logits: Tensor,
    routing: Routing,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    factors: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The experts of each token, the best first, then the shared ones; and their weights.

    Of experts with the same score, that with the lower number is the better one.

    Args:
        logits: [tokens, experts], or [tokens, experts + 1] with a gate; contiguous.
        dtype: of the weights.
        bias: [experts]; added to the scores by which experts are chosen, but not to their weights.
        factors: [experts]; of the weights.

    Returns:
        Weights, and int32 experts, both [tokens, routing.used].
    """
    logits = logits.float()
    count = logits.shape[1] - routing.has_gate
    gate = logits[:, count:].sigmoid()
    logits = logits[:, :count] * routing.sharpness
    is_sigmoid = routing.scores == "sigmoid"
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(dim=-1)
    ranks = scores if is_sigmoid else logits
    ranks = ranks if bias is None else ranks + bias
    if routing.groups > 1:
        grouped = ranks.unflatten(1, (routing.groups, -1))
        best = grouped.topk(2 if is_sigmoid else 1, dim=-1).values.sum(dim=-1)
        others = _best_first(best)[:, routing.top_groups :]
        ranks = grouped.scatter(1, _for_each(others, grouped), float("-inf")).flatten(1)
    experts = _best_first(ranks)[:, : routing.top_k]
    weights = scores.gather(1, experts)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    weights = weights * routing.factor
    if factors is not None:
        weights = weights * factors[experts]
    if routing.shared:
        shared = torch.arange(count, count + routing.shared, device=logits.device)
        experts = torch.cat((experts, shared.expand(len(logits), -1)), dim=1)
        of_shared = gate if routing.has_gate else weights.new_ones(len(logits), 1)
        weights = torch.cat((weights, of_shared.expand(-1, routing.shared)), dim=1)
    return weights.to(dtype), experts.int()


def _best_first(ranks: Tensor) -> Tensor:
    return ranks.argsort(dim=-1, descending=True, stable=True)


def _for_each(groups: Tensor, grouped: Tensor) -> Tensor:
    """Indices of groups for every expert in them."""
    return groups.unsqueeze(-1).expand(-1, -1, grouped.shape[-1])


@in_triton("experts.mixing")
def mix_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: GatedExperts,
    residual: Tensor | None = None,
    beside: Gated | None = None,
) -> Tensor:
    """The weighted sum of what a token's experts make of it: [tokens, hidden] -> the same.

    Does not wait for the device. What a token gets does not depend on the other tokens.

    Args:
        x: [tokens, hidden]; rows contiguous.
        weights, chosen: as from ``choose_experts``.
        residual: [tokens, hidden], contiguous; the sum is added to it in place, and it is returned.
        beside: [tokens, hidden], what is added to the sum.
    """
    order = chosen.flatten().argsort(stable=True)
    in_order = chosen.flatten()[order]
    rows = x[order // chosen.shape[1]]
    gate_up = _product(rows, _dense(experts.gate_up, experts.num_experts, rows), in_order)
    inner = _inner(experts, gate_up, in_order)
    grouped = _product(inner, _dense(experts.down, experts.num_experts, inner), in_order)
    if experts.down_bias is not None:
        grouped = grouped + experts.down_bias[in_order]
    parts = torch.empty_like(grouped)
    parts[order] = grouped
    out = (parts.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
    if beside is not None:
        out += beside.values * beside.logit.sigmoid()
    return out if residual is None else residual.add_(out)


@in_triton("experts.mixing")
def ordered_mix_experts(
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: GatedExperts,
    residual: Tensor | None = None,
    beside: Gated | None = None,
) -> Tensor:
    """``mix_experts``, of which each token has the same bits in any batch; in plain torch it may
    not."""
    return mix_experts.reference(x, weights, chosen, experts, residual, beside)


def _dense(weight: ExpertWeight, count: int, x: Tensor) -> Tensor:
    """[experts, N, K] in the dtype of x, which it multiplies."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, Mxfp4Matrix):
        values = unpack_mxfp4(weight)[:, : x.shape[1]]
    elif isinstance(weight, Fp8Matrix):
        values = dequantize_fp8(weight)
    else:
        values = dequantize_int4(weight)
    dense: Tensor = values.to(x.dtype).unflatten(0, (count, -1)).contiguous()
    return dense


def _inner(experts: GatedExperts, gate_up: Tensor, chosen: Tensor) -> Tensor:
    """The activation of [n, 2 * inner]."""
    if experts.gate_up_bias is not None:
        gate_up = gate_up + experts.gate_up_bias[chosen]
    if experts.paired:
        gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
    if experts.act != "clamped":
        return gated.reference(gate_up, experts.act)
    gate, up = gate_up.chunk(2, dim=1)
    gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    return (up + 1) * (gate * torch.sigmoid(gate * experts.alpha))


def _product(rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
    """rows @ weight[chosen].T: [n, K] -> [n, N]; rows are sorted by expert."""
    if not rows.is_cuda or rows.dtype == torch.bfloat16:
        ids = torch.arange(len(weight), device=rows.device, dtype=chosen.dtype)
        ends = torch.searchsorted(chosen, ids, right=True, out_int32=True)
        return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    # PyTorch's grouped product on GPUs takes bfloat16 alone.
    some = max(_GATHERED // (weight[0].numel() * weight.itemsize), 1)
    out = rows.new_empty(len(rows), weight.shape[1])
    for part, x, ids in zip(*(t.split(some) for t in (out, rows, chosen)), strict=True):
        torch.bmm(weight[ids], x.unsqueeze(-1), out=part.unsqueeze(-1))
    return out
