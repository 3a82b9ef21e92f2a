"""Quantised matrices as the weights of layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asyncllm.errors import ModelError
from asyncllm.kernels.quantized import pack_mxfp4
from asyncllm.kernels.types import (
    FP8_BLOCK,
    MXFP4_BLOCK,
    MXFP4_COLUMNS,
    MXFP4_MAX_SCALE,
    MXFP4_SHIFT,
    Fp8Matrix,
    Int4Matrix,
    Mxfp4Matrix,
)

Matrix = Fp8Matrix | Int4Matrix


class Mxfp4Blocks(NamedTuple):
    """The mxfp4 matrices [experts, N, K] of a checkpoint.

    Attributes:
        blocks, scales: as ``kernels.quantized.dequantize_mxfp4`` takes them.
    """

    blocks: Tensor
    scales: Tensor

    def narrow(self, dim: int, start: int, length: int) -> Mxfp4Blocks:
        """A part of the rows, or of the columns: whole groups of MXFP4_BLOCK."""
        blocks = self.blocks.view(*self.scales.shape, -1)
        if dim == 2:
            start, length = start // MXFP4_BLOCK, length // MXFP4_BLOCK
        return Mxfp4Blocks(
            blocks.narrow(dim, start, length), self.scales.narrow(dim, start, length)
        )


class Fp8Experts(NamedTuple):
    """The fp8 matrices of a tensor that has those of all experts, one after the other.

    Attributes:
        matrices: made as they are needed.
    """

    matrices: Iterator[Fp8Matrix]


class QuantizedWeight(nn.Module, ABC):
    """The weight [N, K] of a projection, allocated but not filled.

    Like a tensor's, its slices are places for the matrices of a checkpoint.
    """

    def __init__(self, size: int, depth: int):
        super().__init__()
        self.shape = torch.Size((size, depth))

    def __getitem__(self, rows: slice) -> Rows:
        start, end, _ = rows.indices(self.shape[0])
        return Rows(self, start, end)

    @abstractmethod
    def matrix(self) -> Matrix | Mxfp4Matrix:
        """The weight for kernels."""

    @abstractmethod
    def write(self, start: int, end: int, columns: int, matrix: Matrix) -> None:
        """Set the first columns of rows start .. end-1 to a matrix of this kind and layout."""

    @abstractmethod
    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill with small random numbers, like those of other layers."""


class Rows(NamedTuple):
    """Rows of a weight, as the place for a matrix of a checkpoint.

    Attributes:
        columns: how many of them, from the first on; None: all.
    """

    weight: QuantizedWeight
    start: int
    end: int
    columns: int | None = None

    @property
    def shape(self) -> torch.Size:
        columns = self.weight.shape[1] if self.columns is None else self.columns
        return torch.Size((self.end - self.start, columns))

    def write(self, matrix: Matrix) -> None:
        """Set the rows to a matrix of this shape and of the weight's kind and layout."""
        self.weight.write(self.start, self.end, self.shape[1], matrix)


class Stack(NamedTuple):
    """The matrices of all experts in one weight, as the place for a tensor of a checkpoint.

    Attributes:
        rows, columns: how many of each matrix, from the first on.
    """

    weight: Mxfp4Weight
    experts: int
    rows: int
    columns: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.experts, self.rows, self.columns))

    def write(self, value: Mxfp4Blocks) -> None:
        """Set all matrices.

        Raises:
            ModelError: a scale is greater than kernels take.
        """
        if (greatest := int(value.scales.max())) > MXFP4_MAX_SCALE:
            raise ModelError(
                f"an mxfp4 matrix is scaled by 2^{greatest - 127}; at most "
                f"2^{MXFP4_MAX_SCALE - 127} is taken"
            )
        rows = self.weight.shape[0] // self.experts
        for expert, (blocks, scales) in enumerate(zip(*value, strict=True)):
            matrix = pack_mxfp4(blocks.unsqueeze(0), scales.unsqueeze(0))
            self.weight.write_packed(expert * rows, matrix)


