"""One token of each row through a gated delta net, from projections to results, in one launch.

A program has one value head of a row: its matrix stays in registers between one read and one write
of memory. The program also convolves the channels that it needs; those of a key head are convolved
by each of its value heads, and the first one keeps the inputs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, next_power_of_2
from asyncllm.kernels.triton.recurrent.convolution import convolved
from asyncllm.kernels.types.recurrent import UNIT_EPS, DeltaNet, LayerState, StateRows


@triton.jit
def softplus(x):
    """log(1 + exp(x)), which is x where exp(x) is large."""
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def decay_of(decay, step_bias, gate, head):
    """The logarithm of a head's decay; ``gate`` is that of one or more tokens."""
    rate = tl.exp(tl.load(decay + head).to(tl.float32))
    return -rate * softplus(gate + tl.load(step_bias + head).to(tl.float32))


@triton.jit
def _conv(
    x,
    weight,
    inputs,
    token,
    position,
    slot,
    first,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    keeps,
    ROW_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """SIZE channels from ``first`` on of one token, convolved and activated: float32 [1, BLOCK]."""
    column = tl.arange(0, BLOCK)[None, :]
    channels = first + column
    exists = column < SIZE
    at = tl.full([1, 1], 0, tl.int32)
    total = convolved(
        x,
        weight,
        inputs,
        at + token,
        token,
        at + position,
        slot,
        channels,
        exists,
        ROW_STRIDE,
        SLOT_STRIDE,
        CHANNELS,
        WIDTH,
    )
    new = tl.load(x + token.to(tl.int64) * ROW_STRIDE + channels, mask=exists)
    place = inputs + slot * SLOT_STRIDE + position % WIDTH * CHANNELS + channels
    tl.store(place, new.to(inputs.dtype.element_ty), mask=exists & keeps)
    return tl.where(exists, total / (1.0 + tl.exp(-total)), 0.0)


@triton.jit
def _decode(
    x,
    gates,
    weight,
    decay,
    step_bias,
    norm,
    inputs,
    matrices,
    slots,
    starts,
    offsets,
    y,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    NORM_EPS: tl.constexpr,
    UNIT: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    MATRIX_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # The step's rows and the states were written long before: at least the projection's launch,
    # which the previous kernel waited for, is in between.
    token = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - token
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(starts + row)
    key = tl.arange(0, KEY_BLOCK)[:, None]
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    matrix = matrices + slot * MATRIX_STRIDE + head * (KEYS * VALUES)
    IS_WHOLE: tl.constexpr = KEYS == KEY_BLOCK and VALUES == VALUE_BLOCK
    state = tl.zeros([KEY_BLOCK, VALUE_BLOCK], tl.float32)
    if (position > 0) & (count == 1):
        if IS_WHOLE:
            state = tl.load(matrix + key * VALUES + column)
        else:
            is_element = (key < KEYS) & (column < VALUES)
            state = tl.load(matrix + key * VALUES + column, mask=is_element, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count != 1:
        return
    result = y + token.to(tl.int64) * (HEADS * VALUES) + head * VALUES + column
    if slot == 0:
        tl.store(result, tl.zeros([1, VALUE_BLOCK], y.dtype.element_ty), mask=column < VALUES)
        return
    key_head = head // GROUP
    is_first = head % GROUP == 0
    q = _conv(
        x,
        weight,
        inputs,
        token,
        position,
        slot,
        key_head * KEYS,
        KEYS,
        KEY_BLOCK,
        is_first,
        ROW_STRIDE,
        SLOT_STRIDE,
        CHANNELS,
        WIDTH,
    )
    k = _conv(
        x,
        weight,
        inputs,
        token,
        position,
        slot,
        (KEY_HEADS + key_head) * KEYS,
        KEYS,
        KEY_BLOCK,
        is_first,
        ROW_STRIDE,
        SLOT_STRIDE,
        CHANNELS,
        WIDTH,
    )
    v = _conv(
        x,
        weight,
        inputs,
        token,
        position,
        slot,
        2 * KEY_HEADS * KEYS + head * VALUES,
        VALUES,
        VALUE_BLOCK,
        True,
        ROW_STRIDE,
        SLOT_STRIDE,
        CHANNELS,
        WIDTH,
    )
    q *= tl.rsqrt(tl.sum(q * q, axis=1, keep_dims=True) + UNIT) * KEYS**-0.5
    k *= tl.rsqrt(tl.sum(k * k, axis=1, keep_dims=True) + UNIT)
    alike = tl.sum(q * k, axis=1, keep_dims=True)
    q = tl.trans(q)
    k = tl.trans(k)
    of_token = gates + token.to(tl.int64) * GATE_STRIDE + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(of_token).to(tl.float32)))
    state *= tl.exp(decay_of(decay, step_bias, tl.load(of_token + HEADS).to(tl.float32), head))
    added = beta * (v - tl.sum(state * k, axis=0, keep_dims=True))
    out = tl.sum(state * q, axis=0, keep_dims=True) + alike * added
    state += k * added
    if IS_WHOLE:
        tl.store(matrix + key * VALUES + column, state)
    else:
        is_element = (key < KEYS) & (column < VALUES)
        tl.store(matrix + key * VALUES + column, state, mask=is_element)
    out *= tl.rsqrt(tl.sum(out * out, axis=1, keep_dims=True) / VALUES + NORM_EPS)
    out *= tl.load(norm + column, mask=column < VALUES, other=0.0).to(tl.float32)
    z = x + token.to(tl.int64) * ROW_STRIDE + CHANNELS + head * VALUES + column
    gate = tl.load(z, mask=column < VALUES, other=0.0).to(tl.float32)
    out *= gate / (1.0 + tl.exp(-gate))
    tl.store(result, out.to(y.dtype.element_ty), mask=column < VALUES)


_launch = Launcher(_decode)


def decode(
    x: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows, y: Tensor
) -> None:
    """``gated_delta_net`` of the rows that have one token, into y."""
    assert state.matrices is not None
    weights = net.convolution, net.decay, net.step_bias, net.norm
    of_rows = rows.slots, rows.starts, rows.offsets
    sizes = net.key_heads, net.value_heads, net.key_dim, net.value_dim, net.eps, UNIT_EPS
    strides = x.stride(0), gates.stride(0), state.inputs.stride(0), state.matrices.stride(0)
    blocks = next_power_of_2(net.key_dim), next_power_of_2(net.value_dim)
    _launch(
        (net.value_heads, len(rows.slots), 1),
        (x, gates, *weights, state.inputs, state.matrices, *of_rows, y),
        (*sizes, *strides, state.inputs.shape[1], *blocks),
        num_warps=max(blocks[0] * blocks[1] // 2048, 1),
    )
