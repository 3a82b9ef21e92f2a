"""Projections on a GPU: which kernel takes them.

| rows of x | kernel |
|--|--|
| 1 | ``gemv`` or ``register_skinny`` |
| a few | ``register_skinny`` |
| a few to dozens, on Hopper GPUs | ``smem_resident`` for small weights, ``tma`` for large ones |
| dozens to 256, on Hopper GPUs | ``tma_split`` where it was measured to be faster |
| others | cuBLAS |

The tables of ``kernels.tuning`` draw the borders. On an H200, the four projections of a layer of
Qwen3-0.6B take 11 us with one row instead of 35 with cuBLAS, those of 8B 91 instead of 112; with
256 rows the gain is 3 to 7 % (docs/kernels.md). For the 0.6B, reading weights is not the
bottleneck: the rest is the transition from one kernel to the next, loading x, and adding up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.quantized import Fp8Rows
from asyncllm.kernels.triton.gemm.fp8 import fp8_gated, fp8_gemv, fp8_linear
from asyncllm.kernels.triton.gemm.gemv import gemv
from asyncllm.kernels.triton.gemm.int4 import int4_linear
from asyncllm.kernels.triton.gemm.projection import Projection, cublas_linear
from asyncllm.kernels.triton.gemm.register_skinny import register_skinny
from asyncllm.kernels.triton.gemm.smem_resident import smem_resident
from asyncllm.kernels.triton.gemm.tma import tma_gemm
from asyncllm.kernels.triton.gemm.tma_split import tma_split_gemm
from asyncllm.kernels.triton.launch import cdiv, next_power_of_2
from asyncllm.kernels.triton.waiting import max_waiting_programs
from asyncllm.kernels.tuning import (
    MAX_ROWS,
    GemvTile,
    RegisterSkinnyTile,
    Shape,
    SmemResidentTile,
    Tile,
    TmaSplitTile,
    TmaTile,
    choose,
    padded_rows,
    tma_split_stages,
)
from asyncllm.kernels.types import Fp8Matrix, Int4Matrix, Norm, Weight


def linear(
    x: Tensor | Fp8Rows,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """See ``kernels.linear.linear``."""
    if isinstance(x, Fp8Rows):
        assert isinstance(weight, Fp8Matrix)
        rows = x.data[: x.rows]
        return fp8_linear(Projection(rows, weight, bias, norm, residual, act, x.dtype), x)
    if isinstance(weight, Fp8Matrix):
        return fp8_linear(Projection(x, weight, bias, norm, residual, act))
    if isinstance(weight, Int4Matrix):
        return int4_linear(Projection(x, weight, bias, norm, residual, act))
    p = Projection(x, weight, bias, norm, residual, act, dtype)
    tile = _choose(p) if 0 < len(x) <= MAX_ROWS else None
    return cublas_linear(p) if tile is None else project(tile, p)


def linear_with_rest(
    x: Tensor, weight: Weight, rest: Tensor, *, norm: Norm | None = None
) -> tuple[Tensor, Tensor]:
    """See ``kernels.linear.linear_with_rest``."""
    if isinstance(weight, Fp8Matrix) and len(x) == 1:
        y = x.new_empty(1, len(rest))
        return fp8_gemv(Projection(x, weight, norm=norm), (rest, y)), y
    return linear(x, weight, norm=norm), linear(x, rest, norm=norm)


def gated_linear(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    act: str,
    then: Weight,
    *,
    norm: Norm | None = None,
) -> Tensor | Fp8Rows:
    """See ``kernels.linear.gated_linear``."""
    if isinstance(weight, Fp8Matrix):
        return fp8_gated(Projection(x, weight, bias, norm, act=act), then)
    return linear(x, weight, bias, norm=norm, act=act)


def _choose(p: Projection[Tensor]) -> Tile | None:
    """The tile for a projection of at least one row; None: cuBLAS."""
    epilogue = "gated" if p.act is not None else "" if p.residual is None else "residual"
    shape = Shape.of(p.weight, p.norm is not None, epilogue)
    gpu, max_waiting = gpu_of(p.x.device), max_waiting_programs(p.x.device)
    tile = choose(gpu.name, len(p.x), shape, hopper=gpu.is_hopper)
    if p.dtype is not None and isinstance(tile, TmaSplitTile):
        return None  # it stores the dtype of x
    # The kernels copy 16 bytes of the weight at a time.
    if tile is None or p.weight.data_ptr() % 16 > 0 or not fits(tile, p.x, shape, max_waiting):
        return None
    return tile


def project(tile: Tile, p: Projection[Tensor]) -> Tensor:
    """Run the kernel that a tile is for."""
    if needs_separate_norm(tile):
        p = p.normalised()
    if isinstance(tile, GemvTile):
        return gemv(tile, p)
    if isinstance(tile, RegisterSkinnyTile):
        return register_skinny(tile, p)
    if isinstance(tile, SmemResidentTile):
        return smem_resident(tile, p)
    if isinstance(tile, TmaTile):
        return tma_gemm(tile, p)
    return tma_split_gemm(tile, p)


def fits(tile: Tile, x: Tensor, shape: Shape, max_waiting: int = 132) -> bool:
    """Whether the kernel can take these rows, where that many programs may wait for each other.

    Kernels on tensor cores multiply x by the norm's weight in the dtype of x, before they divide by
    the root mean square. float16 lacks the range for that.
    """
    if x.stride(1) != 1:
        return False
    if isinstance(tile, GemvTile):
        return len(x) == 1
    if x.element_size() != 2:
        return False
    in_kernel = shape.norm and not needs_separate_norm(tile)
    if in_kernel and x.dtype == torch.float16:
        return False
    if isinstance(tile, RegisterSkinnyTile):
        return shape.columns % tile.block_k == 0
    is_aligned = x.stride(0) % 16 == x.data_ptr() % 16 == 0
    if isinstance(tile, TmaSplitTile):
        return is_aligned and _fits_tma_split(tile, len(x), shape, max_waiting)
    blocks, rest = divmod(shape.columns, tile.fold * tile.splits * tile.block_k)
    sums = tile.fold * max(8, next_power_of_2(len(x)))  # of products, in registers
    if isinstance(tile, SmemResidentTile):
        has_room = sums <= 256
    else:
        has_room = sums * tile.parts <= 192 and 2 <= tile.x_stages <= tile.stages <= blocks
    is_whole = rest == 0 and (shape.epilogue != "gated" or shape.size % 16 == 0)
    return has_room and is_aligned and is_whole and not (in_kernel and tile.splits > 1)


def _fits_tma_split(tile: TmaSplitTile, rows: int, shape: Shape, max_waiting: int) -> bool:
    block_m = padded_rows(rows)
    blocks, rest = divmod(shape.columns, 64 * tile.splits)
    stages = range(max(2, cdiv(block_m, 64)), min(blocks, tma_split_stages(rows, tile.parts)) + 1)
    is_gated = shape.epilogue == "gated"
    if tile.splits > 1:
        # Programs that share outputs wait for each other, and divide the rows of x, of which there
        # are at least 32.
        programs = cdiv(shape.size, 64 * tile.parts) * tile.splits
        is_whole = programs <= max_waiting and tile.splits <= 8 and not is_gated
    else:
        is_whole = shape.size % (16 if is_gated else 8) == 0
    return is_whole and rest == 0 and tile.stages in stages


def needs_separate_norm(tile: Tile) -> bool:
    """Whether another kernel normalises x first."""
    if isinstance(tile, GemvTile):
        return False
    return isinstance(tile, TmaTile | TmaSplitTile) or tile.separate_norm
