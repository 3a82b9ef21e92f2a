"""Copies of recurrent states between slots, all of them in one launch.

A program has the same elements of every slot, and copies them in order: so no program reads what
another one writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv

#: Bytes of a slot that a program copies at once.
BLOCK = 1 << 14


@triton.jit
def _copy_block(states, copies, count, block, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    element = block * BLOCK + tl.arange(0, BLOCK)
    for i in range(count):
        source = tl.load(copies + 2 * i).to(tl.int64)
        target = tl.load(copies + 2 * i + 1).to(tl.int64)
        values = tl.load(states + source * SIZE + element, mask=element < SIZE)
        tl.store(states + target * SIZE + element, values, mask=element < SIZE)
        tl.debug_barrier()  # another thread may load it


@triton.jit(do_not_specialize=["count"])
def _copy_states(
    inputs,
    matrices,
    copies,
    count,
    INPUTS: tl.constexpr,
    MATRICES: tl.constexpr,
    INPUT_BLOCK: tl.constexpr,
    MATRIX_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    BLOCKS: tl.constexpr = (INPUTS + INPUT_BLOCK - 1) // INPUT_BLOCK
    block = tl.program_id(0)
    if block < BLOCKS:
        _copy_block(inputs, copies, count, block, INPUTS, INPUT_BLOCK)
    else:
        _copy_block(matrices, copies, count, block - BLOCKS, MATRICES, MATRIX_BLOCK)


_launch = Launcher(_copy_states)


def copy_states(inputs: Tensor, matrices: Tensor, copies: Tensor) -> None:
    """See ``kernels.recurrent.states.copy_states``."""
    sizes = inputs.shape[1], matrices.shape[1]
    blocks = BLOCK // inputs.itemsize, BLOCK // matrices.itemsize
    grid = (sum(map(cdiv, sizes, blocks)), 1, 1)
    args = (inputs, matrices, copies, len(copies))
    # One stage: a copy may read what the one before has written.
    _launch(grid, args, (*sizes, *blocks), num_warps=8, num_stages=1)
