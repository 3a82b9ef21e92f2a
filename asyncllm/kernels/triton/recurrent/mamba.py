"""Mamba-2: one launch for rows of one token; for longer rows a convolution, then a scan.

A program has one head of a row, with its matrix in registers. The scan goes through the tiles of a
row in order: what a tile's tokens give each other is one product of matrices, what they get from
those before is another.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.launch import Launcher, next_power_of_2
from asyncllm.kernels.triton.recurrent.convolution import convolve
from asyncllm.kernels.triton.recurrent.one_token import (
    convolved_token,
    earlier_part,
    keep_token,
    softplus,
)
from asyncllm.kernels.triton.recurrent.tiles import TILE
from asyncllm.kernels.types.recurrent import LayerState, Mamba, StateRows


@triton.jit
def step_and_decay(a, decay, step_bias, head, LEAST: tl.constexpr, GREATEST: tl.constexpr):
    """The step of one or more tokens, and the logarithm of the decay in it."""
    step = softplus(a.to(tl.float32) + tl.load(step_bias + head))
    step = tl.minimum(tl.maximum(step, LEAST), GREATEST)
    return step, -tl.exp(tl.load(decay + head)) * step


@triton.jit
def _decode(
    x,
    weight,
    bias,
    decay,
    step_bias,
    skip,
    inputs,
    matrices,
    slots,
    starts,
    offsets,
    y,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LEAST: tl.constexpr,
    GREATEST: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    MATRIX_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    INNER: tl.constexpr = HEADS * VALUES
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * KEYS
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - token
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(starts + row)
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    is_value = column < VALUES
    key = tl.arange(0, KEY_BLOCK)[:, None]
    is_element = (key < KEYS) & is_value
    place = matrices + slot * MATRIX_STRIDE + head * (KEYS * VALUES) + key * VALUES + column
    group = head // (HEADS // GROUPS)
    is_first = head % (HEADS // GROUPS) == 0
    first_v = head * VALUES
    first_k = INNER + group * KEYS
    first_q = first_k + GROUPS * KEYS
    # What follows up to the wait was written before this step began with a kernel that waited.
    is_known = is_element & (position > 0) & (count == 1)
    state = tl.load(place, mask=is_known, other=0.0).to(tl.float32)
    earlier_v = earlier_part(
        weight, bias, inputs, position, slot, first_v, VALUES, VALUE_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    earlier_k = earlier_part(
        weight, bias, inputs, position, slot, first_k, KEYS, KEY_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    earlier_q = earlier_part(
        weight, bias, inputs, position, slot, first_q, KEYS, KEY_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count != 1:
        return
    result = y + token.to(tl.int64) * INNER + head * VALUES + column
    if slot == 0:
        tl.store(result, tl.zeros([1, VALUE_BLOCK], y.dtype.element_ty), mask=is_value)
        return
    # The gates come before the channels of the convolution, the numbers after them.
    of_token = x + INNER
    v, new_v = convolved_token(of_token, earlier_v, token, first_v, VALUES, VALUE_BLOCK, ROW_STRIDE)
    k, new_k = convolved_token(of_token, earlier_k, token, first_k, KEYS, KEY_BLOCK, ROW_STRIDE)
    q, new_q = convolved_token(of_token, earlier_q, token, first_q, KEYS, KEY_BLOCK, ROW_STRIDE)
    a = tl.load(of_token + token.to(tl.int64) * ROW_STRIDE + CHANNELS + head)
    gate = tl.load(x + token.to(tl.int64) * ROW_STRIDE + head * VALUES + column, mask=is_value)
    gate = gate.to(tl.float32)
    step, g = step_and_decay(a, decay, step_bias, head, LEAST, GREATEST)
    direct = tl.load(skip + head) * v
    state = state * tl.exp(g) + tl.sum(k, axis=0)[:, None] * (step * v)
    tl.store(place, state.to(matrices.dtype.element_ty), mask=is_element)
    out = tl.sum(state * tl.sum(q, axis=0)[:, None], axis=0, keep_dims=True) + direct
    out *= activate(gate, "silu")
    tl.store(result, out.to(y.dtype.element_ty), mask=is_value)
    keep_token(
        inputs, new_v, position, slot, first_v, True, VALUES, VALUE_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    keep_token(
        inputs, new_k, position, slot, first_k, is_first, KEYS, KEY_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    keep_token(
        inputs, new_q, position, slot, first_q, is_first, KEYS, KEY_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip


@triton.jit
def _scan(
    x,
    xkq,
    decay,
    step_bias,
    skip,
    matrices,
    slots,
    starts,
    offsets,
    y,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    LEAST: tl.constexpr,
    GREATEST: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    MATRIX_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    INNER: tl.constexpr = HEADS * VALUES
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * KEYS
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    if end - begin < 2:
        return
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    key = tl.arange(0, KEY_BLOCK)
    place = matrices + tl.load(slots + row).to(tl.int64) * MATRIX_STRIDE
    place += head * (KEYS * VALUES) + key[:, None] * VALUES + column
    is_element = (key[:, None] < KEYS) & (column < VALUES)
    state = tl.load(place, mask=is_element & (tl.load(starts + row) > 0), other=0.0).to(tl.float32)
    group = head // (HEADS // GROUPS)
    i = tl.arange(0, TILE)[:, None]
    j = tl.arange(0, TILE)[None, :]
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        exists = token[:, None] < end
        at = token[:, None].to(tl.int64)
        numbers = x + token.to(tl.int64) * ROW_STRIDE + INNER + CHANNELS + head
        a = tl.load(numbers, mask=token < end, other=0.0)
        step, g = step_and_decay(a, decay, step_bias, head, LEAST, GREATEST)
        total = tl.cumsum(tl.where(token < end, g, 0.0), 0)
        keys = xkq + at * CHANNELS + INNER + group * KEYS + key[None, :]
        is_key = exists & (key[None, :] < KEYS)
        k = tl.load(keys, mask=is_key, other=0.0).to(tl.float32)
        q = tl.load(keys + GROUPS * KEYS, mask=is_key, other=0.0).to(tl.float32)
        is_value = exists & (column < VALUES)
        values = xkq + at * CHANNELS + head * VALUES + column
        v = tl.load(values, mask=is_value, other=0.0).to(tl.float32)
        added = v * step[:, None]
        decays = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], 0.0))
        pairs = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        pairs = tl.where(i >= j, pairs * decays, 0.0)
        out = tl.dot(q, state, input_precision=PRECISION) * tl.exp(total)[:, None]
        out += tl.dot(pairs, added, input_precision=PRECISION) + tl.load(skip + head) * v
        gates = x + at * ROW_STRIDE + head * VALUES + column
        gate = tl.load(gates, mask=is_value, other=0.0).to(tl.float32)
        out *= activate(gate, "silu")
        result = y + at * INNER + head * VALUES + column
        tl.store(result, out.to(y.dtype.element_ty), mask=is_value)
        last = tl.min(total, axis=0)  # it never grows
        k *= tl.exp(last - total)[:, None]
        state *= tl.exp(last)
        state += tl.dot(tl.trans(k), added, input_precision=PRECISION)
    tl.store(place, state.to(matrices.dtype.element_ty), mask=is_element)


_launch_decode = Launcher(_decode)
_launch_scan = Launcher(_scan)


def mamba(x: Tensor, net: Mamba, state: LayerState, rows: StateRows) -> Tensor:
    """See ``kernels.recurrent.mamba.mamba``."""
    assert state.matrices is not None
    y = x.new_empty(len(x), net.inner) if rows.one_token else x.new_zeros(len(x), net.inner)
    of_rows = rows.slots, rows.starts, rows.offsets
    numbers = net.decay, net.step_bias, net.skip
    sizes = net.heads, net.groups, net.key_dim, net.value_dim, *net.limits, x.stride(0)
    matrix_stride = state.matrices.stride(0)
    blocks = next_power_of_2(net.key_dim), next_power_of_2(net.value_dim)
    grid = net.heads, len(rows.slots), 1
    if not rows.one_token:
        channels = len(net.convolution)
        xkq = x.new_empty(len(x), channels)
        convolving = x[:, net.inner : net.inner + channels], net.convolution, net.bias
        convolve(*convolving, state.inputs, rows, xkq, silu=True, least=2)
        precision = "ieee" if x.dtype == torch.float32 else "tf32"
        at_least_16 = (max(block, 16) for block in blocks)
        _launch_scan(
            grid,
            (x, xkq, *numbers, state.matrices, *of_rows, y),
            (*sizes, matrix_stride, precision, TILE, *at_least_16),
            num_warps=8,
            num_stages=1 if x.dtype == torch.float32 else 2,
        )
    _launch_decode(
        grid,
        (x, net.convolution, net.bias, *numbers, state.inputs, state.matrices, *of_rows, y),
        (*sizes, state.inputs.stride(0), matrix_stride, state.inputs.shape[1], *blocks),
        num_warps=max(blocks[0] * blocks[1] // 2048, 1),
    )
    return y
