"""Which kernel a projection runs on, and how its work is divided: measured tables and a guess.

A table is a JSON object: by ``Shape.key``, then by the bucket of rows, the kernel's name and the
fields of its tile, or null for cuBLAS. One is shipped for each device it was measured on, in
``kernels/tuned``; one of the user's own, which ``asyncllm kernels tune`` writes, comes first.
"""

from __future__ import annotations

import itertools
import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

#: Most rows a kernel of our own takes.
MAX_ROWS = 256

#: Shared memory of a Hopper GPU's multiprocessor for one program, less what every program takes.
SHARED_BYTES = 230_000


class GemvTile(NamedTuple):
    """How the kernel for very few rows divides its work.

    Attributes:
        block_n: outputs of a program.
        block_k: columns loaded at once, by all warps.
        warps: of a program.
        late: the next kernel may start when x is on its way, not at once.
    """

    block_n: int
    block_k: int
    warps: int
    late: bool = False


class DirectTile(NamedTuple):
    """How the kernel for few rows divides its work.

    Attributes:
        block_n: outputs of a program.
        block_k: columns loaded at once, by all warps.
        held: the program has all of its weights in flight at once.
        warps: of a program.
        chains: sums a warp adds to in turn, so that products need not wait for each other.
        late: the next kernel may start when x is on its way, not at once.
        norm_apart: a kernel before this one normalises x.
    """

    block_n: int
    block_k: int
    held: bool
    warps: int
    chains: int = 1
    late: bool = False
    norm_apart: bool = False


class HeldTile(NamedTuple):
    """How the kernel for small weights on Hopper GPUs divides its work.

    Attributes:
        fold: pieces of a row of the weight, each of which is a row of an operand of 64.
        block_k: columns of a product.
        splits: programs that share a tile of outputs.
        warps: of a program, 4 or 8.
        late: the next kernel may start when x is on its way, not at once.
        norm_apart: a kernel before this one normalises x.
    """

    fold: int
    block_k: int
    splits: int
    warps: int
    late: bool = False
    norm_apart: bool = False


class StreamTile(NamedTuple):
    """How the kernel for large weights on Hopper GPUs divides its work; another one normalises x.

    Attributes:
        parts: groups of 64 rows of operands of a program.
        fold: pieces of a row of the weight, each of which is a row of an operand.
        block_k: columns of a product.
        splits: programs that share a tile of outputs.
        stages: products whose part of the weight is in flight.
        x_stages: products whose part of x is in flight.
        stagger: programs begin with different columns.
    """

    parts: int
    fold: int
    block_k: int
    splits: int
    stages: int
    x_stages: int
    stagger: bool = False


class WideTile(NamedTuple):
    """How the kernel for many rows on Hopper GPUs divides its work; another one normalises x.

    Attributes:
        parts: groups of 64 rows of the weight of a program, up to three.
        splits: programs that share a tile of outputs, a power of two.
        stages: blocks of 64 columns in flight.
    """

    parts: int
    splits: int
    stages: int


Tile = GemvTile | DirectTile | HeldTile | StreamTile | WideTile

_KINDS: dict[str, type[Tile]] = {
    "gemv": GemvTile,
    "direct": DirectTile,
    "held": HeldTile,
    "stream": StreamTile,
    "wide": WideTile,
}


class Shape(NamedTuple):
    """A projection, whatever the rows.

    Attributes:
        size: rows of the weight.
        columns: of the weight.
        norm: its input is normalised first.
        epilogue: "", "gated" or "residual".
    """

    size: int
    columns: int
    norm: bool
    epilogue: str

    @classmethod
    def of(cls, weight: Tensor, norm: bool, epilogue: str) -> Shape:
        """Of the projection with this weight."""
        size, columns = weight.shape
        return cls(size, columns, norm, epilogue)

    @property
    def key(self) -> str:
        return f"{self.size}x{self.columns}{' norm' if self.norm else ''} {self.epilogue}".rstrip()


def choose(device_name: str, rows: int, shape: Shape, *, hopper: bool = False) -> Tile | None:
    """The tile for this many rows (at least one); None: cuBLAS.

    Args:
        hopper: the device has compute capability 9.0.
    """
    if rows > MAX_ROWS:
        return None
    bucket = 1 << (rows - 1).bit_length() if rows <= 64 else padded_rows(rows)
    tuned = _table(device_name).get(shape.key, {})
    return tuned[bucket] if bucket in tuned else guess(bucket, shape, hopper=hopper)


def guess(bucket: int, shape: Shape, *, hopper: bool = False) -> Tile | None:
    """The tile of a projection nobody measured."""
    if bucket > 64:
        return None
    if bucket == 1:
        return GemvTile(2 if shape.columns <= 2048 else 1, 1024, 4)
    if hopper and shape.size >= 1024 and shape.columns % 64 == 0:
        small = shape.size * shape.columns <= 2**23
        tile = _guess_held(bucket, shape) if small else None
        return tile or _guess_stream(bucket, shape)
    block_k = next((size for size in (1024, 512, 256) if shape.columns % size == 0), None)
    if bucket > 8 or block_k is None:
        return None
    block_n = 8 if shape.epilogue == "gated" or shape.size <= 2048 else 16
    return DirectTile(block_n, block_k, shape.columns <= 1024, warps=4, chains=2)


