"""The mathematics of sampling: filters as cut-offs on weights, random numbers, and the draw.

Everything here works row by row on whole batches, on any device, without waiting for it.

*Weights* are probabilities that are not divided by their sum: exp((score - best) / temperature), so
the likeliest token of a row weighs exactly 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

#: The draw adds up weights of so many tokens first, then walks through one such tile.
TILE = 256
#: Up to so many largest weights are selected; for more of them, sorting all is faster (measured).
MAX_SELECT = 128

# splitmix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
# torch has no uint64 arithmetic; int64 wraps around to the same bits.
_GAMMA = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def stream_of(seed: Tensor) -> Tensor:
    """Where the random numbers of a seed begin; keeps those of neighbouring seeds apart.

    Args:
        seed: int64, any shape.

    Returns:
        int64 of the same shape.
    """
    return _mix(seed + _GAMMA)


def uniforms(streams: Tensor, positions: Tensor) -> Tensor:
    """One random number for each pair of stream and position, the same on every device.

    This is splitmix64, which can be read at any position: a counter that is mixed.

    Args:
        streams: int64 [m], of ``stream_of``. positions: int64 [m].

    Returns:
        float64 [m], odd multiples of 2**-53; so 0 < u < 1.
    """
    bits = _mix(streams + positions * _GAMMA)
    return _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)


def _mix(z: Tensor) -> Tensor:
    """A bijection on 64 bits in which every bit of the result depends on all of z."""
    z = (z ^ _shift_right(z, 30)) * _MIX_1
    z = (z ^ _shift_right(z, 27)) * _MIX_2
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Shift zeros in; ``>>`` alone repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def weigh(scores: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Turn scores into weights.

    Args:
        scores: [m, vocab], any floating dtype; best: [m], the largest of each row.
        temperature: float32 [m], greater than 0.

    Returns:
        float32 [m, n * TILE]; tokens that do not exist weigh 0.
    """
    num_rows, vocab = scores.shape
    padded = -(-vocab // TILE) * TILE
    weights = torch.empty(num_rows, padded, dtype=torch.float32, device=scores.device)
    if padded > vocab:
        weights[:, vocab:] = -torch.inf
    # Subtracting first: no temperature, however small, can make the result overflow.
    torch.sub(scores, best.float().unsqueeze(1), out=weights[:, :vocab])
    return weights.div_(temperature.unsqueeze(1)).exp_()


def cut_offs(weights: Tensor, top_k: Tensor, top_p: Tensor, depth: int) -> Tensor:
    """The smallest weight that top-k and then top-p keep, so that tokens that tie are kept alike.

    Top-p keeps the fewest tokens whose share of what top-k kept reaches ``top_p``; at least one.

    Args:
        weights: float32 [m, n], none negative.
        top_k: int64 [m], at least 1; ``depth`` or more is off. top_p: float32 [m]; 1 is off.
        depth: how many of the largest weights are looked at.

    Returns:
        float32 [m].
    """
    largest = _largest(weights, depth)
    upto = largest.cumsum(-1)
    last = (top_k.clamp(max=depth) - 1).unsqueeze(1)
    total = upto.gather(1, last)
    enough = torch.where(top_p < 1, top_p, torch.inf).unsqueeze(1) * total
    rank = torch.minimum(torch.searchsorted(upto, enough), last)
    return largest.gather(1, rank).squeeze(1)


def keep_from(weights: Tensor, least: Tensor) -> Tensor:
    """Set weights below a row's ``least``, float32 [m], to 0, in place."""
    # Vectorised on CPUs only where the result of the comparison has the type of its operands.
    kept = torch.ge(weights, least.unsqueeze(1), out=torch.empty_like(weights))
    return weights.mul_(kept)


def _largest(weights: Tensor, depth: int) -> Tensor:
    """The ``depth`` largest weights of each row, falling."""
    if depth <= MAX_SELECT:
        return weights.topk(depth, dim=-1).values
    if weights.device.type == "cpu":
        # numpy sorts values alone, with vector instructions: 20 times faster than torch.
        rising = torch.from_numpy(np.sort(weights.numpy(), axis=-1))
        return rising[:, -depth:].flip(-1)
    return weights.sort(dim=-1, descending=True).values[:, :depth]


def pick(weights: Tensor, uniform: Tensor, best: Tensor) -> Tensor:
    """Draw a token of each row: the first at which the running sum exceeds uniform * total.

    Sums over tiles come first: they are few, so that their running sum is cheap in float64.

    Args:
        weights: float32 [m, n * TILE]. uniform: float64 [m], from 0 to 1, both excluded.
        best: int64 [m], tokens that do not weigh 0.

    Returns:
        int64 [m].
    """
    tiles = weights.view(len(weights), -1, TILE)
    sums = tiles.sum(-1).double()
    upto = sums.cumsum(-1)
    target = uniform.unsqueeze(1) * upto[:, -1:]
    tile = torch.searchsorted(upto, target, right=True).clamp_(max=sums.shape[1] - 1)
    target -= upto.gather(1, tile) - sums.gather(1, tile)
    inside = tiles.gather(1, tile.unsqueeze(2).expand(-1, -1, TILE)).squeeze(1)
    upto = inside.cumsum(-1, dtype=torch.float64)
    offset = torch.searchsorted(upto, target, right=True).clamp_(max=TILE - 1)
    # Where rounding carries the target past the end, the token found may be one that weighs 0.
    real = inside.gather(1, offset) > 0
    return torch.where(real, tile * TILE + offset, best.unsqueeze(1)).squeeze(1)


__all__ = [
    "MAX_SELECT",
    "TILE",
    "cut_offs",
    "keep_from",
    "pick",
    "stream_of",
    "uniforms",
    "weigh",
]
