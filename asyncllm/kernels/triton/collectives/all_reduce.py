"""Sums of all ranks, in one launch, by one push of the words or by two.

One shot: each rank pushes all its words to all others, and adds up what it gets. With N ranks it
sends N - 1 times the size of the tensor.

Two shots: each rank adds up one block of N. It gets this block from all others, and pushes the sum
to them. That sends 2 (N - 1) / N times the size, and the words cross the link twice, one after the
other. (A reduce-scatter and an all-gather: Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005.)
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.collectives.push import (
    NUM_WARPS,
    Channel,
    blocks_of,
    end,
    load,
    next_number,
    push,
    push_to_others,
    receive,
    store,
)
from asyncllm.kernels.triton.launch import Launcher, cdiv

_THREADS: tl.constexpr = tl.constexpr(32 * NUM_WARPS)


@triton.jit
def _add(lower, upper, word, DTYPE: tl.constexpr):
    """Add what a word holds to sums in float32: one value of 32 bits, or two of 16."""
    if tl.float32 == DTYPE:
        return lower + word.to(tl.float32, bitcast=True), upper
    else:
        first = (word & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        second = ((word >> 16) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True)
        return lower + first.to(tl.float32), upper + second.to(tl.float32)


@triton.jit
def _word_of(lower, upper, DTYPE: tl.constexpr):
    if tl.float32 == DTYPE:
        return lower.to(tl.int32, bitcast=True)
    else:
        first = lower.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        second = upper.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32)
        return (first & 0xFFFF) | (second << 16)


@triton.jit
def _sum_of_block(
    a,
    b,
    c,
    target,
    block,
    words,
    memories,
    number,
    gives_up,
    DTYPE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ADDS: tl.constexpr,
):
    """This rank's words of a block plus those of all others, and plus the target's if ADDS."""
    if ADDS:
        base_a, base_b, base_c = load(target, block, words)
    # All ranks add in the same order, so they get the same bits.
    zeros = tl.zeros([_THREADS], tl.float32)
    lower_a, upper_a, lower_b, upper_b, lower_c, upper_c = zeros, zeros, zeros, zeros, zeros, zeros
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            their_a, their_b, their_c = a, b, c
        else:
            their_a, their_b, their_c = receive(
                memories, RANK, rank, number, gives_up, SIZE, PROGRAMS
            )
        lower_a, upper_a = _add(lower_a, upper_a, their_a, DTYPE)
        lower_b, upper_b = _add(lower_b, upper_b, their_b, DTYPE)
        lower_c, upper_c = _add(lower_c, upper_c, their_c, DTYPE)
    if ADDS:
        lower_a, upper_a = _add(lower_a, upper_a, base_a, DTYPE)
        lower_b, upper_b = _add(lower_b, upper_b, base_b, DTYPE)
        lower_c, upper_c = _add(lower_c, upper_c, base_c, DTYPE)
    return (
        _word_of(lower_a, upper_a, DTYPE),
        _word_of(lower_b, upper_b, DTYPE),
        _word_of(lower_c, upper_c, DTYPE),
    )


@triton.jit(do_not_specialize=["words"])
def _one_shot(
    x,
    base,
    memories,
    counts,
    gives_up,
    words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
):
    DTYPE: tl.constexpr = x.dtype.element_ty
    target = base.to(tl.pointer_type(tl.int32))
    block = tl.program_id(0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number = next_number(counts)
    a, b, c = load(x.to(tl.pointer_type(tl.int32)), block, words)
    push_to_others(memories, RANK, number, a, b, c, RANK, SIZE, PROGRAMS)
    a, b, c = _sum_of_block(
        a,
        b,
        c,
        target,
        block,
        words,
        memories,
        number,
        gives_up,
        DTYPE,
        RANK,
        SIZE,
        PROGRAMS,
        ADDS,
    )
    store(target, block, words, a, b, c)
    end(counts, number)


@triton.jit(do_not_specialize=["words"])
def _two_shots(
    x,
    base,
    memories,
    counts,
    gives_up,
    words,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ADDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program p has blocks p * SIZE and on, one for each rank to add up."""
    DTYPE: tl.constexpr = x.dtype.element_ty
    source = x.to(tl.pointer_type(tl.int32))
    target = base.to(tl.pointer_type(tl.int32))
    first = tl.program_id(0) * SIZE
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number = next_number(counts)
    for other in tl.static_range(SIZE):
        if other != RANK:
            a, b, c = load(source, first + other, words)
            push(memories, other, RANK, number, a, b, c, SIZE, PROGRAMS)
    a, b, c = load(source, first + RANK, words)
    a, b, c = _sum_of_block(
        a,
        b,
        c,
        target,
        first + RANK,
        words,
        memories,
        number,
        gives_up,
        DTYPE,
        RANK,
        SIZE,
        PROGRAMS,
        ADDS,
    )
    push_to_others(memories, SIZE + RANK, number, a, b, c, RANK, SIZE, PROGRAMS)
    store(target, first + RANK, words, a, b, c)
    for other in tl.static_range(SIZE):
        if other != RANK:
            a, b, c = receive(memories, RANK, SIZE + other, number, gives_up, SIZE, PROGRAMS)
            store(target, first + other, words, a, b, c)
    end(counts, number)


_launch_one_shot = Launcher(_one_shot)
_launch_two_shots = Launcher(_two_shots)


def sum_in_one_shot(x: Tensor, residual: Tensor | None, channel: Channel) -> Tensor:
    """See ``Ranks.sum``. All ranks launch the same, in the same order, on one stream each.

    Takes as many programs as ``blocks_of(x)``.
    """
    return _sum(_launch_one_shot, blocks_of(x), x, residual, channel)


def sum_in_two_shots(x: Tensor, residual: Tensor | None, channel: Channel) -> Tensor:
    """As ``sum_in_one_shot``, with the same bits, for more than two ranks.

    Takes as many programs as ``blocks_of(x)``, divided by the ranks.
    """
    programs = cdiv(blocks_of(x), len(channel.memories))
    return _sum(_launch_two_shots, programs, x, residual, channel)


def _sum(
    launch: Launcher, programs: int, x: Tensor, residual: Tensor | None, channel: Channel
) -> Tensor:
    base = x if residual is None else residual
    words = x.numel() * x.itemsize // 4
    launch(
        (programs, 1, 1),
        (x, base, channel.memories, channel.counts, channel.gives_up, words),
        (channel.rank, len(channel.memories), len(channel.counts), residual is not None),
        NUM_WARPS,
    )
    return base
