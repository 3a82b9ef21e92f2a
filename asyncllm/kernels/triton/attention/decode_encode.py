"""How a decode program loads or encodes its queries and the newest token."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.triton.attention.decode_pieces import LOWEST, in_log2
from asyncllm.kernels.triton.qk_norm_rope import in_8_bits


@triton.jit
def load_encoding(
    weight,
    rope,
    position,
    HEADS: tl.constexpr,
    ROTARY: tl.constexpr,
    DISTANCE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Load early what ``_encode`` needs besides the heads.

    Returns:
        Of each element of a head: the norm's weight, that of its rotary partner, cosine and sine;
        [HEADS, D] each, so that they are in the threads that get the heads. Zeros in place of those
        without a norm or without rotary positions.
    """
    HALF: tl.constexpr = ROTARY // 2
    dim = tl.arange(0, triton.next_power_of_2(HEAD_DIM))[None, :]
    every = tl.zeros([HEADS, 1], tl.int32)
    inside = (dim < HEAD_DIM) & (every == 0)
    turns = is_rotated(dim, ROTARY, DISTANCE) & (every == 0)
    own, other, cos, sin = every, every, every, every
    if weight is not None:
        weight += every
        partner = partners(dim, ROTARY, DISTANCE)
        own = tl.load(weight + dim, mask=inside, other=0.0, eviction_policy="evict_last")
        other = tl.load(weight + partner, mask=inside, other=0.0, eviction_policy="evict_last")
    if ROTARY > 0:
        angle = rope + position * ROTARY + tl.where(dim < HALF, dim, dim - DISTANCE) + every
        cos = tl.load(angle, mask=turns, other=1.0, eviction_policy="evict_last")
        sin = tl.load(angle + HALF, mask=turns, other=0.0, eviction_policy="evict_last")
    return own, other, cos, sin


