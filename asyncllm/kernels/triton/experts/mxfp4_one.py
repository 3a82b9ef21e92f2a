"""The experts of one token in MXFP4, on tensor cores fed from registers.

As ``single``: nothing is grouped, a program requests its words at once, and in the second product a
row of the weight is that of all experts of the token, one after the other.

A product of the tensor cores takes 8 columns of x, and there is one. So a row of the weight is cut
into as many pieces as a program has warps, at most 8. Each warp multiplies its own piece by all
pieces of x, and keeps the products of equal ones.

On an H200, one token of gpt-oss-20b takes 23 us a layer instead of 35 in groups; reading takes 12.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from asyncllm.kernels.triton.codes import mxfp4_operand, mxfp4_words
from asyncllm.kernels.triton.experts.products import activated
from asyncllm.kernels.triton.launch import Launcher, cdiv
from asyncllm.kernels.types import GatedExperts, Mxfp4Matrix

#: Rows of the weight of a program, columns of a block, and columns of a product's x.
ROWS, SPAN, PIECES = gl.constexpr(16), gl.constexpr(128), gl.constexpr(8)
SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
#: Warps of a program of the first product, and of the second.
FIRST_WARPS, SECOND_WARPS = 4, 8


class Cut(NamedTuple):
    """How rows are cut into pieces.

    Attributes:
        columns: of the weight.
        split: pieces of a row of an expert.
        warps: of a program; each has a piece.
        blocks: of 128 columns of a row.
        each: blocks of a piece.
        early: of these, requested before anything else.
        waits: for the kernel before, but not until then.
    """

    columns: Any
    split: Any
    warps: Any
    blocks: Any
    each: Any
    early: Any
    waits: Any


@gluon.constexpr_function
def _x_layout(warps: int) -> gl.DistributedLinearLayout:
    """Pieces of x, [8, 128], of which a thread has what it multiplies."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[0, 0]] * (warps.bit_length() - 1),
        block_bases=[],
        shape=[8, 128],
    )


