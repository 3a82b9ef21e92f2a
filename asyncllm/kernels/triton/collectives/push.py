"""How ranks give each other words: each pushes its own into the memories of the others.

Three words of 32 bits travel beside the number of the launch, in one store of 128 bits, so nothing
else has to say that they have come (as in NCCL's LL protocol). Who waits polls its own memory.

Program p of every rank has places of its own in all memories, and its own count of launches. There
are two places for each word, used in turn: a rank that writes for launch n + 2 has read what the
others wrote for n + 1, and they began that after they had read all words of n.

A launch may have more programs than run at once. Programs start in the order of their numbers, on
which CUB's decoupled look-back relies, too; so the first that has not ended runs on every rank.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import NATIVE, cdiv

NUM_WARPS: Final = 8
_THREADS: tl.constexpr = tl.constexpr(32 * NUM_WARPS)
#: Words of a block: three to a thread, which can then wait for them alone.
WORDS: Final = 3 * 32 * NUM_WARPS
#: The words of a thread and the number.
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


def blocks_of(x: Tensor) -> int:
    """The blocks that the values of x fill, whole words."""
    return cdiv(x.numel() * x.itemsize, 4 * WORDS)


def place_bytes(programs: int, ranks: int) -> int:
    """The memory that a rank needs for launches of up to ``programs``."""
    slots: int = num_slots(ranks)
    return 2 * slots * programs * 32 * NUM_WARPS * _PLACE_BYTES


@triton.constexpr_function
def num_slots(ranks):
    """Blocks that a program may receive in a launch: words of each rank and, with more than two
    ranks, sums of each (``sum_in_two_shots``)."""
    return ranks if ranks == 2 else 2 * ranks


@triton.jit
def next_number(counts):
    """The number of this launch, for its program."""
    return tl.load(counts + tl.program_id(0)) + 1


@triton.jit
def end(counts, number):
    tl.debug_barrier()  # every warp has read the count
    tl.store(counts + tl.program_id(0), number)


@triton.jit
def load(x, block, words):
    """The three words of each thread of a block of x, of 32-bit elements; 0 behind the last one."""
    a, b, c = _indices(block)
    return (
        tl.load(x + a, mask=a < words, other=0),
        tl.load(x + b, mask=b < words, other=0),
        tl.load(x + c, mask=c < words, other=0),
    )


@triton.jit
def store(x, block, words, a, b, c):
    """The counterpart of ``load``."""
    index_a, index_b, index_c = _indices(block)
    tl.store(x + index_a, a, mask=index_a < words)
    tl.store(x + index_b, b, mask=index_b < words)
    tl.store(x + index_c, c, mask=index_c < words)


@triton.jit
def _indices(block):
    first = block * (3 * _THREADS) + tl.arange(0, _THREADS)
    return first, first + _THREADS, first + 2 * _THREADS


@triton.jit
def push(memories, holder, slot, number, a, b, c, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Store a block in another rank's memory, with the number of the launch, a scalar."""
    places = _places(memories, holder, slot, number, SIZE, PROGRAMS)
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
def push_to_others(
    memories, slot, number, a, b, c, RANK: tl.constexpr, SIZE: tl.constexpr, PROGRAMS: tl.constexpr
):
    """Push the same block to all other ranks."""
    for other in tl.static_range(SIZE):
        if other != RANK:
            push(memories, other, slot, number, a, b, c, SIZE, PROGRAMS)


@triton.jit
def receive(memories, rank, slot, number, gives_up, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """The block of this launch in a slot of this rank, once it has come; any block once
    ``gives_up`` is not 0."""
    places = _places(memories, rank, slot, number, SIZE, PROGRAMS)
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
def _places(memories, holder, slot, number, SIZE: tl.constexpr, PROGRAMS: tl.constexpr):
    """Where a slot of this program lies in the holder's memory in this launch."""
    memory = tl.load(memories + holder).to(tl.pointer_type(tl.int32))
    block = ((number & 1) * num_slots(SIZE) + slot) * PROGRAMS + tl.program_id(0)
    return memory + (block.to(tl.int64) * _THREADS + tl.arange(0, _THREADS)) * 4
