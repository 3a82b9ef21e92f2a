"""Attention of decode rows over the paged KV cache, in Triton.

Flash decoding (Dao et al., 2023): a row's tokens are cut into pieces that programs attend to
side by side, each for all query heads of one K/V head, and whoever finishes a row's last piece
adds them up.

Microseconds of one layer on an H200, in a graph of many layers' pages; bfloat16, 8 K/V heads of
128, page size 16. Floor: bytes of K and V at 4.3 TB/s. Mixed: lengths of 100 to 2,000, uniform.

| rows x length | 16 heads | 32 heads | floor | FlashInfer 0.6.13, its better one: 16, 32 heads |
|---------------|----------|----------|-------|-------------------------------------------------|
| 1 x 640       | 5.8      | 7.2      | 0.6   | 8.6, 8.6                                        |
| 8 x 640       | 11.3     |          | 4.9   | 12.5, 15.6                                      |
| 128 x 768     | 97.0     | 97.8     | 93.6  | 98.0, 107.9                                     |
| 256 x 768     | 187.0    | 188.6    | 187.3 | 200.5, 201.8                                    |
| 256 x 1,500   | 357.1    | 359.2    | 365.8 | 373.1, 374.1                                    |
| 256, mixed    | 256.2    | 258.3    | 247.2 | 261.1, 263.1                                    |

Equal shares of all rows' tokens for each program, found on the device, were slower everywhere:
1 x 640 took 7.4, 256 x 768 took 196.7.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from asyncllm.kernels.triton.decode_pieces import LOWEST, attend, find_piece, finish

if TYPE_CHECKING:
    from torch import Tensor

    from asyncllm.attention.base import AttentionSpec

#: Rows times K/V heads of one launch are at most this many.
MAX_PAIRS = 1 << 18
#: Of a launch with many rows.
MAX_PROGRAMS = 8192
#: K of a tile; its V takes as much again.
MAX_TILE_BYTES = 32 << 10


class Cut(NamedTuple):
    """How a launch is cut.

    Attributes:
        splits: a row's tokens are cut into at most so many pieces.
        chunk: of at least so many tokens each.
        tile: tokens that a program attends to at a time.
        warps, stages: of a program, and of its pipeline of loads.
    """

    splits: int
    chunk: int
    tile: int
    warps: int
    stages: int


def choose_cut(rows: int, spec: AttentionSpec, max_length: int, itemsize: int) -> Cut:
    """The measured best for so many rows of up to ``max_length`` tokens.

    The more rows there are, the less there is to gain from a second piece, which costs 2 us. Very
    long rows are cut even so, lest all wait for one of them.
    """
    pairs = rows * spec.num_kv_heads
    if pairs <= 64:
        cut = Cut(32, 64, 64, 2, 2)
    elif pairs <= 128:
        cut = Cut(16, 128, 64, 2, 2)
    elif pairs <= 256:
        cut = Cut(8, 256, 32, 2, 2)
    elif pairs <= 640:
        cut = Cut(4, 256, 128, 4, 2)
    else:
        # 4,000 programs that find nothing to do cost 1 us.
        cut = Cut(max(MAX_PROGRAMS // pairs, 1), 4096, 128, 4, 2)
    return fitted(cut, spec, max_length, itemsize)


def fitted(cut: Cut, spec: AttentionSpec, max_length: int, itemsize: int) -> Cut:
    """No more pieces than there can be, and no larger tiles than shared memory has room for."""
    token_bytes = triton.next_power_of_2(spec.head_dim) * itemsize
    return cut._replace(
        splits=max(min(cut.splits, max_length // cut.chunk), 1),
        tile=max(min(cut.tile, MAX_TILE_BYTES // token_bytes), 16),
    )


def decode_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_table: Tensor,
    slots: Tensor,
    lengths: Tensor,
    spec: AttentionSpec,
    *,
    out: Tensor | None = None,
    cut: Cut | None = None,
) -> Tensor:
    """See ``kernels.decode.decode_attention``."""
    num_rows, _, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_rows == 0:
        return out
    page_size = keys.shape[1]
    cut = cut or choose_cut(num_rows, spec, block_table.shape[1] * page_size, q.itemsize)
    partial, stats, arrivals = workspace(num_rows, spec, cut, q.device)
    pdl: dict[str, Any] = {"launch_pdl": True} if q.is_cuda else {}
    _decode[(spec.num_kv_heads, cut.splits, num_rows)](
        q,
        keys,
        values,
        block_table,
        slots,
        lengths,
        out,
        partial,
        stats,
        arrivals,
        block_table.stride(0),
        q.stride(0),
        q.stride(1),
        spec.scale,
        spec.softcap or 0.0,
        spec.window or 0,
        HAS_SOFTCAP=spec.softcap is not None,
        HAS_WINDOW=spec.window is not None,
        PAGE_SIZE=page_size,
        KV_HEADS=spec.num_kv_heads,
        GROUP=spec.num_heads // spec.num_kv_heads,
        HEAD_DIM=head_dim,
        **launch_constants(spec, q.dtype, cut),
        PDL=bool(pdl),
        num_warps=cut.warps,
        num_stages=cut.stages,
        **pdl,
    )
    return out


def launch_constants(spec: AttentionSpec, dtype: torch.dtype, cut: Cut) -> dict[str, Any]:
    """Sizes of the blocks that a program works on."""
    group = spec.num_heads // spec.num_kv_heads
    dims = triton.next_power_of_2(spec.head_dim)
    group_block = triton.next_power_of_2(group)
    return {
        "SPLITS": cut.splits,
        "CHUNK": cut.chunk,
        "TILE": cut.tile,
        "M": max(group_block, 16),
        "D": dims,
        "STEP": max(min(2048 * cut.warps // (group_block * dims), 32), 1),
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }


def workspace(
    num_rows: int, spec: AttentionSpec, cut: Cut, device: torch.device
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """partial, stats and arrivals of ``decode_pieces.finish``."""
    # Made by any launch at all, so that none that a graph captures has to.
    arrivals = _arrivals(device)
    if cut.splits == 1:
        return None, None, None
    pieces = num_rows * spec.num_heads * cut.splits
    partial = torch.empty(pieces * spec.head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(pieces * 2, dtype=torch.float32, device=device)
    return partial, stats, arrivals


@cache
def _arrivals(device: torch.device) -> Tensor:
    """Counters that each launch finds at zero and leaves so: its launches run one by one."""
    return torch.zeros(MAX_PAIRS, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["window"])
def _decode(
    q,
    keys,
    values,
    block_table,
    slots,
    lengths,
    out,
    partial,
    stats,
    arrivals,
    table_stride,
    q_row_stride,
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
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    kv_head = tl.program_id(0)
    piece = tl.program_id(1)
    row = tl.program_id(2)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(lengths + row).to(tl.int32)
    table = block_table + tl.load(slots + row).to(tl.int64) * table_stride
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    begin, end, pieces = find_piece(first, length, piece, SPLITS, TILE, CHUNK)
    if piece >= pieces:
        return
    lane = tl.arange(0, M)
    dim = tl.arange(0, D)
    q += row.to(tl.int64) * q_row_stride + kv_head * GROUP * q_head_stride
    inside = (lane < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    queries = tl.load(q + lane[:, None] * q_head_stride + dim[None, :], mask=inside, other=0.0)
    acc, total, peak = attend(
        queries,
        tl.zeros([M, D], tl.float32),
        tl.zeros([M], tl.float32),
        tl.full([M], LOWEST, tl.float32),
        begin,
        end,
        keys,
        values,
        table,
        kv_head,
        scale,
        softcap,
        HAS_SOFTCAP,
        PAGE_SIZE,
        KV_HEADS,
        HEAD_DIM,
        TILE,
        PRECISION,
    )
    finish(
        acc, total, peak, row, kv_head, piece, pieces, out, partial, stats, arrivals,
        SPLITS, KV_HEADS, GROUP, HEAD_DIM, STEP,
    )  # fmt: skip


__all__ = ["Cut", "choose_cut", "decode_attention"]
