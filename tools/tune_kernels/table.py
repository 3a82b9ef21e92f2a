"""Writes tables of tiles; ``asyncllm.kernels.tuning`` reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from asyncllm.kernels.tuning import KINDS, Shape, Tile, parse, user_table


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
