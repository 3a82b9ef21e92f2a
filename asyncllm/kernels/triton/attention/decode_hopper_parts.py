"""Data of ``decode_hopper``: constants, memory, pieces of rows, and the producer warp."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents

from asyncllm.kernels.triton.attention.decode_pieces import cut_row
from asyncllm.kernels.triton.page_copies import copy_block, find_cells

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
