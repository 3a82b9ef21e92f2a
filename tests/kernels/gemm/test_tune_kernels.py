"""What ``tools.tune_kernels`` tries, and for which projections."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import asyncllm.demo
from asyncllm.kernels.tuning import Shape, SmemResidentTile, TmaSplitTile, TmaTile, choose
from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import read_spec

pytest.importorskip("triton")

from asyncllm.parallel.ranks import Alone
from tools.tune_kernels.candidates import candidates, layers
from tools.tune_kernels.timing import BUCKETS, save

SHAPES = [
    Shape(4096, 1024, True, ""),
    Shape(1024, 3072, False, "residual"),
    Shape(24576, 4096, True, "gated"),
    Shape(4096, 12288, False, "residual"),
    Shape(151936, 4096, True, ""),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
@pytest.mark.parametrize("rows", BUCKETS)
def test_candidates_can_run(rows: int, shape: Shape) -> None:
    from asyncllm.kernels.triton.gemm.linear import fits

    tiles = list(candidates(rows, shape, hopper=True))
    elsewhere = list(candidates(rows, shape, hopper=False))
    hopper = SmemResidentTile | TmaTile | TmaSplitTile
    assert not any(isinstance(tile, hopper) for tile in elsewhere)
    assert rows == 1 or any(isinstance(tile, hopper) for tile in tiles)
    assert 0 < len(tiles) <= 120
    assert len(set(tiles)) == len(tiles)
    x = torch.empty(rows, shape.columns, dtype=torch.bfloat16)
    assert all(fits(tile, x, shape) for tile in [*tiles, *elsewhere])


def test_projections_of_a_model() -> None:
    spec = read_spec(Path(asyncllm.demo.__file__).parent / "model")
    model = make_model(spec, torch.bfloat16, torch.device("meta"), 1)
    found = list(layers(model, Alone()))
    assert len(found) == spec.config.num_hidden_layers + 1
    qkv, o, gate_up, down = found[0]
    assert (qkv.norm, qkv.epilogue) == (True, "")
    assert (o.norm, o.epilogue) == (False, "residual")
    assert (gate_up.norm, gate_up.epilogue) == (True, "gated")
    assert gate_up.size == 2 * down.columns
    assert (down.norm, down.epilogue) == (False, "residual")
    assert found[-1] == (Shape(spec.config.vocab_size, qkv.columns, True, ""),)


def test_measured_choices_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    shape, other = SHAPES[:2]
    tile = next(candidates(8, shape, hopper=False))
    save("A GPU", 8, {shape: None, other: None})
    save("A GPU", 8, {shape: tile})
    save("A GPU", 16, {shape: None})
    assert choose("A GPU", 7, shape) == tile
    assert choose("A GPU", 8, other) is None
    assert choose("A GPU", 16, shape) is None
