"""Data of ``decode_hopper``: constants, memory, pieces of rows, the producer warp, and heads."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from asyncllm.kernels.triton.attention.decode_encode import partners, scaled
from asyncllm.kernels.triton.attention.decode_pieces import cut_row
from asyncllm.kernels.triton.page_copies import copy_block, find_cells
from asyncllm.kernels.triton.qk_norm_rope import in_8_bits

#: Tokens of a tile.
TILE = gl.constexpr(64)
#: The barriers of each stage: K or V has arrived, or has been used.
K_FULL, V_FULL, K_FREE, V_FREE = map(gl.constexpr, range(4))


class Layer(NamedTuple):
    """Constants of a model's layer, and of the programs for it.

    Attributes:
        group: query heads of a K/V head.
        columns: of a product: the group, padded.
        lanes: heads loaded at a time: the group, key and value, padded.
        stages: tiles in shared memory. Of two programs on a multiprocessor, one loads tokens while
            the other begins or ends.
        rotary, eps, offset: of the encoding, if the heads are not yet encoded.
        fold: heads of K and V that are taken as one, of ``head_dim / fold`` elements each; a query
            is 0 in the elements of the other heads. The sizes above are after that.
    """

    scale: Any
    page_size: Any
    kv_heads: Any
    group: Any
    head_dim: Any
    columns: Any
    lanes: Any
    stages: Any
    rotary: Any
    eps: Any
    offset: Any
    fold: Any


class Shared(NamedTuple):
    """Shared memory.

    Attributes:
        heads: [lanes, head_dim]; queries, key and value as they were loaded.
        q: [columns, head_dim]; for 8-bit pages [2, columns, head_dim / 2].
        p: [columns, TILE]; weights of a tile.
        k, v: [stages, TILE, head_dim]; of 8-bit pages, two numbers are one int16.
        barriers: [4 * stages], kind by kind.
    """

    heads: Any
    q: Any
    p: Any
    k: Any
    v: Any
    barriers: Any


class Piece(NamedTuple):
    """The work of a program: older tokens begin .. end - 1 of a row, for one K/V head.

    Attributes:
        number: of the ``pieces`` of the row.
        table: page numbers of the row.
        newest: the position of the row's newest token if it belongs to this piece, else -1.
    """

    row: Any
    kv_head: Any
    number: Any
    pieces: Any
    begin: Any
    end: Any
    table: Any
    newest: Any


class Memory(NamedTuple):
    """Global memory; see ``kernels.attention`` and ``Workspace``.

    Attributes:
        q: queries, or all heads if they are not yet encoded.
        sinks: of the query heads, or None.
        scales: of 8-bit pages, or None.
        position, place: of the newest token: its rotary position, and its index in the flattened
            pages.
    """

    q: Any
    q_row_stride: Any
    q_head_stride: Any
    q_weight: Any
    k_weight: Any
    rope: Any
    sinks: Any
    scales: Any
    position: Any
    place: Any
    k: Any
    v: Any
    out: Any
    partial: Any
    stats: Any
    arrivals: Any
    splits: Any


@gluon.constexpr_function
def products_layout(columns):
    """The layout of scores [TILE, columns] and of sums of values [head_dim, columns]."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def heads_layout(head_dim):
    """The layout of [lanes, head_dim] or [TILE, head_dim]: 16 bytes for each thread."""
    lanes = head_dim // 8
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