def _guess_held(bucket: int, shape: Shape) -> HeldTile | None:
    for fold, block_k in itertools.product((1, 2, 4), (256, 128)):
        columns, rest = divmod(shape.columns, fold * block_k)
        if (
            rest == 0
            and shape.size * fold >= 60 * 64
            and fold * bucket <= 256
            and held_bytes(bucket, shape, fold, columns * block_k, block_k) <= SHARED_BYTES
        ):
            return HeldTile(fold, block_k, 1, warps=8 if bucket == 64 else 4, late=True)
    return None


def _guess_stream(bucket: int, shape: Shape) -> StreamTile:
    tiles = -(-shape.size // 64)
    parts = 3 if tiles >= 300 else 1
    fold = 1
    while (
        parts == 1
        and tiles * fold <= 132
        and 2 * fold * max(8, bucket) <= 64
        and shape.columns % (256 * fold) == 0
    ):
        fold *= 2
    block_k = 128 if shape.columns % (128 * fold) == 0 else 64
    x_stages = 5 if parts == 1 and block_k == 64 else 3
    shared = SHARED_BYTES if parts == 3 else SHARED_BYTES // 2
    stages = stream_stages(bucket, parts, fold, block_k, x_stages, shared)
    stages = min(stages, shape.columns // (fold * block_k))
    return StreamTile(parts, fold, block_k, 1, stages, min(x_stages, stages))


def held_bytes(rows: int, shape: Shape, fold: int, columns: int, block_k: int) -> int:
    """Shared memory of a ``held`` program, of so many columns of each piece."""
    x_columns = min(2 * block_k, columns) if shape.norm else columns
    return 2 * (64 * columns + fold * max(8, rows) * x_columns)


def stream_stages(
    rows: int, parts: int, fold: int, block_k: int, x_stages: int, shared: int
) -> int:
    """Stages of a ``stream`` program that so many bytes of shared memory have room for."""
    x_rows = max(8, rows)
    outputs = 4 * 64 * x_rows
    x = 2 * fold * x_rows * block_k * x_stages
    return (shared - outputs - x) // (2 * parts * 64 * block_k)


def padded_rows(rows: int) -> int:
    """Rows of x in a ``wide`` program."""
    return -(-rows // 32) * 32


def wide_stages(rows: int, parts: int) -> int:
    """Stages of a ``wide`` program that shared memory has room for."""
    return SHARED_BYTES // (128 * (64 * parts + padded_rows(rows)))


def user_table(device_name: str) -> Path:
    """Where the user's own table for devices of this name is."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "asyncllm" / "tuned" / _file_name(device_name)


def save(device_name: str, rows: int, tiles: dict[Shape, Tile | None]) -> Path:
    """Add the choices for this many rows to the user's own table; where that is."""
    path = user_table(device_name)
    table = parse(path.read_text()) if path.is_file() else {}
    for shape, tile in tiles.items():
        table.setdefault(shape.key, {})[rows] = tile
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(dump(table))
    partial.replace(path)  # what reads it at the same time finds it whole
    return path


def parse(text: str) -> dict[str, dict[int, Tile | None]]:
    """A table from its JSON."""
    return {
        key: {int(bucket): _tile(choice) for bucket, choice in buckets.items()}
        for key, buckets in json.loads(text).items()
    }


def dump(table: dict[str, dict[int, Tile | None]]) -> str:
    """A table as JSON, one line per shape."""
    lines = [
        f"{json.dumps(key)}: {json.dumps({b: _fields(t) for b, t in sorted(buckets.items())})}"
        for key, buckets in sorted(table.items())
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


@cache
def _table(device_name: str) -> dict[str, dict[int, Tile | None]]:
    merged: dict[str, dict[int, Tile | None]] = {}
    shipped = Path(__file__).parent / "tuned" / _file_name(device_name)
    for path in (shipped, user_table(device_name)):
        if path.is_file():
            for key, buckets in parse(path.read_text()).items():
                merged.setdefault(key, {}).update(buckets)
    return merged


def _file_name(device_name: str) -> str:
    return device_name.replace(" ", "_").replace("/", "_") + ".json"


def _tile(choice: list[Any] | None) -> Tile | None:
    if choice is None:
        return None
    name, *fields = choice
    return _KINDS[name](*fields)


def _fields(tile: Tile | None) -> list[Any] | None:
    if tile is None:
        return None
    name = next(name for name, kind in _KINDS.items() if isinstance(tile, kind))
    return [name, *tile]
