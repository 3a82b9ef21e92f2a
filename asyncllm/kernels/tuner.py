"""Times the ways a projection can run, for ``asyncllm kernels tune``.

What is timed is a chain of projections in a CUDA graph, as in a decode step, over enough weights
that none is still in the L2 cache when its turn comes again. A kernel that overlaps with the one
before and the one after it has no time of its own: the candidates of a projection are first ranked
in a chain of that projection alone, then the best few compete in a chain of the whole layer.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.tuning import (
    SHARED_BYTES,
    DirectTile,
    GemvTile,
    HeldTile,
    Shape,
    StreamTile,
    Tile,
    WideTile,
    held_bytes,
    stream_stages,
    wide_stages,
)
from asyncllm.kernels.types import Norm

#: Rows that are tuned; other numbers of rows use the next larger entry.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)

#: Several times the L2 cache of any GPU.
_ROTATED_BYTES = 400 * 2**20

#: Registers of a thread for what it holds of the weight, of x and of the norm's weight.
_REGISTERS = 200

#: Candidates that compete in the chain of a layer.
_FINALISTS = 6


class Job(NamedTuple):
    """A candidate for so many rows of a projection."""

    rows: int
    shape: Shape
    tile: Tile


def candidates(
    rows: int, shape: Shape, *, hopper: bool, multiprocessors: int = 132
) -> Iterator[Tile]:
    """The tiles worth trying; ``hopper``: on a device of compute capability 9.0."""
    halves = 2 if shape.epilogue == "gated" else 1
    if rows == 1:
        yield from _gemv_tiles(shape, halves)
    if rows <= (8 if hopper else 32):
        yield from _direct_tiles(rows, shape, halves)
    if hopper and 2 <= rows <= 64:
        yield from _held_tiles(rows, shape)
        yield from _stream_tiles(rows, shape)
    if hopper and rows >= 64:
        yield from _wide_tiles(rows, shape, multiprocessors)


def _gemv_tiles(shape: Shape, halves: int) -> Iterator[GemvTile]:
    for block_n in (1, 2, 4, 8, 16):
        for warps, block_k in ((4, 1024), (8, 1024), (8, 2048)):
            held = block_n * halves * shape.columns / (32 * warps)
            if 16 <= held <= 128 and block_k <= max(shape.columns, 1024):
                yield GemvTile(block_n, block_k, warps, late=False)
                yield GemvTile(block_n, block_k, warps, late=True)


def _direct_tiles(rows: int, shape: Shape, halves: int) -> Iterator[DirectTile]:
    x_rows = max(8, rows) * (2 if shape.norm else 1)
    for block_n, (warps, chains) in itertools.product(
        (8, 16, 32), ((2, 4), (4, 2), (4, 4), (8, 1), (8, 2))
    ):
        block_rows = block_n * halves
        per_register = 64 * warps  # elements of all threads
        held = (block_rows + x_rows) * shape.columns <= _REGISTERS * per_register
        sizes = [
            size
            for size in (2048, 1024, 512, 256)
            if shape.columns % size == 0 and size >= 32 * warps * chains
        ]
        if shape.size < 64 * block_rows:
            continue
        for block_k in sizes[:1] if held else sizes:
            registers = (block_rows + x_rows) * block_k / per_register
            if held or 32 <= registers <= _REGISTERS * 3 // 4:
                for late in (False, True) if held else (False,):
                    yield DirectTile(block_n, block_k, held, warps, chains, late)
                    if shape.norm and rows >= 16:
                        yield DirectTile(block_n, block_k, held, warps, chains, late, True)


def _held_tiles(rows: int, shape: Shape) -> Iterator[HeldTile]:
    for fold, splits in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        programs = -(-shape.size // (64 // fold)) * splits
        x_rows = fold * max(8, rows)
        if (
            not 60 <= programs <= (400 if fold * splits == 1 else 264)
            or x_rows > 256
            or (shape.epilogue == "gated" and fold > 4)
            or (shape.norm and splits > 1)
        ):
            continue
        columns, rest = divmod(shape.columns, fold * splits)
        sizes = [
            size for size in (512, 256, 128) if columns % size == 0 and 2 <= columns // size <= 8
        ]
        for block_k in sizes[:2] if rest == 0 else ():
            if held_bytes(rows, shape, fold, columns, block_k) <= SHARED_BYTES:
                for warps, late in itertools.product((4, 8), (False, True)):
                    if warps == 4 or x_rows >= 64:
                        yield HeldTile(fold, block_k, splits, warps, late)


def _stream_tiles(rows: int, shape: Shape) -> Iterator[StreamTile]:
    for parts, fold, splits in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 4)):
        programs = -(-shape.size // (parts * 64 // fold)) * splits
        if (
            programs < 60
            or (programs > 264 and fold * splits > 1)
            or (fold > 1 and (parts == 2 or splits == 4))
            or parts * fold * max(8, rows) > 192
        ):
            continue
        found: dict[StreamTile, None] = {}
        for block_k, shared in itertools.product((64, 128), (SHARED_BYTES // 2, SHARED_BYTES)):
            blocks, rest = divmod(shape.columns, fold * splits * block_k)
            x_stages = 5 if parts == 1 and block_k == 64 else 3
            stages = stream_stages(rows, parts, fold, block_k, x_stages, shared)
            stages = min(stages, blocks)
            if rest == 0 and stages >= 2:
                x_stages = min(x_stages, stages)
                tile = StreamTile(parts, fold, block_k, splits, stages, x_stages)
                found[tile] = None
                if parts == 1 and block_k == 128:
                    found[tile._replace(stagger=True)] = None
        yield from found


def _wide_tiles(rows: int, shape: Shape, multiprocessors: int) -> Iterator[WideTile]:
    is_gated = shape.epilogue == "gated"
    for parts, splits in itertools.product((1, 2, 3), (1, 2, 4, 8)):
        blocks, rest = divmod(shape.columns, 64 * splits)
        programs = -(-shape.size // (parts * 64)) * splits
        shares = splits > 1 or shape.epilogue == "residual"
        if (
            rest > 0
            or programs < 60
            or (shares and programs > multiprocessors)
            or (is_gated and splits > 1)
        ):
            continue
        most = min(wide_stages(rows, parts), blocks, 12)
        for stages in (most, most - 1):
            if stages >= max(2, -(-rows // 64)):
                yield WideTile(parts, splits, stages)


def compile_all(layers: Iterable[Sequence[Shape]], dtype: torch.dtype) -> None:
    """Compile all candidates into Triton's cache, in up to sixteen processes."""
    shapes = dict.fromkeys(itertools.chain.from_iterable(layers))
    jobs = [
        Job(rows, shape, tile)
        for rows, shape in itertools.product(BUCKETS, shapes)
        for tile in _candidates(rows, shape)
    ]
    workers = min(os.cpu_count() or 1, 16)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        for done in [pool.submit(_compile, jobs[i::workers], dtype) for i in range(workers)]:
            done.result()


