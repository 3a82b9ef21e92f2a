"""Causal attention of rows of several new tokens over the paged KV cache, in Triton.

Flash attention (Dao, arXiv 2205.14135 and 2307.08691): a program attends a tile of queries to the
keys of one K/V head, block by block, with a running softmax. A tile contains all query heads of the
group, so that keys are read once for all of them. Grid: one dimension, because the others end at
65,535; K/V heads, then the most tiles there can be.

On one H200 (bfloat16, 16 heads of 128, 8 K/V heads, pages of 16 tokens) 8,000 tokens take 622 us,
422 TFLOP/s, with blocks of 32 keys, 690 us with 64; FlashInfer's FA2 takes 941 us. Below some 2,000
tokens 64 keys are better: 26 us instead of 31 for 1,024 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.attention import prefill_hopper
from asyncllm.kernels.triton.attention.decode_encode import as_float16
from asyncllm.kernels.triton.attention.decode_pieces import LOG2_E, LOWEST, take_sinks
from asyncllm.kernels.triton.attention.prefill_tiles import find_tiles, load_tile
from asyncllm.kernels.triton.launch import Launcher, next_power_of_2, shared_bytes
from asyncllm.kernels.types import AttentionSpec, PrefillRows

#: From this many tokens on, blocks of fewer keys are faster.
MANY = 2048
#: Shared memory of the measured best blocks for heads of 256.
LARGE_BYTES = 144 << 10


class Blocks(NamedTuple):
    """How a launch is cut: queries (times the heads of a group) and keys of a block."""

    queries: int
    keys: int
    warps: int
    stages: int


def prefill_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    rows: PrefillRows,
    spec: AttentionSpec,
    *,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    blocks: Blocks | None = None,
) -> Tensor:
    """See ``kernels.attention.prefill_attention``.

    Args:
        blocks: of this kernel; by default the kernel for Hopper if it can run, or the best blocks.
    """
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // spec.num_kv_heads
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if blocks is None and prefill_hopper.supports(q, keys, spec):
        return prefill_hopper.prefill_attention(
            q, keys, values, block_table, rows, spec, scales=scales, sinks=sinks, out=out
        )
    blocks = choose_blocks(q) if blocks is None else blocks
    queries = max(blocks.queries, next_power_of_2(group))
    tiles = find_tiles(rows, num_tokens, queries // group)
    most = num_tokens // (queries // group) + len(rows.slots)
    strides = (block_table.stride(0), q.stride(0), q.stride(1))
    factors = (spec.scale, spec.softcap or 0.0, spec.window or 0)
    _launch(
        (spec.num_kv_heads * most, 1, 1),
        (q, keys, values, out, block_table, tiles, scales, sinks, *strides, *factors),
        (
            *(spec.softcap is not None, spec.window is not None),
            *(keys.shape[1], spec.num_kv_heads, group, head_dim),
            *(queries, blocks.keys, max(next_power_of_2(head_dim), 16)),
            "ieee" if q.dtype == torch.float32 else "tf32",
        ),
        blocks.warps,
        blocks.stages,
    )
    return out


def choose_blocks(q: Tensor) -> Blocks:
    """The measured best for q's dtype, head size and number of tokens, if it fits this GPU.

    Heads of 512 are not measured: of what fits, the largest that keeps nearly all in registers.
    """
    is_small = shared_bytes(q) < LARGE_BYTES
    if q.shape[-1] > 256:
        if q.dtype == torch.float32:
            return Blocks(16, 16, 4, 2) if is_small else Blocks(32, 16, 8, 2)
        return Blocks(32, 16, 4, 2) if is_small else Blocks(64, 32, 8, 2)
    if q.shape[-1] > 128 and is_small:
        return Blocks(32, 16, 4, 2) if q.dtype == torch.float32 else Blocks(64, 32, 4, 2)
    if q.dtype == torch.float32:
        return Blocks(32, 32, 4, 2)
    if q.shape[-1] > 128:
        return Blocks(128, 64, 8, 2)
    return Blocks(64, 64 if len(q) < MANY else 32, 4, 2)


@triton.jit(do_not_specialize=["table_stride", "window"])
def _prefill(
    q,
    keys,
    values,
    out,
    block_table,
    tiles,
    scales,
    sinks,
    table_stride,
    q_token_stride,
    q_head_stride,
    scale,
    softcap,
    window,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    if tile >= tl.load(tiles):
        return
    queries, inside, token, head, query_at, first, stop, table = load_tile(
        q, block_table, tiles, tile, kv_head, table_stride, q_token_stride, q_head_stride,
        GROUP, HEAD_DIM, QUERIES, DIMS,
    )  # fmt: skip
    of_queries = None
    if scales is not None:
        scale *= tl.load(scales + kv_head)
        if q.dtype.element_ty != tl.float32:
            queries, of_queries = as_float16(queries)
    acc = tl.zeros([QUERIES, DIMS], tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    peak = tl.full([QUERIES], LOWEST, tl.float32)
    begin = 0
    if HAS_WINDOW:
        begin = tl.maximum(first + 1 - window, 0) // KEYS * KEYS
        whole = begin
    else:
        # Blocks of which all queries of this tile see every key need no mask.
        whole = (first + 1) // KEYS * KEYS
        acc, total, peak = _attend(
            acc, total, peak, queries, of_queries, query_at, keys, values, table, kv_head, begin,
            whole, stop, scale, softcap, window, False, HAS_SOFTCAP, HAS_WINDOW, PAGE_SIZE,
            KV_HEADS, HEAD_DIM, KEYS, DIMS, PRECISION,
        )  # fmt: skip
    acc, total, peak = _attend(
        acc, total, peak, queries, of_queries, query_at, keys, values, table, kv_head, whole, stop,
        stop, scale, softcap, window, True, HAS_SOFTCAP, HAS_WINDOW, PAGE_SIZE, KV_HEADS, HEAD_DIM,
        KEYS, DIMS, PRECISION,
    )  # fmt: skip
    if sinks is not None:
        acc, total, _ = take_sinks(acc, total, peak, tl.load(sinks + head))
    if scales is not None:
        acc *= tl.load(scales + KV_HEADS + kv_head)
    # Lanes without a query may have a total of 0.
    result = (acc / tl.maximum(total, 1e-30)[:, None]).to(out.dtype.element_ty)
    out_at = (token.to(tl.int64) * (KV_HEADS * GROUP) + head) * HEAD_DIM
    dim = tl.arange(0, DIMS)
    tl.store(out + out_at[:, None] + dim[None, :], result, mask=inside)


@triton.jit
def _attend(
    acc,
    total,
    peak,
    queries,
    of_queries,
    query_at,
    keys,
    values,
    table,
    kv_head,
    begin,
    end,
    stop,
    scale,
    softcap,
    window,
    MASKED: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend to the keys at positions begin .. end - 1, of which those before ``stop`` exist.

    Args:
        of_queries: what one is in each of them, or None: one.
    """
    dim = tl.arange(0, DIMS)
    for block in range(begin, end, KEYS):
        key_at = block + tl.arange(0, KEYS)
        # A page may contain anything, even NaN, after the positions that exist.
        if MASKED:
            page = tl.load(table + key_at // PAGE_SIZE, mask=key_at < stop, other=0)
        else:
            page = tl.load(table + key_at // PAGE_SIZE)
        cell = (page.to(tl.int64) * PAGE_SIZE + key_at % PAGE_SIZE) * KV_HEADS + kv_head
        at = cell[:, None] * HEAD_DIM + dim[None, :]
        if MASKED:
            exists = (key_at < stop)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(keys + at, mask=exists, other=0.0)
        elif HEAD_DIM == DIMS:
            k = tl.load(keys + at)
        else:
            k = tl.load(keys + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        # Pages may be 8-bit.
        scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision=PRECISION)
        if of_queries is not None:
            scores *= of_queries[:, None]
        factor = scale * LOG2_E
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (1 + exp(2 x))
            scores = softcap * (1 - 2 / (1 + tl.exp2(scores * (2 * factor / softcap))))
            factor = LOG2_E
        if MASKED:
            seen = key_at[None, :] <= query_at[:, None]
            if HAS_WINDOW:
                seen &= key_at[None, :] > query_at[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, axis=1) * factor)
        weights = tl.exp2(scores * factor - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, axis=1)
        acc *= fade[:, None]
        if MASKED:
            v = tl.load(values + at, mask=exists, other=0.0)
        elif HEAD_DIM == DIMS:
            v = tl.load(values + at)
        else:
            v = tl.load(values + at, mask=(dim < HEAD_DIM)[None, :], other=0.0)
        v = v.to(queries.dtype)
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = new_peak
    return acc, total, peak


_launch = Launcher(_prefill)
