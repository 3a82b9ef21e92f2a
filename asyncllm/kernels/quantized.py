"""Quantised rows, and conversions of quantised matrices in plain torch."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.types import (
    FP8_BLOCK,
    MXFP4_BLOCK,
    MXFP4_COLUMNS,
    MXFP4_SHIFT,
    Fp8Matrix,
    Int4Matrix,
    Mxfp4Matrix,
    packed_block,
)

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: The number of each code of e2m1.
_E2M1 = (*_MAGNITUDES, *(-number for number in _MAGNITUDES))


class Fp8Rows(NamedTuple):
    """Rows of activations in 8 bits, for a product with an ``Fp8Matrix``.

    Attributes:
        data: float8_e4m3fn [rows and padding, K].
        scale: float32 [K / FP8_BLOCK, rows and padding], or [1, ...].
        rows: without padding.
        dtype: of what was rounded, and of products.
    """

    data: Tensor
    scale: Tensor
    rows: int
    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def is_cuda(self) -> bool:
        return self.data.is_cuda


#: The greatest number of e4m3.
_FP8_MAX: Final = 448.0
_ROWS_AT_ONCE: Final = 1024  # a multiple of FP8_BLOCK


def quantize_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The data, e4m3 [N, K], and scales of blocks of an ``Fp8Matrix``, as checkpoints have them.

    The greatest number of each block becomes that of e4m3. Needs little memory beside the result.
    """
    rows, columns = weight.shape
    data = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scale = weight.new_empty(-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK), dtype=torch.float32)
    for start in range(0, rows, _ROWS_AT_ONCE):
        values = weight[start : start + _ROWS_AT_ONCE].float()
        padding = (0, -columns % FP8_BLOCK, 0, -len(values) % FP8_BLOCK)
        blocks = F.pad(values.abs(), padding).unflatten(1, (-1, FP8_BLOCK))
        greatest = blocks.unflatten(0, (-1, FP8_BLOCK)).amax((1, 3))
        # Not 0, which numbers cannot be divided by.
        scales = (greatest / _FP8_MAX).clamp_(min=torch.finfo(torch.float32).tiny)
        scale[start // FP8_BLOCK :][: len(scales)] = scales
        data[start : start + _ROWS_AT_ONCE] = values / _of_elements(scales, values.shape)
    return data, scale


def _of_elements(scale: Tensor, shape: torch.Size) -> Tensor:
    """Scales of blocks, for each element of a matrix of that shape."""
    by_row = scale.repeat_interleave(FP8_BLOCK, 0)[: shape[0]]
    return by_row.repeat_interleave(FP8_BLOCK, 1)[:, : shape[1]]


def dequantize_fp8(weight: Fp8Matrix) -> Tensor:
    """The matrix as float32 [N, K]."""
    data, scale = weight
    return data.float() * (_of_elements(scale, data.shape) if weight.is_blocked else scale)


def dequantize_int4(weight: Int4Matrix) -> Tensor:
    """The matrix as float32 [N, K], columns in the order stored."""
    bytes_ = weight.packed.unflatten(1, (-1, weight.block // 2))
    codes = torch.stack((bytes_ & 15, bytes_ >> 4), dim=2).flatten(1)
    zero, scale = (
        part.float().t().repeat_interleave(weight.group, 1) for part in (weight.zero, weight.scale)
    )
    values: Tensor = (codes.float() - zero) * scale
    return values


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Matrices of experts in bfloat16, [experts, N, K], which has all their numbers.

    OCP Microscaling Formats (MX), version 1.0, 2023: e2m1 codes and e8m0 scales.

    Args:
        blocks: uint8 [experts, N, K / 32, 16], two codes each, the first in the lower bits; or
            [experts, N, K / 2].
        scales: uint8 [experts, N, K / 32]: exponents of 2, plus 127.
    """
    numbers = torch.tensor(_E2M1, dtype=torch.bfloat16, device=blocks.device)
    experts, rows, groups = scales.shape
    out = numbers.new_empty(experts, rows, groups * MXFP4_BLOCK)
    for expert, codes, exponents in zip(out, blocks, scales, strict=True):
        pairs = torch.stack((codes & 15, codes >> 4), dim=-1).view(rows, groups, -1)
        # The bits of a float32; 0, which stands for less than any weight, becomes 0.
        factors = (exponents.int() << 23).view(torch.float32).to(numbers.dtype)
        expert.copy_((numbers[pairs.int()] * factors.unsqueeze(-1)).flatten(1))
    return out


#: The bits of a word that two numbers have: signs, and from bit 6 on the other three bits of each.
_MXFP4_BITS: Final = (6, 7, 8, 15, 22, 23, 24, 31)
#: For each of these bits of the fourth pair, in an order that gives them all: the bit of the word
#: that is then known, and the one that it is combined with.
_MXFP4_FOURTH: Final = (
    *((31, 27, None), (23, 19, 27), (15, 11, 19), (7, 3, 11)),
    *((6, 10, 2), (8, 4, 12), (22, 26, 18), (24, 20, 28)),
)


def pack_mxfp4(blocks: Tensor, scales: Tensor) -> Mxfp4Matrix:
    """The matrix for kernels of what ``dequantize_mxfp4`` takes: [experts * N, K]."""
    experts, rows, groups = scales.shape
    padding = -groups % (MXFP4_COLUMNS // MXFP4_BLOCK)
    codes = F.pad(blocks.reshape(experts * rows, groups, -1), (0, 0, 0, padding))
    even, odd = (codes & 15).int(), (codes >> 4).int()
    low, high = ((code & 8) << 12 | (code & 7) << 6 for code in (even, odd))
    pairs = (low | high << 16).view(experts * rows, -1, 4, 4, 4)
    words = _mxfp4_words(pairs.permute(0, 1, 4, 2, 3)).flatten(1)
    packed = words.contiguous().view(torch.uint8)
    shifted = scales.view(experts * rows, groups) + MXFP4_SHIFT
    return Mxfp4Matrix(packed, F.pad(shifted, (0, padding)))


def _mxfp4_words(pairs: Tensor) -> Tensor:
    """Words of which ``_mxfp4_pairs`` gives int32 [..., 4]."""
    first, second, third, fourth = pairs.unbind(-1)
    words = first | second << 6 | _shifted(second, 26) | _shifted(third, 6)
    for bit, place, other in _MXFP4_FOURTH:
        value = fourth >> bit & 1
        if other is not None:
            value = value ^ words >> other & 1
        words |= value << place
    return words


def _mxfp4_pairs(words: Tensor) -> Tensor:
    """Four pairs of 16-bit numbers of each word, int32 [..., 4].

    Each 128 columns of a row are 16 words. Word 4 q + g has codes of group g: those of columns c
    and c + 1, where c is 32 g + 2 q, and of those 8, 16 and 24 columns further. So the words of one
    q are what a thread needs for a product of tensor cores, one after the other.

    The fewest operations make pairs of numbers of a word. Columns c and c + 1 are in place, the
    next two are after a rotation by 6 bits to the right, the third two after a shift by 6 to the
    left. The last two are where shifts by 4 to the left and to the right differ: these bits cannot
    all have places of their own.
    """
    turned = _shifted(words, 6) | words << 26
    pairs = words, turned, words << 6, words << 4 ^ _shifted(words, 4)
    mask = sum(1 << bit for bit in _MXFP4_BITS) - (1 << 32)
    return torch.stack(pairs, dim=-1) & mask


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Words, int32, shifted to the right, with zeros from the left."""
    return words >> bits & (1 << 32 - bits) - 1


def unpack_mxfp4(matrix: Mxfp4Matrix) -> Tensor:
    """The matrix as float32 [N, padded K]."""
    words = matrix.packed.view(torch.int32).view(len(matrix.packed), -1, 4, 4)
    pairs = _mxfp4_pairs(words).permute(0, 1, 3, 4, 2)
    halves = torch.stack((pairs, pairs >> 16), dim=-1).flatten(1)
    codes = halves >> 12 & 8 | halves >> 6 & 7
    numbers = torch.tensor(_E2M1, device=words.device)
    values = numbers[codes].view(len(words), -1, MXFP4_BLOCK)
    factors = torch.exp2(matrix.scale.float() - 127 - MXFP4_SHIFT)
    return (values * factors.unsqueeze(-1)).flatten(1)


def pack_int4(codes: Tensor, group: int) -> Tensor:
    """``Int4Matrix.packed`` of codes, uint8 [N, K] below 16."""
    low, high = codes.unflatten(1, (-1, 2, packed_block(group) // 2)).unbind(2)
    packed: Tensor = (low | (high << 4)).flatten(1)
    return packed
