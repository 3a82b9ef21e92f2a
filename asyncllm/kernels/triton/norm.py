"""Root-mean-square normalisation. A program reads a few whole rows into registers.

On an H200 it is as fast as memory: 0.74 us for one row of 1,024 elements, 9.3 for 8,192 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv, next_power_of_2
from asyncllm.kernels.types import Norm


@triton.jit(do_not_specialize=["rows"])
def _rms_norm(
    x,
    weight,
    y,
    rows,
    ROW_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    columns = tl.arange(0, BLOCK)
    exists = columns < SIZE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Row by row: a tile of several would be added up in another order.
    first = tl.program_id(0).to(tl.int64) * ROWS
    OWN: tl.constexpr = ROWS if GROUPS > 1 else 1  # rows with factors of their own
    factors: tl.tuple = ()
    for i in tl.static_range(OWN):
        of_group = weight + (first + i) % GROUPS * SIZE + columns
        factor = tl.load(of_group, mask=exists, other=0.0).to(tl.float32)
        factors += (factor if OFFSET is None else factor + OFFSET,)
    if PDL:
        tl.extra.cuda.gdc_wait()
    loaded: tl.tuple = ()
    for i in tl.static_range(ROWS):
        mask = (first + i < rows) & exists
        loaded += (tl.load(x + (first + i) * ROW_STRIDE + columns, mask=mask, other=0.0),)
    for i in tl.static_range(ROWS):
        values = loaded[i].to(tl.float32)
        values *= tl.rsqrt(tl.sum(values * values, 0) / SIZE + EPS)
        if OFFSET is None:
            values = values.to(y.dtype.element_ty).to(tl.float32)
        values *= factors[i % OWN]
        mask = (first + i < rows) & exists
        tl.store(y + (first + i) * SIZE + columns, values.to(y.dtype.element_ty), mask=mask)


_launch = Launcher(_rms_norm)


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """See ``kernels.norm.rms_norm``."""
    weight, eps, offset = norm
    size = x.shape[-1]
    rows = x if x.dim() == 2 else x.reshape(-1, size)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    count = rows.shape[0]
    if count == 0:
        return y
    block = next_power_of_2(size)
    row_bytes = block * x.itemsize
    # An SM starts 6 programs a microsecond, so programs take several of many short rows.
    per_program = max(4096 // row_bytes, 1) if count >= 1024 else 1
    num_warps = min(max(row_bytes // 2048, 4), 16)
    grid = (cdiv(count, per_program), 1, 1)
    groups = weight.numel() // size
    constants = (rows.stride(0), size, groups, eps, offset, per_program, block)
    _launch(grid, (rows, weight, y, count), constants, num_warps)
    return y
