"""Recurrent layers token by token: a token has the same bits in any step, and so has the state.

A warp has a few columns of a head's matrix in registers, and goes through the tokens of a row in
order, however many these are. Each step rounds the matrix as it is stored.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.triton.recurrent.convolution import convolve
from asyncllm.kernels.triton.recurrent.delta_chunks import convolve_heads, normalize
from asyncllm.kernels.triton.recurrent.delta_decode import decay_of
from asyncllm.kernels.triton.recurrent.mamba import step_and_decay
from asyncllm.kernels.types.recurrent import DeltaNet, LayerState, Mamba, StateRows

#: Columns of a matrix that a warp has. Another number has other bits.
COLUMNS = 8


@triton.jit
def _open(
    matrices, starts, row, slot, head,
    KEYS: tl.constexpr, VALUES: tl.constexpr, MATRIX_STRIDE: tl.constexpr,
    KEY_BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The program's part of a matrix: its keys and columns, where it is, which elements exist, and
    its numbers before the row's first token."""
    key = tl.arange(0, KEY_BLOCK)[:, None]
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_element = (key < KEYS) & (column < VALUES)
    place = matrices + slot * MATRIX_STRIDE + head * (KEYS * VALUES) + key * VALUES + column
    is_known = tl.load(starts + row) > 0
    state = tl.load(place, mask=is_element & is_known, other=0.0).to(tl.float32)
    return key, column, place, is_element, state


@triton.jit
def _rounded(state, matrices):
    """The matrix as the next step reads it."""
    return state.to(matrices.dtype.element_ty).to(tl.float32)


@triton.jit
def _of_token(
    qkv, gates, token, first_q, first_k, first_v, head, key, column,
    CHANNELS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr, HEADS: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
):  # fmt: skip
    """Query, key, value and the two gates of a token."""
    at = qkv + tl.cast(token, tl.int64) * CHANNELS
    q = tl.load(at + first_q + key, mask=key < KEYS, other=0.0).to(tl.float32)
    k = tl.load(at + first_k + key, mask=key < KEYS, other=0.0).to(tl.float32)
    v = tl.load(at + first_v + column, mask=column < VALUES, other=0.0).to(tl.float32)
    numbers = gates + tl.cast(token, tl.int64) * GATE_STRIDE + head
    return q, k, v, tl.load(numbers).to(tl.float32), tl.load(numbers + HEADS).to(tl.float32)


