"""Projections to test: random inputs, and what they are in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.activation import gated
from asyncllm.kernels.tuning import Tile
from asyncllm.kernels.types import Norm
from tests.support.kernels.device import DEVICE

#: Relative error, in the Frobenius norm, of what is rounded to this dtype a few times.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

#: The interpreter cannot multiply matrices of bfloat16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

#: Arguments of ``Case``: what may be around a product.
AROUND: list[dict[str, Any]] = [
    {},
    {"bias": True},
    {"norm": True},
    {"norm": True, "offset": True, "bias": True},
    {"norm": True, "act": "silu"},
    {"act": "gelu_pytorch_tanh", "bias": True},
    {"residual": True},
    {"residual": True, "bias": True, "norm": True},
]


class Case:
    """A projection with random inputs, and what it is in float64."""

    def __init__(
        self,
        rows: int,
        size: int,
        columns: int,
        dtype: torch.dtype,
        *,
        norm: bool = False,
        offset: float | None = None,
        bias: bool = False,
        act: str | None = None,
        residual: bool = False,
    ):
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE).to(dtype)

        self.x = draw(rows, columns + 16)[:, :columns]  # rows with a gap between them
        self.weight = draw(size, columns) * columns**-0.5
        self.bias = draw(size) if bias else None
        self.norm = Norm(draw(columns), 1e-5, offset) if norm else None
        self.act = act
        out = size if act is None else size // 2
        self.residual = draw(rows, out) if residual else None
        self.expected = self._exact()

    def _exact(self) -> Tensor:
        x: Tensor = self.x.double()
        if self.norm is not None:
            gain = self.norm.weight.double() + (self.norm.offset or 0.0)
            x = x * (x.square().mean(-1, keepdim=True) + self.norm.eps).rsqrt() * gain
        y: Tensor = x @ self.weight.double().t()
        if self.bias is not None:
            y += self.bias.double()
        if self.act is not None:
            y = gated.reference(y, self.act)
        return y if self.residual is None else y + self.residual.double()

    def run(self, tile: Tile) -> Tensor:
        from asyncllm.kernels.triton.gemm.linear import project
        from asyncllm.kernels.triton.gemm.projection import Projection

        p = Projection(self.x, self.weight, self.bias, self.norm, self.residual, self.act)
        return project(tile, p)

    def check(self, got: Tensor) -> None:
        assert got.dtype == self.x.dtype
        assert got.shape == self.expected.shape
        assert got.isfinite().all()
        error = (got.double() - self.expected).norm() / self.expected.norm()
        assert error < TOLERANCE[got.dtype], error


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels leave unwritten is NaN."""
    empty = torch.empty

    def nan(*args: Any, **kwargs: Any) -> Tensor:
        poisoned: Tensor = empty(*args, **kwargs).fill_(torch.nan)
        return poisoned

    monkeypatch.setattr(torch, "empty", nan)
