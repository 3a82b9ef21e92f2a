"""Times the kernels of projections.

A chain of projections is timed in a CUDA graph, as in a decode step, over so many weights that none
is still in the L2 cache when its turn comes again. A kernel that overlaps its neighbours has no
time of its own: the candidates of a projection are first ranked in a chain of that projection
alone, then the best few compete in a chain of the whole layer.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.triton.gemm.linear import project
from asyncllm.kernels.triton.gemm.projection import Projection, cublas_linear
from asyncllm.kernels.tuning import KINDS, Shape, Tile, parse, user_table
from asyncllm.kernels.types import Norm
from tools.tune_kernels.candidates import candidates

#: Numbers of rows that are measured; others use the next larger one.
BUCKETS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256)

#: Several times the L2 cache of any GPU.
_ROTATED_BYTES = 400 * 2**20

#: Candidates that compete in the chain of a layer.
_FINALISTS = 6


class Job(NamedTuple):
    """A candidate for a projection of a number of rows."""

    rows: int
    shape: Shape
    tile: Tile


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
    gpu = gpu_of(torch.cuda.current_device())
    return candidates(rows, shape, hopper=gpu.is_hopper, multiprocessors=gpu.multiprocessors)


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
        weight = self.weights[turn % len(self.weights)]
        p = Projection(self.x, weight, None, self.norm, self.residual, self.act)
        if tile is None:
            cublas_linear(p)
        else:
            project(tile, p)


class Tuned(NamedTuple):
    """The fastest tiles of a layer's projections (None: cuBLAS), and the layer's time."""

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
    steps()  # compiles, and allocates the buffers that launches share
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


def save(device_name: str, rows: int, tiles: dict[Shape, Tile | None]) -> Path:
    """Add the choices for a number of rows to the user's own table, and return its path."""
    path = user_table(device_name)
    table = parse(path.read_text()) if path.is_file() else {}
    for shape, tile in tiles.items():
        table.setdefault(shape.key, {})[rows] = tile
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(dump(table))
    partial.replace(path)  # readers find the whole table, old or new
    return path


def dump(table: dict[str, dict[int, Tile | None]]) -> str:
    """A table as JSON, one line per shape."""
    lines = [
        f"{json.dumps(key)}: {json.dumps({b: _fields(t) for b, t in sorted(buckets.items())})}"
        for key, buckets in sorted(table.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _fields(tile: Tile | None) -> list[Any] | None:
    if tile is None:
        return None
    name = next(name for name, kind in KINDS.items() if isinstance(tile, kind))
    return [name, *tile]