@triton.jit
def _delta_tokens(
    qkv, gates, decay, step_bias, matrices, slots, starts, offsets, out,
    KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    GATE_STRIDE: tl.constexpr, MATRIX_STRIDE: tl.constexpr, KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    head = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    if end == begin:
        return
    key, column, place, is_element, state = _open(
        matrices, starts, row, slot, head, KEYS, VALUES, MATRIX_STRIDE, KEY_BLOCK, COLUMNS
    )
    first_q = head // (HEADS // KEY_HEADS) * KEYS
    first_k = KEY_HEADS * KEYS + first_q
    first_v = 2 * KEY_HEADS * KEYS + head * VALUES
    q, k, v, b, a = _of_token(
        qkv, gates, begin, first_q, first_k, first_v, head, key, column,
        CHANNELS, KEYS, VALUES, HEADS, GATE_STRIDE,
    )  # fmt: skip
    for token in range(begin, end):
        # The next token's numbers are on their way meanwhile.
        next_q, next_k, next_v, next_b, next_a = _of_token(
            qkv, gates, tl.minimum(token + 1, end - 1), first_q, first_k, first_v, head, key,
            column, CHANNELS, KEYS, VALUES, HEADS, GATE_STRIDE,
        )  # fmt: skip
        beta = 1.0 / (1.0 + tl.exp(-b))
        kept = tl.exp(decay_of(decay, step_bias, a, head))
        added = beta * (v - kept * tl.sum(state * k, axis=0, keep_dims=True))
        result = kept * tl.sum(state * q, axis=0, keep_dims=True)
        result += tl.sum(q * k, axis=0, keep_dims=True) * added
        state = _rounded(kept * state + k * added, matrices)
        at = out + tl.cast(token, tl.int64) * (HEADS * VALUES) + head * VALUES + column
        tl.store(at, result.to(out.dtype.element_ty), mask=column < VALUES)
        q, k, v, b, a = next_q, next_k, next_v, next_b, next_a
    tl.store(place, state.to(matrices.dtype.element_ty), mask=is_element & (slot > 0))


@triton.jit
def _mamba_tokens(
    x, xkq, decay, step_bias, skip, matrices, slots, starts, offsets, y,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    LEAST: tl.constexpr, GREATEST: tl.constexpr, ROW_STRIDE: tl.constexpr,
    MATRIX_STRIDE: tl.constexpr, KEY_BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    INNER: tl.constexpr = HEADS * VALUES
    CHANNELS: tl.constexpr = INNER + 2 * GROUPS * KEYS
    head = tl.program_id(0)
    row = tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    slot = tl.load(slots + row).to(tl.int64)
    if end == begin:
        return
    key, column, place, is_element, state = _open(
        matrices, starts, row, slot, head, KEYS, VALUES, MATRIX_STRIDE, KEY_BLOCK, COLUMNS
    )
    first_k = INNER + head // (HEADS // GROUPS) * KEYS
    for token in range(begin, end):
        at = xkq + tl.cast(token, tl.int64) * CHANNELS
        of_token = x + tl.cast(token, tl.int64) * ROW_STRIDE
        v = tl.load(at + head * VALUES + column, mask=column < VALUES, other=0.0).to(tl.float32)
        k = tl.load(at + first_k + key, mask=key < KEYS, other=0.0).to(tl.float32)
        q = tl.load(at + first_k + GROUPS * KEYS + key, mask=key < KEYS, other=0.0).to(tl.float32)
        gate = tl.load(of_token + head * VALUES + column, mask=column < VALUES, other=0.0)
        a = tl.load(of_token + INNER + CHANNELS + head)
        step, g = step_and_decay(a, decay, step_bias, head, LEAST, GREATEST)
        state = state * tl.exp(g) + k * (step * v)
        result = tl.sum(state * q, axis=0, keep_dims=True) + tl.load(skip + head) * v
        result *= activate(gate.to(tl.float32), "silu")
        state = _rounded(state, matrices)
        results = y + tl.cast(token, tl.int64) * INNER + head * VALUES + column
        tl.store(results, result.to(y.dtype.element_ty), mask=column < VALUES)
    tl.store(place, state.to(matrices.dtype.element_ty), mask=is_element & (slot > 0))


_launch_delta = Launcher(_delta_tokens)
_launch_mamba = Launcher(_mamba_tokens)


def ordered_delta_net(
    x: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows
) -> Tensor:
    """See ``kernels.recurrent.delta.ordered_delta_net``."""
    assert state.matrices is not None
    y = x.new_empty(len(x), net.value_heads * net.value_dim)
    out = y.new_empty(y.shape)
    qkv = convolve_heads(x, net, state, rows, alike=True)
    of_rows = rows.slots, rows.starts, rows.offsets
    sizes = net.key_heads, net.value_heads, net.key_dim, net.value_dim
    strides = gates.stride(0), state.matrices.stride(0)
    _launch_delta(
        (net.value_heads, len(rows.slots), cdiv(net.value_dim, COLUMNS)),
        (qkv, gates, net.decay, net.step_bias, state.matrices, *of_rows, out),
        (*sizes, *strides, next_power_of_2(net.key_dim), COLUMNS),
        num_warps=1,
    )
    normalize(x, out, net, rows, y)
    return y


def ordered_mamba(x: Tensor, net: Mamba, state: LayerState, rows: StateRows) -> Tensor:
    """See ``kernels.recurrent.mamba.ordered_mamba``."""
    assert state.matrices is not None
    y = x.new_zeros(len(x), net.inner)
    channels = len(net.convolution)
    xkq = x.new_empty(len(x), channels)
    convolving = x[:, net.inner : net.inner + channels], net.convolution, net.bias
    convolve(*convolving, state.inputs, rows, xkq, silu=True, alike=True)
    of_rows = rows.slots, rows.starts, rows.offsets
    sizes = net.heads, net.groups, net.key_dim, net.value_dim, *net.limits, x.stride(0)
    _launch_mamba(
        (net.heads, len(rows.slots), cdiv(net.value_dim, COLUMNS)),
        (x, xkq, net.decay, net.step_bias, net.skip, state.matrices, *of_rows, y),
        (*sizes, state.matrices.stride(0), next_power_of_2(net.key_dim), COLUMNS),
        num_warps=1,
    )
    return y
