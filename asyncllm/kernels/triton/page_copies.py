"""Copies tokens of pages to shared memory with the tensor memory accelerator of Hopper GPUs."""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.types import AttentionSpec

HEAD_DIMS = (64, 128)
#: Elements of 128 bytes, the greatest width of a copy to shared memory.
SPAN = gl.constexpr(64)
SHARED = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
#: Of rows that are half as wide.
NARROW = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=16, rank=2))


def can_copy(keys: Tensor, spec: AttentionSpec, block: int) -> bool:
    """Whether this GPU can copy blocks of ``block`` tokens of these pages."""
    page_size = keys.shape[1]
    return (
        keys.is_cuda
        and gpu_of(keys.device).is_hopper
        and keys.dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
        and spec.head_dim in HEAD_DIMS
        and page_size % 16 == 0
        and (block % page_size == 0 or page_size % block == 0)
    )


def describe(pages: Tensor, block: int) -> TensorDescriptor:
    """A descriptor of pages [num_pages, page_size, num_kv_heads, head_dim] for ``copy_block``.

    8-bit pages are described as words of two numbers.
    """
    words = pages.view(torch.int16) if pages.itemsize == 1 else pages
    span = min(words.shape[3], SPAN.value)
    layout = shared_layout(span)
    box = [min(pages.shape[1], block), span]
    return TensorDescriptor.from_tensor(words.flatten(2).flatten(0, 1), box, layout)


@gluon.constexpr_function
def shared_layout(width):
    """The layout of rows of so many words in shared memory."""
    return SHARED.value if width >= SPAN.value else NARROW.value


@gluon.jit
def find_cells(table, start, end, BLOCK: gl.constexpr, COPIED: gl.constexpr, PAGE: gl.constexpr):
    """The cells, in the flattened pages, of the parts of the block that begins at token ``start``.

    The table may end after the page of token ``end - 1``, so parts after it copy that page again.
    """
    cells = ()
    for part in gl.static_range(BLOCK // COPIED):
        at = gl.minimum(start + part * COPIED, end - 1)
        page = gl.load(table + at // PAGE)
        cells += (page * PAGE + at % PAGE // COPIED * COPIED,)  # type: ignore[assignment]
    return cells


@gluon.jit
def copy_block(pages, cells, column, ring, stage, full):
    """Request a block.

    Args:
        pages: of ``describe``.
        cells: of ``find_cells``.
        column: the first column of the head.
        ring: shared memory, [stages, BLOCK, head_dim].
        full: the barrier of this stage.
    """
    COPIED: gl.constexpr = pages.block_type.shape[0]
    STAGES: gl.constexpr = ring.shape[0]
    PARTS: gl.constexpr = ring.shape[1] // COPIED
    WIDTH: gl.constexpr = pages.block_type.shape[1]
    SPANS: gl.constexpr = ring.shape[2] // WIDTH
    # In shared memory, the first 128 bytes of all rows come before the next 128 bytes.
    LAYOUT: gl.constexpr = shared_layout(WIDTH)
    boxes = ring._reinterpret(ring.dtype, [STAGES * SPANS * PARTS, COPIED, WIDTH], LAYOUT)
    mbarrier.expect(full, ring.shape[1] * ring.shape[2] * 2)
    for part in gl.static_range(PARTS):
        for span in gl.static_range(SPANS):
            box = boxes.index((stage * SPANS + span) * PARTS + part)
            at = [cells[part], column + span * WIDTH]
            tma.async_copy_global_to_shared(pages, at, full, box)
