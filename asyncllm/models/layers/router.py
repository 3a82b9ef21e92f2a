"""Which experts of a mixture a token goes through, and with what weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.kernels.experts import choose_experts
from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.types import Norm, Routing
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.quant.place import Place


class SoftmaxRouter(Linear):
    """The likeliest experts, weighted by their probabilities.

    Args:
        normalize: a token's expert weights sum to one.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        place: Placement,
        *,
        top_k: int,
        normalize: bool,
        bias: bool = False,
    ):
        super().__init__(hidden_size, num_experts, place, bias=bias)
        self.routing = Routing(top_k, "softmax", normalize)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in the dtype of x, and int32 experts, both [tokens, top_k]."""
        return choose_experts(self(x), self.routing, x.dtype)


class ScaledRouter(SoftmaxRouter):
    """Gemma 4's: with a norm of its own before, and a factor of each expert's weights.

    Args:
        eps: of the norm.
    """

    def __init__(
        self, hidden_size: int, num_experts: int, place: Placement, *, top_k: int, eps: float
    ):
        super().__init__(hidden_size, num_experts, place, top_k=top_k, normalize=True)
        self.scale = place.empty(hidden_size)
        self.per_expert_scale = place.empty(num_experts)
        self.eps = eps

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """See ``SoftmaxRouter.route``."""
        scaled = rms_norm(x, Norm(self.scale, self.eps)) * x.shape[-1] ** -0.5
        weights, experts = choose_experts(self(scaled), self.routing, torch.float32)
        return (weights * self.per_expert_scale[experts]).to(x.dtype), experts

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield from super().parts()
        yield "scale", self.scale
        yield "per_expert_scale", self.per_expert_scale

    def fill_neutral(self) -> None:
        """Set the factors to scale by one."""
        self.scale.fill_(1.0)
        self.per_expert_scale.fill_(1.0)


class SigmoidRouter(nn.Module):
    """A score from 0 to 1 for each expert, all in float32.

    ``e_score_correction_bias`` is added to scores to choose experts, but not to their weights: it
    balances the load.

    Args:
        normalize: a token's expert weights sum to ``factor``.
        factor: of all weights.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        place: Placement,
        *,
        top_k: int,
        normalize: bool,
        factor: float,
    ):
        super().__init__()
        in_float32 = replace(place, dtype=torch.float32)
        self.weight = in_float32.empty(num_experts, hidden_size)
        self.e_score_correction_bias = in_float32.empty(num_experts)
        self.routing = Routing(top_k, "sigmoid", normalize, factor)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights in the dtype of x, and int32 experts, both [tokens, top_k]."""
        logits = F.linear(x.float(), self.weight)
        return choose_experts(logits, self.routing, x.dtype, self.e_score_correction_bias)


Router = SoftmaxRouter | SigmoidRouter
