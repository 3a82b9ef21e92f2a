"""Allocation of parameters, and parameters that hold several tensors of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from asyncllm.models.quant.weight import Place


@dataclass(frozen=True, slots=True)
class Placement:
    """The dtype and device of a model's parameters.

    Attributes:
        quantized: projections get their weights later; see ``models.loading.allocate``.
    """

    dtype: torch.dtype
    device: torch.device
    quantized: bool = False

    def empty(self, *shape: int) -> nn.Parameter:
        """An uninitialised parameter without gradient."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)

    def projection(self, rows: int, columns: int) -> nn.Parameter:
        """The weight of a projection: as ``empty``, but on the meta device if ``quantized``."""
        device = torch.device("meta") if self.quantized else self.device
        values = torch.empty(rows, columns, dtype=self.dtype, device=device)
        return nn.Parameter(values, requires_grad=False)


class Packed(nn.Module, ABC):
    """A layer whose parameters hold several tensors of the checkpoint each."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, Place]]:
        """The places for the checkpoint's tensors, by name relative to the parent module.

        Places are views of the parameters in the shape on disk; together they cover them.
        """