@triton.jit
def begin_softmax(
    row_q,
    head_stride,
    kv_head,
    has_newest,
    place,
    query_encoding,
    key_encoding,
    keys,
    values,
    k_scale,
    v_scale,
    scale,
    softcap,
    ENCODES: tl.constexpr,
    KV_KINDS: tl.constexpr,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    DISTANCE: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    NORMALIZES_VALUES: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Load the queries of a group, and begin the softmax with the newest token, if it is ours.

    Args:
        row_q: queries of the row. If ENCODES, all heads of a projection's output: they are encoded,
            and the newest key and value, if it has them (see ``kv_kinds``), are written to
            ``place`` in the flattened pages.
        has_newest: whether the newest token belongs to this program.
        query_encoding, key_encoding: of ``load_encoding``, for what is encoded.
        k_scale, v_scale: of 8-bit pages, or None.
        scale: of scores, that of keys included.

    Returns:
        queries [G, D], and (acc, total, peak) of the softmax; acc is yet to be scaled by v_scale.
    """
    G: tl.constexpr = triton.next_power_of_2(GROUP)
    D: tl.constexpr = triton.next_power_of_2(HEAD_DIM)
    dim = tl.arange(0, D)[None, :]
    in_head = dim < HEAD_DIM
    lane = tl.arange(0, G)[:, None]
    heads = row_q + (kv_head * GROUP + lane) * head_stride
    inside = (lane < GROUP) & in_head
    if ENCODES:
        queries = _encode(
            heads, inside, query_encoding, NORM, ROTARY, DISTANCE, EPS, OFFSET, HEAD_DIM
        )
    else:
        queries = tl.load(heads + dim, mask=inside, other=0.0)
    acc, total, peak = softmax_of_none(G, D)
    if has_newest:
        at = (place * KV_HEADS + kv_head) * HEAD_DIM + dim
        if ENCODES and KV_KINDS > 0:
            k_head = row_q + (KV_HEADS * GROUP + kv_head + tl.zeros([1, 1], tl.int32)) * head_stride
            v_head = k_head + (KV_KINDS - 1) * KV_HEADS * head_stride
            v = tl.load(v_head + dim, mask=in_head, other=0.0)
            if NORMALIZES_VALUES:
                wide = v.to(tl.float32)
                mean = tl.sum(wide * wide, axis=1, keep_dims=True) / HEAD_DIM
                v = (wide * tl.rsqrt(mean + EPS)).to(v.dtype)
            k = _encode(
                k_head, in_head, key_encoding, NORM, ROTARY, DISTANCE, EPS, OFFSET, HEAD_DIM
            )
            if k_scale is not None:
                k = in_8_bits(k, k_scale)
                v = in_8_bits(v, v_scale)
            tl.store(keys + at, k, mask=in_head & (place >= 0))
            tl.store(values + at, v, mask=in_head & (place >= 0))
        else:
            k = tl.load(keys + at, mask=in_head, other=0.0)
            v = tl.load(values + at, mask=in_head, other=0.0)
        dots = tl.sum(queries.to(tl.float32) * k.to(tl.float32), axis=1)
        peak = in_log2(dots, scale, softcap, HAS_SOFTCAP)
        total += 1.0
        acc += v.to(tl.float32)
    return queries, acc, total, peak


@triton.jit
def as_float16(queries):
    """Queries [lanes, D] for products with 8-bit numbers, which one instruction makes float16 of.

    Returns:
        float16, the largest element of each being 256, and what one is in them, [lanes].
    """
    wide = queries.to(tl.float32)
    unit = tl.maximum(tl.max(tl.abs(wide), axis=1), 1e-30) / 256
    return (wide / unit[:, None]).to(tl.float16), unit


@triton.jit
def softmax_of_none(G: tl.constexpr, D: tl.constexpr):
    """The softmax (acc, total, peak) of no tokens."""
    acc = tl.zeros([G, D], tl.float32)
    return acc, tl.zeros([G], tl.float32), tl.full([G], LOWEST, tl.float32)


@triton.jit
def _encode(
    heads,
    inside,
    encoding,
    NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    DISTANCE: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Load heads, normalise and rotate them as ``kernels.attention.encode_heads`` does; [heads, D].

    The rotary partner of each element is loaded as well, not exchanged between threads.

    Args:
        heads: addresses [heads, 1].
        inside: [heads, D].
    """
    own, other, cos, sin = encoding
    dim = tl.arange(0, inside.shape[1])[None, :]
    x = tl.load(heads + dim, mask=inside, other=0.0)
    dtype: tl.constexpr = x.dtype
    if ROTARY > 0:
        y = tl.load(heads + partners(dim, ROTARY, DISTANCE), mask=inside, other=0.0).to(tl.float32)
    x = x.to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / HEAD_DIM + EPS)
        x = scaled(x * inverse, own, OFFSET, dtype)
        if ROTARY > 0:
            y = scaled(y * inverse, other, OFFSET, dtype)
    if ROTARY > 0:
        x = x * cos + y * tl.where(dim < ROTARY // 2, -sin, sin)
    return x.to(dtype)


@triton.jit
def is_rotated(dim, ROTARY: tl.constexpr, DISTANCE: tl.constexpr):
    """Whether elements of a head have a rotary partner."""
    HALF: tl.constexpr = ROTARY // 2
    return (dim < HALF) | ((dim >= DISTANCE) & (dim < DISTANCE + HALF))


@triton.jit
def partners(dim, ROTARY: tl.constexpr, DISTANCE: tl.constexpr):
    """The rotary partner of each element of a head; itself where there is none."""
    other = tl.where(dim < ROTARY // 2, dim + DISTANCE, dim - DISTANCE)
    return tl.where(is_rotated(dim, ROTARY, DISTANCE), other, dim)


@triton.jit
def scaled(x, weights, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Normalised x times the norm's weights, rounded as ``encode_heads`` does; float32."""
    weights = weights.to(tl.float32)
    if OFFSET is None:
        return x.to(DTYPE).to(tl.float32) * weights
    else:
        return x * (weights + OFFSET)
