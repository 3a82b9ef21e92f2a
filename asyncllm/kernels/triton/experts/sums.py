"""Sums of products along the columns of rows of a weight, for each format of weights."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.triton.codes import (
    mxfp4_factors,
    mxfp4_numbers,
    offset_codes,
    scaled,
    subtract,
    unpack,
)
from asyncllm.kernels.triton.launch import NATIVE


@triton.jit
def _dot(a, b, acc):
    """acc + a @ b; float32 is not rounded."""
    if NATIVE:
        return tl.dot(a, b, acc, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")


@triton.jit
def dense_sums(
    weight, x_at, has_row, rows, acc, K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr
):
    k = tl.arange(0, BLOCK_K)
    w_at = weight + rows[:, None] * K + k[None, :]
    x_at += k[:, None]
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_at + start)
            x = tl.load(x_at + start, has_row, other=0.0)
        else:
            w = tl.load(w_at + start, (start + k < K)[None, :], other=0.0)
            x = tl.load(x_at + start, (start + k < K)[:, None] & has_row, other=0.0)
        acc = _dot(w, x, acc)
    return acc


@triton.jit
def fp8_sums(
    weight, scale, x_at, x_scale, source, has_row, rows, acc, x_rows,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, BLOCKED: tl.constexpr,
):  # fmt: skip
    """With scales of blocks, steps are of 128 columns.

    Args:
        x_scale: for each row of x, which is in 8 bits, too, or for each row of each block.
        source: rows of x, of which there are ``x_rows``.
    """
    BLOCKS: tl.constexpr = (K + 127) // 128
    k = tl.arange(0, BLOCK_K)
    w_at = weight + rows[:, None] * K + k[None, :]
    s_at = scale + rows // 128 * BLOCKS
    x_at += k[:, None]
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            w = tl.load(w_at + start)
            x = tl.load(x_at + start, has_row, other=0.0)
        else:
            w = tl.load(w_at + start, (start + k < K)[None, :], other=0.0)
            x = tl.load(x_at + start, (start + k < K)[:, None] & has_row, other=0.0)
        if BLOCKED:
            factor = tl.load(s_at + start // 128)[:, None]
            size = tl.load(x_scale + start // 128 * x_rows + source)
            acc += _dot(w, x, tl.zeros_like(acc)) * factor * size[None, :]
        else:
            acc = _dot(w, x, acc)
    if not BLOCKED:
        acc *= tl.load(scale + rows)[:, None] * tl.load(x_scale + source)[None, :]
    return acc


@triton.jit
def mxfp4_sums(
    packed, scale, x_at, has_row, rows, acc,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Steps are of whole blocks of 128 columns; x has fewer."""
    PADDED: tl.constexpr = (K + 127) // 128 * 128
    half = tl.arange(0, BLOCK_K // 2)
    w_at = packed + rows[:, None] * (PADDED // 2) + half[None, :]
    s_at = scale + rows[:, None] * (PADDED // 32) + tl.arange(0, BLOCK_K // 32)[None, :]
    k = half // 32 * 64 + half % 32
    x_at += k[:, None]
    for start in tl.range(0, PADDED, BLOCK_K, num_stages=STAGES):
        if PADDED % BLOCK_K == 0:
            codes = tl.load(w_at + start // 2)
            scales = tl.load(s_at + start // 32)
        else:
            codes = tl.load(w_at + start // 2, (start // 2 + half < PADDED // 2)[None, :], other=0)
            group = start // 32 + tl.arange(0, BLOCK_K // 32)
            scales = tl.load(s_at + start // 32, (group < PADDED // 32)[None, :], other=0)
        first = tl.load(x_at + start, (start + k < K)[:, None] & has_row, other=0.0)
        second = tl.load(x_at + start + 32, (start + k + 32 < K)[:, None] & has_row, other=0.0)
        low, high = mxfp4_numbers(codes)
        low_factors, high_factors = mxfp4_factors(scales)
        acc = _dot(scaled(low, low_factors), first, acc)
        acc = _dot(scaled(high, high_factors), second, acc)
    return acc


@triton.jit
def int4_sums(
    packed, scale, zero, x_at, has_row, rows, acc, count,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Steps are of a block of columns.

    Args:
        count: rows of the matrices of all experts.
    """
    HALF: tl.constexpr = BLOCK_K // 2
    half = tl.arange(0, HALF)
    w_at = packed + rows[:, None] * (K // 2) + half[None, :]
    x_at += half[:, None]
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        codes = tl.load(w_at + start // 2)
        first = tl.load(x_at + start, has_row, other=0.0)
        second = tl.load(x_at + start + HALF, has_row, other=0.0)
        at = start // GROUP * count + rows
        factor = tl.load(scale + at).to(tl.float32)[:, None]
        offset = offset_codes(tl.load(zero + at), first.dtype)[:, None]
        low, high = unpack(codes, first.dtype)
        low, high = subtract(low, offset, first.dtype), subtract(high, offset, first.dtype)
        acc += _dot(high, second, _dot(low, first, tl.zeros_like(acc))) * factor
    return acc
