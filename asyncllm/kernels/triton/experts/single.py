"""The experts of one token, on the CUDA cores.

Each program requests whole rows of weights, into registers, as ``gemm.gemv`` does. The first kernel
has programs for each expert. Those of the second multiply the rows of all experts for some outputs
and add them up in order, together with the residual; they request their weights while the first one
still runs. That is safe, as the first kernel lets the second start only after the kernel before
both, which has chosen the experts, has ended.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.codes import fp8_numbers, mxfp4_factors, mxfp4_numbers, scaled
from asyncllm.kernels.triton.experts.products import activated, parts
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.types import ExpertWeight, Fp8Matrix, GatedExperts, Mxfp4Matrix


class SingleTile(NamedTuple):
    """How a program computes.

    Attributes:
        outputs: of a program.
        warps: of a program.
    """

    outputs: int
    warps: int


@triton.jit
def _numbers(weight, scale, rows, K: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """Rows of a weight, in one or two tiles of BLOCK columns; see ``_columns``."""
    k = tl.arange(0, BLOCK)
    if FORMAT == "mxfp4":
        PADDED: tl.constexpr = (K + 127) // 128 * 128
        at = weight + rows[:, None] * (PADDED // 2) + k[None, :]
        codes = tl.load(at, (k < PADDED // 2)[None, :], other=0, eviction_policy="evict_first")
        group = tl.arange(0, BLOCK // 16)
        at = scale + rows[:, None] * (PADDED // 32) + group[None, :]
        low, high = mxfp4_numbers(codes)
        first, second = mxfp4_factors(tl.load(at, (group < PADDED // 32)[None, :], other=0))
        return (scaled(low, first), scaled(high, second))
    else:
        at = weight + rows[:, None] * K + k[None, :]
        if K == BLOCK:
            w = tl.load(at, eviction_policy="evict_first")
        else:
            w = tl.load(at, (k < K)[None, :], other=0.0, eviction_policy="evict_first")
        if FORMAT == "dense":
            return (w,)
        else:
            at = scale + rows[:, None] // 128 * ((K + 127) // 128) + k[None, :] // 128
            return (fp8_numbers(w, tl.bfloat16).to(tl.float32) * tl.load(at, (k < K)[None, :]),)


@triton.jit
def _columns(x, K: tl.constexpr, BLOCK: tl.constexpr, FORMAT: tl.constexpr):
    """The elements of a row that tiles of ``_numbers`` are multiplied by."""
    k = tl.arange(0, BLOCK)
    if FORMAT == "mxfp4":
        k = k // 32 * 64 + k % 32
        first = tl.load(x + k, k < K, other=0.0).to(tl.float32)
        second = tl.load(x + k + 32, k + 32 < K, other=0.0).to(tl.float32)
        return (first, second)
    else:
        value = tl.load(x + k, k < K, other=0.0).to(tl.float32)
        if FORMAT == "fp8_blocks":
            # As ``quantize_rows`` rounds, which is done where there are more tokens.
            blocks = tl.reshape(value, [BLOCK // 128, 128])
            size = tl.maximum(tl.max(tl.abs(blocks), axis=1), 1e-12)[:, None] / 448.0
            blocks = tl.minimum(tl.maximum(blocks / size, -448.0), 448.0)
            blocks = blocks.to(tl.float8e4nv).to(tl.float32) * size
            value = tl.reshape(blocks, [BLOCK])
        return (value,)


@triton.jit
def _row_sums(numbers, columns):
    """The products of rows and a column, added up: [rows]."""
    products = numbers[0].to(tl.float32) * columns[0][None, :]
    for i in tl.static_range(1, len(numbers)):
        products += numbers[i].to(tl.float32) * columns[i][None, :]
    return tl.sum(products, axis=1)


@triton.jit
def _first(
    inner,  # [TOP_K, SIZE]
    x,  # [1, K]
    weight,
    scale,
    bias,
    chosen,  # int32 [1, TOP_K]
    SIZE: tl.constexpr,
    K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    ACT: tl.constexpr,
    PAIRED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    TILES: tl.constexpr = (SIZE + OUTPUTS - 1) // OUTPUTS
    choice = tl.program_id(0) // TILES
    i = tl.arange(0, 2 * OUTPUTS)
    output = tl.program_id(0) % TILES * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.minimum(tl.program_id(0) % TILES * OUTPUTS + i % OUTPUTS, SIZE - 1)
    n = n * 2 + i // OUTPUTS if PAIRED else n + i // OUTPUTS * SIZE
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    rows = tl.load(chosen + choice).to(tl.int64) * (2 * SIZE) + n
    numbers = _numbers(weight, scale, rows, K, BLOCK, FORMAT)
    y = _row_sums(numbers, _columns(x, K, BLOCK, FORMAT))
    if BIAS:
        y += tl.load(bias + rows).to(tl.float32)
    gate, up = tl.split(tl.permute(tl.reshape(y, [2, OUTPUTS]), [1, 0]))
    y = activated(gate, up, ACT, ALPHA, LIMIT)
    tl.store(inner + choice * SIZE + output, y.to(inner.dtype.element_ty), output < SIZE)


@triton.jit
def _second(
    out,  # [1, SIZE]
    inner,  # [TOP_K, K]
    weight,
    scale,
    bias,
    chosen,
    factors,  # [1, TOP_K]
    SIZE: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    OUTPUTS: tl.constexpr,
    BLOCK: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    n = tl.minimum(output, SIZE - 1)
    numbers: tl.tuple = ()
    offsets: tl.tuple = ()
    weights: tl.tuple = ()
    for j in tl.static_range(TOP_K):
        rows = tl.load(chosen + j).to(tl.int64) * SIZE + n
        numbers += (_numbers(weight, scale, rows, K, BLOCK, FORMAT),)
        weights += (tl.load(factors + j).to(tl.float32),)
        if BIAS:
            offsets += (tl.load(bias + rows).to(tl.float32),)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([OUTPUTS], tl.float32)
    for j in tl.static_range(TOP_K):
        y = _row_sums(numbers[j], _columns(inner + j * K, K, BLOCK, FORMAT))
        if BIAS:
            y += offsets[j]
        # Rounded as if it were stored, which it is where there are more tokens.
        total += (y * weights[j]).to(out.dtype.element_ty).to(tl.float32)
    if RESIDUAL:
        total += tl.load(out + output, output < SIZE, other=0.0).to(tl.float32)
    tl.store(out + output, total.to(out.dtype.element_ty), output < SIZE)


_launch_first = Launcher(_first)
_launch_second = Launcher(_second)


def takes(weight: ExpertWeight) -> bool:
    """Whether the kernels take such a weight."""
    if isinstance(weight, Fp8Matrix):
        return weight.is_blocked
    return isinstance(weight, Tensor | Mxfp4Matrix)


def mix_one(
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: GatedExperts,
    tiles: tuple[SingleTile, SingleTile],
    *,
    has_residual: bool,
) -> None:
    """The mixture of one token, added to ``out`` or written there."""
    top_k, hidden = chosen.shape[1], x.shape[1]
    codes, scale, _, form, _ = parts(experts.gate_up)
    size = codes.numel() // codes.shape[-1] // experts.num_experts // 2
    inner = torch.empty(top_k, size, dtype=x.dtype, device=x.device)
    first, second = tiles
    act = (experts.act, experts.paired, experts.alpha, experts.limit)
    has_bias = experts.gate_up_bias is not None
    _launch_first(
        (top_k * cdiv(size, first.outputs), 1, 1),
        (inner, x, codes, scale, experts.gate_up_bias, chosen),
        (size, hidden, first.outputs, _block(hidden, form), form, *act, has_bias),
        first.warps,
    )
    codes, scale, _, form, _ = parts(experts.down)
    has_bias = experts.down_bias is not None
    _launch_second(
        (cdiv(hidden, second.outputs), 1, 1),
        (out, inner, codes, scale, experts.down_bias, chosen, weights),
        (hidden, size, top_k, second.outputs, _block(size, form), form, has_bias, has_residual),
        second.warps,
    )


def _block(columns: int, form: str) -> int:
    """Columns of a tile."""
    return max(next_power_of_2(columns) // (2 if form == "mxfp4" else 1), 128)


def single_tiles(experts: GatedExperts) -> tuple[SingleTile, SingleTile]:
    """The tiles of the two products of one token."""
    if isinstance(experts.gate_up, Mxfp4Matrix):
        return SingleTile(4, 4), SingleTile(2, 4)
    return SingleTile(4, 4), SingleTile(4, 4)
