"""Mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.errors import ModelError
from asyncllm.kernels.experts import mix_experts
from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.types import ExpertWeight, GatedExperts, Norm
from asyncllm.models.layers.linear import Kept, Weight
from asyncllm.models.layers.parameter import Packed, Placement
from asyncllm.models.layers.router import Router
from asyncllm.models.quant.place import Place
from asyncllm.models.quant.weight import Mxfp4Weight, QuantizedWeight, Stack

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
        self.count = num_experts
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
        self.hidden_size = hidden_size
        inner = self.inner.size
        self.gate_up_proj: Weight = place.projection(num_experts, 2 * inner, hidden_size)
        self.down_proj: Weight = place.projection(num_experts, hidden_size, inner)
        self.act = act

    def matrices(self) -> GatedExperts:
        """The weights for ``kernels.experts``."""
        weights = _matrices(self.gate_up_proj), _matrices(self.down_proj)
        return GatedExperts(self.count, *weights, act=self.act)

    def modules_on_disk(self) -> dict[str, list[str]]:
        """The modules of the checkpoint whose matrices each weight has, relative to the parent."""
        each = [f"experts.{expert}" for expert in range(self.count)]
        gates = [f"{expert}.{name}" for expert in each for name in ("gate_proj", "up_proj")]
        return {"gate_up_proj": gates, "down_proj": [f"{expert}.down_proj" for expert in each]}

    def parts(self) -> Iterator[tuple[str, Place]]:
        if self.is_fused_on_disk:
            gate_up = Kept.of(self.inner, self.inner)
            yield "experts.gate_up_proj", gate_up.place(1, _whole(self.gate_up_proj, self.count))
            yield "experts.down_proj", self.inner.place(2, _whole(self.down_proj, self.count))
            return
        gates, downs = _flat(self.gate_up_proj), _flat(self.down_proj)
        size, hidden = self.inner.size, self.hidden_size
        for expert in range(self.count):
            start = 2 * size * expert
            gate, up = gates[start : start + size], gates[start + size : start + 2 * size]
            down = downs[hidden * expert : hidden * (expert + 1)]
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

    def matrices(self) -> GatedExperts:
        return GatedExperts(
            self.count,
            _matrices(self.gate_up_proj),
            _matrices(self.down_proj),
            self.gate_up_proj_bias,
            self.down_proj_bias if self.adds_bias else None,
            act="clamped",
            paired=True,
            alpha=self.alpha,
            limit=self.limit,
        )

    def parts(self) -> Iterator[tuple[str, Place]]:
        (one,) = self.inner.slices
        pairs = Kept(2 * self.inner.whole, (slice(2 * one.start, 2 * one.stop),))
        yield "experts.gate_up_proj", pairs.place(1, _whole(self.gate_up_proj, self.count))
        yield "experts.gate_up_proj_bias", pairs.place(1, self.gate_up_proj_bias)
        yield "experts.down_proj", self.inner.place(2, _whole(self.down_proj, self.count))
        yield "experts.down_proj_bias", self.down_proj_bias


def _matrices(weight: Weight) -> ExpertWeight:
    return weight.matrix() if isinstance(weight, QuantizedWeight) else weight


def _flat(weight: Weight) -> Tensor | QuantizedWeight:
    """The rows of all experts, one after the other."""
    return weight if isinstance(weight, QuantizedWeight) else weight.flatten(0, 1)


def _whole(weight: Weight, count: int) -> Tensor | Stack:
    """The place of a tensor of the checkpoint that has the matrices of all experts."""
    if isinstance(weight, Mxfp4Weight):
        return Stack(weight, count)
    assert isinstance(weight, Tensor), "other quantised matrices are stored one by one"
    return weight


class TokenGate(nn.Module):
    """A factor from 0 to 1 for each token: [tokens, hidden] -> [tokens, 1]."""

    def __init__(self, hidden_size: int, place: Placement):
        super().__init__()
        self.weight = place.empty(1, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight).sigmoid()


class SparseMoE(nn.Module):
    """Each token goes through the experts that the router chooses: [tokens, hidden] -> the same.

    Args:
        shared: an MLP that all tokens go through as well; its ranks are ``Apart``.
        shared_gate: weights its output.
    """

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

    def forward(
        self,
        x: Tensor,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        routed_by: Tensor | None = None,
    ) -> Tensor:
        """Normalises x first, and adds to ``residual`` in place.

        Args:
            routed_by: what the router sees, if not the normalised x; of the same shape.
        """
        if norm is not None:
            x = rms_norm(x, norm)
        weights, chosen = self.gate.route(x if routed_by is None else routed_by)
        is_alone = self.ranks.size == 1
        total = residual if is_alone else None
        if self.shared_expert is not None:
            total = self._add_shared(x, total)
        out = mix_experts(x, weights, chosen, self.experts.matrices(), total)
        return out if is_alone else self.ranks.sum(out, residual)

    def _add_shared(self, x: Tensor, total: Tensor | None) -> Tensor:
        """What the shared expert makes of x, added to ``total`` in place."""
        assert self.shared_expert is not None
        if self.shared_expert_gate is None:
            out: Tensor = self.shared_expert(x, residual=total)
            return out
        out = self.shared_expert(x) * self.shared_expert_gate(x)
        return out if total is None else total.add_(out)
