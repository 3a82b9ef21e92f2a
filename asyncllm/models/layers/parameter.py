"""Where parameters live, and how one parameter holds several tensors of a checkpoint."""

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
        quantized: what form each projection's weight takes is decided when the checkpoint is known:
            see ``models.quant.allocate``.
    """

    dtype: torch.dtype
    device: torch.device
    quantized: bool = False

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter that nothing has been written to yet, without gradient."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)

    def projection(self, rows: int, columns: int) -> nn.Parameter:
        """The weight of a projection: as ``empty``, but without memory if it may be quantised."""
        device = torch.device("meta") if self.quantized else self.device
        values = torch.empty(rows, columns, dtype=self.dtype, device=device)
        return nn.Parameter(values, requires_grad=False)


class Packed(nn.Module, ABC):
    """A layer whose parameters each hold several tensors of the checkpoint."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, Place]]:
        """The checkpoint's tensors: name, relative to the module this one is in, and its place.

        Places are views of the parameters, of the shape on disk; together they cover them.
        """
