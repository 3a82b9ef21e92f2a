"""Which experts of a mixture a token goes through, and with what weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.experts import choose_experts
from asyncllm.kernels.types import Norm, Routing
from asyncllm.models.layers.parameter import Placement, Stored
from asyncllm.models.quant.place import Place


class Routes(NamedTuple):
    """Where tokens go.

    Attributes:
        weights: in the dtype of the tokens, [tokens, experts of a token].
        experts: int32, of the same shape.
        gate: the logit of the shared expert's weight, [tokens, 1], if that expert is not among
            ``experts``; None: its weight is 1.
    """

    weights: Tensor
    experts: Tensor
    gate: Tensor | None = None


class Router(Stored):
    """The likeliest experts, weighted by their probabilities.

    A projection, never quantised, and one launch that chooses from its logits. Every rank has all
    of it. The gate of a shared expert is one more row of the projection.

    Args:
        bias: of logits.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        place: Placement,
        routing: Routing,
        *,
        bias: bool = False,
    ):
        super().__init__()
        self.count = num_experts
        self.kernels = place.kernels
        self.weight = place.empty(num_experts + routing.has_gate, hidden_size)
        self.bias = place.empty(num_experts) if bias else None
        self.routing = routing

    def route(self, x: Tensor) -> Routes:
        """Where tokens x, [tokens, hidden], go."""
        return self._routes(self.kernels.linear(x, self.weight, self.bias), x.dtype)

    def _routes(
        self,
        logits: Tensor,
        dtype: torch.dtype,
        bias: Tensor | None = None,
        factors: Tensor | None = None,
    ) -> Routes:
        """See ``choose_experts``."""
        chosen = choose_experts(logits, self.routing, dtype, bias, factors)
        is_apart = self.routing.has_gate and self.routing.shared == 0
        return Routes(*chosen, logits[:, self.count :] if is_apart else None)

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield "weight", self.weight[: self.count]
        if self.bias is not None:
            yield "bias", self.bias
        if self.routing.has_gate:
            yield "shared_gate.weight", self.weight[self.count :]


class ScaledRouter(Router):
    """Gemma 4's: with a norm of its own before, and a factor of each expert's weights.

    Args:
        eps: of the norm.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, place: Placement, routing: Routing, *, eps: float
    ):
        # The normalised x is divided by the root of its size; here, its logits are.
        routing = routing._replace(sharpness=hidden_size**-0.5)
        super().__init__(hidden_size, num_experts, place, routing)
        self.scale = place.empty(hidden_size)
        self.per_expert_scale = place.empty(num_experts)
        self.eps = eps

    def route(self, x: Tensor) -> Routes:
        logits = self.kernels.linear(x, self.weight, norm=Norm(self.scale, self.eps))
        return self._routes(logits, x.dtype, factors=self.per_expert_scale)

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield from super().parts()
        yield "scale", self.scale
        yield "per_expert_scale", self.per_expert_scale

    def fill_neutral(self) -> None:
        """Set the factors to scale by one."""
        self.scale.fill_(1.0)
        self.per_expert_scale.fill_(1.0)


class BalancedRouter(Router):
    """GLM's: logits are float32, and ``e_score_correction_bias`` balances the load.

    It is added to scores to choose experts, but not to their weights.
    """

    def __init__(self, hidden_size: int, num_experts: int, place: Placement, routing: Routing):
        super().__init__(hidden_size, num_experts, place, routing)
        in_float32 = replace(place, dtype=torch.float32)
        self.e_score_correction_bias = in_float32.empty(num_experts)

    def route(self, x: Tensor) -> Routes:
        logits = self.kernels.linear(x, self.weight, dtype=torch.float32)
        return self._routes(logits, x.dtype, self.e_score_correction_bias)

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield from super().parts()
        yield "e_score_correction_bias", self.e_score_correction_bias
