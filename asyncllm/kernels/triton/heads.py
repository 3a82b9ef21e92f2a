"""Norms and rotary positions of the heads, and their K and V into pages: a program per token.

A head is taken as head_dim / 2 pairs of elements, each pair in one thread: rotation moves nothing
between threads. Elements beyond the rotary ones are paired as well, and turn by nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher

if TYPE_CHECKING:
    from asyncllm.attention.base import AttentionSpec
    from asyncllm.kernels.heads import HeadEncoding


@triton.jit
def paired_columns(DIM: tl.constexpr, ROTARY: tl.constexpr, BLOCK: tl.constexpr):
    """Where in a head the two elements of each pair are; int32 [BLOCK] each."""
    pairs = tl.arange(0, BLOCK)
    if ROTARY == 0 or ROTARY == DIM:
        first = pairs
        second = pairs + DIM // 2
    else:
        rotary = pairs < ROTARY // 2
        first = tl.where(rotary, pairs, pairs + ROTARY // 2)
        second = first + tl.where(rotary, ROTARY // 2, (DIM - ROTARY) // 2)
    return first, second


@triton.jit
def norm_factors(weight, columns, mask, OFFSET: tl.constexpr):
    """What a norm multiplies these elements by; float32 [BLOCK]."""
    factors = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    if OFFSET:
        factors += 1.0
    return factors


@triton.jit
def normalized(
    first,
    second,
    first_factors,
    second_factors,
    DIM: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """RMSNorm of heads, float32 [heads, BLOCK] each; rounds as ``kernels.norm.rms_norm``."""
    mean = tl.sum(first * first + second * second, axis=1) / DIM
    scale = tl.rsqrt(mean + EPS)[:, None]
    first *= scale
    second *= scale
    if not OFFSET:
        first = first.to(DTYPE).to(tl.float32)
        second = second.to(DTYPE).to(tl.float32)
    return first * first_factors[None, :], second * second_factors[None, :]


@triton.jit
def turned(first, second, cos, sin):
    """Rotate pairs, float32 [heads, BLOCK] each."""
    cos = cos[None, :]
    sin = sin[None, :]
    return first * cos - second * sin, second * cos + first * sin


# positions and written are often slices of an upload, which start anywhere.
@triton.jit(do_not_specialize_on_alignment=["positions", "written"])
def _encode_heads(
    qkv,
    q_weight,
    k_weight,
    rope,
    positions,
    keys,
    values,
    written,
    ROW_STRIDE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK: tl.constexpr = triton.next_power_of_2(DIM // 2)
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    NORMS: tl.constexpr = q_weight is not None
    pairs = tl.arange(0, BLOCK)
    exists = pairs < DIM // 2
    first, second = paired_columns(DIM, ROTARY, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if NORMS:
        first_q_factors = norm_factors(q_weight, first, exists, OFFSET)
        second_q_factors = norm_factors(q_weight, second, exists, OFFSET)
        first_k_factors = norm_factors(k_weight, first, exists, OFFSET)
        second_k_factors = norm_factors(k_weight, second, exists, OFFSET)
    if PDL:
        tl.extra.cuda.gdc_wait()

    # Whatever a token needs is loaded before anything is stored: no load may pass a store.
    token = tl.program_id(0).to(tl.int64)
    place = tl.load(written + token)
    if ROTARY:
        turns = rope + tl.load(positions + token) * ROTARY + pairs
        cos = tl.load(turns, mask=pairs < ROTARY // 2, other=1.0)
        sin = tl.load(turns + ROTARY // 2, mask=pairs < ROTARY // 2, other=0.0)
    first = first[None, :]
    second = second[None, :]
    q_heads = tl.arange(0, triton.next_power_of_2(NUM_HEADS))[:, None]
    kv_heads = tl.arange(0, triton.next_power_of_2(2 * NUM_KV_HEADS))[:, None]
    is_k = kv_heads < NUM_KV_HEADS
    q_mask = (q_heads < NUM_HEADS) & exists[None, :]
    kv_mask = (kv_heads < 2 * NUM_KV_HEADS) & exists[None, :]
    q = qkv + token * ROW_STRIDE + q_heads * DIM
    kv = qkv + token * ROW_STRIDE + (NUM_HEADS + kv_heads) * DIM
    first_kv = tl.load(kv + first, mask=kv_mask, other=0.0)
    second_kv = tl.load(kv + second, mask=kv_mask, other=0.0)
    if NORMS or ROTARY:
        first_q = tl.load(q + first, mask=q_mask, other=0.0).to(tl.float32)
        second_q = tl.load(q + second, mask=q_mask, other=0.0).to(tl.float32)
        first_k = first_kv.to(tl.float32)
        second_k = second_kv.to(tl.float32)
        if NORMS:
            first_q, second_q = normalized(
                first_q, second_q, first_q_factors, second_q_factors, DIM, EPS, OFFSET, DTYPE
            )
            first_k, second_k = normalized(
                first_k, second_k, first_k_factors, second_k_factors, DIM, EPS, OFFSET, DTYPE
            )
        if ROTARY:
            first_q, second_q = turned(first_q, second_q, cos, sin)
            first_k, second_k = turned(first_k, second_k, cos, sin)
        first_kv = tl.where(is_k, first_k.to(DTYPE), first_kv)
        second_kv = tl.where(is_k, second_k.to(DTYPE), second_kv)
        tl.store(kv + first, first_kv, mask=kv_mask & is_k)
        tl.store(kv + second, second_kv, mask=kv_mask & is_k)
    pages = tl.where(is_k, keys + kv_heads * DIM, values + (kv_heads - NUM_KV_HEADS) * DIM)
    pages += place * (NUM_KV_HEADS * DIM)
    tl.store(pages + first, first_kv, mask=kv_mask & (place >= 0))
    tl.store(pages + second, second_kv, mask=kv_mask & (place >= 0))
    if NORMS or ROTARY:
        tl.store(q + first, first_q.to(DTYPE), mask=q_mask)
        tl.store(q + second, second_q.to(DTYPE), mask=q_mask)


_launch = Launcher(_encode_heads)


def encode_heads(
    qkv: Tensor,
    spec: AttentionSpec,
    encoding: HeadEncoding,
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    written: Tensor,
) -> None:
    """See ``kernels.heads.encode_heads``."""
    tokens = qkv.shape[0]
    if tokens == 0:
        return
    q_norm, k_norm, rope = encoding
    q_weight = k_weight = None
    eps, offset = 0.0, False
    if q_norm is not None and k_norm is not None:
        (q_weight, eps, offset), k_weight = q_norm, k_norm.weight
        assert k_norm[1:] == (eps, offset)
    rotary = 0 if rope is None else rope.shape[1]
    sizes = (qkv.stride(0), spec.num_heads, spec.num_kv_heads, spec.head_dim, rotary)
    # At most 128 bytes a thread, and more threads than pairs: factors stay out of shared memory.
    num_warps = 4 if qkv.shape[1] * qkv.itemsize <= 16384 and spec.head_dim <= 128 else 8
    _launch(
        (tokens, 1, 1),
        (qkv, q_weight, k_weight, rope, positions, keys, values, written),
        (*sizes, eps, offset),
        num_warps,
    )
