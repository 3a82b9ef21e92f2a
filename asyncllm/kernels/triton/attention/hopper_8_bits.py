"""Steps of ``decode_hopper`` and ``prefill_hopper`` for 8-bit pages.

The tensor cores multiply float16, and one instruction makes two of two e4m3. K and V are copied to
shared memory as words of two numbers: dimensions 2 i and 2 i + 1 of a token.

In decode attention, tensor cores take K and V from registers. Of K, words 2 j and 2 j + 1 are in
one register, so that one product takes the dimensions of even words and another those of odd ones,
with queries divided likewise. V is loaded transposed, so that a register has the same word of two
tokens; dimensions 2 i and 2 i + 1 have sums of their own.

In prompt attention, they take blocks of K and V from shared memory. A third warpgroup converts them
there while the other two attend to earlier blocks.

Queries are scaled so that the largest element of each becomes ``LARGEST``, as the range of float16
is smaller than that of bfloat16. The scales of pages take part in the scores and in the result.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import debug_barrier

from asyncllm.kernels.triton.attention import prefill_hopper_parts as prefill
from asyncllm.kernels.triton.attention.decode_hopper_parts import (
    K_FREE,
    K_FULL,
    TILE,
    V_FULL,
    barrier,
    heads_layout,
    products_layout,
)
from asyncllm.kernels.triton.attention.decode_pieces import LOG2_E, LOWEST
from asyncllm.kernels.triton.attention.prefill_hopper_parts import (
    ROW,
    STAGES,
    VECTORS,
    blocks_of,
    item_of,
    tile_of,
)
from asyncllm.kernels.triton.attention.prefill_tiles import KEYS

LARGEST = gl.constexpr(256.0)
#: Of ``prefill_hopper``.
PREFILL_K_FULL, PREFILL_V_FULL = prefill.K_FULL, prefill.V_FULL
PREFILL_K_FREE, PREFILL_V_FREE = prefill.K_FREE, prefill.V_FREE
#: Float16 of the four bytes of a register: bytes 0 and 1, then 2 and 3.
IN_ORDER = gl.constexpr(
    "{ .reg .b16 l, h; mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)
#: Likewise, bytes 0 and 2, then 1 and 3.
APART = gl.constexpr(
    "{ .reg .b32 t; .reg .b16 l, h; prmt.b32 t, $2, 0, 0x3120; mov.b32 {l, h}, t; "
    "cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }"
)


@gluon.jit
def halves(words, ASM: gl.constexpr):
    """Two float16 tensors of int16 words."""
    kinds: gl.constexpr = (gl.float16, gl.float16)
    return gl.inline_asm_elementwise(ASM, "=r,=r,r", [words], kinds, is_pure=True, pack=2)


@gluon.jit
def scales_of(scales, kv_head, layer: gl.constexpr):
    """Those of keys or of values, for each column."""
    lane = gl.arange(0, layer.columns, layout=gl.SliceLayout(1, heads_layout(layer.head_dim)))
    head = gl.minimum(lane, layer.group - 1) // (layer.group // layer.fold)
    return gl.load(scales + kv_head * layer.fold + head)


@gluon.jit
def begin_8_bits(heads, k_scale, piece, shared, layer: gl.constexpr):
    """``begin``, with sums of even and of odd dimensions, before they are scaled.

    Returns:
        low and high [head_dim / 2, columns], totals, peak; and the factor of scores [columns].
    """
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    PRODUCTS: gl.constexpr = products_layout(layer.columns)
    COLUMN: gl.constexpr = gl.SliceLayout(0, PRODUCTS)
    WORDS: gl.constexpr = layer.head_dim // 2
    shared.heads.store(heads)
    queries = shared.heads.slice(0, layer.columns).load(LAYOUT).to(gl.float32)
    key = shared.heads.slice(layer.group, 1).load(LAYOUT).to(gl.float32)
    value = shared.heads.slice(layer.group + 1, 1).load(LAYOUT).to(gl.float32)
    scale = k_scale * (layer.scale * LOG2_E)
    unit = gl.maximum(gl.max(gl.abs(queries), 1), 1e-30) / LARGEST
    scaled = (queries / unit[:, None]).to(gl.float16)
    pairs = gl.reshape(scaled, [layer.columns, WORDS // 2, 2, 2])
    even, odd = gl.split(gl.permute(pairs, (0, 1, 3, 2)))
    # Lanes after the queries are columns, too; their results are discarded.
    shared.q.index(0).store(gl.reshape(even, [layer.columns, WORDS]))
    shared.q.index(1).store(gl.reshape(odd, [layer.columns, WORDS]))
    exists = piece.newest >= 0
    scores = gl.convert_layout(gl.sum(queries * key, 1) * scale, COLUMN)
    factor = gl.convert_layout(unit * scale, COLUMN)
    lowest = gl.full([layer.columns], LOWEST, gl.float32, layout=COLUMN)
    peak = gl.where(exists, scores, lowest)
    none = gl.zeros([WORDS, layer.columns], gl.float32, layout=PRODUCTS)
    low, high = gl.split(gl.reshape(value, [1, WORDS, 2]))
    low = none + gl.convert_layout(gl.permute(low, (1, 0)), PRODUCTS)
    high = none + gl.convert_layout(gl.permute(high, (1, 0)), PRODUCTS)
    place = gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
    nothing = gl.zeros([TILE, layer.columns], gl.float32, layout=PRODUCTS)
    totals = gl.where(((place == 0) & exists)[:, None], nothing + 1.0, nothing)
    fence_async_shared()
    debug_barrier()  # all threads have stored their queries
    return low, high, totals, peak, factor


@gluon.jit
def attend_8_bits(low, high, totals, peak, factor, shared, piece, number, layer: gl.constexpr):
    """Take the tile of this number into the softmax."""
    PRODUCTS: gl.constexpr = products_layout(layer.columns)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, PRODUCTS, 2)
    stage = number % layer.stages
    parity = (number // layer.stages) & 1
    none = gl.zeros([TILE, layer.columns], gl.float32, layout=PRODUCTS)
    mbarrier.wait(barrier(shared, K_FULL, stage, layer), parity)
    even, odd = halves(shared.k.index(stage).load(LEFT), IN_ORDER)
    q = shared.q.index(0).permute((1, 0))
    scores = warpgroup_mma(even, q, none, use_acc=False, is_async=True)
    q = shared.q.index(1).permute((1, 0))
    scores = warpgroup_mma(odd, q, scores, is_async=True)
    mbarrier.wait(barrier(shared, V_FULL, stage, layer), parity)
    words = shared.v.index(stage).permute((1, 0)).load(LEFT)
    count = piece.end - piece.begin - number * TILE
    scores = warpgroup_mma_wait(0, deps=(scores,))
    scores *= factor[None, :]
    if count < TILE:
        place = gl.arange(0, TILE, layout=gl.SliceLayout(1, PRODUCTS))
        scores = gl.where((place < count)[:, None], scores, float("-inf"))
        # Unwritten memory may be NaN, and 0 * NaN is NaN.
        token = gl.arange(0, TILE, layout=gl.SliceLayout(0, LEFT))
        words = gl.where((token < count)[None, :], words, gl.zeros_like(words))
    new_peak = gl.maximum(peak, gl.max(scores, 0))
    weights = gl.exp2(scores - new_peak[None, :])
    fade = gl.exp2(peak - new_peak)
    totals = totals * fade[None, :] + weights
    p = shared.p.permute((1, 0))
    p.store(weights.to(gl.float16))
    first, second = halves(words, APART)
    fence_async_shared()
    debug_barrier()  # all threads have stored their weights, and loaded K and V
    mbarrier.arrive(barrier(shared, K_FREE, stage, layer), count=1)
    low = warpgroup_mma(first, p, low * fade[None, :], is_async=True)
    high = warpgroup_mma(second, p, high * fade[None, :], is_async=True)
    low, high = warpgroup_mma_wait(0, deps=(low, high))
    return low, high, totals, new_peak


@gluon.jit
def joined(low, high, layer: gl.constexpr):
    """Sums of all dimensions, [columns, head_dim]."""
    pairs = gl.permute(gl.join(low, high), (1, 0, 2))
    return gl.reshape(pairs, [layer.columns, layer.head_dim])


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
            barriers = raw.barriers, shared.barriers
            _convert(raw.k, shared.k, *barriers, number, PREFILL_K_FULL, PREFILL_K_FREE)
            _convert(raw.v, shared.v, *barriers, number, PREFILL_V_FULL, PREFILL_V_FREE)
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
