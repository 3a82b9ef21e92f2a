"""Which kernel a projection runs on, and how its work is divided: measured tables, or a guess.

A table is a JSON object: ``Shape.key`` -> rows -> [kernel, fields of its tile...], or null for
cuBLAS. Those in ``kernels/tuned`` ship with the package, one for each device that was measured. The
user's own table, which ``tools/tune_kernels`` of a checkout writes, takes precedence.
"""

from __future__ import annotations

import itertools
import json
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

#: The most rows that our kernels take.
MAX_ROWS = 256

#: Shared memory of one program on a Hopper GPU, less what every program needs.
SHARED_BYTES = 230_000


class GemvTile(NamedTuple):
    """Work of ``gemv``, the kernel for one row.

    Attributes:
        block_n: outputs of a program.
        block_k: columns loaded at once by all warps.
        warps: of a program.
        pdl_late: let the next kernel start once x has been requested, not at once.
    """

    block_n: int
    block_k: int
    warps: int
    pdl_late: bool = False


class RegisterSkinnyTile(NamedTuple):
    """Work of ``register_skinny``, the kernel for few rows.

    Attributes:
        block_n, block_k, warps, pdl_late: see ``GemvTile``.
        preloads: a program requests all of its weight at once.
        chains: accumulators of a warp, so that consecutive products need not wait for each other.
        separate_norm: another kernel normalises x first.
    """

    block_n: int
    block_k: int
    preloads: bool
    warps: int
    chains: int = 1
    pdl_late: bool = False
    separate_norm: bool = False


class SmemResidentTile(NamedTuple):
    """Work of ``smem_resident``, the kernel for small weights on Hopper GPUs.

    Attributes:
        fold: pieces that a row of the weight is cut into; each is a row of the 64-row operand.
        block_k: columns of a product.
        splits: programs that share outputs, each with a part of the columns.
        warps: of a program, 4 or 8.
        pdl_late: see ``GemvTile``.
        separate_norm: another kernel normalises x first.
    """

    fold: int
    block_k: int
    splits: int
    warps: int
    pdl_late: bool = False
    separate_norm: bool = False


class TmaTile(NamedTuple):
    """Work of ``tma``, the kernel for large weights on Hopper GPUs. Another kernel normalises x.

    Attributes:
        parts: 64-row operands of a program.
        fold, block_k, splits: see ``SmemResidentTile``.
        stages: blocks of the weight in flight.
        x_stages: blocks of x in flight.
        stagger: programs begin at different columns.
    """

    parts: int
    fold: int
    block_k: int
    splits: int
    stages: int
    x_stages: int
    stagger: bool = False


class TmaSplitTile(NamedTuple):
    """Work of ``tma_split``, the kernel for many rows on Hopper GPUs. Another kernel normalises x.

    Attributes:
        parts: 64-row operands of a program, up to three.
        splits: programs that share outputs, a power of two.
        stages: blocks of 64 columns in flight.
    """

    parts: int
    splits: int
    stages: int


class Fp8Tile(NamedTuple):
    """Work of ``fp8_tiles``, the kernel for 8-bit weights on Hopper GPUs; another one rounds x.

    Attributes:
        rows: of x, of a program; a power of two from 8 to 128.
        parts: 64-row operands of a program, up to three; each has a warpgroup.
        splits: programs that share outputs, each with a part of the columns.
        stages: blocks of 128 columns in flight.
    """

    rows: int
    parts: int
    splits: int
    stages: int


class Fp8GemvTile(NamedTuple):
    """Work of ``fp8.fp8_gemv``, of a program: rows of the weight, columns that are loaded at once,
    warps."""

    rows: int
    columns: int
    warps: int


Tile = GemvTile | RegisterSkinnyTile | SmemResidentTile | TmaTile | TmaSplitTile

#: The kernels, by their names in tables.
KINDS: dict[str, type[Tile]] = {
    "gemv": GemvTile,
    "register_skinny": RegisterSkinnyTile,
    "smem_resident": SmemResidentTile,
    "tma": TmaTile,
    "tma_split": TmaSplitTile,
}


class Shape(NamedTuple):
    """A projection for any number of rows.

    Attributes:
        size, columns: of the weight.
        norm: x is normalised first.
        epilogue: "", "gated" or "residual".
    """

    size: int
    columns: int
    norm: bool
    epilogue: str

    @classmethod
    def of(cls, weight: Tensor, norm: bool, epilogue: str) -> Shape:
        """The shape of a projection with this weight."""
        size, columns = weight.shape
        return cls(size, columns, norm, epilogue)

    @property
    def key(self) -> str:
        """Its name in tables."""
        return f"{self.size}x{self.columns}{' norm' if self.norm else ''} {self.epilogue}".rstrip()


def choose(device_name: str, rows: int, shape: Shape, *, hopper: bool = False) -> Tile | None:
    """The tile for a number of rows, at least one; None: cuBLAS.

    Args:
        hopper: the device has compute capability 9.0.
    """
    if rows > MAX_ROWS:
        return None
    bucket = 1 << (rows - 1).bit_length() if rows <= 64 else padded_rows(rows)
    tuned = _table(device_name).get(shape.key, {})
    return tuned[bucket] if bucket in tuned else guess(bucket, shape, hopper=hopper)


