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
from asyncllm.kernels.types.recurrent import UNIT_EPS, DeltaNet, LayerState, StateRows

#: How often a program goes over parts of its matrix.
PASSES = 1


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
def convolved_token(
    x,
    weight,
    bias,
    inputs,
    token,
    position,
    slot,
    first,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    SLOT_STRIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """SIZE channels from ``first`` on of one token: convolved and activated, float32 [1, BLOCK],
    and what ``keep_token`` takes. Stores nothing, so that loads do not wait for each other."""
    column = tl.arange(0, BLOCK)[None, :]
    channels = first + column
    exists = column < SIZE
    new = tl.load(x + token.to(tl.int64) * ROW_STRIDE + channels, mask=exists, other=0.0)
    weights = weight + channels * WIDTH + WIDTH - 1
    total = new.to(tl.float32) * tl.load(weights, mask=exists, other=0.0).to(tl.float32)
    of_slot = inputs + slot * SLOT_STRIDE + channels
    for back in tl.static_range(1, WIDTH):
        place = of_slot + (position - back + WIDTH) % WIDTH * CHANNELS
        old = tl.load(place, mask=exists & (position >= back), other=0.0).to(tl.float32)
        total += old * tl.load(weights - back, mask=exists, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channels, mask=exists, other=0.0).to(tl.float32)
    return tl.where(exists, total / (1.0 + tl.exp(-total)), 0.0), new


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
    PASSES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    GROUP: tl.constexpr = HEADS // KEY_HEADS
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    PART: tl.constexpr = KEY_BLOCK // PASSES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # The step's rows and the states were written long before: at least the projection's launch,
    # which the previous kernel waited for, is in between.
    token = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - token
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(starts + row)
    part = tl.arange(0, PART)[:, None]
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    is_value = column < VALUES
    matrix = matrices + slot * MATRIX_STRIDE + head * (KEYS * VALUES) + part * VALUES + column
    is_known = (position > 0) & (count == 1) & is_value
    if PASSES == 1:
        state = tl.load(matrix, mask=is_known & (part < KEYS), other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count != 1:
        return
    result = y + token.to(tl.int64) * (HEADS * VALUES) + head * VALUES + column
    if slot == 0:
        tl.store(result, tl.zeros([1, VALUE_BLOCK], y.dtype.element_ty), mask=is_value)
        return
    first_q = head // GROUP * KEYS
    first_k = KEY_HEADS * KEYS + first_q
    first_v = 2 * KEY_HEADS * KEYS + head * VALUES
    q, new_q = convolved_token(
        x, weight, None, inputs, token, position, slot, first_q, KEYS, KEY_BLOCK,
        ROW_STRIDE, SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    k, new_k = convolved_token(
        x, weight, None, inputs, token, position, slot, first_k, KEYS, KEY_BLOCK,
        ROW_STRIDE, SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    v, new_v = convolved_token(
        x, weight, None, inputs, token, position, slot, first_v, VALUES, VALUE_BLOCK,
        ROW_STRIDE, SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    of_token = gates + token.to(tl.int64) * GATE_STRIDE + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(of_token).to(tl.float32)))
    kept = tl.exp(decay_of(decay, step_bias, tl.load(of_token + HEADS).to(tl.float32), head))
    factors = tl.load(norm + column, mask=is_value, other=0.0).to(tl.float32)
    z = x + token.to(tl.int64) * ROW_STRIDE + CHANNELS + head * VALUES + column
    gate = tl.load(z, mask=is_value, other=0.0).to(tl.float32)
    factors *= gate / (1.0 + tl.exp(-gate))
    q *= tl.rsqrt(tl.sum(q * q, axis=1, keep_dims=True) + UNIT) * KEYS**-0.5
    k *= tl.rsqrt(tl.sum(k * k, axis=1, keep_dims=True) + UNIT)
    alike = tl.sum(q * k, axis=1, keep_dims=True)
    if PASSES == 1:
        q = tl.trans(q)
        k = tl.trans(k)
        of_key = tl.sum(state * k, axis=0, keep_dims=True)
        of_query = tl.sum(state * q, axis=0, keep_dims=True)
        added = beta * (v - kept * of_key)
        tl.store(matrix, kept * state + k * added, mask=is_value & (part < KEYS))
    else:
        # The matrix is read twice, from the cache the second time, and never as a whole in
        # registers, so that more programs run at the same time.
        q = tl.reshape(q, [PASSES, PART])
        k = tl.reshape(k, [PASSES, PART])
        number = tl.arange(0, PASSES)[:, None]
        of_key = tl.zeros([1, VALUE_BLOCK], tl.float32)
        of_query = tl.zeros([1, VALUE_BLOCK], tl.float32)
        for i in tl.static_range(PASSES):
            exists = is_known & (i * PART + part < KEYS)
            state = tl.load(matrix + i * PART * VALUES, mask=exists, other=0.0)
            keys = tl.sum(tl.where(number == i, k, 0.0), axis=0)[:, None]
            queries = tl.sum(tl.where(number == i, q, 0.0), axis=0)[:, None]
            of_key += tl.sum(state * keys, axis=0, keep_dims=True)
            of_query += tl.sum(state * queries, axis=0, keep_dims=True)
        added = beta * (v - kept * of_key)
        for i in tl.static_range(PASSES):
            exists = is_known & (i * PART + part < KEYS)
            state = tl.load(matrix + i * PART * VALUES, mask=exists, other=0.0)
            keys = tl.sum(tl.where(number == i, k, 0.0), axis=0)[:, None]
            place = matrix + i * PART * VALUES
            exists = is_value & (i * PART + part < KEYS)
            tl.store(place, kept * state + keys * added, mask=exists)
    out = kept * of_query + alike * added
    out *= tl.rsqrt(tl.sum(out * out, axis=1, keep_dims=True) / VALUES + NORM_EPS) * factors
    tl.store(result, out.to(y.dtype.element_ty), mask=is_value)
    is_first = head % GROUP == 0
    keep_token(
        inputs, new_q, position, slot, first_q, is_first, KEYS, KEY_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    keep_token(
        inputs, new_k, position, slot, first_k, is_first, KEYS, KEY_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    keep_token(
        inputs, new_v, position, slot, first_v, True, VALUES, VALUE_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip


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
        (*sizes, *strides, state.inputs.shape[1], *blocks, PASSES),
        num_warps=max(blocks[0] * blocks[1] // 2048 // PASSES, 1),
    )
