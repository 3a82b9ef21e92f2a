"""Projections against float64, on each kernel and with everything around the product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.activation import gated_reference
from asyncllm.kernels.linear import linear, linear_reference
from asyncllm.kernels.norm import Norm
from asyncllm.kernels.tuning import (
    DirectTile,
    GemvTile,
    Shape,
    SkinnyTile,
    Tile,
    choose,
    dump,
    guess,
    parse,
)
from tests.kernels.device import DEVICE

pytest.importorskip("triton")
from asyncllm.kernels.triton.linear import fits, project

#: Relative error, in the Frobenius norm, of what is rounded to this dtype a few times.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}

#: The interpreter cannot multiply matrices of bfloat16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32

GEMV = GemvTile(4, 128, 4)
SKINNY = SkinnyTile(16, 32, 1, 3, 4)
DIRECT = DirectTile(16, 128, True, 4)


class Case:
    """A projection with random inputs, and what it is in float64."""

    def __init__(
        self,
        rows: int,
        size: int,
        columns: int,
        dtype: torch.dtype,
        *,
        norm: bool = False,
        offset: bool = False,
        bias: bool = False,
        act: str | None = None,
        residual: bool = False,
    ):
        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=DEVICE).to(dtype)

        self.x = draw(rows, columns + 16)[:, :columns]  # rows with a gap between them
        self.weight = draw(size, columns) * columns**-0.5
        self.bias = draw(size) if bias else None
        self.norm = Norm(draw(columns), 1e-5, offset) if norm else None
        self.act = act
        out = size if act is None else size // 2
        self.residual = draw(rows, out) if residual else None
        self.expected = self._exact()

    def _exact(self) -> Tensor:
        x: Tensor = self.x.double()
        if self.norm is not None:
            gain = self.norm.weight.double() + float(self.norm.offset)
            x = x * (x.square().mean(-1, keepdim=True) + self.norm.eps).rsqrt() * gain
        y: Tensor = x @ self.weight.double().t()
        if self.bias is not None:
            y += self.bias.double()
        if self.act is not None:
            y = gated_reference(y, self.act)
        return y if self.residual is None else y + self.residual.double()

    def run(self, tile: Tile) -> Tensor:
        return project(
            tile, self.x, self.weight, self.bias,
            norm=self.norm, residual=self.residual, act=self.act,
        )  # fmt: skip

    def check(self, got: Tensor) -> None:
        assert got.dtype == self.x.dtype
        assert got.shape == self.expected.shape
        assert got.isfinite().all()
        error = (got.double() - self.expected).norm() / self.expected.norm()
        assert error < TOLERANCE[got.dtype], error


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kernels leave unwritten is NaN."""
    empty = torch.empty

    def nan(*args: Any, **kwargs: Any) -> Tensor:
        poisoned: Tensor = empty(*args, **kwargs).fill_(torch.nan)
        return poisoned

    monkeypatch.setattr(torch, "empty", nan)


AROUND = [
    {},
    {"bias": True},
    {"norm": True},
    {"norm": True, "offset": True, "bias": True},
    {"norm": True, "act": "silu"},
    {"act": "gelu_pytorch_tanh", "bias": True},
    {"residual": True},
    {"residual": True, "bias": True, "norm": True},
]


@pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (1, GEMV),
        (1, SKINNY),
        (3, SkinnyTile(16, 32, 2, 2, 4)),
        (1, DIRECT),
        (3, DirectTile(8, 64, False, 2)),
    ],
    ids=str,
)
def test_everything_around_the_product(rows: int, tile: Tile, around: dict[str, object]) -> None:
    case = Case(rows, 72, 256, DTYPE, **around)  # type: ignore[arg-type]
    got = case.run(tile)
    case.check(got)
    if case.residual is not None:
        assert got is case.residual


@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
def test_activations(act: str) -> None:
    case = Case(1, 64, 128, torch.float32, act=act)
    case.check(case.run(GEMV))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tile", [GEMV, SKINNY], ids=str)
def test_dtypes(tile: Tile, dtype: torch.dtype) -> None:
    if tile is SKINNY and dtype == torch.bfloat16:
        dtype = DTYPE
    case = Case(1, 48, 128, dtype)
    case.check(case.run(tile))


