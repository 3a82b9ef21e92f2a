"""Random numbers by counter: splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
Generators", OOPSLA 2014), the same on every device.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from torch import Tensor

Ints = TypeVar("Ints", Tensor, np.ndarray)

# torch has no uint64 arithmetic; int64 wraps around to the same bits.
GAMMA = 0x9E3779B97F4A7C15 - 2**64
MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
MIX_2 = 0x94D049BB133111EB - 2**64


def stream_of(seed: Ints) -> Ints:
    """The stream of random numbers of a seed; neighbouring seeds get distant streams.

    Args:
        seed: int64, any shape; a tensor or an array.

    Returns:
        int64 of the same shape.
    """
    return _mix(seed + GAMMA)


def uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """One random number for each pair of stream and position, the same on every device.

    splitmix64 mixes a counter, so it can be read at any position.

    Args:
        streams: int64 [m], of ``stream_of``. positions: int64 [m].

    Returns:
        float64 [m], odd multiples of 2**-53; so 0 < u < 1.
    """
    bits = _mix(streams + positions * GAMMA)
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _mix(z: Ints) -> Ints:
    """A bijection on 64 bits in which every bit of the result depends on all of z."""
    z = (z ^ _shift_right(z, 30)) * MIX_1
    z = (z ^ _shift_right(z, 27)) * MIX_2
    mixed: Ints = z ^ _shift_right(z, 31)
    return mixed


def _shift_right(z: Ints, bits: int) -> Ints:
    """Shift zeros in; ``>>`` alone repeats the sign."""
    shifted: Ints = (z >> bits) & ((1 << (64 - bits)) - 1)
    return shifted