@gluon.jit
def piece_of(lengths, slots, block_table, table_stride, splits, chunk):
    """This program's piece.

    Returns:
        The piece; whether it exists (a row's only piece may have no tokens); and whether the row is
        not padding.
    """
    number = gl.program_id(1)
    row = gl.program_id(2).to(gl.int64)
    length, table, _, stop, size = cut_row(
        row, lengths, slots, block_table, table_stride, 0, splits, chunk, False, TILE
    )
    begin = number * size
    end = gl.minimum(begin + size, stop)
    newest = gl.where((end == stop) & (length > 0), length - 1, -1)
    pieces = gl.maximum((stop + size - 1) // size, 1)
    piece = Piece(row, gl.program_id(0), number, pieces, begin, end, table, newest)
    return piece, number < pieces, length > 0


@gluon.jit
def tiles_of(piece):
    """The number of tiles of a piece; the last one may not be full."""
    return (piece.end - piece.begin + TILE - 1) // TILE


@gluon.jit
def barrier(shared, kind: gl.constexpr, stage, layer: gl.constexpr):
    """The barrier of this kind of a stage."""
    return shared.barriers.index(kind * layer.stages + stage)


@gluon.jit
def produce(keys, values, piece, shared, layer: gl.constexpr):
    """Request tile after tile, as stages become free."""
    COPIED: gl.constexpr = keys.block_type.shape[0]
    column = piece.kv_head * shared.k.shape[2]
    for number in range(tiles_of(piece)):
        start = piece.begin + number * TILE
        cells = find_cells(piece.table, start, piece.end, TILE, COPIED, layer.page_size)
        stage = number % layer.stages
        parity = (number // layer.stages + 1) & 1
        mbarrier.wait(barrier(shared, K_FREE, stage, layer), parity)
        copy_block(keys, cells, column, shared.k, stage, barrier(shared, K_FULL, stage, layer))
        if shared.v.dtype != gl.int16:  # K and V of 8-bit pages become free at the same time
            mbarrier.wait(barrier(shared, V_FREE, stage, layer), parity)
        copy_block(values, cells, column, shared.v, stage, barrier(shared, V_FULL, stage, layer))
        if number == 0:
            gdc_launch_dependents()


@gluon.jit
def _dims(layer: gl.constexpr):
    """Elements of a head, [head_dim]."""
    return gl.arange(0, layer.head_dim, layout=gl.SliceLayout(0, heads_layout(layer.head_dim)))


@gluon.jit
def within_head(dim, layer: gl.constexpr):
    """Elements of one of several heads that are taken as one."""
    if layer.fold > 1:
        dim = dim % (layer.head_dim // layer.fold)
    return dim


@gluon.jit
def is_own(lane, dim, layer: gl.constexpr):
    """Whether elements belong to the head of K and V that a query sees; [lanes, head_dim]."""
    every = (lane >= 0)[:, None] & (dim >= 0)[None, :]
    if layer.fold > 1:
        of_lane = lane // (layer.group // layer.fold)
        every = of_lane[:, None] == (dim // (layer.head_dim // layer.fold))[None, :]
    return every


@gluon.jit
def load_turns(rope, position, layer: gl.constexpr):
    """Load early the cosines and sines of each element of a head, [head_dim].

    The sine is negative where the partner is subtracted.
    """
    HALF: gl.constexpr = layer.rotary // 2
    dim = within_head(_dims(layer), layer)
    angle = rope + position * layer.rotary + gl.where(dim < HALF, dim, dim - HALF)
    turns = dim < layer.rotary
    cos = gl.load(angle, mask=turns, other=1.0)
    sin = gl.load(angle + HALF, mask=turns, other=0.0)
    return cos, gl.where(dim < HALF, -sin, sin)


@gluon.jit
def load_heads(memory, piece, turns, layer: gl.constexpr, ENCODES: gl.constexpr):
    """Queries of a group, then key and value of the newest token; [lanes, head_dim].

    Key and value are 0 if the newest token does not belong to this piece. If ENCODES, heads are
    encoded as by ``kernels.attention.encode_heads``, and key and value written to their page.
    """
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    lane = gl.arange(0, layer.lanes, layout=gl.SliceLayout(1, LAYOUT))
    dim = _dims(layer)
    is_query = lane < layer.group
    is_key = lane == layer.group
    is_new = (lane >= layer.group) & (lane < layer.group + 2) & (piece.newest >= 0)
    of_new = is_new[:, None] & (dim >= 0)[None, :]
    of_query = is_query[:, None] & is_own(lane, dim, layer)
    row = memory.q + piece.row * memory.q_row_stride
    cell = (memory.place * layer.kv_heads + piece.kv_head) * layer.head_dim
    page = gl.where(is_key, memory.k + cell, memory.v + cell)
    query = piece.kv_head * layer.group + lane
    cells = page[:, None] + dim[None, :]
    if ENCODES:
        # A row has all queries, then all keys, then all values.
        after: gl.constexpr = layer.group * layer.kv_heads
        new = after + ((lane - layer.group) * layer.kv_heads + piece.kv_head) * layer.fold
        number = gl.where(is_query, query, new)
        inside = of_query | of_new
        heads = _encode(row + number * memory.q_head_stride, inside, memory, turns, layer)
        mask = of_new & (memory.place >= 0)
        if memory.scales is not None:
            scale = gl.where(is_key, 0, layer.kv_heads * layer.fold) + piece.kv_head * layer.fold
            scale = memory.scales + scale[:, None]
            if layer.fold > 1:
                scale += (dim // (layer.head_dim // layer.fold))[None, :]
            kept = in_8_bits(heads, gl.load(scale))
            gl.store(cells, kept, mask=mask)
            heads = gl.where(is_query[:, None], heads, kept.to(heads.dtype))
        else:
            gl.store(cells, heads, mask=mask)
    elif memory.scales is not None:
        at = (row + query * memory.q_head_stride)[:, None] + within_head(dim, layer)[None, :]
        heads = gl.load(at, mask=of_query, other=0.0)
        kept = gl.load(cells, mask=of_new, other=0.0)
        heads = gl.where(is_query[:, None], heads, kept.to(heads.dtype))
    else:
        at = gl.where(is_query, row + query * memory.q_head_stride, page)
        heads = gl.load(at[:, None] + dim[None, :], mask=of_query | of_new, other=0.0)
    return heads


@gluon.jit
def _encode(heads, inside, memory, turns, layer: gl.constexpr):
    """Load heads of a group, and normalise and rotate all but the value; [lanes, head_dim].

    The rotary partner of each element is loaded as well, not exchanged between threads.

    Args:
        heads: addresses, [lanes].
        inside: mask of elements, [lanes, head_dim].
        turns: of ``load_turns``, or None.
    """
    LAYOUT: gl.constexpr = heads_layout(layer.head_dim)
    lane = gl.arange(0, layer.lanes, layout=gl.SliceLayout(1, LAYOUT))
    dim = _dims(layer)
    partner = partners(within_head(dim, layer), layer.rotary, layer.rotary // 2)
    # A query has one head, a key or value as many as are taken as one.
    at = heads[:, None] + dim[None, :]
    partner_at = heads[:, None] + partner[None, :]
    if layer.fold > 1:
        of_query = (lane < layer.group)[:, None]
        before = (dim - within_head(dim, layer))[None, :]
        at -= gl.where(of_query, before, 0)
        partner_at += gl.where(of_query, 0, before)
    plain = gl.load(at, mask=inside, other=0.0)
    dtype: gl.constexpr = plain.dtype
    x = plain.to(gl.float32)
    y = x
    if turns is not None:
        y = gl.load(partner_at, mask=inside, other=0.0).to(gl.float32)
    if memory.q_weight is not None:
        weight = gl.where(lane < layer.group, memory.q_weight, memory.k_weight)[:, None]
        scale = gl.rsqrt(gl.sum(x * x, 1) / layer.head_dim + layer.eps)[:, None]
        x = scaled(x * scale, gl.load(weight + dim[None, :]), layer.offset, dtype)
        if turns is not None:
            y = scaled(y * scale, gl.load(weight + partner[None, :]), layer.offset, dtype)
    if turns is not None:
        cos, sin = turns
        x = x * cos[None, :] + y * sin[None, :]
    return gl.where((lane <= layer.group)[:, None], x.to(dtype), plain)
