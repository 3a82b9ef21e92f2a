"""One token of each row through a gated delta net.

``decode`` goes from projections to results in one launch. A program has one value head of a row; it
also convolves the channels that it needs. Those of a key head are convolved by each of its value
heads, and the first one keeps the inputs.

``step`` is for rows of one token beside prompts, which are convolved and normalised together.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.triton.recurrent.one_token import (
    convolved_token,
    earlier_part,
    keep_token,
    softplus,
)
from asyncllm.kernels.types.recurrent import UNIT_EPS, DeltaNet, LayerState, StateRows

#: Columns of a head's matrix that a program of ``step`` has, and its warps.
COLUMNS = 64
WARPS = 8


@triton.jit
def decay_of(decay, step_bias, gate, head):
    """The logarithm of a head's decay; ``gate`` is that of one or more tokens."""
    rate = tl.exp(tl.load(decay + head).to(tl.float32))
    return -rate * softplus(gate + tl.load(step_bias + head).to(tl.float32))


@triton.jit
def _add_three(a, b, c, d, e, f):
    """Of ``tl.reduce``, for three sums at once: each alone would have barriers of its own."""
    return a + d, b + e, c + f


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
    token = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - token
    slot = tl.load(slots + row).to(tl.int64)
    position = tl.load(starts + row)
    key = tl.arange(0, KEY_BLOCK)[:, None]
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    is_value = column < VALUES
    matrix = matrices + slot * MATRIX_STRIDE + head * (KEYS * VALUES) + key * VALUES + column
    first_q = head // GROUP * KEYS
    first_k = KEY_HEADS * KEYS + first_q
    first_v = 2 * KEY_HEADS * KEYS + head * VALUES
    # What follows up to the wait was written before this step began with a kernel that waited.
    earlier_q = earlier_part(
        weight, None, inputs, position, slot, first_q, KEYS, KEY_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    earlier_k = earlier_part(
        weight, None, inputs, position, slot, first_k, KEYS, KEY_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    earlier_v = earlier_part(
        weight, None, inputs, position, slot, first_v, VALUES, VALUE_BLOCK,
        SLOT_STRIDE, CHANNELS, WIDTH,
    )  # fmt: skip
    is_element = is_value & (key < KEYS)
    is_known = is_element & (position > 0) & (count == 1)
    state = tl.load(matrix, mask=is_known, other=0.0).to(tl.float32)
    factors = tl.load(norm + column, mask=is_value, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count != 1:
        return
    result = y + token.to(tl.int64) * (HEADS * VALUES) + head * VALUES + column
    if slot == 0:
        tl.store(result, tl.zeros([1, VALUE_BLOCK], y.dtype.element_ty), mask=is_value)
        return
    q, new_q = convolved_token(x, earlier_q, token, first_q, KEYS, KEY_BLOCK, ROW_STRIDE)
    k, new_k = convolved_token(x, earlier_k, token, first_k, KEYS, KEY_BLOCK, ROW_STRIDE)
    v, new_v = convolved_token(x, earlier_v, token, first_v, VALUES, VALUE_BLOCK, ROW_STRIDE)
    of_token = gates + token.to(tl.int64) * GATE_STRIDE + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(of_token).to(tl.float32)))
    kept = tl.exp(decay_of(decay, step_bias, tl.load(of_token + HEADS).to(tl.float32), head))
    z = x + token.to(tl.int64) * ROW_STRIDE + CHANNELS + head * VALUES + column
    gate = tl.load(z, mask=is_value, other=0.0).to(tl.float32)
    factors *= activate(gate, "silu")
    of_q, of_k, alike = tl.reduce((q * q, k * k, q * k), 1, _add_three, keep_dims=True)
    q_scale = tl.rsqrt(of_q + UNIT) * KEYS**-0.5
    k_scale = tl.rsqrt(of_k + UNIT)
    alike *= q_scale * k_scale
    # As columns; a transposition would have each thread convolve all that it multiplies.
    q = tl.sum(q * q_scale, axis=0)[:, None]
    k = tl.sum(k * k_scale, axis=0)[:, None]
    of_key = tl.sum(state * k, axis=0, keep_dims=True)
    of_query = tl.sum(state * q, axis=0, keep_dims=True)
    added = beta * (v - kept * of_key)
    state = kept * state + k * added
    tl.store(matrix, state.to(matrices.dtype.element_ty), mask=is_element)
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


@triton.jit
def _step(
    qkv,
    gates,
    decay,
    step_bias,
    matrices,
    slots,
    starts,
    offsets,
    out,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    MATRIX_STRIDE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - token
    slot = tl.load(slots + row).to(tl.int64)
    key = tl.arange(0, KEY_BLOCK)[:, None]
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_value = column < VALUES
    is_element = is_value & (key < KEYS)
    matrix = matrices + slot * MATRIX_STRIDE + head * (KEYS * VALUES) + key * VALUES + column
    is_known = (tl.load(starts + row) > 0) & (count == 1)
    # The states and the step's rows were written long before: at least the convolution's launch,
    # which the previous kernel waited for, is in between.
    state = tl.load(matrix, mask=is_element & is_known, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if count != 1:
        return
    of_token = qkv + token.to(tl.int64) * CHANNELS
    keys = of_token + head // (HEADS // KEY_HEADS) * KEYS + key
    q = tl.load(keys, mask=key < KEYS, other=0.0).to(tl.float32)
    k = tl.load(keys + KEY_HEADS * KEYS, mask=key < KEYS, other=0.0).to(tl.float32)
    values = of_token + 2 * KEY_HEADS * KEYS + head * VALUES + column
    v = tl.load(values, mask=is_value, other=0.0).to(tl.float32)
    numbers = gates + token.to(tl.int64) * GATE_STRIDE + head
    beta = 1.0 / (1.0 + tl.exp(-tl.load(numbers).to(tl.float32)))
    kept = tl.exp(decay_of(decay, step_bias, tl.load(numbers + HEADS).to(tl.float32), head))
    added = beta * (v - kept * tl.sum(state * k, axis=0, keep_dims=True))
    result = kept * tl.sum(state * q, axis=0, keep_dims=True)
    result += tl.sum(q * k, axis=0, keep_dims=True) * added
    state = kept * state + k * added
    tl.store(matrix, state.to(matrices.dtype.element_ty), mask=is_element & (slot > 0))
    place = out + token.to(tl.int64) * (HEADS * VALUES) + head * VALUES + column
    tl.store(place, result.to(out.dtype.element_ty), mask=is_value)


_launch = Launcher(_decode)
_launch_step = Launcher(_step)


def decode(
    x: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows, y: Tensor
) -> None:
    """``gated_delta_net`` of rows that have one token each, into y."""
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
        num_warps=max(blocks[0] * blocks[1] // 4096, 1),
    )


def step(
    qkv: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows, out: Tensor
) -> None:
    """The recurrence of the rows that have one token, from what is convolved, into ``out``."""
    assert state.matrices is not None
    heads, columns = net.value_heads, min(COLUMNS, next_power_of_2(net.value_dim))
    of_rows = rows.slots, rows.starts, rows.offsets
    sizes = net.key_heads, heads, net.key_dim, net.value_dim
    strides = gates.stride(0), state.matrices.stride(0)
    _launch_step(
        (heads, len(rows.slots), cdiv(net.value_dim, columns)),
        (qkv, gates, net.decay, net.step_bias, state.matrices, *of_rows, out),
        (*sizes, *strides, next_power_of_2(net.key_dim), columns),
        num_warps=WARPS,
    )
