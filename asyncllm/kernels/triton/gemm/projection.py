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
    """The arguments of ``kernels.linear.linear``."""

    x: Tensor
    weight: W
    bias: Tensor | None = None
    norm: Norm | None = None
    residual: Tensor | None = None
    act: str | None = None
    dtype: torch.dtype | None = None

    @property
    def gain(self) -> Tensor | None:
        """The norm's weight."""
        return None if self.norm is None else self.norm.weight

    @property
    def prologue(self) -> tuple[bool, float, bool]:
        """The constants NORM, EPS and OFFSET of kernels that normalise x.

        They never round x before they multiply it by the weight: OFFSET is whether to add 1.
        """
        if self.norm is None:
            return False, 0.0, False
        return True, self.norm.eps, bool(self.norm.offset)

    @property
    def epilogue(self) -> tuple[bool, bool, str | None]:
        """The constants BIAS, RESIDUAL and ACT of kernels."""
        return self.bias is not None, self.residual is not None, self.act

    def output(self) -> Tensor:
        """The residual, or a new tensor [M, N], or [M, N / 2] with ``act``."""
        if self.residual is not None:
            return self.residual
        size = _rows_of(self.weight)
        shape = len(self.x), size if self.act is None else size // 2
        return torch.empty(shape, dtype=self.dtype or self.x.dtype, device=self.x.device)

    def normalised(self) -> Projection[W]:
        """The projection that is left after a kernel of its own has normalised x."""
        if self.norm is None:
            return self
        return self._replace(x=rms_norm(self.x, self.norm), norm=None)

    def finish(self, y: Tensor) -> Tensor:
        """The activation of a product with bias, or add it to the residual in place."""
        if self.act is not None:
            return gated(y, self.act)
        return y if self.residual is None else self.residual.add_(y)


def _rows_of(weight: Weight) -> int:
    if isinstance(weight, Fp8Matrix):
        return len(weight.data)
    return len(weight.packed) if isinstance(weight, Int4Matrix) else len(weight)


def cublas_linear(p: Projection[Tensor]) -> Tensor:
    """The product by cuBLAS, and kernels for the norm and the activation."""
    p = p.normalised()
    if p.dtype not in (None, p.x.dtype):
        return torch.mm(p.x, p.weight.t(), out_dtype=p.dtype)
    if p.residual is not None and p.bias is None:
        return p.residual.addmm_(p.x, p.weight.t())
    return p.finish(F.linear(p.x, p.weight, p.bias))
