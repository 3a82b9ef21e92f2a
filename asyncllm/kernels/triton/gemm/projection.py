"""The arguments of a projection, and the projection by cuBLAS."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.triton.activation import gated
from asyncllm.kernels.triton.norm import rms_norm
from asyncllm.kernels.types import Fp8Matrix, Int4Matrix, Norm, Weight

W = TypeVar("W", bound=Weight)


class Projection(NamedTuple, Generic[W]):
    """The arguments of ``kernels.linear.linear`` and where its result goes.

    Attributes:
        out: [M, N], or [M, N / 2] with ``act``.
        add: the result is added to ``out``.
    """

    x: Tensor
    weight: W
    bias: Tensor | None
    norm: Norm | None
    act: str | None
    out: Tensor
    add: bool

    @classmethod
    def of(
        cls,
        x: Tensor,
        weight: W,
        bias: Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
        act: str | None = None,
    ) -> Projection[W]:
        if residual is not None:
            return cls(x, weight, bias, norm, act, residual, True)
        size = rows_of(weight) if act is None else rows_of(weight) // 2
        out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
        return cls(x, weight, bias, norm, act, out, False)

    @property
    def gain(self) -> Tensor | None:
        """The norm's weight."""
        return None if self.norm is None else self.norm.weight

    @property
    def prologue(self) -> tuple[bool, float, bool]:
        """The constants NORM, EPS and OFFSET of kernels that normalise x."""
        if self.norm is None:
            return False, 0.0, False
        return True, self.norm.eps, self.norm.offset

    @property
    def epilogue(self) -> tuple[bool, bool, str | None]:
        """The constants BIAS, RESIDUAL and ACT of kernels."""
        return self.bias is not None, self.add, self.act

    def normalised(self) -> Projection[W]:
        """The same with x normalised by a kernel of its own."""
        if self.norm is None:
            return self
        return self._replace(x=rms_norm(self.x, self.norm), norm=None)


def rows_of(weight: Weight) -> int:
    """N of a weight [N, K]."""
    if isinstance(weight, Fp8Matrix):
        return len(weight.data)
    return len(weight.packed) if isinstance(weight, Int4Matrix) else len(weight)


def cublas_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``kernels.linear.linear`` with the product from cuBLAS, and kernels for the rest."""
    if norm is not None:
        x = rms_norm(x, norm)
    if residual is not None and bias is None:
        return residual.addmm_(x, weight.t())
    return finished(F.linear(x, weight, bias), residual, act)


def finished(y: Tensor, residual: Tensor | None, act: str | None) -> Tensor:
    """The activation of a product, or the product added to the residual in place."""
    if act is not None:
        return gated(y, act)
    return y if residual is None else residual.add_(y)