def _candidates(rows: int, shape: Shape) -> Iterator[Tile]:
    """The tiles worth trying on this GPU."""
    found = torch.cuda.get_device_properties()
    return candidates(
        rows,
        shape,
        hopper=(found.major, found.minor) == (9, 0),
        multiprocessors=found.multi_processor_count,
    )


def _compile(jobs: Sequence[Job], dtype: torch.dtype) -> None:
    """Run each on a few outputs: the number of outputs is not compiled in."""
    for job in jobs:
        _Projection(job.shape._replace(size=256), job.rows, 1, dtype).run(0, job.tile)
    torch.cuda.synchronize()


class _Projection:
    """A projection with several weights, which take turns."""

    def __init__(self, shape: Shape, rows: int, copies: int, dtype: torch.dtype):
        def draw(*size: int) -> Tensor:
            return torch.randn(size, dtype=dtype, device="cuda")

        scale = shape.columns**-0.5
        self.weights = [draw(shape.size, shape.columns).mul_(scale) for _ in range(copies)]
        self.x = draw(rows, shape.columns)
        self.norm = Norm(torch.ones_like(self.x[0]), 1e-6) if shape.norm else None
        self.residual = draw(rows, shape.size) if shape.epilogue == "residual" else None
        self.act = "silu" if shape.epilogue == "gated" else None

    def run(self, turn: int, tile: Tile | None) -> None:
        from asyncllm.kernels.triton.gemm.linear import project
        from asyncllm.kernels.triton.gemm.projection import Projection, cublas_linear

        weight = self.weights[turn % len(self.weights)]
        norm, residual, act = self.norm, self.residual, self.act
        if tile is None:
            cublas_linear(self.x, weight, norm=norm, residual=residual, act=act)
        else:
            project(tile, Projection.of(self.x, weight, norm=norm, residual=residual, act=act))


class Tuned(NamedTuple):
    """The fastest tiles of a layer's projections (None: cuBLAS), and what they take."""

    tiles: dict[Shape, Tile | None]
    microseconds: float
    library_microseconds: float


def tune(layer: Sequence[Shape], rows: int, dtype: torch.dtype) -> Tuned:
    """Find the tiles of the projections of one kind of layer, given in the order they run."""
    chain = _Chain(layer, rows, dtype)
    finalists = [chain.ranked(i)[:_FINALISTS] for i in range(len(layer))]
    chosen = [ranked[0] for ranked in finalists]
    fastest = chain.microseconds(chosen)
    for i in list(range(len(layer))) * 2:
        for tile in finalists[i]:
            trial = [*chosen[:i], tile, *chosen[i + 1 :]]
            took = chain.microseconds(trial)
            if took < fastest:
                fastest, chosen = took, trial
    library = chain.microseconds([None] * len(layer))
    return Tuned(dict(zip(layer, chosen, strict=True)), fastest, library)


class _Chain:
    """The projections of a layer, one after another, over and over again."""

    def __init__(self, layer: Sequence[Shape], rows: int, dtype: torch.dtype):
        size = sum(shape.size * shape.columns for shape in layer) * dtype.itemsize
        self.turns = max(2, -(-_ROTATED_BYTES // size))
        self.rows = rows
        self.layer = layer
        self.projections = [_Projection(shape, rows, self.turns, dtype) for shape in layer]

    def microseconds(self, tiles: Sequence[Tile | None]) -> float:
        """The time of a layer with these tiles."""

        def steps() -> None:
            for turn in range(self.turns):
                for projection, tile in zip(self.projections, tiles, strict=True):
                    projection.run(turn, tile)

        return _graph_microseconds(steps) / self.turns

    def ranked(self, i: int) -> list[Tile | None]:
        """The candidates of a projection, the fastest first."""
        projection, shape = self.projections[i], self.layer[i]
        times: list[tuple[float, Tile | None]] = []
        for tile in [None, *_candidates(self.rows, shape)]:

            def steps(tile: Tile | None = tile) -> None:
                for turn in range(self.turns):
                    projection.run(turn, tile)

            times.append((_graph_microseconds(steps), tile))
        return [tile for _, tile in sorted(times, key=lambda timed: timed[0])]


def _graph_microseconds(steps: Callable[[], None], replays: int = 8) -> float:
    """The lower quartile of the times of replays of a graph of these steps."""
    steps()  # compiles, and allocates what is kept outside of the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    graph.replay()
    times: list[float] = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times)[replays // 4]
