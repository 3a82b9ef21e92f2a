"""The convolution of one token of a row, as part of kernels that do more with it."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.triton.activation import activate


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which is x where exp(x) is large."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def earlier_part(
    weight,
    bias,
    inputs,
    position,
    slot,
    first,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """What earlier tokens add to the convolution of SIZE channels from ``first`` on, and the
    factors of the token itself: float32 [1, BLOCK] each."""
    column = tl.arange(0, BLOCK)[None, :]
    channels = first + column
    exists = column < SIZE
    weights = weight + channels * WIDTH + WIDTH - 1
    total = tl.zeros([1, BLOCK], tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=exists, other=0.0).to(tl.float32)
    of_slot = inputs + slot * SLOT_STRIDE + channels
    for back in tl.static_range(1, WIDTH):
        place = of_slot + (position - back + WIDTH) % WIDTH * CHANNELS
        old = tl.load(place, mask=exists & (position >= back), other=0.0).to(tl.float32)
        total += old * tl.load(weights - back, mask=exists, other=0.0).to(tl.float32)
    return total, tl.load(weights, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def convolved_token(
    x,
    earlier,
    token,
    first,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
):
    """SIZE channels from ``first`` on of one token: convolved and activated, float32 [1, BLOCK],
    and what ``keep_token`` takes. Stores nothing, so that loads do not wait for each other.

    Args:
        earlier: of ``earlier_part``.
    """
    column = tl.arange(0, BLOCK)[None, :]
    at = x + token.to(tl.int64) * ROW_STRIDE + first + column
    new = tl.load(at, mask=column < SIZE, other=0.0)
    return activate(earlier[0] + new.to(tl.float32) * earlier[1], "silu"), new


@triton.jit
def keep_token(
    inputs,
    new,
    position,
    slot,
    first,
    keeps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Keep what ``convolved_token`` has read for the following tokens."""
    column = tl.arange(0, BLOCK)[None, :]
    place = inputs + slot * SLOT_STRIDE + position % WIDTH * CHANNELS + first + column
    tl.store(place, new.to(inputs.dtype.element_ty), mask=(column < SIZE) & keeps)
