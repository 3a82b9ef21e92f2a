"""Where parameters live, and how one parameter holds several tensors of a checkpoint."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Placement:
    """The dtype and device of a model's parameters."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *shape: int) -> nn.Parameter:
        """A parameter that nothing has been written to yet, without gradient."""
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return nn.Parameter(values, requires_grad=False)


class Packed(nn.Module, ABC):
    """A layer whose parameters each hold several tensors of the checkpoint."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors: name, relative to the module this one is in, and its place.

        Places are views of the parameters, of the shape on disk; together they cover them.
        """
