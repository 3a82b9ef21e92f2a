"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.kernels.activation import gated
from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.types import Norm
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.mlp import check_activation
from asyncllm.models.layers.parameter import Packed, Placement


class Experts(Packed):
    """The gated MLPs of all experts: one tensor for gate and up, one for down."""

    def __init__(
        self, num_experts: int, hidden_size: int, intermediate_size: int, act: str, place: Placement
    ):
        super().__init__()
        self.gate_up_proj = place.empty(num_experts, 2 * intermediate_size, hidden_size)
        self.down_proj = place.empty(num_experts, hidden_size, intermediate_size)
        self.act = check_activation(act)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Apply each expert to its rows.

        Args:
            rows: [n, hidden], sorted by expert.
            ends: int32 [num_experts]; the end of each expert's rows.

        Returns:
            [n, hidden].
        """
        gate_up = F.grouped_mm(rows, self.gate_up_proj.transpose(1, 2), offs=ends)
        return F.grouped_mm(gated(gate_up, self.act), self.down_proj.transpose(1, 2), offs=ends)

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        pairs = zip(self.gate_up_proj, self.down_proj, strict=True)
        for expert, (gate_up, down) in enumerate(pairs):
            gate, up = gate_up.chunk(2)
            yield f"experts.{expert}.gate_proj.weight", gate
            yield f"experts.{expert}.up_proj.weight", up
            yield f"experts.{expert}.down_proj.weight", down


class SparseMoE(nn.Module):
    """Each token goes through its ``top_k`` likeliest experts: [tokens, hidden] -> the same.

    Does not wait for the device. Deterministic, as it uses no atomic additions.

    Args:
        normalize: a token's expert weights sum to one.
    """

    expert_ids: Tensor

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        place: Placement,
        *,
        num_experts: int,
        top_k: int,
        normalize: bool,
    ):
        super().__init__()
        self.gate = Linear(hidden_size, num_experts, place)
        self.experts = Experts(num_experts, hidden_size, intermediate_size, act, place)
        self.top_k = top_k
        self.normalize = normalize
        expert_ids = torch.arange(num_experts, device=place.device)
        self.register_buffer("expert_ids", expert_ids, persistent=False)

    def forward(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Normalises x first, and adds to ``residual`` in place."""
        if norm is not None:
            x = rms_norm(x, norm)
        weights, experts = self._route(x)
        order = experts.flatten().argsort(stable=True)
        ends = torch.searchsorted(
            experts.flatten()[order], self.expert_ids, right=True, out_int32=True
        )
        grouped = self.experts(x[order // self.top_k], ends)
        chosen = torch.empty_like(grouped)
        chosen[order] = grouped
        out = (chosen.view(*experts.shape, -1) * weights.unsqueeze(-1)).sum(dim=1)
        return out if residual is None else residual.add_(out)

    def _route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in the dtype of x, and experts, both [tokens, top_k]."""
        probabilities = self.gate(x).softmax(dim=-1, dtype=torch.float32)
        weights, experts = probabilities.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights.to(x.dtype), experts
