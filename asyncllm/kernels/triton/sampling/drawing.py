"""Parts of the sampling kernels: parameters, random numbers, and the draw."""

from __future__ import annotations

import triton
import triton.language as tl

from asyncllm.kernels.random_streams import GAMMA, MIX_1, MIX_2
from asyncllm.wire.messages import BAD_TOKEN

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
#: No token: larger than any id.
NONE: tl.constexpr = tl.constexpr(2**31 - 1)
_BAD: tl.constexpr = tl.constexpr(BAD_TOKEN)
_GAMMA: tl.constexpr = tl.constexpr(GAMMA)
_MIX_1: tl.constexpr = tl.constexpr(MIX_1)
_MIX_2: tl.constexpr = tl.constexpr(MIX_2)


@triton.jit
def parameters(table, slot):
    """temperature, top_p, min_p, top_k of a slot; see ``kernels.sampling.RECORD``."""
    at = table + slot * 3
    floats = at.to(tl.pointer_type(tl.float32), bitcast=True)
    top_k = tl.load(at.to(tl.pointer_type(tl.int32), bitcast=True) + 5)
    return tl.load(floats + 2), tl.load(floats + 3), tl.load(floats + 4), top_k


@triton.jit
def filtered(top_p, min_p, top_k):
    return (top_p < 1) | (min_p > 0) | (top_k > 0)


@triton.jit
def is_finite(best):
    return (best > -float("inf")) & (best < float("inf"))


@triton.jit
def finish(token, best, slot, row, tokens, relay):
    """Store the token of a row, or BAD_TOKEN if its best score is not finite."""
    token = tl.where(is_finite(best), token, _BAD).to(tl.int64)
    tl.store(tokens + row, token)
    tl.store(relay + slot, tl.maximum(token, 0))


@triton.jit
def uniform_of(table, slot, position):
    """The random number of a slot at a position, 0 < u < 1."""
    # In blocks of one element: the interpreter's scalars warn when they wrap around.
    z = tl.zeros([1], tl.int64) + position
    z = tl.load(table + slot * 3) + z * _GAMMA
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    z = z ^ _shift_right(z, 31)
    return tl.sum((_shift_right(z, 12).to(tl.float64) + 0.5) * 2.0**-52, 0)


@triton.jit
def _shift_right(z, BITS: tl.constexpr):
    return (z >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def find(masses, share, SIZE: tl.constexpr):
    """The first of float64 [SIZE] at which the running sum exceeds ``share`` of the total.

    Returns its index, and the remaining share of its own mass.
    """
    index = tl.arange(0, SIZE)
    upto = tl.cumsum(masses, 0)
    target = share * tl.sum(masses, 0)
    found = tl.min(tl.where((masses > 0) & (upto > target), index, SIZE), 0)
    # If rounding carries the target past the end: the last one with a mass.
    found = tl.minimum(found, tl.max(tl.where(masses > 0, index, 0), 0))
    before = tl.sum(tl.where(index < found, masses, 0.0), 0)
    return found, (target - before) / tl.sum(tl.where(index == found, masses, 0.0), 0)


@triton.jit
def locate(weights, share, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``find`` in float32 [ROWS, COLUMNS]: an index into the flattened weights."""
    row, share = find(tl.sum(weights.to(tl.float64), 1), share, ROWS)
    line = tl.sum(tl.where(tl.arange(0, ROWS)[:, None] == row, weights, 0.0), 0)
    column, _ = find(line.to(tl.float64), share, COLUMNS)
    return row * COLUMNS + column
