"""Projections against float64, on each kernel and with everything around the product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.kernels.linear import linear
from asyncllm.kernels.tuning import (
    GemvTile,
    RegisterSkinnyTile,
    Shape,
    SmemResidentTile,
    Tile,
    TmaTile,
    choose,
    guess,
    parse,
)
from tests.support.kernels.device import DEVICE
from tests.support.kernels.linear_case import AROUND, DTYPE, Case, poison

pytest.importorskip("triton")
from asyncllm.kernels.triton.gemm.linear import fits, project
from asyncllm.kernels.triton.gemm.projection import Projection
from tools.tune_kernels.timing import dump

GEMV = GemvTile(4, 128, 4)
REGISTER_SKINNY = RegisterSkinnyTile(16, 128, True, 4)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (1, GEMV),
        (3, RegisterSkinnyTile(16, 128, True, 4, separate_norm=True)),
        (1, REGISTER_SKINNY),
        (3, RegisterSkinnyTile(8, 64, False, 2)),
    ],
    ids=str,
)
def test_everything_around_the_product(rows: int, tile: Tile, around: dict[str, Any]) -> None:
    case = Case(rows, 72, 256, DTYPE, **around)
    got = case.run(tile)
    case.check(got)
    if case.residual is not None:
        assert got is case.residual


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations(act: str) -> None:
    case = Case(1, 64, 128, torch.float32, act=act)
    case.check(case.run(GEMV))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile", [GEMV, REGISTER_SKINNY], ids=str)
def test_dtypes(tile: Tile, dtype: torch.dtype) -> None:
    if tile is REGISTER_SKINNY and dtype != torch.float16:
        dtype = DTYPE  # of a GPU's two bytes
    case = Case(1, 48, 128, dtype)
    case.check(case.run(tile))


@pytest.mark.parametrize(
    "tile",
    [
        REGISTER_SKINNY,
        RegisterSkinnyTile(32, 256, True, 4, 2),
        RegisterSkinnyTile(8, 128, False, 2, 2),
        RegisterSkinnyTile(16, 128, True, 4, 1, pdl_late=True, separate_norm=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [5, 8, 33])
def test_tiles_of_few_rows(rows: int, tile: RegisterSkinnyTile) -> None:
    case = Case(rows, 136, 256, DTYPE, norm=True, act="silu")
    case.check(case.run(tile))


@pytest.mark.parametrize("columns", [96, 1000, 1024 + 8])
def test_odd_sizes_of_one_row(columns: int) -> None:
    case = Case(1, 37, columns, torch.bfloat16, norm=True)
    case.check(case.run(GemvTile(2, 256, 2, pdl_late=True)))


def test_rows_do_not_depend_on_padding() -> None:
    case = Case(8, 64, 256, DTYPE, norm=True)
    few = (Projection(case.x[:n], case.weight, norm=case.norm) for n in (1, 2, 5, 8))
    alone = [project(REGISTER_SKINNY, p) for p in few]
    for got in alone:
        assert torch.equal(got, alone[-1][: len(got)])


def test_float16_is_normalised_before_the_tensor_cores() -> None:
    shape = Shape(64, 256, norm=True, epilogue="")
    assert not fits(REGISTER_SKINNY, torch.empty(2, 256, dtype=torch.float16), shape)
    assert fits(REGISTER_SKINNY, torch.empty(2, 256, dtype=torch.bfloat16), shape)
    apart = REGISTER_SKINNY._replace(separate_norm=True)
    assert fits(apart, torch.empty(2, 256, dtype=torch.float16), shape)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 64, 200])
@pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
def test_public_function(rows: int, around: dict[str, Any]) -> None:
    case = Case(rows, 144, 320, torch.bfloat16, **around)
    got = linear(
        case.x, case.weight, case.bias, norm=case.norm, residual=case.residual, act=case.act
    )
    if rows > 0:
        case.check(got)
    assert got.shape == case.expected.shape


@pytest.mark.parametrize("rows", [1, 2, 8, 64, 200, 300])
def test_products_that_are_not_rounded(rows: int) -> None:
    """Logits of a router in float32, of a 16-bit x and weight."""
    x, weight = (torch.randn(n, 512, device=DEVICE).to(DTYPE) for n in (rows, 144))
    expected = x.double() @ weight.double().t()
    found = [linear(x, weight, dtype=torch.float32)]
    if rows <= 8:
        tile = GEMV if rows == 1 else REGISTER_SKINNY
        found.append(project(tile, Projection(x, weight, dtype=torch.float32)))
    for got in found:
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
def test_reference(around: dict[str, Any]) -> None:
    case = Case(3, 144, 320, torch.float32, **around)
    case.check(
        linear.reference(
            case.x, case.weight, case.bias, norm=case.norm, residual=case.residual, act=case.act
        )
    )


def test_tables_survive_json() -> None:
    table: dict[str, dict[int, Tile | None]] = {
        "64x32 norm gated": {1: GEMV, 8: SmemResidentTile(1, 64, 1, 4), 64: None},
        "64x32": {1: GEMV, 2: REGISTER_SKINNY, 4: TmaTile(1, 1, 64, 1, 4, 3)},
    }
    assert parse(dump(table)) == table


def test_user_table_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "asyncllm" / "tuned"
    folder.mkdir(parents=True)
    shape = Shape(64, 512, norm=False, epilogue="")
    (folder / "Some_GPU.json").write_text(dump({shape.key: {8: REGISTER_SKINNY, 16: None}}))
    assert choose("Some GPU", 5, shape) == REGISTER_SKINNY
    assert choose("Some GPU", 16, shape) is None
    assert choose("Some GPU", 1, shape) == guess(1, shape)
    assert choose("Some GPU", 1000, shape) is None


SHAPES = [
    Shape(size, columns, norm, epilogue)
    for size, columns in ((1024, 2048), (4096, 1024), (6144, 4096), (24576, 4096), (96, 8192))
    for norm, epilogue in ((True, ""), (True, "gated"), (False, "residual"))
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.key)
def test_guesses_can_run(shape: Shape) -> None:
    for rows in (1, 2, 4, 8, 16, 32, 64):
        x = torch.empty(rows, shape.columns, dtype=torch.bfloat16)
        tiles = [guess(rows, shape), guess(rows, shape, hopper=True)]
        assert all(tile is None or fits(tile, x, shape) for tile in tiles)
        assert tiles[0] is None or isinstance(tiles[0], GemvTile | RegisterSkinnyTile)
        if shape.size >= 1024 and 1 < rows < 64:
            assert isinstance(tiles[1], SmemResidentTile | TmaTile)
    assert guess(64, shape, hopper=True) is None
