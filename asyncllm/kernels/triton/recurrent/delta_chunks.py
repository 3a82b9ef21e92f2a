"""Prompts through gated delta nets, a tile of tokens at a time: see ``kernels.recurrent.delta``.

Two kernels. The first works on all tiles side by side, and computes what does not need the state:
with T = (I + tril(beta K K^T D, -1))^-1, it stores T beta V, T beta (K exp(G)) and Q K^T D. The
second goes through the tiles of a row in order, with some columns of a head's matrix in registers.
A third normalises the results.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.triton.recurrent.convolution import TOKENS, convolve
from asyncllm.kernels.triton.recurrent.delta_decode import decay_of
from asyncllm.kernels.triton.recurrent.tiles import TILE, find_tiles, load_tile
from asyncllm.kernels.types.recurrent import UNIT_EPS, DeltaNet, LayerState, StateRows

#: Tokens of a block whose triangle is inverted token by token.
PART = tl.constexpr(16)
#: Columns of a head's matrix that a program has.
COLUMNS = 32


@triton.jit
def _inverse(lower, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangle [TILE, TILE].

    Blocks on the diagonal are inverted by substitution, each token after those before it. With B of
    these inverses, and M = B times the rest, the whole is (I - M)(I + M^2) B, as M^4 is 0.
    Products of the whole triangle, without blocks, would be sums of huge numbers that cancel where
    keys are alike.
    """
    PARTS: tl.constexpr = TILE // PART
    row = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    is_block = row // PART == column // PART
    blocks = tl.where(is_block, lower, 0.0)
    blocks = tl.sum(tl.reshape(blocks, [PARTS, PART, PARTS, PART]), axis=2)
    token = tl.arange(0, PART)[None, :, None]
    inverse = tl.zeros([PARTS, PART, PART], tl.float32)  # without the identity
    for i in tl.range(1, PART):
        factors = tl.sum(tl.where(token == i, blocks, 0.0), axis=1)
        earlier = tl.sum(factors[:, :, None] * inverse, axis=1)
        inverse = tl.where(token == i, -(factors + earlier)[:, None, :], inverse)
    whole = tl.broadcast_to(inverse[:, :, None, :], [PARTS, PART, PARTS, PART])
    whole = tl.where(is_block, tl.reshape(whole, [TILE, TILE]), 0.0)
    whole += tl.where(row == column, 1.0, 0.0)
    rest = tl.where(is_block, 0.0, lower)
    m = tl.dot(whole, rest, input_precision=PRECISION)
    square = tl.dot(m, m, input_precision=PRECISION)
    series = square - m - tl.dot(m, square, input_precision=PRECISION)
    return whole + tl.dot(series, whole, input_precision=PRECISION)


@triton.jit
def _load_gates(gates, decay, step_bias, token, end, head, GATE_STRIDE: tl.constexpr, HEADS):
    """beta and the running sum of g of a tile's tokens; 0 and the last sum after the row's end."""
    place = gates + token.to(tl.int64) * GATE_STRIDE + head
    exists = token < end
    beta = 1.0 / (1.0 + tl.exp(-tl.load(place, mask=exists, other=0.0).to(tl.float32)))
    g = decay_of(
        decay, step_bias, tl.load(place + HEADS, mask=exists, other=0.0).to(tl.float32), head
    )
    return tl.where(exists, beta, 0.0), tl.cumsum(tl.where(exists, g, 0.0), 0)


@triton.jit
def _prepare(
    qkv,
    gates,
    decay,
    step_bias,
    slots,
    starts,
    offsets,
    tiles,
    u,
    w,
    mixed,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, first, _, end, _, _ = load_tile(tiles, starts, slots, offsets)
    if row < 0:
        return
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    token = first + tl.arange(0, TILE)
    exists = token[:, None] < end
    at = token[:, None].to(tl.int64)
    key = tl.arange(0, KEY_BLOCK)[None, :]
    keys = qkv + at * CHANNELS + head // (HEADS // KEY_HEADS) * KEYS + key
    q = tl.load(keys, mask=exists & (key < KEYS), other=0.0)
    k = tl.load(keys + KEY_HEADS * KEYS, mask=exists & (key < KEYS), other=0.0)
    beta, total = _load_gates(gates, decay, step_bias, token, end, head, GATE_STRIDE, HEADS)
    i = tl.arange(0, TILE)[:, None]
    j = tl.arange(0, TILE)[None, :]
    decays = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], 0.0))
    q = q.to(tl.float32)
    k = k.to(tl.float32)
    pairs = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    pairs = tl.where(i >= j, pairs * decays, 0.0)
    square = mixed + (at * HEADS + head) * TILE + j
    tl.store(square, pairs.to(mixed.dtype.element_ty), mask=exists)
    alike = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    lower = tl.where(i > j, beta[:, None] * alike * decays, 0.0)
    inverse = _inverse(lower, TILE, INVERSE_PRECISION)
    grown = (beta * tl.exp(total))[:, None] * k
    solved = tl.dot(inverse, grown, input_precision=PRECISION)
    place = w + (at * HEADS + head) * KEYS + key
    tl.store(place, solved.to(w.dtype.element_ty), mask=exists & (key < KEYS))
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    is_value = exists & (column < VALUES)
    values = qkv + at * CHANNELS + 2 * KEY_HEADS * KEYS + head * VALUES + column
    v = tl.load(values, mask=is_value, other=0.0).to(tl.float32)
    solved = tl.dot(inverse, beta[:, None] * v, input_precision=PRECISION)
    place = u + (at * HEADS + head) * VALUES + column
    tl.store(place, solved.to(u.dtype.element_ty), mask=is_value)


