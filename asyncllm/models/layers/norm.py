"""Normalisation over the last dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.types import Norm
from asyncllm.models.layers.linear import Kept
from asyncllm.models.layers.parameter import Placement, Stored
from asyncllm.models.quant.place import Place
from asyncllm.parallel.ranks import Ranks


class RMSNorm(nn.Module):
    """x / rms(x) * weight; see ``kernels.norm``."""

    #: The weight that scales by one, and ``Norm.offset``.
    neutral = 1.0
    offset: float | None = None

    def __init__(self, size: int, eps: float, place: Placement):
        super().__init__()
        self.weight = place.empty(size)
        self.eps = eps

    @property
    def norm(self) -> Norm:
        """The norm as an argument of fused kernels."""
        return Norm(self.weight, self.eps, self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.norm)

    def before_projection(self, x: Tensor) -> tuple[Tensor, Norm | None]:
        """x, and the norm that the projection of x applies first."""
        return x, self.norm

    def fill_neutral(self) -> None:
        """Set the weight to scale by one."""
        self.weight.fill_(self.neutral)


class GemmaRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), computed in float32."""

    neutral = 0.0
    offset = 1.0


class Float32RMSNorm(RMSNorm):
    """x / rms(x) * weight, computed in float32."""

    offset = 0.0


class SharedRMSNorm(RMSNorm, Stored):
    """One norm over the heads of all ranks.

    Args:
        kept: the features of this rank.
        make_norm: makes a norm of a size.
    """

    def __init__(self, kept: Kept, make_norm: Callable[[int], RMSNorm], ranks: Ranks):
        nn.Module.__init__(self)
        norm = make_norm(kept.size)
        self.weight, self.eps = norm.weight, norm.eps
        self.kept = kept
        self.ranks = ranks

    def forward(self, x: Tensor) -> Tensor:
        if self.ranks.size == 1:
            return super().forward(x)
        squares = self.ranks.sum(x.float().square().sum(dim=-1, keepdim=True))
        # Heads that several ranks have are added as often as they are counted.
        mean = squares / (self.kept.size * self.ranks.size)
        return (x.float() * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield "weight", self.kept.place(0, self.weight)


class GroupedRMSNorm(RMSNorm, Stored):
    """A norm of each group of features, of which every rank has some.

    Args:
        kept: the features of this rank.
        size: features of a group.
    """

    def __init__(self, kept: Kept, size: int, eps: float, place: Placement):
        super().__init__(kept.size, eps, place)
        self.kept = kept
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        norm = Norm(self.weight.view(-1, self.size), self.eps, self.offset)
        return rms_norm(x.unflatten(1, (-1, self.size)), norm).flatten(1)

    def parts(self) -> Iterator[tuple[str, Place]]:
        yield "weight", self.kept.place(0, self.weight)


class LayerNorm(nn.Module):
    """(x - mean) / std, then scaled and shifted when ``affine``."""

    def __init__(self, size: int, place: Placement, *, affine: bool = True, eps: float = 1e-5):
        super().__init__()
        self.weight = place.empty(size) if affine else None
        self.bias = place.empty(size) if affine else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.eps)

    def before_projection(self, x: Tensor) -> tuple[Tensor, Norm | None]:
        """As ``RMSNorm.before_projection``; no projection fuses this norm."""
        return self(x), None

    def fill_neutral(self) -> None:
        """Set the weights to scale by one and shift by zero."""
        if self.weight is not None and self.bias is not None:
            self.weight.fill_(1.0)
            self.bias.fill_(0.0)
