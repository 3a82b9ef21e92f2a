"""Places for the tensors of a checkpoint, which differ from their own form."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.models.quant.weight import Rows, Stack


class Reordered(NamedTuple):
    """A place whose row i is row ``order[i]`` of the checkpoint's tensor or matrix.

    Attributes:
        order: int64 [rows], on the CPU.
    """

    place: Tensor | Rows
    order: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.place.shape


class Slice(NamedTuple):
    """A place for what is from ``start`` on along one dimension, as much as the place holds."""

    dim: int
    start: int
    place: Tensor | Rows | Reordered | Stack

    @property
    def stop(self) -> int:
        return self.start + self.place.shape[self.dim]


class Sliced(NamedTuple):
    """Places for parts of a tensor or matrix of the checkpoint; the rest is for other ranks.

    Attributes:
        shape: on disk.
    """

    shape: torch.Size
    slices: tuple[Slice, ...]

    @property
    def mT(self) -> Sliced:
        """The places for the transposes of matrices [n, rows, columns]."""
        first, rows, columns = self.shape
        swapped = {0: 0, 1: 2, 2: 1}
        slices = []
        for dim, start, place in self.slices:
            assert isinstance(place, Tensor)
            slices.append(Slice(swapped[dim], start, place.mT))
        return Sliced(torch.Size((first, columns, rows)), tuple(slices))


class Each(NamedTuple):
    """The places of all experts' matrices, for a tensor of the checkpoint that has them all.

    Attributes:
        turned: it has their transposes.
    """

    places: tuple[Place, ...]
    turned: bool = False

    @property
    def shape(self) -> torch.Size:
        rows, columns = self.places[0].shape
        return torch.Size(
            (len(self.places), *((columns, rows) if self.turned else (rows, columns)))
        )

    @property
    def mT(self) -> Each:
        """The places for the transposes."""
        return self._replace(turned=not self.turned)


#: The place for a tensor or a quantised matrix of a checkpoint.
Place = Tensor | Rows | Reordered | Sliced | Stack | Each


def sliced(
    dim: int, size: int, slices: Iterable[tuple[int, Tensor | Rows | Reordered | Stack]]
) -> Place:
    """The place of a tensor that is ``size`` long on disk along ``dim``.

    Args:
        slices: where each part starts on disk, and its place.
    """
    parts = tuple(Slice(dim, start, place) for start, place in slices)
    shape = list(parts[0].place.shape)
    if len(parts) == 1 and shape[dim] == size:
        return parts[0].place
    shape[dim] = size
    return Sliced(torch.Size(shape), parts)
