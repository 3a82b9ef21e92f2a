"""Sums and rows of all ranks, in one launch: each rank pushes its values to the GPUs of the others.

Three words of 32 bits travel beside the number of the launch, in one store of 128 bits, so nothing
else has to say that they have come (as in NCCL's LL protocol). Who waits polls its own memory.

Program p of every rank has the same words, places of its own in all memories, and its own count of
launches. There are two places for each word, used in turn: a rank that writes for launch n + 2 has
read what the others wrote for n + 1, and they began that after they had read the words of n.

A launch may have more programs than run at once. Programs start in the order of their numbers, on
which CUB's decoupled look-back relies, too; so the first that has not ended runs on every rank.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import NATIVE, Launcher, cdiv

_NUM_WARPS: Final = 8
_THREADS: tl.constexpr = tl.constexpr(32 * _NUM_WARPS)
#: Words of a program: three to a thread, which can then wait for them alone.
WORDS: Final = 3 * 32 * _NUM_WARPS
_WORDS: tl.constexpr = tl.constexpr(WORDS)
#: A thread's place: its words and the number.
_PLACE_BYTES: Final = 16

# Scalars of 128 bits, because the parts of a vector may arrive one after the other.
_PUSH: tl.constexpr = tl.constexpr("""{
.reg .b64 first, last;
.reg .b128 all;
mov.b64 first, {$2, $3};
mov.b64 last, {$4, $5};
mov.b128 all, {first, last};
st.relaxed.sys.global.b128 [$1], all;
mov.b32 $0, 0;
}""")

# Every 16,384 polls it looks whether to give up, which is a read of host memory.
_POLL: tl.constexpr = tl.constexpr("""{
.reg .pred done, again;
.reg .b32 number, polls, other;
.reg .b64 first, last;
.reg .b128 all;
mov.b32 polls, 0;
POLL:
ld.relaxed.sys.global.b128 all, [$3];
mov.b128 {first, last}, all;
mov.b64 {$0, $1}, first;
mov.b64 {$2, number}, last;
setp.eq.b32 done, number, $4;
@done bra DONE;
add.u32 polls, polls, 1;
and.b32 other, polls, 0x3FFF;
setp.ne.u32 again, other, 0;
@again bra POLL;
ld.relaxed.sys.global.b32 other, [$5];
setp.eq.b32 again, other, 0;
@again bra POLL;
DONE:
}""")


def place_bytes(programs: int, ranks: int) -> int:
    """The memory that a rank needs for the words of launches of so many programs."""
    return 2 * ranks * programs * 32 * _NUM_WARPS * _PLACE_BYTES


@triton.jit
def _push(places, a, b, c, number):
    """Store three words at each place with the number of their launch, a scalar."""
    if NATIVE:
        tl.inline_asm_elementwise(
            _PUSH,
            "=r,l,r,r,r,r",
            [places.to(tl.int64), a, b, c, number + tl.zeros_like(a)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(places, a)
        tl.store(places + 1, b)
        tl.store(places + 2, c)
        tl.store(places + 3, number + tl.zeros_like(a))


@triton.jit
def _await(places, number, gives_up):
    """The words of the launch once they have come, or any once ``gives_up`` is not 0."""
    if NATIVE:
        addresses = places.to(tl.int64)
        numbers = tl.full(places.shape, number, tl.int32)
        flag = tl.full(places.shape, gives_up.to(tl.int64), tl.int64)
        a, b, c = tl.inline_asm_elementwise(
            _POLL,
            "=&r,=&r,=&r,l,r,l",
            [addresses, numbers, flag],
            dtype=(tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        numbers = tl.load(places + 3)
        while (tl.min((numbers == number).to(tl.int32)) == 0) & (tl.load(gives_up) == 0):
            numbers = tl.load(places + 3)
        a = tl.load(places)
        b = tl.load(places + 1)
        c = tl.load(places + 2)
    return a, b, c


@triton.jit
def _place(memories, holder, source, number, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """In the holder's memory, where this program's words from the source lie in this launch."""
    memory = tl.load(memories + holder).to(tl.pointer_type(tl.int32))
    block = ((number & 1) * SIZE + source) * PROGRAMS + tl.program_id(0)
    return memory + (block.to(tl.int64) * _THREADS + tl.arange(0, _THREADS)) * 4


@triton.jit
def _first_index():
    """Where a thread's first word is; the others are ``_THREADS`` and twice that behind it."""
    return tl.program_id(0) * _WORDS + tl.arange(0, _THREADS)


