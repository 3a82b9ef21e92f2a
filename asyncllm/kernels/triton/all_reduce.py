"""Sums and rows of all ranks, in one launch: each rank pushes its values to the GPUs of the others.

A value travels as a word of 32 bits beside the number of the launch, in one store of 64 bits, so
nothing else has to say that it has come (as in NCCL's LL protocol). Who waits polls its own memory.

Program p of every rank has the same words, places of its own in all memories, and its own count of
launches. There are two places for each word, used in turn: a rank that writes for launch n + 2 has
read what the others wrote for n + 1, and they began that after they had read the words of n.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import NATIVE, Launcher, cdiv

_NUM_WARPS: Final = 8
#: Words of a program: one to a thread, which can then wait for it alone.
WORDS: Final = 32 * _NUM_WARPS
_WORDS: tl.constexpr = tl.constexpr(WORDS)

# Every 16,384 polls it looks whether to give up, which is a read of host memory.
_POLL: tl.constexpr = tl.constexpr("""{
.reg .pred done, again;
.reg .b32 number, polls, other;
.reg .b64 both;
mov.b32 polls, 0;
POLL:
ld.relaxed.sys.global.b64 both, [$1];
mov.b64 {$0, number}, both;
setp.eq.b32 done, number, $2;
@done bra DONE;
add.u32 polls, polls, 1;
and.b32 other, polls, 0x3FFF;
setp.ne.u32 again, other, 0;
@again bra POLL;
ld.relaxed.sys.global.b32 other, [$3];
setp.eq.b32 again, other, 0;
@again bra POLL;
DONE:
}""")


def place_bytes(programs: int, ranks: int) -> int:
    """The memory that a rank needs for the words of launches of so many programs."""
    return 2 * ranks * programs * WORDS * 8


@triton.jit
def _push(places, word, number):
    """Store words with the number of their launch: pointers of int64, int32, a scalar."""
    low = word.to(tl.uint32, bitcast=True).to(tl.uint64)
    high = number.to(tl.uint32, bitcast=True).to(tl.uint64) << 32
    both = (low | high).to(tl.int64, bitcast=True)
    if NATIVE:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0;",
            "=r,l,l",
            [places.to(tl.int64), both],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(places, both)


@triton.jit
def _await(places, number, gives_up):
    """The words of the launch once they have come, or any once ``gives_up`` is not 0."""
    if NATIVE:
        addresses = places.to(tl.int64)
        numbers = tl.full(places.shape, number, tl.int32)
        flag = tl.full(places.shape, gives_up.to(tl.int64), tl.int64)
        words = tl.inline_asm_elementwise(
            _POLL,
            "=&r,l,r,l",
            [addresses, numbers, flag],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        both = tl.load(places)
        while (tl.min(((both >> 32) == number).to(tl.int32)) == 0) & (tl.load(gives_up) == 0):
            both = tl.load(places)
        words = both.to(tl.int32)
    return words


@triton.jit
def _place(memories, holder, source, number, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """In the holder's memory, where this program's words from the source lie in this launch."""
    memory = tl.load(memories + holder).to(tl.pointer_type(tl.int64))
    block = ((number & 1) * SIZE + source) * PROGRAMS + tl.program_id(0)
    return memory + block.to(tl.int64) * _WORDS + tl.arange(0, _WORDS)


@triton.jit
def _begin(
    x,
    index,
    exists,
    memories,
    counts,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Push this rank's words to all others; returns the number of the launch, and the words."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number = tl.load(counts + tl.program_id(0)) + 1
    mine = tl.load(x.to(tl.pointer_type(tl.int32)) + index, mask=exists, other=0)
    for other in tl.static_range(SIZE):
        if other != RANK:
            _push(_place(memories, other, RANK, number, SIZE, PROGRAMS), mine, number)
    return number, mine


@triton.jit
def _word_from(
    source: tl.constexpr,
    mine,
    memories,
    number,
    gives_up,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """The words of a rank in this launch."""
    if source == RANK:
        return mine
    else:
        return _await(_place(memories, RANK, source, number, SIZE, PROGRAMS), number, gives_up)


@triton.jit
def _end(counts, number):
    tl.debug_barrier()  # every warp has read the count
    tl.store(counts + tl.program_id(0), number)


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


@triton.jit(do_not_specialize=["words"])
def _sum(
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
    program = tl.program_id(0)
    index = program * _WORDS + tl.arange(0, _WORDS)
    exists = index < words
    target = base.to(tl.pointer_type(tl.int32))
    number, mine = _begin(x, index, exists, memories, counts, RANK, SIZE, PROGRAMS, PDL)
    # All ranks add in the same order, so they get the same bits.
    lower = tl.zeros([_WORDS], tl.float32)
    upper = tl.zeros([_WORDS], tl.float32)
    for rank in tl.static_range(SIZE):
        word = _word_from(rank, mine, memories, number, gives_up, RANK, SIZE, PROGRAMS)
        lower, upper = _add(lower, upper, word, DTYPE)
    if ADDS:
        word = tl.load(target + index, mask=exists, other=0)
        lower, upper = _add(lower, upper, word, DTYPE)
    total = _word_of(lower, upper, DTYPE)
    tl.store(target + index, total, mask=exists)
    _end(counts, number)


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
    program = tl.program_id(0)
    index = program * _WORDS + tl.arange(0, _WORDS)
    exists = index < words
    target = y.to(tl.pointer_type(tl.int32))
    number, mine = _begin(x, index, exists, memories, counts, RANK, SIZE, PROGRAMS, PDL)
    place = index // COLUMNS * (COLUMNS * SIZE) + index % COLUMNS
    for rank in tl.static_range(SIZE):
        word = _word_from(rank, mine, memories, number, gives_up, RANK, SIZE, PROGRAMS)
        tl.store(target + place + rank * COLUMNS, word, mask=exists)
    _end(counts, number)


_launch_sum = Launcher(_sum)
_launch_gather = Launcher(_gather)


class Channel(NamedTuple):
    """What the programs of one rank find the others by.

    Attributes:
        memories: int64 [size]: where this rank finds the memory of each, of ``place_bytes``; zeros
            before the first launch.
        counts: int32 [programs] zeros, this rank's.
        gives_up: int32 [1] in page-locked memory of the host. Once it is not 0, nothing waits.
        rank: this one.
    """

    memories: Tensor
    counts: Tensor
    gives_up: Tensor
    rank: int


def programs_for(x: Tensor) -> int:
    """The programs of a launch for x, whose values must fill whole words."""
    return cdiv(x.numel() * x.itemsize, 4 * WORDS)


def sum_of_all(x: Tensor, residual: Tensor | None, channel: Channel) -> Tensor:
    """See ``Ranks.sum``. All ranks launch the same, in the same order, on one stream each."""
    base = x if residual is None else residual
    ranks, programs = len(channel.memories), len(channel.counts)
    words = x.numel() * x.itemsize // 4
    _launch_sum(
        (programs_for(x), 1, 1),
        (x, base, channel.memories, channel.counts, channel.gives_up, words),
        (channel.rank, ranks, programs, residual is not None),
        _NUM_WARPS,
    )
    return base


def rows_of_all(x: Tensor, channel: Channel) -> Tensor:
    """See ``Ranks.gather``. All ranks launch the same, in the same order, on one stream each."""
    ranks, programs = len(channel.memories), len(channel.counts)
    rows, columns = x.shape
    y = x.new_empty(rows, ranks * columns)
    words = x.numel() * x.itemsize // 4
    _launch_gather(
        (programs_for(x), 1, 1),
        (x, y, channel.memories, channel.counts, channel.gives_up, words),
        (columns * x.itemsize // 4, channel.rank, ranks, programs),
        _NUM_WARPS,
    )
    return y