class Fp8Weight(QuantizedWeight):
    """8-bit floating point.

    Args:
        blocked: one scale for each block, else for each row. Parts begin at multiples of FP8_BLOCK.
    """

    def __init__(self, size: int, depth: int, device: torch.device, *, blocked: bool):
        super().__init__(size, depth)
        scales = (-(-size // FP8_BLOCK), -(-depth // FP8_BLOCK)) if blocked else (size, 1)
        self.data = _parameter((size, depth), torch.float8_e4m3fn, device)
        self.scale = _parameter(scales, torch.float32, device)

    def matrix(self) -> Fp8Matrix:
        return Fp8Matrix(self.data, self.scale)

    def write(self, start: int, end: int, columns: int, matrix: Matrix) -> None:
        assert isinstance(matrix, Fp8Matrix)
        place = self.matrix().rows(start, end).columns(0, columns)
        place.data.copy_(matrix.data)
        place.scale.copy_(matrix.scale)

    def fill_dummy(self, generator: torch.Generator) -> None:
        values = torch.empty(self.shape, device=self.data.device)
        self.data.copy_(values.normal_(0.0, 64.0, generator=generator).clamp_(-448.0, 448.0))
        self.scale.fill_(0.02 / 64.0)


class Int4Weight(QuantizedWeight):
    """4-bit integers.

    Args:
        group: columns that share a scale.
        scale: dtype of scales.
        reordered: whether there is an ``Int4Matrix.order``, shared by all parts.
    """

    def __init__(
        self,
        size: int,
        depth: int,
        device: torch.device,
        *,
        group: int,
        scale: torch.dtype,
        reordered: bool = False,
    ):
        super().__init__(size, depth)
        groups = depth // group
        self.packed = _parameter((size, depth // 2), torch.uint8, device)
        self.scale = _parameter((groups, size), scale, device)
        self.zero = _parameter((groups, size), torch.uint8, device)
        self.order = _parameter((depth,), torch.int64, device) if reordered else None

    def matrix(self) -> Int4Matrix:
        return Int4Matrix(self.packed, self.scale, self.zero, self.order)

    def write(self, start: int, end: int, columns: int, matrix: Matrix) -> None:
        assert isinstance(matrix, Int4Matrix)
        place = self.matrix().rows(start, end)
        if columns < self.shape[1]:
            place = place.columns(0, columns)
        place.packed.copy_(matrix.packed)
        place.scale.copy_(matrix.scale)
        place.zero.copy_(matrix.zero)
        if self.order is not None and matrix.order is not None:
            self.order.copy_(matrix.order)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.packed.random_(0, 256, generator=generator)
        self.scale.fill_(0.02 / 4.6)  # codes 0 to 15 deviate by 4.6
        self.zero.fill_(8)
        if self.order is not None:
            self.order.copy_(torch.arange(len(self.order)))


class Mxfp4Weight(QuantizedWeight):
    """4-bit floating point in groups of MXFP4_BLOCK columns."""

    def __init__(self, size: int, depth: int, device: torch.device):
        super().__init__(size, depth)
        padded = -(-depth // MXFP4_COLUMNS) * MXFP4_COLUMNS
        self.packed = _parameter((size, padded // 2), torch.uint8, device)
        self.scale = _parameter((size, padded // MXFP4_BLOCK), torch.uint8, device)

    def matrix(self) -> Mxfp4Matrix:
        return Mxfp4Matrix(self.packed, self.scale)

    def write(self, start: int, end: int, columns: int, matrix: Matrix) -> None:
        raise TypeError("matrices in mxfp4 are those of all experts: see Stack")

    def write_packed(self, start: int, matrix: Mxfp4Matrix) -> None:
        """Set the first columns of rows, from ``start`` on."""
        rows = slice(start, start + len(matrix.packed))
        for place, values in ((self.packed, matrix.packed), (self.scale, matrix.scale)):
            place[rows, : values.shape[1]].copy_(values)

    def fill_dummy(self, generator: torch.Generator) -> None:
        self.packed.random_(0, 256, generator=generator)
        self.scale.fill_(127 - 7 + MXFP4_SHIFT)  # codes deviate by 2.9


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