@triton.jit
def _load(x, index, words):
    """Three words of each thread; 0 behind the last one."""
    a = tl.load(x + index, mask=index < words, other=0)
    b = tl.load(x + index + _THREADS, mask=index + _THREADS < words, other=0)
    c = tl.load(x + index + 2 * _THREADS, mask=index + 2 * _THREADS < words, other=0)
    return a, b, c


@triton.jit
def _begin(
    x,
    words,
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
    a, b, c = _load(x.to(tl.pointer_type(tl.int32)), _first_index(), words)
    for other in tl.static_range(SIZE):
        if other != RANK:
            _push(_place(memories, other, RANK, number, SIZE, PROGRAMS), a, b, c, number)
    return number, a, b, c


@triton.jit
def _words_from(
    source: tl.constexpr,
    a,
    b,
    c,
    memories,
    number,
    gives_up,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    PROGRAMS: tl.constexpr,
):
    """The words of a rank in this launch; a, b and c are this rank's."""
    if source == RANK:
        return a, b, c
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
    target = base.to(tl.pointer_type(tl.int32))
    index = _first_index()
    number, a, b, c = _begin(x, words, memories, counts, RANK, SIZE, PROGRAMS, PDL)
    if ADDS:
        base_a, base_b, base_c = _load(target, index, words)
    # All ranks add in the same order, so they get the same bits.
    zeros = tl.zeros([_THREADS], tl.float32)
    lower_a, upper_a, lower_b, upper_b, lower_c, upper_c = zeros, zeros, zeros, zeros, zeros, zeros
    for rank in tl.static_range(SIZE):
        their_a, their_b, their_c = _words_from(
            rank, a, b, c, memories, number, gives_up, RANK, SIZE, PROGRAMS
        )
        lower_a, upper_a = _add(lower_a, upper_a, their_a, DTYPE)
        lower_b, upper_b = _add(lower_b, upper_b, their_b, DTYPE)
        lower_c, upper_c = _add(lower_c, upper_c, their_c, DTYPE)
    if ADDS:
        lower_a, upper_a = _add(lower_a, upper_a, base_a, DTYPE)
        lower_b, upper_b = _add(lower_b, upper_b, base_b, DTYPE)
        lower_c, upper_c = _add(lower_c, upper_c, base_c, DTYPE)
    _store(target, index, words, _word_of(lower_a, upper_a, DTYPE))
    _store(target, index + _THREADS, words, _word_of(lower_b, upper_b, DTYPE))
    _store(target, index + 2 * _THREADS, words, _word_of(lower_c, upper_c, DTYPE))
    _end(counts, number)


@triton.jit
def _store(target, index, words, word):
    tl.store(target + index, word, mask=index < words)


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
    number, a, b, c = _begin(x, words, memories, counts, RANK, SIZE, PROGRAMS, PDL)
    target = y.to(tl.pointer_type(tl.int32))
    index = _first_index()
    for rank in tl.static_range(SIZE):
        their_a, their_b, their_c = _words_from(
            rank, a, b, c, memories, number, gives_up, RANK, SIZE, PROGRAMS
        )
        _store_beside(target, index, words, their_a, rank, COLUMNS, SIZE)
        _store_beside(target, index + _THREADS, words, their_b, rank, COLUMNS, SIZE)
        _store_beside(target, index + 2 * _THREADS, words, their_c, rank, COLUMNS, SIZE)
    _end(counts, number)


@triton.jit
def _store_beside(
    target, index, words, word, rank: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr
):
    place = index // COLUMNS * (COLUMNS * SIZE) + index % COLUMNS + rank * COLUMNS
    tl.store(target + place, word, mask=index < words)


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
