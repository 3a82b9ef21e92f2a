"""Projections, single and fused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate

from torch import Tensor, nn

from asyncllm.kernels.linear import linear
from asyncllm.kernels.types import Norm
from asyncllm.models.layers.parameter import Packed, Placement
from asyncllm.models.quant.weight import Matrix, Place, QuantizedWeight, Reordered, Rows

Weight = nn.Parameter | QuantizedWeight


class Linear(nn.Module):
    """x @ weight.T + bias: [tokens, in_features] -> [tokens, out_features]."""

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, bias: bool = False
    ):
        super().__init__()
        self.weight: Weight = place.projection(out_features, in_features)
        self.bias = place.empty(out_features) if bias else None

    def forward(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """See ``kernels.linear``: normalises x first, and adds to ``residual`` in place."""
        return linear(x, _matrix(self.weight), self.bias, norm=norm, residual=residual)

    def parts(self) -> Iterator[tuple[str, Place]]:
        """The places for the checkpoint's tensors, by name."""
        yield "weight", self.weight[:]
        if self.bias is not None:
            yield "bias", self.bias


class FusedLinear(Packed):
    """Several projections of one input as one matrix, whose rows are theirs in order.

    Args:
        outputs: the output features of each projection, by its name in the checkpoint.
        orders: see ``Reordered``; of projections whose rows are in another order on disk.
    """

    def __init__(
        self,
        in_features: int,
        outputs: dict[str, int],
        place: Placement,
        *,
        bias: bool = False,
        orders: Mapping[str, Tensor] | None = None,
    ):
        super().__init__()
        self.outputs = outputs
        self.orders = orders or {}
        self.weight: Weight = place.projection(sum(outputs.values()), in_features)
        self.bias = place.empty(sum(outputs.values())) if bias else None

    def forward(self, x: Tensor, *, norm: Norm | None = None, act: str | None = None) -> Tensor:
        """See ``kernels.linear``: normalises x first, and applies a gated activation."""
        return linear(x, _matrix(self.weight), self.bias, norm=norm, act=act)

    def parts(self) -> Iterator[tuple[str, Place]]:
        ends = accumulate(self.outputs.values())
        for (name, size), end in zip(self.outputs.items(), ends, strict=True):
            yield f"{name}.weight", self._ordered(name, self.weight[end - size : end])
            if self.bias is not None:
                yield f"{name}.bias", self._ordered(name, self.bias[end - size : end])

    def _ordered(self, name: str, place: Tensor | Rows) -> Place:
        return Reordered(place, self.orders[name]) if name in self.orders else place


def _matrix(weight: Weight) -> Tensor | Matrix:
    return weight.matrix() if isinstance(weight, QuantizedWeight) else weight
