"""Projections, single and fused, whole or shared by the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from asyncllm.kernels.quantized import Fp8Rows
from asyncllm.kernels.types import Mxfp4Matrix, Norm
from asyncllm.models.layers.parameter import Packed, Placement, Stored
from asyncllm.models.quant.place import Place, Reordered, sliced
from asyncllm.models.quant.weight import Matrix, QuantizedWeight, Rows, Stack
from asyncllm.parallel.ranks import Ranks, share

Weight = nn.Parameter | QuantizedWeight


class Kept(NamedTuple):
    """The features of a projection that this rank has.

    Attributes:
        whole: how many there are on disk.
        slices: of them, in order.
    """

    whole: int
    slices: tuple[slice, ...]

    @property
    def size(self) -> int:
        """The features of this rank."""
        return sum(part.stop - part.start for part in self.slices)

    @classmethod
    def share(cls, count: int, what: str, ranks: Ranks, unit: int = 1) -> Self:
        """This rank's share of ``count`` units of features; see ``parallel.ranks.share``."""
        part = share(count, what, ranks)
        return cls(count * unit, (slice(part.start * unit, part.stop * unit),))

    def times(self, unit: int) -> Self:
        """The features of units that have so many each, where these are units."""
        parts = (slice(part.start * unit, part.stop * unit) for part in self.slices)
        return type(self)(self.whole * unit, tuple(parts))

    @classmethod
    def aligned(cls, count: int, unit: int, ranks: Ranks) -> Self:
        """This rank's share in whole units of features: a rank may have one more than another."""
        units = -(-count // unit)
        start, stop = (units * rank // ranks.size for rank in (ranks.rank, ranks.rank + 1))
        return cls(count, (slice(start * unit, min(stop * unit, count)),))

    @classmethod
    def of(cls, *parts: Kept) -> Self:
        """The features of projections that are one on disk."""
        starts = accumulate((part.whole for part in parts[:-1]), initial=0)
        slices = tuple(
            slice(start + one.start, start + one.stop)
            for start, part in zip(starts, parts, strict=True)
            for one in part.slices
        )
        return cls(sum(part.whole for part in parts), slices)

    def place(self, dim: int, values: Tensor | Rows | Stack, order: Tensor | None = None) -> Place:
        """The place on disk of what this rank has along a dimension.

        Args:
            order: see ``Reordered``; of this rank's features.
        """
        if len(self.slices) == 1:
            if isinstance(values, Stack) or order is None:
                return sliced(dim, self.whole, [(self.slices[0].start, values)])
            place = Reordered(values, order)
            return sliced(dim, self.whole, [(self.slices[0].start, place)])
        ends = accumulate(part.stop - part.start for part in self.slices)
        if self.size == self.whole:
            return values
        return sliced(
            dim,
            self.whole,
            [
                (part.start, _cut(values, dim, end - (part.stop - part.start), end))
                for part, end in zip(self.slices, ends, strict=True)
            ],
        )


def _cut(values: Tensor | Rows | Stack, dim: int, start: int, end: int) -> Tensor | Rows:
    if isinstance(values, Tensor):
        return values.narrow(dim, start, end - start)
    assert isinstance(values, Rows)
    assert dim == 0, "columns of a quantised weight are written as a whole"
    return values._replace(start=values.start + start, end=values.start + end)


class Linear(Stored):
    """x @ weight.T + bias: [tokens, in_features] -> [tokens, out_features]. Every rank has it."""

    def __init__(
        self, in_features: int, out_features: int, place: Placement, *, bias: bool = False
    ):
        super().__init__()
        self.kernels = place.kernels
        self.weight: Weight = place.projection(out_features, in_features)
        self.bias = place.empty(out_features) if bias else None

    def forward(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """See ``kernels.linear``: normalises x first, and adds to ``residual`` in place."""
        weight = _matrix(self.weight)
        return self.kernels.linear(x, weight, self.bias, norm=norm, residual=residual)

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield "weight", self.weight[:]
        if self.bias is not None:
            yield "bias", self.bias


class RowLinear(Linear):
    """A projection of features that are shared by the ranks, whose products are added up.

    Args:
        inputs: the features.
    """

    def __init__(self, inputs: Kept, out_features: int, place: Placement, *, bias: bool = False):
        super().__init__(inputs.size, out_features, place, bias=bias)
        self.inputs = inputs
        self.ranks = place.ranks

    def forward(
        self, x: Tensor | Fp8Rows, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        weight, linear = _matrix(self.weight), self.kernels.linear
        if self.ranks.size == 1:
            return linear(x, weight, self.bias, norm=norm, residual=residual)
        bias = self.bias if self.ranks.rank == 0 else None
        return self.ranks.sum(linear(x, weight, bias, norm=norm), residual)

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield "weight", self.inputs.place(1, self.weight[:])
        if self.bias is not None:
            yield "bias", self.bias


class FusedLinear(Packed):
    """Several projections of one input as one matrix, whose rows are theirs in order.

    Args:
        outputs: this rank's output features of each projection, by its name in the checkpoint.
        orders: see ``Reordered``; of projections whose rows are in another order on disk.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, Kept],
        place: Placement,
        *,
        bias: bool = False,
        orders: Mapping[str, Tensor] | None = None,
    ):
        super().__init__()
        self.outputs = outputs
        self.orders = orders or {}
        self.kernels = place.kernels
        size = sum(output.size for output in outputs.values())
        self.weight: Weight = place.projection(size, in_features)
        self.bias = place.empty(size) if bias else None

    def forward(self, x: Tensor, *, norm: Norm | None = None) -> Tensor:
        """See ``kernels.linear``: normalises x first."""
        return self.kernels.linear(x, _matrix(self.weight), self.bias, norm=norm)

    def gated(
        self, x: Tensor, act: str, then: Linear, *, norm: Norm | None = None
    ) -> Tensor | Fp8Rows:
        """See ``kernels.linear.gated_linear``: what the projection ``then`` takes."""
        weight, after = _matrix(self.weight), _matrix(then.weight)
        return self.kernels.gated_linear(x, weight, self.bias, act, after, norm=norm)

    def parts(self) -> Iterator[tuple[str, Place]]:
        for name, kept, rows in _rows_of(self.outputs):
            order = self.orders.get(name)
            yield f"{name}.weight", kept.place(0, self.weight[rows], order)
            if self.bias is not None:
                yield f"{name}.bias", kept.place(0, self.bias[rows], order)


class MixedLinear(FusedLinear):
    """Projections of one input, the last of which may be stored in another format than the first:
    [tokens, in_features] -> what the first ones yield, and what the last ones yield.

    Args:
        outputs, last: see ``FusedLinear``; of the first and of the last projections.

    Attributes:
        rest: the weight of the last ones, never quantised, if they have one of their own.
    """

    def __init__(
        self,
        in_features: int,
        outputs: Mapping[str, Kept],
        last: Mapping[str, Kept],
        place: Placement,
        *,
        orders: Mapping[str, Tensor] | None = None,
    ):
        super().__init__(in_features, {**outputs, **last}, place, orders=orders)
        self.last = last
        self.rest: nn.Parameter | None = None

    def set_apart(self, place: Placement) -> None:
        """Give the last ones a weight of their own; the first one's is allocated afterwards."""
        size, columns = self.weight.shape
        count = sum(output.size for output in self.last.values())
        self.outputs = {n: kept for n, kept in self.outputs.items() if n not in self.last}
        self.weight = place.projection(size - count, columns)
        self.rest = place.empty(count, columns)

    def forward(  # type: ignore[override]
        self, x: Tensor, *, norm: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``kernels.linear``: normalises x first."""
        weight = _matrix(self.weight)
        if self.rest is not None:
            return self.kernels.linear_with_rest(x, weight, self.rest, norm=norm)
        y, count = (
            self.kernels.linear(x, weight, norm=norm),
            sum(kept.size for kept in self.last.values()),
        )
        return y[:, :-count], y[:, -count:]

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield from super().parts()
        if self.rest is not None:
            for name, kept, rows in _rows_of(self.last):
                yield f"{name}.weight", kept.place(0, self.rest[rows], self.orders.get(name))


def _rows_of(outputs: Mapping[str, Kept]) -> Iterator[tuple[str, Kept, slice]]:
    """The rows of each projection in a weight that has them in order."""
    start = 0
    for name, kept in outputs.items():
        yield name, kept, slice(start, start + kept.size)
        start += kept.size


def rows_by_part(groups: int, sizes: Sequence[int]) -> list[Tensor]:
    """The rows on disk of each part, where each group has rows of every part side by side: int64
    [groups * size] for each size."""
    rows = torch.arange(groups * sum(sizes)).view(groups, sum(sizes))
    return [part.flatten() for part in rows.split(list(sizes), dim=1)]


def _matrix(weight: Weight) -> Tensor | Matrix:
    if not isinstance(weight, QuantizedWeight):
        return weight
    matrix = weight.matrix()
    assert not isinstance(matrix, Mxfp4Matrix), "such weights are those of experts"
    return matrix
