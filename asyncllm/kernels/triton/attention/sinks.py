"""Sinks for attention that was computed without them; each program has some heads of a token.

Bound by memory: it reads and writes the attention of all heads once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.attention.decode_pieces import LOG2_E
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["lse", "sinks"])
def _apply_sinks(
    out,
    lse,
    sinks,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    first = (tl.program_id(0) // blocks).to(tl.int64) * NUM_HEADS
    heads = tl.program_id(0) % blocks * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    exists = heads < NUM_HEADS
    sums = tl.load(lse + first + heads, mask=exists, other=0.0)
    sink = tl.load(sinks + heads, mask=exists, other=0.0).to(tl.float32)
    kept = 1.0 / (1.0 + tl.exp2(sink * LOG2_E - sums))
    kept = tl.where(kept == kept, kept, 1.0)  # NaN where nobody wrote the log-sum-exp
    at = out + (first + heads)[:, None] * HEAD_DIM + columns[None, :]
    mask = exists[:, None] & (columns < HEAD_DIM)[None, :]
    values = tl.load(at, mask=mask).to(tl.float32) * kept[:, None]
    tl.store(at, values.to(out.dtype.element_ty), mask=mask)


_launch = Launcher(_apply_sinks)


def apply_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """See ``kernels.attention.apply_sinks``."""
    tokens, num_heads, head_dim = out.shape
    if tokens == 0:
        return
    num_warps = 4
    block = next_power_of_2(head_dim)
    per_program = num_warps * 32 * 16 // out.itemsize
    heads = min(max(per_program // block, 1), next_power_of_2(num_heads))
    grid = (tokens * cdiv(num_heads, heads), 1, 1)
    _launch(grid, (out, lse, sinks), (num_heads, head_dim, heads, block), num_warps)
