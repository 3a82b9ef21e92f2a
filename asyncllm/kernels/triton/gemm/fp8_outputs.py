"""From the sums of ``fp8_tiles`` to outputs; see its ``Plan``, and ``wgmma_tiles.Output``."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import debug_barrier

from asyncllm.kernels.triton.activation import activate
from asyncllm.kernels.triton.gemm.wgmma_tiles import ROWS, output_layout


@gluon.jit
def weight_rows(i, part, n, plan: gl.constexpr):
    """See ``wgmma_tiles.weight_rows``."""
    if plan.act is None:
        return gl.minimum(part * ROWS + i, n - 1)
    else:
        row = gl.minimum(part * (ROWS // 2) + i // 16 * 8 + i % 8, n // 2 - 1)
        return row + i // 8 % 2 * (n // 2)


@gluon.jit
def finish(y, output, part, rows, first_row, split, plan: gl.constexpr):
    """Write outputs; of programs that share some, the last one to arrive does."""
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout))
    is_last = True
    if plan.splits > 1:
        CELLS: gl.constexpr = ROWS * plan.block_m
        group = part + gl.program_id(1) * (gl.num_programs(2) * plan.parts)
        j = gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, y.type.layout))
        cells = i[:, None] * plan.block_m + j[None, :]
        cells = output.partial + group * (plan.splits * CELLS) + cells
        gl.store(cells + split * CELLS, y)
        debug_barrier()  # the stores of all threads come before the arrival
        is_last = gl.atomic_add(output.arrivals + group, 1, sem="acq_rel") == plan.splits - 1
    if is_last:
        if plan.splits > 1:
            gl.store(output.arrivals + group, 0)
            y = gl.load(cells, cache_modifier=".cg")
            for s in gl.static_range(1, plan.splits):
                y += gl.load(cells + s * CELLS, cache_modifier=".cg")
        _write(y, output, part, rows, first_row, plan)


@gluon.jit
def _write(y, output, part, rows, first_row, plan: gl.constexpr):
    """From sums to outputs."""
    SIZE: gl.constexpr = ROWS if plan.act is None else ROWS // 2
    OUT: gl.constexpr = output_layout(SIZE, plan.block_m, 4)
    if plan.bias:
        y += gl.load(output.bias + rows).to(gl.float32)[:, None]
    if plan.residual:
        m = first_row + gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, y.type.layout))
        n = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, y.type.layout))
        at = output.out + m.to(gl.int64)[None, :] * output.stride + n[:, None]
        exists = (m < output.m)[None, :] & (n < output.n)[:, None]
        y += gl.load(at, exists, other=0.0).to(gl.float32)
    if plan.act is not None:
        halves = gl.reshape(y, [ROWS // 16, 2, 8, plan.block_m])
        gate, up = gl.split(gl.permute(halves, [0, 2, 3, 1]))
        y = gl.reshape(activate(gate, plan.act) * up, [SIZE, plan.block_m])
    y = gl.convert_layout(y.to(output.out.dtype.element_ty), OUT)
    m = first_row + gl.arange(0, plan.block_m, layout=gl.SliceLayout(0, OUT))
    n = part * SIZE + gl.arange(0, SIZE, layout=gl.SliceLayout(1, OUT))
    limit = output.n if plan.act is None else output.n // 2
    at = output.out + m.to(gl.int64)[None, :] * output.stride + n[:, None]
    gl.store(at, y, (m < output.m)[None, :] & (n < limit)[:, None])
