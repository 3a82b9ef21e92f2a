"""What ``prefill_hopper`` does for 8-bit pages.

Tensor cores take blocks of keys and values from shared memory, in 16 bits. So blocks are copied to
shared memory as they are, and a third warpgroup converts them to float16 while the other two attend
to earlier blocks. Queries become float16, too, scaled so that the largest element of each is
``LARGEST``. The scales of pages take part in the scores and in the result.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language import debug_barrier

from asyncllm.kernels.triton.attention.decode_hopper_8_bits import IN_ORDER, LARGEST, halves
from asyncllm.kernels.triton.attention.prefill_hopper_parts import (
    K_FREE,
    K_FULL,
    ROW,
    STAGES,
    V_FREE,
    V_FULL,
    VECTORS,
    blocks_of,
    item_of,
    tile_of,
)
from asyncllm.kernels.triton.attention.prefill_tiles import KEYS

#: Keys that are converted at a time.
ROWS = gl.constexpr(32)


@gluon.constexpr_function
def _words_layout(words):
    """The layout of so many words of two numbers of each key."""
    return gl.BlockedLayout([1, 8], [32 * 8 // words, words // 8], [4, 1], [1, 0])


@gluon.jit
def convert(raw, shared, work, layer: gl.constexpr):
    """Convert the blocks of all items, as they arrive and as stages become free."""
    number = 0
    turn = 0
    item = item_of(turn)
    while item < work.items:
        tile = tile_of(work, item // work.pieces, layer)
        blocks = blocks_of(tile, item % work.pieces, work.pieces, layer)
        for _ in range(blocks.last - blocks.first + 1):
            _convert(raw.k, shared.k, raw.barriers, shared.barriers, number, K_FULL, K_FREE)
            _convert(raw.v, shared.v, raw.barriers, shared.barriers, number, V_FULL, V_FREE)
            number += 1
        turn += 1
        item = item_of(turn)


@gluon.jit
def _convert(raw, ring, raw_barriers, barriers, number, FULL: gl.constexpr, FREE: gl.constexpr):
    HEAD_DIM: gl.constexpr = ring.shape[2]
    LAYOUT: gl.constexpr = _words_layout(HEAD_DIM // 2)
    stage = number % STAGES
    mbarrier.wait(raw_barriers.index(FULL), number & 1)
    mbarrier.wait(barriers.index(FREE + stage), (number // STAGES + 1) & 1)
    for part in gl.static_range(KEYS // ROWS):
        words = raw.index(0).slice(part * ROWS, ROWS).load(LAYOUT)
        even, odd = halves(words, IN_ORDER)
        even = gl.reshape(even, [ROWS, HEAD_DIM // 4, 2])
        odd = gl.reshape(odd, [ROWS, HEAD_DIM // 4, 2])
        numbers = gl.reshape(gl.permute(gl.join(even, odd), (0, 1, 3, 2)), [ROWS, HEAD_DIM])
        ring.index(stage).slice(part * ROWS, ROWS).store(numbers)
    fence_async_shared()
    debug_barrier()  # all threads have loaded and stored
    mbarrier.arrive(barriers.index(FULL + stage), count=1)
    mbarrier.arrive(raw_barriers.index(FREE), count=1)


@gluon.jit
def prepare_queries(copies, dtype: gl.constexpr):
    """Make float16 of a warpgroup's queries in shared memory.

    Args:
        copies: [HALF, head_dim]; queries of ``dtype``, as float16.

    Returns:
        What one is in each query: [HALF].
    """
    plain = copies._reinterpret(dtype, copies.shape, copies.layout)
    queries = plain.load(VECTORS).to(gl.float32)
    unit = gl.maximum(gl.max(gl.abs(queries), 1), 1e-30) / LARGEST
    copies.store((queries / unit[:, None]).to(gl.float16))
    fence_async_shared()
    debug_barrier()  # all threads have stored their queries
    return gl.convert_layout(unit, ROW)


@gluon.jit
def in_vectors(results, copies):
    """``convert_layout`` to VECTORS, in the memory of queries that are no longer needed: there is
    no other left."""
    plain = copies._reinterpret(results.dtype, copies.shape, copies.layout)
    plain.store(results)
    debug_barrier()  # all threads have stored
    results = plain.load(VECTORS)
    debug_barrier()  # all threads have loaded: the next queries may come
    return results
