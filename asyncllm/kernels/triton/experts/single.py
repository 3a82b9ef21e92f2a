"""The experts of one token, on the CUDA cores.

There is nothing to group: a program computes some outputs from whole rows of the weight, all of
which it requests at once. In the second product, such a row is that of all experts of the token,
one after the other, so nothing is left to add up, and a program requests its rows before the first
product has ended.

Scales of 8-bit weights are those of whole blocks of rows, so x is multiplied by them instead.

On an H200, one token of Qwen3-30B-A3B takes 21.5 us a layer in bfloat16 instead of 33 in groups;
reading takes 17.6. In 8 bits it takes 16.7 instead of 20.4.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.experts.product import parts
from asyncllm.kernels.triton.experts.products import activated
from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.types import ExpertWeight, Fp8Matrix, Gated, GatedExperts

#: Bytes of the weight that a program of the first and of the second product loads, if that is not
#: more than those of the fewest rows.
FIRST_BYTES, SECOND_BYTES = 32 << 10, 48 << 10
#: The most bytes of the weight that a thread has room for.
THREAD_BYTES = 512
#: Bytes of a row that are loaded at once.
CHUNK_BYTES = 2048


class Tile(NamedTuple):
    """How a program computes.

    Attributes:
        outputs: of a program.
        columns: loaded at once.
        warps: of the program.
    """

    outputs: int
    columns: int
    warps: int


@triton.jit
def _rounded(x, FORMAT: tl.constexpr):
    """x, 1-dimensional, as it is multiplied by weights of that format."""
    if FORMAT == "fp8_blocks":
        blocks = tl.reshape(x, [x.shape[0] // 128, 128])
        size = (tl.maximum(tl.max(tl.abs(blocks), axis=1), 1e-12) / 448.0)[:, None]
        codes = tl.minimum(tl.maximum(blocks / size, -448.0), 448.0).to(tl.float8e4nv)
        return tl.reshape(codes.to(tl.float32) * size, [x.shape[0]])
    else:
        return x


@triton.jit
def _partial(weights, x):
    """Sums of eight products, which a thread has: [rows, columns] -> [rows, columns / 8]."""
    products = weights * x[None, :]
    return tl.sum(tl.reshape(products, [weights.shape[0], weights.shape[1] // 8, 8]), axis=2)


@triton.jit
def _first_of_one(
    inner,  # [TOP_K, INNER]
    x,  # [K]
    weight,  # [experts * 2 * INNER, K]
    scale,
    bias,
    chosen,  # int32 [TOP_K]
    tiles,
    INNER: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FORMAT: tl.constexpr,
    ACT: tl.constexpr,
    PAIRED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    choice = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    output = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(output, INNER - 1)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    begin = tl.load(chosen + choice) * (2 * INNER)
    rows_of_gate = begin + (n * 2 if PAIRED else n)
    rows_of_up = begin + (n * 2 + 1 if PAIRED else n + INNER)
    gates = _rows(weight, rows_of_gate, K, BLOCK_K)
    ups = _rows(weight, rows_of_up, K, BLOCK_K)
    gate = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for i in tl.static_range(CHUNKS):
        column = i * BLOCK_K + k
        here = tl.load(x + column, column < K, other=0.0).to(tl.float32)
        here = _rounded(here, FORMAT)
        of_gate, of_up = here, here
        if FORMAT == "fp8_blocks":
            row = begin + tile * BLOCK_N * (2 if PAIRED else 1)
            at = scale + column // 128
            of_gate *= tl.load(at + row // 128 * (K // 128), column < K, other=0.0)
            row += 0 if PAIRED else INNER
            of_up *= tl.load(at + row // 128 * (K // 128), column < K, other=0.0)
        gate += _partial(gates[i].to(tl.float32), of_gate)
        up += _partial(ups[i].to(tl.float32), of_up)
    gate, up = tl.sum(gate, axis=1), tl.sum(up, axis=1)
    if BIAS:
        gate += tl.load(bias + rows_of_gate).to(tl.float32)
        up += tl.load(bias + rows_of_up).to(tl.float32)
    y = activated(gate, up, ACT, ALPHA, LIMIT)
    tl.store(inner + choice * INNER + output, y.to(inner.dtype.element_ty), output < INNER)


@triton.jit
def _rows(weight, rows, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """All columns of rows of the weight, BLOCK_K at a time: a tuple of [rows, BLOCK_K]."""
    k = tl.arange(0, BLOCK_K)
    at = weight + rows.to(tl.int64)[:, None] * K + k[None, :]
    tiles: tl.tuple = ()
    for i in tl.static_range((K + BLOCK_K - 1) // BLOCK_K):
        if (i + 1) * BLOCK_K <= K:
            tiles += (tl.load(at + i * BLOCK_K, eviction_policy="evict_first"),)
        else:
            inside = (i * BLOCK_K + k < K)[None, :]
            tiles += (tl.load(at + i * BLOCK_K, inside, other=0.0, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _second_of_one(
    out,  # [HIDDEN]; also the residual
    inner,  # [TOP_K, K]
    weight,  # [experts * HIDDEN, K]
    scale,
    bias,
    chosen,  # int32 [TOP_K]
    factors,  # [TOP_K]
    beside,  # [HIDDEN]
    logit,  # of the weight of ``beside``
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr,
    FORMAT: tl.constexpr,
    BIAS: tl.constexpr,
    BESIDE: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row of the weight is that of all experts, one after the other."""
    COLUMNS: tl.constexpr = TOP_K * K
    CHUNKS: tl.constexpr = (COLUMNS + BLOCK_K - 1) // BLOCK_K
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    n = tl.minimum(output, HIDDEN - 1)
    # The choice is older than the first product, so nothing has to be waited for yet.
    tiles: tl.tuple = ()
    for i in tl.static_range(CHUNKS):
        column = i * BLOCK_K + tl.arange(0, BLOCK_K)
        j = tl.minimum(column // K, TOP_K - 1)
        # Columns that a thread loads at once are those of one expert.
        expert = tl.max_constancy(tl.load(chosen + j), [ALIGNED]).to(tl.int64)
        k = tl.max_contiguous(tl.multiple_of(column % K, [ALIGNED]), [ALIGNED])
        at = weight + (expert * (HIDDEN * K) + k)[None, :] + n[:, None] * K
        tiles += (
            tl.load(at, (column < COLUMNS)[None, :], other=0.0, eviction_policy="evict_first"),
        )
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    for i in tl.static_range(CHUNKS):
        column = i * BLOCK_K + tl.arange(0, BLOCK_K)
        j = tl.minimum(column // K, TOP_K - 1)
        factor = tl.load(factors + j).to(tl.float32)
        here = tl.load(inner + column, column < COLUMNS, other=0.0).to(tl.float32)
        here = _rounded(here, FORMAT) * factor
        if FORMAT == "fp8_blocks":
            row = tl.load(chosen + j) * HIDDEN + tl.program_id(0) * BLOCK_N
            at = scale + row // 128 * (K // 128) + column % K // 128
            here *= tl.load(at, column < COLUMNS, other=0.0)
        total += _partial(tiles[i].to(tl.float32), here)
    y = tl.sum(total, axis=1)
    if BIAS:
        for j in tl.static_range(TOP_K):
            row = tl.load(chosen + j) * HIDDEN + n
            y += tl.load(bias + row).to(tl.float32) * tl.load(factors + j).to(tl.float32)
    if BESIDE:
        gate = 1.0 / (1.0 + tl.exp(-tl.load(logit).to(tl.float32)))
        y += tl.load(beside + n).to(tl.float32) * gate
    if RESIDUAL:
        y += tl.load(out + n).to(tl.float32)
    tl.store(out + output, y.to(out.dtype.element_ty), output < HIDDEN)


_launch_first = Launcher(_first_of_one)
_launch_second = Launcher(_second_of_one)


def fits(experts: GatedExperts, x: Tensor, top_k: int) -> bool:
    """Whether ``mix_one`` can take experts."""
    if not all(isinstance(w, Tensor) or _has_blocks(w) for w in (experts.gate_up, experts.down)):
        return False
    inner = experts.inner_size
    first, second = _tiles(experts, top_k)
    if isinstance(experts.gate_up, Fp8Matrix) and (inner % 64 or x.shape[1] % 128):
        return False  # outputs of a program, or experts, would share a block of scales
    room = THREAD_BYTES * 32
    return (
        2 * first.outputs * _row_bytes(experts.gate_up) <= first.warps * room
        and second.outputs * top_k * _row_bytes(experts.down) <= second.warps * room
    )


def _has_blocks(weight: ExpertWeight) -> bool:
    return isinstance(weight, Fp8Matrix) and weight.is_blocked and weight.data.shape[1] % 128 == 0


def _codes(weight: ExpertWeight) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight[0]


def _row_bytes(weight: ExpertWeight) -> int:
    codes = _codes(weight)
    return codes.shape[-1] * codes.itemsize


def _tiles(experts: GatedExperts, top_k: int) -> tuple[Tile, Tile]:
    """Of the two products: the best of some dozen on an H200 with the sizes of Qwen3-30B-A3B."""
    itemsize = _codes(experts.down).itemsize
    columns = CHUNK_BYTES // itemsize
    first = FIRST_BYTES // (2 * _row_bytes(experts.gate_up))
    second = SECOND_BYTES // (top_k * _row_bytes(experts.down))
    return Tile(_outputs(first), columns, 8), Tile(_outputs(second), columns, 8 // itemsize)


def _outputs(most: int) -> int:
    return min(max(next_power_of_2(most + 1) // 2, 1), 8)


def mix_one(
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: GatedExperts,
    beside: Gated | None,
    *,
    has_residual: bool,
) -> None:
    """See ``kernels.experts.mix_experts``; for one row of x and what ``fits``."""
    top_k = chosen.shape[1]
    first, second = _tiles(experts, top_k)
    codes, scale, _, form, _ = parts(experts.gate_up)
    size = experts.inner_size
    inner = x.new_empty(top_k, size)
    tiles = cdiv(size, first.outputs)
    _launch_first(
        (top_k * tiles, 1, 1),
        (inner, x, codes, scale, experts.gate_up_bias, chosen, tiles),
        (
            *(size, codes.shape[-1], first.outputs, first.columns, form, experts.act),
            *(experts.paired, experts.alpha, experts.limit, experts.gate_up_bias is not None),
        ),
        first.warps,
    )
    codes, scale, _, form, _ = parts(experts.down)
    values, logit = (None, None) if beside is None else beside
    _launch_second(
        (cdiv(x.shape[1], second.outputs), 1, 1),
        (out, inner, codes, scale, experts.down_bias, chosen, weights, values, logit),
        (
            *(x.shape[1], codes.shape[-1], top_k, second.outputs, second.columns),
            *(min(16 // codes.itemsize, 8), form, experts.down_bias is not None),
            *(beside is not None, has_residual),
        ),
        second.warps,
    )
