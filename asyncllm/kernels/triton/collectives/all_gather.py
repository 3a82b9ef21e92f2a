"""Rows of all ranks side by side, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.collectives.push import (
    NUM_WARPS,
    WORDS,
    Channel,
    blocks_of,
    end,
    load,
    next_number,
    push_to_others,
    receive,
)
from asyncllm.kernels.triton.launch import Launcher

_THREADS: tl.constexpr = tl.constexpr(32 * NUM_WARPS)
_WORDS: tl.constexpr = tl.constexpr(WORDS)


@triton.jit(do_not_specialize=["words"])
def _gather(
    x,
    y,
    memories,
    counts,
    gives_up,
    words,
    COLUMNS: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number = next_number(counts)
    a, b, c = load(x.to(tl.pointer_type(tl.int32)), tl.program_id(0), words)
    push_to_others(memories, RANK, number, a, b, c, RANK, SIZE, PROGRAMS)
    target = y.to(tl.pointer_type(tl.int32))
    _store_beside(target, words, a, b, c, RANK, COLUMNS, SIZE)
    for other in tl.static_range(SIZE):
        if other != RANK:
            a, b, c = receive(memories, RANK, other, number, gives_up, SIZE, PROGRAMS)
            _store_beside(target, words, a, b, c, other, COLUMNS, SIZE)
    end(counts, number)


@triton.jit
def _store_beside(
    target, words, a, b, c, rank: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr
):
    index = tl.program_id(0) * _WORDS + tl.arange(0, _THREADS)
    _store_words(target, index, words, a, rank, COLUMNS, SIZE)
    _store_words(target, index + _THREADS, words, b, rank, COLUMNS, SIZE)
    _store_words(target, index + 2 * _THREADS, words, c, rank, COLUMNS, SIZE)


@triton.jit
def _store_words(
    target, index, words, word, rank: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr
):
    place = index // COLUMNS * (COLUMNS * SIZE) + index % COLUMNS + rank * COLUMNS
    tl.store(target + place, word, mask=index < words)


_launch = Launcher(_gather)


def rows_of_all(x: Tensor, channel: Channel) -> Tensor:
    """See ``Ranks.gather``. All ranks launch the same, in the same order, on one stream each.

    Takes as many programs as ``blocks_of(x)``.
    """
    ranks, programs = len(channel.memories), len(channel.counts)
    rows, columns = x.shape
    y = x.new_empty(rows, ranks * columns)
    words = x.numel() * x.itemsize // 4
    _launch(
        (blocks_of(x), 1, 1),
        (x, y, channel.memories, channel.counts, channel.gives_up, words),
        (columns * x.itemsize // 4, channel.rank, ranks, programs),
        NUM_WARPS,
    )
    return y
