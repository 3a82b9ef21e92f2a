"""Norms and rotary positions of heads, and K and V into their pages: a program for each token.

A head is head_dim / 2 pairs of elements, each pair in one thread, so that rotation exchanges
nothing between threads. Elements beyond the rotary ones are pairs that are not rotated.

On an H200, 16 query and 8 K/V heads of 128 take 1.2 us for one token and 41 for 8,192, which is the
speed of memory. A program for every 8 or 16 heads is up to 0.4 us faster for few tokens and a
quarter slower for many: each loads the token's cosines, sines and factors again.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import NATIVE, Launcher
from asyncllm.kernels.types import FP8_MAX as _FP8_MAX
from asyncllm.kernels.types import AttentionSpec, HeadEncoding

FP8_MAX = tl.constexpr(_FP8_MAX)


@triton.jit
def paired_columns(
    DIM: tl.constexpr, ROTARY: tl.constexpr, DISTANCE: tl.constexpr, BLOCK: tl.constexpr
):
    """The positions in a head of the two elements of each pair; int32 [BLOCK] each."""
    pairs = tl.arange(0, BLOCK)
    if ROTARY == 0 or DISTANCE == DIM // 2:
        first = pairs
        second = pairs + DIM // 2
    else:
        rotary = pairs < ROTARY // 2
        first = tl.where(rotary, pairs, pairs + ROTARY // 2)
        second = first + tl.where(rotary, ROTARY // 2, (DIM - ROTARY) // 2)
    return first, second


@triton.jit
def norm_factors(weight, columns, exists, OFFSET: tl.constexpr):
    """The factors of a norm for these elements, float32 [1, BLOCK]; None without a norm."""
    factors = None
    if weight is not None:
        factors = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)[None, :]
        if OFFSET is not None:
            factors += OFFSET
    return factors


@triton.jit
def by_root_mean_square(x, y, DIM: tl.constexpr, EPS: tl.constexpr):
    """Pairs [heads, BLOCK] divided by the root mean square of their heads."""
    scale = tl.rsqrt(tl.sum(x * x + y * y, axis=1, keep_dims=True) / DIM + EPS)
    return x * scale, y * scale


@triton.jit
def encoded(
    first,
    second,
    first_factors,
    second_factors,
    cos,
    sin,
    DIM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    """Normalise, rounding as ``kernels.norm.rms_norm`` does, and rotate pairs [heads, BLOCK]."""
    dtype: tl.constexpr = first.dtype
    x = first.to(tl.float32)
    y = second.to(tl.float32)
    if first_factors is not None:
        x, y = by_root_mean_square(x, y, DIM, EPS)
        if OFFSET is None:
            x = x.to(dtype).to(tl.float32)
            y = y.to(dtype).to(tl.float32)
        x *= first_factors
        y *= second_factors
    if cos is not None:
        x, y = x * cos - y * sin, y * cos + x * sin
    return x.to(dtype), y.to(dtype)


@triton.jit
def in_8_bits(x, scale):
    """Numbers as 8-bit pages keep them: see ``kernels.attention.to_pages``."""
    x = x.to(tl.float32) * tl.div_rn(1.0, scale)
    x = tl.maximum(x, -FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, FP8_MAX, propagate_nan=tl.PropagateNan.ALL)
    if not NATIVE:  # the interpreter does not round to the nearest
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        small = (x + 24576.0) - 24576.0  # below 2^-6, numbers are 2^-9 apart
        x = tl.where(tl.abs(x) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return x.to(tl.float8e4nv)


# positions and slot_mapping are often slices of an upload, of any alignment.
@triton.jit(do_not_specialize_on_alignment=["positions", "slot_mapping"])
def _encode_heads(
    qkv,
    q_weight,
    k_weight,
    rope,
    positions,
    keys,
    values,
    slot_mapping,
    scales,
    ROW_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    KV_KINDS: tl.constexpr,
    DISTANCE: tl.constexpr,
    ROTARY: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMALIZES_VALUES: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM // 2)
    pairs = tl.arange(0, BLOCK)
    exists = pairs < DIM // 2
    first, second = paired_columns(DIM, ROTARY, DISTANCE, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    first_q_factors = norm_factors(q_weight, first, exists, OFFSET)
    second_q_factors = norm_factors(q_weight, second, exists, OFFSET)
    first_k_factors = norm_factors(k_weight, first, exists, OFFSET)
    second_k_factors = norm_factors(k_weight, second, exists, OFFSET)
    if PDL:
        tl.extra.cuda.gdc_wait()

    token = tl.program_id(0).to(tl.int64)
    place = tl.load(slot_mapping + token)
    cos = None
    sin = None
    if rope is not None:
        turns = rope + tl.load(positions + token) * ROTARY + pairs
        cos = tl.load(turns, mask=pairs < ROTARY // 2, other=1.0)[None, :]
        sin = tl.load(turns + ROTARY // 2, mask=pairs < ROTARY // 2, other=0.0)[None, :]
    first = first[None, :]
    second = second[None, :]
    heads = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
    mask = (heads < NUM_HEADS) & exists[None, :]
    q = qkv + token * ROW_STRIDE + heads * DIM
    # All loads come first, as the compiler moves none across a store.
    if KV_KINDS > 0:
        kv_heads = tl.arange(0, triton.next_power_of_2(2 * NUM_KV_HEADS))[:, None]
        kv_mask = (kv_heads < 2 * NUM_KV_HEADS) & exists[None, :]
        is_k = kv_heads < NUM_KV_HEADS
        source = kv_heads if KV_KINDS == 2 else kv_heads % NUM_KV_HEADS
        kv = qkv + token * ROW_STRIDE + (NUM_HEADS + source) * DIM
        first_kv = tl.load(kv + first, mask=kv_mask, other=0.0)
        second_kv = tl.load(kv + second, mask=kv_mask, other=0.0)
    first_q = tl.load(q + first, mask=mask, other=0.0)
    second_q = tl.load(q + second, mask=mask, other=0.0)

    first_q, second_q = encoded(
        first_q, second_q, first_q_factors, second_q_factors, cos, sin, DIM, EPS, OFFSET
    )
    tl.store(q + first, first_q, mask=mask)
    tl.store(q + second, second_q, mask=mask)

    # Keys and values share one tile, which wastes less where there are few heads.
    if KV_KINDS > 0:
        first_k, second_k = encoded(
            first_kv, second_kv, first_k_factors, second_k_factors, cos, sin, DIM, EPS, OFFSET
        )
        if NORMALIZES_VALUES:
            first_v, second_v = by_root_mean_square(
                first_kv.to(tl.float32), second_kv.to(tl.float32), DIM, EPS
            )
            first_kv = first_v.to(first_kv.dtype)
            second_kv = second_v.to(second_kv.dtype)
        first_kv = tl.where(is_k, first_k, first_kv)
        second_kv = tl.where(is_k, second_k, second_kv)
        if scales is not None:
            scale = tl.load(scales + kv_heads, mask=kv_heads < 2 * NUM_KV_HEADS, other=1.0)
            first_kv = in_8_bits(first_kv, scale)
            second_kv = in_8_bits(second_kv, scale)
        pages = tl.where(is_k, keys + kv_heads * DIM, values + (kv_heads - NUM_KV_HEADS) * DIM)
        pages += place * (NUM_KV_HEADS * DIM)
        tl.store(pages + first, first_kv, mask=kv_mask & (place >= 0))
        tl.store(pages + second, second_kv, mask=kv_mask & (place >= 0))


_launch = Launcher(_encode_heads)


def encode_heads(
    qkv: Tensor,
    spec: AttentionSpec,
    encoding: HeadEncoding,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    slot_mapping: Tensor,
    scales: Tensor | None = None,
) -> Tensor:
    """See ``kernels.attention.encode_heads``."""
    tokens = qkv.shape[0]
    if tokens > 0:
        weights, constants = encoding_of(encoding)
        sizes = (qkv.stride(0), spec.num_heads, spec.num_kv_heads, spec.head_dim)
        kinds = kv_kinds(spec), spec.pair_distance or constants[0] // 2
        # More threads than pairs: otherwise factors would pass through shared memory.
        num_warps = 4 if spec.head_dim <= 128 and qkv.shape[1] * qkv.itemsize <= 24576 else 8
        _launch(
            (tokens, 1, 1),
            (qkv, *weights, positions, keys, values, slot_mapping, scales),
            (*sizes, *kinds, *constants, encoding.normalizes_values),
            num_warps,
        )
    q, _, _ = spec.split_heads(qkv)
    return q


def kv_kinds(spec: AttentionSpec) -> int:
    """KV_KINDS of kernels: 2 if a projection yields keys and values, 1 if values are keys, 0 if it
    yields neither."""
    _, keys, values = spec.projected_heads
    return (keys > 0) + (values > 0)


def encoding_of(
    encoding: HeadEncoding,
) -> tuple[tuple[Tensor | None, Tensor | None, Tensor | None], tuple[int, float, float | None]]:
    """Arguments of kernels: (q_weight, k_weight, rope) and (ROTARY, EPS, OFFSET)."""
    q_norm, k_norm, rope = encoding.q_norm, encoding.k_norm, encoding.rope
    rotary = 0 if rope is None else rope.shape[1]
    if q_norm is None:
        assert k_norm is None
        return (None, None, rope), (rotary, 0.0, None)
    if k_norm is None:  # of a layer without keys of its own
        return (q_norm.weight, None, rope), (rotary, q_norm.eps, q_norm.offset)
    assert q_norm[1:] == k_norm[1:]
    return (q_norm.weight, k_norm.weight, rope), (rotary, q_norm.eps, q_norm.offset)
