"""Launch arguments of decode attention: rows, heads, how they are cut, and a workspace."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.triton.launch import Scratch, next_power_of_2
from asyncllm.kernels.types import AttentionSpec, DecodeRows

#: The most rows times K/V heads of a launch.
MAX_PAIRS = 1 << 18
#: From here on, cutting rows into pieces costs more than it gains.
MANY_PAIRS = 512
#: The most programs of a launch with many rows.
MAX_PROGRAMS = 8192
#: K of a tile; its V takes as much again.
MAX_TILE_BYTES = 32 << 10


class Heads(NamedTuple):
    """Whether and how a launch encodes its heads.

    Attributes:
        encodes: q is a projection's output: encode it, and write the newest key and value.
        tensors: q_weight, k_weight, rope, positions and slot_mapping.
        constants: ROTARY, EPS and OFFSET.
        sinks, normalizes_values: see ``HeadEncoding``.
    """

    encodes: bool
    tensors: tuple[Tensor | None, ...]
    constants: tuple[int, float, float | None]
    sinks: Tensor | None = None
    normalizes_values: bool = False


UNENCODED = Heads(False, (None,) * 5, (0, 0.0, None))


class Cut(NamedTuple):
    """How a launch is cut.

    Attributes:
        splits: the most pieces of a row.
        chunk: tokens of a piece, or more if there would be too many pieces.
        tile: tokens that a program attends to at a time.
        warps, stages: of a program, and of its pipeline of loads.
    """

    splits: int
    chunk: int
    tile: int
    warps: int
    stages: int


def max_length(rows: DecodeRows) -> int:
    """Positions that the block table has room for."""
    return rows.block_table.shape[1] * rows.keys.shape[1]


def choose_cut(rows: int, spec: AttentionSpec, max_length: int, itemsize: int) -> Cut:
    """The measured best for rows of up to ``max_length`` tokens.

    Tile, warps and stages are compiled in, so only two sets of them are used. Another piece costs 2
    us; the more rows, the less it gains. Very long rows are always cut, so that one of them does
    not delay the launch.
    """
    pairs = rows * spec.num_kv_heads
    if pairs <= 32:
        cut = Cut(32, 64, 64, 2, 2)
    elif pairs <= 64:
        cut = Cut(16, 128, 64, 2, 2)
    elif pairs <= MANY_PAIRS:
        cut = Cut(8, 128, 64, 2, 2)
    else:
        # 4,000 idle programs cost 1 us.
        cut = Cut(max(MAX_PROGRAMS // pairs, 1), 4096, 128, 4, 2)
    return fitted(cut, spec, max_length, itemsize)


def fitted(cut: Cut, spec: AttentionSpec, max_length: int, itemsize: int) -> Cut:
    """No more pieces than the longest row has, tiles that fit into shared memory, and for heads of
    512 as many warps as keep them in registers (with 4, a thread spills 1 KB)."""
    token_bytes = next_power_of_2(spec.head_dim) * itemsize
    return cut._replace(
        splits=fitting_splits(cut.splits, cut.chunk, max_length),
        tile=max(min(cut.tile, MAX_TILE_BYTES // token_bytes), 16),
        warps=cut.warps if spec.head_dim <= 256 else 8,
    )


def fitting_splits(splits: int, chunk: int, max_length: int) -> int:
    """No more pieces than the longest row has, and at least one."""
    return max(min(splits, max_length // chunk), 1)


class Workspace(NamedTuple):
    """Global memory in which pieces are added up.

    Attributes:
        partial: float32 [pairs, splits, group, head_dim]; weighted values of each piece.
        stats: float32 [pairs, splits, 2, group]; peak and total of its weights.
        arrivals: int32 [MAX_PAIRS]; pieces of a pair that are stored. Zeros before and after.
    """

    partial: Tensor
    stats: Tensor
    arrivals: Tensor


_scratch = Scratch()


def workspace_of(device: torch.device, rows: int, spec: AttentionSpec, splits: int) -> Workspace:
    """For a launch with ``rows`` rows of at most ``splits`` pieces."""
    pieces = rows * spec.num_heads * splits
    floats = _scratch.floats(pieces * (2 + spec.head_dim), device)
    # The pieces first, so that both are aligned.
    partial, stats = floats[: pieces * spec.head_dim], floats[pieces * spec.head_dim :]
    return Workspace(partial, stats, _scratch.counters(MAX_PAIRS, device))
