"""Short convolutions: a program for a block of channels of a part of a tile of tokens."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.triton.recurrent.tiles import TILE, find_tiles, load_tile
from asyncllm.kernels.types.recurrent import StateRows

#: Channels and tokens of a program.
BLOCK = 128
TOKENS = 16


@triton.jit
def convolved(
    x,
    weight,
    inputs,
    token,
    begin,
    position,
    slot,
    channels,
    exists,
    ROW_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The sums of tokens [n, 1] of one row and channels [1, m], float32 [n, m].

    Args:
        begin: the row's first token; what comes before is in the slot.
        position: [n, 1].
        exists: [n, m]; what is loaded.
    """
    total = tl.zeros(exists.shape, tl.float32)
    for back in tl.static_range(WIDTH):
        is_new = token - back >= begin
        new = tl.load(
            x + (token - back).to(tl.int64) * ROW_STRIDE + channels, mask=exists & is_new, other=0.0
        ).to(tl.float32)
        at = position - back
        place = inputs + slot * SLOT_STRIDE + (at + WIDTH) % WIDTH * CHANNELS + channels
        old = tl.load(place, mask=exists & ~is_new & (at >= 0), other=0.0).to(tl.float32)
        factor = tl.load(weight + channels * WIDTH + WIDTH - 1 - back, mask=channels < CHANNELS)
        total += tl.where(is_new, new, old) * factor.to(tl.float32)
    return total


@triton.jit
def _convolve(
    x,
    weight,
    bias,
    inputs,
    slots,
    starts,
    offsets,
    tiles,
    y,
    ROW_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    UNITS: tl.constexpr,
    SCALED: tl.constexpr,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, first, begin, end, start, slot = load_tile(tiles, starts, slots, offsets)
    if row < 0:
        return
    block = tl.program_id(1)
    column = tl.arange(0, BLOCK)[None, :]
    channels = block * SIZE + column
    token = first + tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)[:, None]
    exists = (token < end) & (column < SIZE) & (channels < CHANNELS)
    position = start + token - begin
    total = convolved(
        x,
        weight,
        inputs,
        token,
        begin,
        position,
        slot.to(tl.int64),
        channels,
        exists,
        ROW_STRIDE,
        SLOT_STRIDE,
        CHANNELS,
        WIDTH,
    )
    if bias is not None:
        total += tl.load(bias + channels, mask=channels < CHANNELS, other=0.0).to(tl.float32)
    if SILU:
        total = activate(total, "silu")
    if block < UNITS:
        total = tl.where(exists, total, 0.0)
        total *= tl.rsqrt(tl.sum(total * total, axis=1, keep_dims=True) + EPS)
        if block < SCALED:
            total *= SIZE**-0.5
    tl.store(y + token.to(tl.int64) * CHANNELS + channels, total.to(y.dtype.element_ty), exists)


@triton.jit
def _keep_inputs(
    x,
    inputs,
    slots,
    starts,
    offsets,
    LEAST: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    if end - begin < LEAST:
        return
    channels = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = inputs + tl.load(slots + row).to(tl.int64) * SLOT_STRIDE + channels
    start = tl.load(starts + row)
    for back in tl.static_range(WIDTH):
        token = end - 1 - back
        mask = (channels < CHANNELS) & (token >= begin)
        value = tl.load(x + token.to(tl.int64) * ROW_STRIDE + channels, mask=mask)
        at = start + token - begin
        tl.store(place + at % WIDTH * CHANNELS, value.to(inputs.dtype.element_ty), mask=mask)


_launch = Launcher(_convolve)
_launch_keep = Launcher(_keep_inputs)


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    rows: StateRows,
    *,
    silu: bool,
) -> Tensor:
    """See ``kernels.recurrent.convolution.short_convolution``."""
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    convolve(x, weight, bias, inputs, rows, y, silu=silu)
    return y


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    inputs: Tensor,
    rows: StateRows,
    y: Tensor,
    *,
    silu: bool,
    least: int = 1,
    alike: bool = False,
    size: int = BLOCK,
    units: int = 0,
    scaled: int = 0,
    eps: float = 0.0,
) -> None:
    """``short_convolution`` of rows of at least ``least`` tokens into y [tokens, channels].

    Args:
        size: channels of a head; ``units`` heads are then divided by their norms, and the first
            ``scaled`` of them also by the root of ``size``.
        eps: added to the sum of squares.
        alike: rows of one token have the programs of longer ones, and the same bits.
    """
    channels, width = weight.shape
    is_one = rows.one_token and not alike
    tiles, count = find_tiles(rows, len(x), least)
    args = (x, weight, bias, inputs, rows.slots, rows.starts, rows.offsets, tiles, y)
    strides = x.stride(0), inputs.stride(0), channels, width
    block = next_power_of_2(size)
    tokens = 1 if is_one else TOKENS
    parts = 1 if rows.one_token else TILE // TOKENS
    constants = (*strides, silu, units, scaled, eps, size, tokens, block)
    grid = (count, cdiv(channels, size), parts)
    _launch(grid, args, constants, num_warps=1 if is_one else 4)
    kept = (x, inputs, rows.slots, rows.starts, rows.offsets)
    grid = (len(rows.slots), cdiv(channels, 1024), 1)
    _launch_keep(grid, kept, (least, *strides, 1024), num_warps=4)
