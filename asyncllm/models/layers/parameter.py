"""Allocation of parameters, and parameters that hold several tensors of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from asyncllm.kernels.choice import FASTEST, Kernels
from asyncllm.models.quant.place import Place
from asyncllm.parallel.ranks import Alone, Ranks


@dataclass(frozen=True, slots=True)
class Placement:
    """The dtype and device of a model's parameters, the rank that has them, and its kernels.

    Attributes:
        quantized: projections get their weights later; see ``models.loading.allocate``.
    """

    dtype: torch.dtype
    device: torch.device
    quantized: bool = False
    ranks: Ranks = field(default_factory=Alone)
    kernels: Kernels = FASTEST

    def empty(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter without gradient."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)

    def projection(self, *shape: int) -> nn.Parameter:
        """The weight of a projection: as ``empty``, but on the meta device if ``quantized``."""
        device = torch.device("meta") if self.quantized else self.device
        values = torch.empty(shape, dtype=self.dtype, device=device)
        return nn.Parameter(values, requires_grad=False)


@runtime_checkable
class HasNeutral(Protocol):
    """A layer of factors that may all be 1."""

    def fill_neutral(self) -> None:
        """Set the factors to scale by one, and what is added to zero."""


class Stored(nn.Module, ABC):
    """A layer that says where its tensors of the checkpoint go."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, Place]]:
        """The places for the checkpoint's tensors, by name relative to this module.

        Places are views of the parameters, or of their parts, in the shape on disk; together they
        cover them.
        """


class Packed(Stored):
    """A layer whose parameters hold several tensors of the checkpoint each.

    Names of its parts are relative to the parent module.
    """
