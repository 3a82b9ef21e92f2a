"""Gated activations: a program for each block of a row, in float32 until the store.

On an H200 it is as fast as memory: 0.7 us for one row, 36 for 8,192 rows of 3,072 results. With
gelu, erf takes as long as memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv


@triton.jit
def activate(x, ACT: tl.constexpr):
    """The activation of that name in config.json, of a float32 tile."""
    if ACT == "silu":
        return x / (1.0 + tl.exp(-x))
    elif ACT == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACT == "gelu_pytorch_tanh":
        # 0.5 (1 + tanh u) = sigmoid(2 u), with u = sqrt(2 / pi) (x + 0.044715 x^3)
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    else:
        tl.static_assert(ACT == "relu", "unknown activation")
        return tl.where(x < 0.0, 0.0, x)  # NaN stays NaN


@triton.jit
def _gated(
    x,
    y,
    ROW_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    ACT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    gate = tl.load(x + row * ROW_STRIDE + columns, mask=mask).to(tl.float32)
    up = tl.load(x + row * ROW_STRIDE + SIZE + columns, mask=mask).to(tl.float32)
    values = activate(gate, ACT) * up
    tl.store(y + row * SIZE + columns, values.to(y.dtype.element_ty), mask=mask)


_launch = Launcher(_gated)


@triton.jit
def _sigmoid_gated(
    x,
    gate,
    y,
    ROW_STRIDE: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    blocks: tl.constexpr = (SIZE + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)
    columns = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    values = tl.load(x + row * ROW_STRIDE + columns, mask=mask).to(tl.float32)
    logits = tl.load(gate + row * GATE_STRIDE + columns, mask=mask).to(tl.float32)
    values = values / (1.0 + tl.exp(-logits))
    tl.store(y + row * SIZE + columns, values.to(y.dtype.element_ty), mask=mask)


_launch_sigmoid = Launcher(_sigmoid_gated)


def gated(x: Tensor, act: str) -> Tensor:
    """See ``kernels.activation.gated``."""
    rows, size = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, size)
    if rows == 0:
        return y
    num_warps = 4
    block = num_warps * 32 * 16 // x.itemsize
    grid = (rows * cdiv(size, block), 1, 1)
    _launch(grid, (x, y), (x.stride(0), size, act, block), num_warps)
    return y


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """See ``kernels.activation.sigmoid_gated``."""
    rows, size = x.shape
    y = x.new_empty(rows, size)
    if rows == 0:
        return y
    num_warps = 4
    block = num_warps * 32 * 16 // x.itemsize
    grid = (rows * cdiv(size, block), 1, 1)
    strides = x.stride(0), gate.stride(0)
    _launch_sigmoid(grid, (x, gate, y), (*strides, size, block), num_warps)
    return y