@triton.jit
def _advance(
    qkv,
    gates,
    decay,
    step_bias,
    matrices,
    slots,
    starts,
    offsets,
    u,
    w,
    mixed,
    out,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    MATRIX_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(2)
    begin = tl.load(offsets + row)
    end = tl.load(offsets + row + 1)
    if end - begin < 2:
        return
    head = tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEYS + HEADS * VALUES
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    key = tl.arange(0, KEY_BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    place = matrices + slot * MATRIX_STRIDE + head * (KEYS * VALUES)
    place += key[:, None] * VALUES + column
    is_element = (key[:, None] < KEYS) & (column < VALUES)
    state = tl.load(place, mask=is_element & (tl.load(starts + row) > 0), other=0.0)
    is_key = key[None, :] < KEYS
    for first in range(begin, end, TILE):
        token = first + tl.arange(0, TILE)
        exists = token[:, None] < end
        at = token[:, None].to(tl.int64)
        _, total = _load_gates(gates, decay, step_bias, token, end, head, GATE_STRIDE, HEADS)
        keys = qkv + at * CHANNELS + head // (HEADS // KEY_HEADS) * KEYS + key[None, :]
        q = tl.load(keys, mask=exists & is_key, other=0.0).to(tl.float32)
        k = tl.load(keys + KEY_HEADS * KEYS, mask=exists & is_key, other=0.0).to(tl.float32)
        solved = w + (at * HEADS + head) * KEYS + key[None, :]
        solved = tl.load(solved, mask=exists & is_key, other=0.0).to(tl.float32)
        is_value = exists & (column < VALUES)
        added = u + (at * HEADS + head) * VALUES + column
        added = tl.load(added, mask=is_value, other=0.0).to(tl.float32)
        added -= tl.dot(solved, state, input_precision=PRECISION)
        pairs = mixed + (at * HEADS + head) * TILE + tl.arange(0, TILE)[None, :]
        pairs = tl.load(pairs, mask=exists, other=0.0).to(tl.float32)
        result = tl.dot(q, state, input_precision=PRECISION) * tl.exp(total)[:, None]
        result += tl.dot(pairs, added, input_precision=PRECISION)
        place_of_result = out + (at * HEADS + head) * VALUES + column
        tl.store(place_of_result, result.to(out.dtype.element_ty), mask=is_value)
        last = tl.min(total, axis=0)  # it never grows
        k *= tl.exp(last - total)[:, None]
        state *= tl.exp(last)
        state += tl.dot(tl.trans(k), added, input_precision=PRECISION)
    tl.store(place, state, mask=is_element)


@triton.jit
def _normalize(
    x,
    out,
    norm,
    slots,
    starts,
    offsets,
    tiles,
    y,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    VALUES: tl.constexpr,
    NORM_EPS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, first, _, end, _, _ = load_tile(tiles, starts, slots, offsets)
    if row < 0:
        return
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    token = (first + tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
    mask = (token < end) & (column < VALUES)
    head = tl.program_id(1) * VALUES + column
    values = tl.load(out + token * (HEADS * VALUES) + head, mask=mask, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / VALUES + NORM_EPS)
    values *= tl.load(norm + column, mask=column < VALUES, other=0.0).to(tl.float32)
    gate = tl.load(x + token * ROW_STRIDE + CHANNELS + head, mask=mask, other=0.0).to(tl.float32)
    values *= gate / (1.0 + tl.exp(-gate))
    tl.store(y + token * (HEADS * VALUES) + head, values.to(y.dtype.element_ty), mask=mask)


_launch_prepare = Launcher(_prepare)
_launch_advance = Launcher(_advance)
_launch_normalize = Launcher(_normalize)


def chunks(
    x: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows, y: Tensor
) -> None:
    """``gated_delta_net`` of the rows that have more than one token, into y."""
    assert state.matrices is not None
    heads, keys, values = net.value_heads, net.key_dim, net.value_dim
    qkv = x.new_empty(len(x), net.channels)
    convolve(
        *(x, net.convolution, None, state.inputs, rows, qkv),
        silu=True,
        least=2,
        size=keys,
        units=2 * net.key_heads,
        scaled=net.key_heads,
        eps=UNIT_EPS,
    )
    tiles, count = find_tiles(rows, len(x), 2)
    of_rows = rows.slots, rows.starts, rows.offsets
    u = x.new_empty(len(x), heads, values)
    w = x.new_empty(len(x), heads, keys)
    mixed = x.new_empty(len(x), heads, TILE)
    out = x.new_empty(len(x), heads, values)
    is_exact = x.dtype == torch.float32
    precision, inverse = ("ieee", "ieee") if is_exact else ("tf32", "tf32x3")
    sizes = net.key_heads, heads, keys, values, gates.stride(0)
    key_block, value_block = (max(next_power_of_2(n), 16) for n in (keys, values))
    _launch_prepare(
        (count, heads, 1),
        (qkv, gates, net.decay, net.step_bias, *of_rows, tiles, u, w, mixed),
        (*sizes, precision, inverse, TILE, key_block, value_block),
        num_warps=8,
    )
    columns = min(COLUMNS, value_block)
    _launch_advance(
        (cdiv(values, columns), heads, len(rows.slots)),
        (qkv, gates, net.decay, net.step_bias, state.matrices, *of_rows, u, w, mixed, out),
        (*sizes, state.matrices.stride(0), precision, TILE, key_block, columns),
        num_warps=8,
        num_stages=2,
    )
    _launch_normalize(
        (count, heads, TILE // TOKENS),
        (x, out, net.norm, *of_rows, tiles, y),
        (net.channels, heads, values, net.eps, x.stride(0), TOKENS, value_block),
        num_warps=4,
    )