@gluon.jit
def _request(weight, scale, row, block, cut: gl.constexpr):
    """The words and scales of a block of rows."""
    LAYOUT: gl.constexpr = row.type.layout.parent
    k = gl.arange(0, SPAN // 8, layout=gl.SliceLayout(0, LAYOUT))
    at = row * cut.blocks + block
    inside = block < cut.blocks
    words_at = weight + at.to(gl.int64)[:, None] * (SPAN // 8) + k[None, :]
    words = gl.load(words_at, inside[:, None] & (k >= 0)[None, :], other=0)
    return words, gl.load(scale + at, inside, other=0)


@gluon.jit
def _share(x, cut: gl.constexpr):
    """x, a row for each expert, in shared memory, by block: the pieces' columns, in the order in
    which a thread needs them (``kernels.quantized``)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 32 // cut.warps], [8 // cut.warps, 4 * cut.warps], [cut.warps, 1], [1, 0]
    )
    n = gl.arange(0, PIECES, layout=gl.SliceLayout(1, LAYOUT))
    k = gl.arange(0, SPAN, layout=gl.SliceLayout(0, LAYOUT))
    blocks: gl.tuple = ()
    for b in gl.static_range(cut.each):
        column = (n % cut.split * (cut.each * SPAN) + b * SPAN)[:, None] + k[None, :]
        exists = (column < cut.columns) & (n < cut.warps)[:, None]
        at = x + (n // cut.split * cut.columns)[:, None] + column
        blocks += (gl.load(at, exists, other=0.0),)
    shared: gl.tuple = ()
    for b in gl.static_range(cut.each):
        here = gl.permute(gl.reshape(blocks[b], [PIECES, 4, 4, 4, 2]), [0, 3, 1, 2, 4])
        here = gl.reshape(here, [PIECES, SPAN])
        shared += (gl.allocate_shared_memory(here.dtype, [PIECES, SPAN], SHARED, here),)
    return shared


@gluon.jit
def _sums(weight, scale, row, x, cut: gl.constexpr):
    """Products of the warps' pieces, [16 * warps], of rows in the layout of words."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [cut.warps, 1], [16, 8])
    i = gl.arange(0, ROWS * cut.warps, layout=row.type.layout)
    first = i // ROWS % cut.split * cut.each
    blocks: gl.tuple = ()
    for b in gl.static_range(cut.each):
        if b < cut.early:
            blocks += (_request(weight, scale, row, first + b, cut),)
    if cut.waits:
        gdc_launch_dependents()
        gdc_wait()
    shared = _share(x, cut)
    sums = gl.zeros([ROWS * cut.warps, PIECES], gl.float32, layout=SUMS)
    for b in gl.static_range(cut.each):
        words, scales = blocks[b]
        w = mxfp4_operand(words, scales)
        if b + cut.early < cut.each:
            blocks += (_request(weight, scale, row, first + b + cut.early, cut),)
        here = gl.reshape(shared[b].load(_x_layout(cut.warps)), [PIECES, 4, 4, 4, 2])
        here = gl.reshape(gl.permute(here, [2, 3, 1, 4, 0]), [SPAN, PIECES])
        # No number changes its thread.
        w = gl.convert_layout(w, gl.DotOperandLayout(0, SUMS, 2))
        sums = mma_v2(w, gl.convert_layout(here, gl.DotOperandLayout(1, SUMS, 2)), sums)
    i = gl.arange(0, ROWS * cut.warps, layout=gl.SliceLayout(1, SUMS))
    n = gl.arange(0, PIECES, layout=gl.SliceLayout(0, SUMS))
    return gl.sum(gl.where((i // ROWS)[:, None] == n[None, :], sums, 0.0), axis=1)


@gluon.jit
def _of_program(y, WARPS: gl.constexpr):
    """The sums of all warps: [16 * WARPS] -> [16]."""
    return gl.sum(gl.reshape(y, [WARPS, ROWS]), axis=0)


@gluon.jit(do_not_specialize=["tiles"])
def _first_of_one(
    inner,  # [top_k, OUTPUTS / 2]
    x,  # [COLUMNS]
    weight,  # int32 [experts * OUTPUTS, padded COLUMNS / 8]; gate and up alternate
    scale,  # int32 [experts * OUTPUTS, padded COLUMNS / 128]
    bias,  # [experts, OUTPUTS]
    chosen,  # int32 [top_k]
    tiles,
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    ACT: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    BIAS: gl.constexpr,
    PDL: gl.constexpr,
):
    BLOCKS: gl.constexpr = (COLUMNS + SPAN - 1) // SPAN
    EACH: gl.constexpr = (BLOCKS + WARPS - 1) // WARPS
    cut: gl.constexpr = Cut(COLUMNS, WARPS, WARPS, BLOCKS, EACH, EACH, False)
    choice = gl.program_id(0) // tiles
    begin = gl.program_id(0) % tiles * ROWS
    i = gl.arange(0, ROWS * WARPS, layout=gl.SliceLayout(1, mxfp4_words(WARPS)))
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = gl.load(chosen + choice)
    # Eight rows of the gate, then the same of up.
    row = gl.minimum(begin + i % 8 * 2 + i // 8 % 2, OUTPUTS - 1) + expert * OUTPUTS
    y = _of_program(_sums(weight, scale, row, x, cut), WARPS)
    if BIAS:
        r = gl.arange(0, ROWS, layout=y.type.layout)
        row = gl.minimum(begin + r % 8 * 2 + r // 8, OUTPUTS - 1) + expert * OUTPUTS
        y += gl.load(bias + row).to(gl.float32)
    gate, up = gl.split(gl.permute(gl.reshape(y, [2, ROWS // 2]), [1, 0]))
    y = activated(gate, up, ACT, ALPHA, LIMIT)
    output = begin // 2 + gl.arange(0, ROWS // 2, layout=y.type.layout)
    at = inner + choice * (OUTPUTS // 2) + output
    gl.store(at, y.to(inner.dtype.element_ty), output < OUTPUTS // 2)


@gluon.jit
def _second_of_one(
    out,  # [OUTPUTS]
    inner,  # [TOP_K, COLUMNS]
    weight,  # int32 [experts * OUTPUTS, padded COLUMNS / 8]
    scale,  # int32 [experts * OUTPUTS, padded COLUMNS / 128]
    bias,  # [experts, OUTPUTS]
    chosen,  # int32 [TOP_K]
    factors,  # [TOP_K]
    OUTPUTS: gl.constexpr,
    COLUMNS: gl.constexpr,
    TOP_K: gl.constexpr,
    WARPS: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
):
    SPLIT: gl.constexpr = WARPS // TOP_K
    BLOCKS: gl.constexpr = (COLUMNS + SPAN - 1) // SPAN
    EACH: gl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    cut: gl.constexpr = Cut(COLUMNS, SPLIT, WARPS, BLOCKS, EACH, 4, PDL)
    begin = gl.program_id(0) * ROWS
    i = gl.arange(0, ROWS * WARPS, layout=gl.SliceLayout(1, mxfp4_words(WARPS)))
    # The choice is older than the first product, so nothing has to be waited for yet.
    expert = gl.load(chosen + i // (ROWS * SPLIT))
    row = gl.minimum(begin + i % ROWS, OUTPUTS - 1) + expert * OUTPUTS
    y = _sums(weight, scale, row, inner, cut)
    j = gl.arange(0, ROWS * WARPS, layout=y.type.layout) // (ROWS * SPLIT)
    y = _of_program(y * gl.load(factors + j).to(gl.float32), WARPS)
    output = begin + gl.arange(0, ROWS, layout=y.type.layout)
    n = gl.minimum(output, OUTPUTS - 1)
    if BIAS:
        for j in gl.static_range(TOP_K):
            of_expert = gl.load(bias + gl.load(chosen + j) * OUTPUTS + n).to(gl.float32)
            y += of_expert * gl.load(factors + j).to(gl.float32)
    if RESIDUAL:
        y += gl.load(out + n).to(gl.float32)
    gl.store(out + output, y.to(out.dtype.element_ty), output < OUTPUTS)


_launch_first = Launcher(_first_of_one)
_launch_second = Launcher(_second_of_one, max_registers=128)


def fits(experts: GatedExperts, top_k: int) -> bool:
    """Whether ``mix_one`` can take experts, on a GPU."""
    weights = experts.gate_up, experts.down
    is_mxfp4 = all(isinstance(weight, Mxfp4Matrix) for weight in weights)
    return is_mxfp4 and experts.paired and SECOND_WARPS % top_k == 0


def mix_one(
    out: Tensor,
    x: Tensor,
    weights: Tensor,
    chosen: Tensor,
    experts: GatedExperts,
    *,
    has_residual: bool,
) -> None:
    """See ``kernels.experts.mix_experts``; for one row of x and what ``fits``."""
    assert isinstance(experts.gate_up, Mxfp4Matrix)
    assert isinstance(experts.down, Mxfp4Matrix)
    top_k, size = chosen.shape[1], experts.inner_size
    inner = x.new_empty(top_k, size)
    words, scale = (part.view(torch.int32) for part in experts.gate_up)
    tiles = cdiv(2 * size, ROWS.value)
    _launch_first(
        (top_k * tiles, 1, 1),
        (inner, x, words, scale, experts.gate_up_bias, chosen, tiles),
        (
            *(2 * size, x.shape[1], FIRST_WARPS, experts.act, experts.alpha, experts.limit),
            experts.gate_up_bias is not None,
        ),
        FIRST_WARPS,
    )
    words, scale = (part.view(torch.int32) for part in experts.down)
    _launch_second(
        (cdiv(x.shape[1], ROWS.value), 1, 1),
        (out, inner, words, scale, experts.down_bias, chosen, weights),
        (x.shape[1], size, top_k, SECOND_WARPS, experts.down_bias is not None, has_residual),
        SECOND_WARPS,
    )
