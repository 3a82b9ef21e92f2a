"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.errors import ModelError
from asyncllm.kernels.activation import gated
from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.types import Norm
from asyncllm.models.layers.linear import Kept
from asyncllm.models.layers.parameter import Packed, Placement
from asyncllm.models.layers.router import Router
from asyncllm.models.quant.place import Place

#: Bytes that rows of the matrices of ``grouped_mm`` must be multiples of.
_ALIGNMENT = 16


class Experts(Packed):
    """The gated MLPs of all experts: one tensor for gate and up, one for down.

    Each rank has a share of every expert's features.

    Attributes:
        is_fused_on_disk: the checkpoint has these two tensors too, and not three matrices of each
            expert.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        place: Placement,
    ):
        super().__init__()
        self.is_fused_on_disk = False
        self.inner = Kept.share(intermediate_size, "the size of experts", place.ranks)
        if place.ranks.size > 1 and self.inner.size * place.dtype.itemsize % _ALIGNMENT:
            raise ModelError(
                f"tp {place.ranks.size} divides experts of {intermediate_size} features so that "
                f"rows are no multiples of {_ALIGNMENT} bytes, which their matmul needs",
                param="tp",
            )
        if any(n * place.dtype.itemsize % _ALIGNMENT for n in (hidden_size, intermediate_size)):
            raise ModelError(
                f"experts of {intermediate_size} features and a hidden size of {hidden_size} have "
                f"rows that are no multiples of {_ALIGNMENT} bytes, which their matmul needs"
            )
        self.gate_up_proj = place.empty(num_experts, 2 * self.inner.size, hidden_size)
        self.down_proj = place.empty(num_experts, hidden_size, self.inner.size)
        self.act = act

    def forward(self, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            rows: [n, hidden], sorted by expert.
            experts: int64 [n]; the expert of each row.
            ends: int32 [num_experts]; the end of each expert's rows.

        Returns:
            [n, hidden]; to be added up over the ranks.
        """
        gate_up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        return F.grouped_mm(gated(gate_up, self.act), self.down_proj.transpose(1, 2), offs=ends)

    def parts(self) -> Iterator[tuple[str, Place]]:
        if self.is_fused_on_disk:
            gate_up = Kept.of(self.inner, self.inner)
            yield "experts.gate_up_proj", gate_up.place(1, self.gate_up_proj)
            yield "experts.down_proj", self.inner.place(2, self.down_proj)
            return
        pairs = zip(self.gate_up_proj, self.down_proj, strict=True)
        for expert, (gate_up, down) in enumerate(pairs):
            gate, up = gate_up.chunk(2)
            yield f"experts.{expert}.gate_proj.weight", self.inner.place(0, gate)
            yield f"experts.{expert}.up_proj.weight", self.inner.place(0, up)
            yield f"experts.{expert}.down_proj.weight", self.inner.place(1, down)


class ClampedExperts(Experts):
    """gpt-oss's: with biases, and gate and up of a feature side by side, here and on disk.

    The activation is ``(up + 1) * gate * sigmoid(alpha * gate)``, of gate at most ``limit``, and up
    between that and its negative.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        place: Placement,
        *,
        alpha: float,
        limit: float,
    ):
        super().__init__(num_experts, hidden_size, intermediate_size, "silu", place)
        self.gate_up_proj_bias = place.empty(num_experts, 2 * self.inner.size)
        self.down_proj_bias = place.empty(num_experts, hidden_size)
        self.alpha = alpha
        self.limit = limit
        self.adds_bias = place.ranks.rank == 0  # as outputs are added up

    def forward(self, rows: Tensor, experts: Tensor, ends: Tensor) -> Tensor:
        gate_up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        gate, up = (gate_up + self.gate_up_proj_bias[experts]).unflatten(1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        inner = (up + 1) * (gate * torch.sigmoid(gate * self.alpha))
        out = F.grouped_mm(inner, self.down_proj.transpose(1, 2), offs=ends)
        return out + self.down_proj_bias[experts] if self.adds_bias else out

    def parts(self) -> Iterator[tuple[str, Place]]:
        (one,) = self.inner.slices
        pairs = Kept(2 * self.inner.whole, (slice(2 * one.start, 2 * one.stop),))
        yield "experts.gate_up_proj", pairs.place(1, self.gate_up_proj)
        yield "experts.gate_up_proj_bias", pairs.place(1, self.gate_up_proj_bias)
        yield "experts.down_proj", self.inner.place(2, self.down_proj)
        yield "experts.down_proj_bias", self.down_proj_bias


class TokenGate(nn.Module):
    """A factor from 0 to 1 for each token: [tokens, hidden] -> [tokens, 1]."""

    def __init__(self, hidden_size: int, place: Placement):
        super().__init__()
        self.weight = place.empty(1, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sigmoid()


class SparseMoE(nn.Module):
    """Each token goes through the experts that the router chooses: [tokens, hidden] -> the same.

    Does not wait for the device. Deterministic, as it uses no atomic additions.

    Args:
        shared: an MLP that all tokens go through as well; its ranks are ``Apart``.
        shared_gate: weights its output.
    """

    expert_ids: Tensor

    def __init__(
        self,
        router: Router,
        experts: Experts,
        place: Placement,
        *,
        shared: nn.Module | None = None,
        shared_gate: TokenGate | None = None,
    ):
        super().__init__()
        self.gate = router
        self.experts = experts
        self.shared_expert = shared
        self.shared_expert_gate = shared_gate
        self.ranks = place.ranks
        expert_ids = torch.arange(len(experts.gate_up_proj), device=place.device)
        self.register_buffer("expert_ids", expert_ids, persistent=False)

    def forward(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Normalises x first, and adds to ``residual`` in place."""
        if norm is not None:
            x = rms_norm(x, norm)
        weights, experts = self.gate.route(x)
        order = experts.flatten().argsort(stable=True)
        in_order = experts.flatten()[order]
        ends = torch.searchsorted(in_order, self.expert_ids, right=True, out_int32=True)
        grouped = self.experts(x[order // experts.shape[1]], in_order, ends)
        chosen = torch.empty_like(grouped)
        chosen[order] = grouped
        out = (chosen.view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        if self.shared_expert is not None:
            shared = self.shared_expert(x)
            if self.shared_expert_gate is not None:
                shared = shared * self.shared_expert_gate(x)
            out = out + shared
        return self.ranks.sum(out, residual)