@pytest.mark.parametrize(
    "tile",
    [
        DIRECT,
        DirectTile(32, 256, True, 4, 2),
        DirectTile(8, 128, False, 2, 2),
        DirectTile(16, 128, True, 4, 1, late=True, norm_apart=True),
        SkinnyTile(16, 64, 1, 3, 4),
        SkinnyTile(32, 16, 4, 2, 4),
        SkinnyTile(64, 64, 1, 3, 4),
        SkinnyTile(128, 32, 2, 3, 8),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [5, 8, 33])
def test_tiles_of_the_tensor_cores(rows: int, tile: SkinnyTile) -> None:
    case = Case(rows, 136, 256, DTYPE, norm=True, act="silu")
    case.check(case.run(tile))


@pytest.mark.parametrize("columns", [96, 1000, 1024 + 8])
def test_odd_sizes_of_one_row(columns: int) -> None:
    case = Case(1, 37, columns, torch.bfloat16, norm=True)
    case.check(case.run(GemvTile(2, 256, 2, late=True)))


def test_rows_do_not_depend_on_padding() -> None:
    case = Case(8, 64, 256, DTYPE, norm=True)
    alone = [project(SKINNY, case.x[:n], case.weight, norm=case.norm) for n in (1, 2, 5, 8)]
    for got in alone:
        assert torch.equal(got, alone[-1][: len(got)])


def test_shared_tiles_can_be_launched_again() -> None:
    tile = SkinnyTile(16, 32, 4, 2, 4)
    case = Case(4, 160, 256, DTYPE)
    first = case.run(tile)
    assert all(torch.equal(case.run(tile), first) for _ in range(10))


def test_float16_is_normalised_before_the_tensor_cores() -> None:
    shape = Shape(64, 256, norm=True, epilogue="")
    assert not fits(DIRECT, torch.empty(2, 256, dtype=torch.float16), shape)
    assert fits(DIRECT, torch.empty(2, 256, dtype=torch.bfloat16), shape)
    assert fits(SKINNY, torch.empty(2, 256, dtype=torch.float16), shape)


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 64, 200])
@pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
def test_public_function(rows: int, around: dict[str, object]) -> None:
    case = Case(rows, 144, 320, torch.bfloat16, **around)  # type: ignore[arg-type]
    got = linear(
        case.x, case.weight, case.bias, norm=case.norm, residual=case.residual, act=case.act
    )
    if rows > 0:
        case.check(got)
    assert got.shape == case.expected.shape


@pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
def test_reference(around: dict[str, object]) -> None:
    case = Case(3, 144, 320, torch.float32, **around)  # type: ignore[arg-type]
    case.check(
        linear_reference(
            case.x, case.weight, case.bias, norm=case.norm, residual=case.residual, act=case.act
        )
    )


def test_tables_survive_json() -> None:
    table: dict[str, dict[int, Tile | None]] = {
        "64x32 norm gated": {1: GEMV, 8: SKINNY, 64: None},
        "64x32": {1: GEMV, 2: DIRECT},
    }
    assert parse(dump(table)) == table


def test_user_table_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "asyncllm" / "tuned"
    folder.mkdir(parents=True)
    shape = Shape(64, 512, norm=False, epilogue="")
    (folder / "Some_GPU.json").write_text(dump({shape.key: {8: SKINNY, 16: None}}))
    assert choose("Some GPU", 5, shape) == SKINNY
    assert choose("Some GPU", 16, shape) is None
    assert choose("Some GPU", 1, shape) == guess(1, shape)
    assert choose("Some GPU", 1000, shape) is None


@pytest.mark.skipif(DEVICE == "cpu", reason="kernels overlap on a GPU only")
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (1, GemvTile(2, 1024, 4)),
        (1, GemvTile(4, 1024, 4, late=True)),
        (5, DirectTile(8, 512, True, 4, 2)),
        (5, DirectTile(16, 256, False, 4, 2, late=True)),
        (40, SkinnyTile(64, 64, 4, 4, 4)),
    ],
    ids=str,
)
def test_overlapping_kernels_wait_for_each_other(
    rows: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain in a graph, where kernels overlap, gives what one kernel at a time gives."""
    monkeypatch.undo()  # poisoning would come between the kernels
    size, turns = 512, 30
    start = torch.randn(rows, size, device=DEVICE).to(DTYPE)
    norm = Norm(torch.rand(size, device=DEVICE).to(DTYPE), 1e-6)
    wide = torch.randn(turns, 2 * size, size, device=DEVICE).to(DTYPE) * size**-0.5
    narrow = torch.randn(turns, size, size, device=DEVICE).to(DTYPE) * size**-0.5

    def chain(*, apart: bool) -> Tensor:
        stream = start.clone()
        for up, down in zip(wide, narrow, strict=True):
            hidden = project(tile, stream, up, norm=norm, act="silu")
            if apart:
                torch.cuda.synchronize()
            project(tile, hidden, down, residual=stream)
            if apart:
                torch.cuda.synchronize()
        return stream

    expected = chain(apart=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(apart=False)
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert torch.equal(got, expected)