def guess(bucket: int, shape: Shape, *, hopper: bool = False) -> Tile | None:
    """The tile of a projection that has not been measured. For 64 rows, cuBLAS is faster than any
    that could be guessed."""
    if bucket > 32:
        return None
    if bucket == 1:
        return GemvTile(2 if shape.columns <= 2048 else 1, 1024, 4)
    if hopper and shape.size >= 1024 and shape.columns % 64 == 0:
        small = shape.size * shape.columns <= 2**23
        tile = _guess_smem_resident(bucket, shape) if small else None
        return tile or _guess_tma(bucket, shape)
    block_k = next((size for size in (1024, 512, 256) if shape.columns % size == 0), None)
    if bucket > 8 or block_k is None:
        return None
    block_n = 8 if shape.epilogue == "gated" or shape.size <= 2048 else 16
    return RegisterSkinnyTile(block_n, block_k, shape.columns <= 1024, warps=4, chains=2)


def _guess_smem_resident(bucket: int, shape: Shape) -> SmemResidentTile | None:
    for fold, block_k in itertools.product((1, 2, 4), (256, 128)):
        columns, rest = divmod(shape.columns, fold * block_k)
        if (
            rest == 0
            and shape.size * fold >= 60 * 64
            and fold * bucket <= 256
            and smem_resident_bytes(bucket, shape, fold, columns * block_k, block_k) <= SHARED_BYTES
        ):
            return SmemResidentTile(fold, block_k, 1, warps=4, pdl_late=True)
    return None


def _guess_tma(bucket: int, shape: Shape) -> TmaTile:
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
    stages = tma_stages(bucket, parts, fold, block_k, x_stages, shared)
    stages = min(stages, shape.columns // (fold * block_k))
    return TmaTile(parts, fold, block_k, 1, stages, min(x_stages, stages))


def smem_resident_bytes(rows: int, shape: Shape, fold: int, columns: int, block_k: int) -> int:
    """Shared memory of a ``smem_resident`` program with this many columns of each piece."""
    x_columns = min(2 * block_k, columns) if shape.norm else columns
    return 2 * (64 * columns + fold * max(8, rows) * x_columns)


def tma_stages(rows: int, parts: int, fold: int, block_k: int, x_stages: int, shared: int) -> int:
    """Stages of a ``tma`` program that fit into ``shared`` bytes."""
    x_rows = max(8, rows)
    outputs = 4 * 64 * x_rows
    x = 2 * fold * x_rows * block_k * x_stages
    return (shared - outputs - x) // (2 * parts * 64 * block_k)


def padded_rows(rows: int) -> int:
    """Rows of x in a ``tma_split`` program, padded."""
    return -(-rows // 32) * 32


def tma_split_stages(rows: int, parts: int) -> int:
    """Stages of a ``tma_split`` program that fit into shared memory."""
    return SHARED_BYTES // (128 * (64 * parts + padded_rows(rows)))


#: Bytes of shared memory for rings, where two programs share a multiprocessor or not.
_HALF, _WHOLE = 98 << 10, 190 << 10


def choose_fp8_tile(rows: int, size: int, columns: int) -> Fp8Tile | None:
    """The tile for a weight [size, columns], after measurements on an H200 (docs/kernels.md); None
    where other kernels are faster: for one row and many."""
    most = 128 if size <= 96 * 64 else 64
    return fp8_tile(rows, size, columns) if 1 < rows <= most else None


def fp8_tile(rows: int, size: int, columns: int) -> Fp8Tile:
    """The best tile of ``fp8_tiles`` for any number of rows. Its splits are those of the weight."""
    tiles, blocks = -(-size // 64), -(-columns // 128)
    splits = 1
    while tiles * splits < 80 and blocks % (2 * splits) == 0 and blocks >= 8 * splits:
        splits *= 2
    blocks //= splits
    few = tiles <= 264
    if rows > 128:
        block_m, parts, room = 128, 2, _WHOLE
    elif rows > 32:
        block_m, parts = 64, 1 if few else 3
        room = _WHOLE if few and rows <= 64 else _HALF
    else:
        block_m, parts = max(8, 1 << (rows - 1).bit_length()), 1 if few else 3
        room = _HALF if few and (blocks <= 32 or rows <= 16) else _WHOLE
    stages = min(room // ((64 * parts + block_m) * 128 + 4 * block_m), blocks, 24)
    return Fp8Tile(block_m, parts, splits, stages)


def choose_fp8_gemv_tile(columns: int, *, blocked: bool) -> Fp8GemvTile:
    """The measured best for a weight with so many columns, and with a scale for each block; columns
    beyond the weight's cost as much as others."""
    if not blocked:
        return Fp8GemvTile(4, 2048, 4)
    if columns <= 4096:
        return Fp8GemvTile(8, 2048, 4)
    if columns % 2048 and columns <= 6144:
        return Fp8GemvTile(8, 1024, 4)
    if columns % 4096 and columns % 2048 == 0:
        return Fp8GemvTile(4, 2048, 4)
    return Fp8GemvTile(4, 4096, 8)


def is_tuned(device_name: str) -> bool:
    """Whether projections were measured on devices of this name."""
    return bool(_table(device_name))


def user_table(device_name: str) -> Path:
    """The path of the user's own table for devices of this name."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "asyncllm" / "tuned" / _file_name(device_name)


def parse(text: str) -> dict[str, dict[int, Tile | None]]:
    """A table from its JSON, without the kernels of other versions."""
    return {
        key: {
            int(rows): None if choice is None else KINDS[choice[0]](*choice[1:])
            for rows, choice in choices.items()
            if choice is None or choice[0] in KINDS
        }
        for key, choices in json.loads(text).items()
    }


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
