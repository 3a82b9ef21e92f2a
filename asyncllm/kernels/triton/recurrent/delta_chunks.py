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

from asyncllm.kernels.triton.launch import (
    NATIVE,
    Launcher,
    cdiv,
    next_power_of_2,
    shared_bytes,
)
from asyncllm.kernels.triton.recurrent.convolution import TOKENS, convolve
from asyncllm.kernels.triton.recurrent.delta_decode import decay_of
from asyncllm.kernels.triton.recurrent.tiles import TILE, find_tiles, load_tile
from asyncllm.kernels.types.recurrent import UNIT_EPS, DeltaNet, LayerState, StateRows

#: Tokens of a block whose triangle is inverted token by token.
PART = 16
#: Columns of a head's matrix that a program has.
COLUMNS = 32
#: Bytes of shared memory that tiles of two steps ahead need.
DEEP = 200_000


@triton.jit
def _inverse(lower, TILE: tl.constexpr, PART: tl.constexpr, PRECISION: tl.constexpr):
    """(I + lower)^-1 for a strictly lower triangle [TILE, TILE].

    Blocks on the diagonal are inverted by substitution, each token after those before it. With B of
    these inverses, and M = B times the rest, the whole is (I - M)(I + M^2)(I + M^4) ... B, as far
    as powers of M are not 0, which that of the number of blocks is.
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
    power = tl.dot(whole, rest, input_precision=PRECISION)
    series = -power  # without the identity
    for doubling in tl.static_range(1, 5):
        if 2**doubling < PARTS:
            power = tl.dot(power, power, input_precision=PRECISION)
            series += power + tl.dot(series, power, input_precision=PRECISION)
    return whole + tl.dot(series, whole, input_precision=PRECISION)


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """Of 16-bit operands; of float32 ones with that precision. The interpreter has no 16 bits."""
    if NATIVE:
        return tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")


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
    totals,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    INVERSE_PRECISION: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
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
    dtype: tl.constexpr = qkv.dtype.element_ty
    token = first + tl.arange(0, TILE)
    exists = token[:, None] < end
    at = token[:, None].to(tl.int64)
    key = tl.arange(0, KEY_BLOCK)[None, :]
    keys = qkv + at * CHANNELS + head // (HEADS // KEY_HEADS) * KEYS + key
    q = tl.load(keys, mask=exists & (key < KEYS), other=0.0)
    k = tl.load(keys + KEY_HEADS * KEYS, mask=exists & (key < KEYS), other=0.0)
    of_head = gates + token.to(tl.int64) * GATE_STRIDE + head
    b = tl.load(of_head, mask=token < end, other=0.0).to(tl.float32)
    a = tl.load(of_head + HEADS, mask=token < end, other=0.0).to(tl.float32)
    # After the end, nothing is added and nothing decays.
    beta = tl.where(token < end, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    g = decay_of(decay, step_bias, a, head)
    total = tl.cumsum(tl.where(token < end, g, 0.0), 0)
    tl.store(totals + token.to(tl.int64) * HEADS + head, total, mask=token < end)
    i = tl.arange(0, TILE)[:, None]
    j = tl.arange(0, TILE)[None, :]
    decays = tl.exp(tl.where(i >= j, total[:, None] - total[None, :], 0.0))
    pairs = tl.where(i >= j, _dot(q, tl.trans(k), PRECISION) * decays, 0.0)
    square = mixed + (at * HEADS + head) * TILE + j
    tl.store(square, pairs.to(dtype), mask=exists)
    alike = _dot(k, tl.trans(k), PRECISION)
    lower = tl.where(i > j, beta[:, None] * alike * decays, 0.0)
    inverse = _inverse(lower, TILE, PART, INVERSE_PRECISION)
    grown = inverse * (beta * tl.exp(total))[None, :]
    place = w + (at * HEADS + head) * KEYS + key
    solved = _dot(grown.to(dtype), k, PRECISION)
    tl.store(place, solved.to(dtype), mask=exists & (key < KEYS))
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    is_value = exists & (column < VALUES)
    values = qkv + at * CHANNELS + 2 * KEY_HEADS * KEYS + head * VALUES + column
    v = tl.load(values, mask=is_value, other=0.0)
    solved = _dot((inverse * beta[None, :]).to(dtype), v, PRECISION)
    place = u + (at * HEADS + head) * VALUES + column
    tl.store(place, solved.to(dtype), mask=is_value)


@triton.jit
def _advance(
    qkv,
    matrices,
    slots,
    starts,
    offsets,
    u,
    w,
    mixed,
    totals,
    out,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
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
    dtype: tl.constexpr = qkv.dtype.element_ty
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    key = tl.arange(0, KEY_BLOCK)
    slot = tl.load(slots + row).to(tl.int64)
    place = matrices + slot * MATRIX_STRIDE + head * (KEYS * VALUES)
    place += key[:, None] * VALUES + column
    is_element = (key[:, None] < KEYS) & (column < VALUES)
    state = tl.load(place, mask=is_element & (tl.load(starts + row) > 0), other=0.0).to(tl.float32)
    is_key = key[None, :] < KEYS
    j = tl.arange(0, TILE)
    for first in range(begin, end, TILE):
        token = first + j
        exists = token[:, None] < end
        at = token[:, None].to(tl.int64)
        keys = qkv + at * CHANNELS + head // (HEADS // KEY_HEADS) * KEYS + key[None, :]
        q = tl.load(keys, mask=exists & is_key, other=0.0)
        k = tl.load(keys + KEY_HEADS * KEYS, mask=exists & is_key, other=0.0)
        solved = w + (at * HEADS + head) * KEYS + key[None, :]
        solved = tl.load(solved, mask=exists & is_key, other=0.0)
        is_value = exists & (column < VALUES)
        added = u + (at * HEADS + head) * VALUES + column
        added = tl.load(added, mask=is_value, other=0.0).to(tl.float32)
        pairs = mixed + (at * HEADS + head) * TILE + j[None, :]
        pairs = tl.load(pairs, mask=exists, other=0.0)
        # After the end, the running sum stays what it is.
        known = tl.minimum(token, end - 1).to(tl.int64)
        total = tl.load(totals + known * HEADS + head)
        last = tl.load(totals + tl.minimum(first + TILE, end).to(tl.int64) * HEADS - HEADS + head)
        rounded = state.to(dtype)
        added -= _dot(solved, rounded, PRECISION)
        result = _dot(q, rounded, PRECISION) * tl.exp(total)[:, None]
        result += _dot(pairs, added.to(dtype), PRECISION)
        place_of_result = out + (at * HEADS + head) * VALUES + column
        tl.store(place_of_result, result.to(dtype), mask=is_value)
        added *= tl.exp(last - total)[:, None]
        state = state * tl.exp(last) + _dot(tl.trans(k), added.to(dtype), PRECISION)
    tl.store(place, state.to(matrices.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=["num_tokens"])
def _normalize(
    x,
    out,
    norm,
    offsets,
    y,
    num_rows,
    num_tokens,
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
    column = tl.arange(0, VALUE_BLOCK)[None, :]
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
    exists = (token < num_tokens) & (column < VALUES)
    mask = exists & (token < tl.load(offsets + num_rows))  # the others are padding
    head = tl.program_id(1) * VALUES + column
    values = tl.load(out + token * (HEADS * VALUES) + head, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(x + token * ROW_STRIDE + CHANNELS + head, mask=mask, other=0.0).to(tl.float32)
    factors = tl.load(norm + column, mask=column < VALUES, other=0.0).to(tl.float32)
    values *= tl.rsqrt(tl.sum(values * values, axis=1, keep_dims=True) / VALUES + NORM_EPS)
    values *= factors * gate / (1.0 + tl.exp(-gate))
    tl.store(y + token * (HEADS * VALUES) + head, values.to(y.dtype.element_ty), mask=exists)


_launch_prepare = Launcher(_prepare)
_launch_advance = Launcher(_advance)
_launch_normalize = Launcher(_normalize)


def convolve_heads(
    x: Tensor, net: DeltaNet, state: LayerState, rows: StateRows, *, alike: bool = False
) -> Tensor:
    """Queries, keys and values of all rows, [tokens, channels]: convolved, queries and keys divided
    by their norms; anything for padding. For ``alike`` see ``convolve``."""
    qkv = x.new_empty(len(x), net.channels)
    convolve(
        *(x, net.convolution, None, state.inputs, rows, qkv),
        silu=True,
        size=net.key_dim,
        units=2 * net.key_heads,
        scaled=net.key_heads,
        eps=UNIT_EPS,
        alike=alike,
    )
    return qkv


def chunks(
    qkv: Tensor, gates: Tensor, net: DeltaNet, state: LayerState, rows: StateRows, out: Tensor
) -> None:
    """The recurrence of the rows that have more than one token, into ``out``."""
    assert state.matrices is not None
    heads, keys, values = net.value_heads, net.key_dim, net.value_dim
    tiles, count = find_tiles(rows, len(qkv), 2)
    of_rows = rows.slots, rows.starts, rows.offsets
    u = qkv.new_empty(len(qkv), heads, values)
    w = qkv.new_empty(len(qkv), heads, keys)
    mixed = qkv.new_empty(len(qkv), heads, TILE)
    totals = torch.empty(len(qkv), heads, dtype=torch.float32, device=qkv.device)
    is_exact = qkv.dtype == torch.float32
    precision, inverse = ("ieee", "ieee") if is_exact else ("tf32", "tf32x3")
    sizes = net.key_heads, heads, keys, values
    key_block, value_block = (max(next_power_of_2(n), 16) for n in (keys, values))
    _launch_prepare(
        (count, heads, 1),
        (qkv, gates, net.decay, net.step_bias, *of_rows, tiles, u, w, mixed, totals),
        (*sizes, gates.stride(0), precision, inverse, TILE, PART, key_block, value_block),
        num_warps=4,
    )
    columns = min(COLUMNS, value_block)
    ahead = 3 if shared_bytes(qkv) >= DEEP else 2
    _launch_advance(
        (cdiv(values, columns), heads, len(rows.slots)),
        (qkv, state.matrices, *of_rows, u, w, mixed, totals, out),
        (*sizes, state.matrices.stride(0), precision, TILE, key_block, columns),
        num_warps=4,
        num_stages=1 if is_exact else ahead,
    )


def normalize(x: Tensor, out: Tensor, net: DeltaNet, rows: StateRows, y: Tensor) -> None:
    """Normalise and gate what ``chunks`` and parts of heads have left in ``out``, into y."""
    count = len(rows.slots)
    _launch_normalize(
        (cdiv(len(x), TOKENS), net.value_heads, 1),
        (x, out, net.norm, rows.offsets, y, count, len(x)),
        (
            net.channels,
            net.value_heads,
            net.value_dim,
            net.eps,
            x.stride(0),
            TOKENS,
            next_power_of_2(net.value_dim),
        ),
        num_warps=4,
    )
