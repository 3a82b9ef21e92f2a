"""What launches of decode attention share: rows, heads, how they are cut, and a workspace."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from asyncllm.kernels.triton.launch import next_power_of_2

if TYPE_CHECKING:
    from torch import Tensor

    from asyncllm.kernels.types import AttentionSpec

#: Rows times K/V heads of one launch are at most this many.
MAX_PAIRS = 1 << 18
#: More of them are many: there is less to gain from pieces than they cost.
MANY_PAIRS = 512
#: Of a launch with many rows.
MAX_PROGRAMS = 8192
#: K of a tile; its V takes as much again.
MAX_TILE_BYTES = 32 << 10


class Rows(NamedTuple):
    """Where the keys and values of a launch's rows are; see ``kernels.attention``."""

    keys: Tensor
    values: Tensor
    block_table: Tensor
    slots: Tensor
    lengths: Tensor


class Heads(NamedTuple):
    """How a launch gets its queries, keys and values.

    Attributes:
        encodes: q is a projection's output, which is encoded; the newest key and value are written.
        tensors: q_weight, k_weight, rope, positions and slot_mapping.
        constants: ROTARY, EPS and OFFSET.
    """

    encodes: bool
    tensors: tuple[Tensor | None, ...]
    constants: tuple[int, float, bool]


AS_IT_IS = Heads(False, (None,) * 5, (0, 0.0, False))


class Cut(NamedTuple):
    """How a launch is cut.

    Attributes:
        splits: a row's tokens are cut into at most so many pieces.
        chunk: of so many tokens each, if there are fewer pieces than that.
        tile: tokens that a program attends to at a time.
        warps, stages: of a program, and of its pipeline of loads.
    """

    splits: int
    chunk: int
    tile: int
    warps: int
    stages: int


def choose_cut(rows: int, spec: AttentionSpec, max_length: int, itemsize: int) -> Cut:
    """The measured best for so many rows of up to ``max_length`` tokens.

    The kernel is compiled for tile, warps and stages, so there are but two of each. The more rows
    there are, the less there is to gain from another piece, which costs 2 us. Very long rows are
    cut even so, lest all wait for one of them.
    """
    pairs = rows * spec.num_kv_heads
    if pairs <= 32:
        cut = Cut(32, 64, 64, 2, 2)
    elif pairs <= 64:
        cut = Cut(16, 128, 64, 2, 2)
    elif pairs <= MANY_PAIRS:
        cut = Cut(8, 128, 64, 2, 2)
    else:
        # 4,000 programs that find nothing to do cost 1 us.
        cut = Cut(max(MAX_PROGRAMS // pairs, 1), 4096, 128, 4, 2)
    return fitted(cut, spec, max_length, itemsize)


def fitted(cut: Cut, spec: AttentionSpec, max_length: int, itemsize: int) -> Cut:
    """No more pieces than there can be, and no larger tiles than shared memory has room for."""
    token_bytes = next_power_of_2(spec.head_dim) * itemsize
    return cut._replace(
        splits=fitting_splits(cut.splits, cut.chunk, max_length),
        tile=max(min(cut.tile, MAX_TILE_BYTES // token_bytes), 16),
    )


def fitting_splits(splits: int, chunk: int, max_length: int) -> int:
    """No more pieces than there can be, and at least one."""
    return max(min(splits, max_length // chunk), 1)


class Workspace(NamedTuple):
    """Global memory in which pieces are added up.

    Attributes:
        partial: float32 [pairs, splits, group, head_dim]; weighted values of each piece.
        stats: float32 [pairs, splits, 2, group]; peak and total of its weights.
        arrivals: int32 [MAX_PAIRS]; how many pieces of a pair are there. Zeros, and left so.
    """

    partial: Tensor
    stats: Tensor
    arrivals: Tensor


def workspace_of(device: torch.device, rows: int, spec: AttentionSpec, splits: int) -> Workspace:
    """Of a launch with so many rows, each cut into at most so many pieces."""
    pieces = rows * spec.num_heads * splits
    partial = torch.empty(pieces * spec.head_dim, dtype=torch.float32, device=device)
    stats = torch.empty(pieces * 2, dtype=torch.float32, device=device)
    return Workspace(partial, stats, arrivals_of(device))


@cache
def arrivals_of(device: torch.device) -> Tensor:
    """Counters that each launch finds at zero and leaves so: its launches run one by one."""
    return torch.zeros(MAX_PAIRS, dtype=torch.int32, device=device)


__all__ = [
    "AS_IT_IS",
    "MANY_PAIRS",
    "MAX_PROGRAMS",
    "Cut",
    "Heads",
    "Rows",
    "Workspace",
    "arrivals_of",
    "choose_cut",
    "fitted",
    "fitting_splits",
    "workspace_of",
]
