"""Projections on the kernels for Hopper GPUs, and chains of kernels that overlap on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.tuning import (
    DirectTile,
    GemvTile,
    HeldTile,
    Shape,
    StreamTile,
    Tile,
    WideTile,
    wide_stages,
)
from asyncllm.kernels.types import Norm
from tests.support.kernels.device import DEVICE
from tests.support.kernels.linear_case import AROUND, DTYPE, Case, poison

pytest.importorskip("triton")
from asyncllm.kernels.triton.gemm.linear import fits, project
from asyncllm.kernels.triton.gemm.projection import Projection

HELD = [
    HeldTile(1, 128, 1, 4),
    HeldTile(1, 64, 1, 8, late=True),
    HeldTile(2, 256, 1, 4),
    HeldTile(4, 64, 1, 8),
    HeldTile(1, 64, 1, 4, norm_apart=True),
    HeldTile(2, 64, 2, 4, late=True, norm_apart=True),
    HeldTile(1, 128, 4, 8, norm_apart=True),
]
STREAM = [
    StreamTile(1, 1, 64, 1, 8, 4),
    StreamTile(1, 1, 64, 1, 3, 2),
    StreamTile(2, 1, 128, 1, 2, 2),
    StreamTile(3, 1, 64, 2, 3, 3),
    StreamTile(1, 2, 64, 1, 3, 2),
    StreamTile(1, 2, 64, 1, 3, 2, stagger=True),
    StreamTile(1, 2, 64, 2, 2, 2),
]
WIDE = [
    WideTile(1, 1, 4),
    WideTile(2, 1, 5),
    WideTile(3, 1, 4),
    WideTile(1, 2, 8),
    WideTile(2, 2, 4),
    WideTile(3, 4, 4),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@pytest.mark.skipif(DEVICE == "cpu", reason="Gluon has no interpreter")
class TestHopper:
    """Gluon's kernels, of 512 columns."""

    @pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
    @pytest.mark.parametrize("tile", [*HELD, *STREAM], ids=str)
    def test_everything_around_the_product(
        self, tile: HeldTile | StreamTile, around: dict[str, Any]
    ) -> None:
        for rows, size in ((1, 80), (13, 144), (50, 336)):
            case = Case(rows, size, 512, DTYPE, **around)
            assert fits(tile, case.x, Shape(size, 512, case.norm is not None, ""))
            case.check(case.run(tile))

    @pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
    @pytest.mark.parametrize("tile", WIDE, ids=str)
    def test_everything_around_many_rows(self, tile: WideTile, around: dict[str, Any]) -> None:
        if "act" in around:
            tile = tile._replace(splits=1)
        for rows, size in ((20, 336), (70, 80), (130, 144), (224, 1008), (251, 336)):
            if wide_stages(rows, tile.parts) >= tile.stages:
                case = Case(rows, size, 1024, DTYPE, **around)
                assert fits(tile, case.x, Shape(size, 1024, case.norm is not None, ""))
                case.check(case.run(tile))

    @pytest.mark.parametrize("rows", [66, 128])
    def test_many_programs_share_a_tile(self, rows: int) -> None:
        case = Case(rows, 93, 1024, DTYPE, residual=True, bias=True)
        case.check(case.run(WideTile(1, 8, 2)))

    @pytest.mark.parametrize("tile", [*HELD, *STREAM, *WIDE[:3]], ids=str)
    def test_float16(self, tile: HeldTile | StreamTile | WideTile) -> None:
        case = Case(20, 144, 512, torch.float16, act="gelu")
        case.check(case.run(tile))

    @pytest.mark.parametrize(
        "tile", [HeldTile(8, 64, 1, 4), StreamTile(1, 4, 64, 1, 3, 2)], ids=str
    )
    @pytest.mark.parametrize("rows", [5, 16, 30])
    def test_odd_sizes(self, tile: HeldTile | StreamTile, rows: int) -> None:
        case = Case(rows, 93, 1024, DTYPE, residual=True, bias=True)
        case.check(case.run(tile))

    @pytest.mark.parametrize("tile", [HELD[0], STREAM[0]], ids=str)
    @pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
    def test_activations(self, tile: HeldTile | StreamTile, act: str) -> None:
        case = Case(10, 144, 512, DTYPE, act=act)
        case.check(case.run(tile))

    @pytest.mark.parametrize("tile", [HELD[-1], STREAM[-1], WideTile(2, 2, 3)], ids=str)
    def test_shared_tiles_can_be_launched_again(self, tile: Tile) -> None:
        case = Case(40, 640, 512, DTYPE)
        first = case.run(tile)
        assert all(torch.equal(case.run(tile), first) for _ in range(10))


@pytest.mark.parametrize("tile", [HELD[0], STREAM[0]], ids=str)
def test_only_what_the_kernels_for_hopper_can_take(tile: HeldTile | StreamTile) -> None:
    x = torch.empty(4, 512, dtype=torch.bfloat16)
    assert fits(tile, x, Shape(72, 512, norm=True, epilogue=""))
    assert not fits(tile, x[:, :480], Shape(72, 480, norm=True, epilogue=""))
    assert not fits(tile, x.float(), Shape(72, 512, norm=True, epilogue=""))
    assert not fits(tile, x, Shape(72, 512, norm=True, epilogue="gated"))
    assert not fits(tile, torch.empty(4, 520, dtype=x.dtype)[:, :512], Shape(72, 512, True, ""))
    assert not fits(HeldTile(1, 128, 2, 4), x, Shape(72, 512, norm=True, epilogue=""))
    assert not fits(StreamTile(1, 1, 64, 1, 4, 1), x, Shape(72, 512, norm=True, epilogue=""))
    assert not fits(StreamTile(1, 1, 64, 1, 9, 4), x, Shape(72, 512, norm=True, epilogue=""))


def test_only_what_the_kernel_for_many_rows_can_take() -> None:
    x = torch.empty(100, 512, dtype=torch.bfloat16)
    shape = Shape(4096, 512, norm=True, epilogue="")
    assert fits(WideTile(1, 2, 4), x, shape, multiprocessors=128)
    assert not fits(WideTile(1, 2, 4), x, shape, multiprocessors=127)  # which all wait for some
    assert fits(WideTile(1, 1, 4), x, shape, multiprocessors=1)
    assert fits(WideTile(2, 2, 4), x, shape._replace(epilogue="residual"), multiprocessors=64)
    assert not fits(WideTile(1, 1, 4), x, shape._replace(epilogue="residual"), multiprocessors=63)
    assert not fits(WideTile(2, 2, 4), x, shape._replace(epilogue="gated"))
    assert not fits(WideTile(2, 1, 4), x, shape._replace(size=4100))
    assert not fits(WideTile(2, 2, 5), x, shape)  # more stages than blocks
    assert not fits(WideTile(3, 1, 7), x, shape)  # or than shared memory has room for
    assert not fits(WideTile(1, 1, 4), x[:, :500], shape._replace(columns=500))
    assert not fits(WideTile(1, 1, 4), x.float(), shape)


@pytest.mark.skipif(DEVICE == "cpu", reason="kernels overlap on a GPU only")
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (1, GemvTile(2, 1024, 4)),
        (1, GemvTile(4, 1024, 4, late=True)),
        (5, DirectTile(8, 512, True, 4, 2)),
        (5, DirectTile(16, 256, False, 4, 2, late=True)),
        (5, HeldTile(1, 128, 1, 4)),
        (16, HeldTile(2, 256, 1, 4, late=True)),
        (40, HeldTile(4, 64, 1, 8)),
        (40, HeldTile(1, 128, 4, 4, norm_apart=True)),
        (16, StreamTile(2, 1, 64, 1, 3, 3)),
        (40, StreamTile(1, 1, 64, 2, 3, 2)),
        (40, StreamTile(1, 1, 64, 1, 3, 3, stagger=True)),
        (100, WideTile(1, 1, 4)),
        (150, WideTile(3, 1, 4)),
        (200, WideTile(1, 2, 4)),
        (250, WideTile(2, 2, 4)),
    ],
    ids=str,
)
def test_overlapping_kernels_wait_for_each_other(
    rows: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain in a graph, where kernels overlap, gives what one kernel at a time gives."""
    monkeypatch.undo()  # poisoning would come between the kernels
    size, turns = 512, 30
    gated = tile._replace(splits=1) if isinstance(tile, WideTile) else tile
    start = torch.randn(rows, size, device=DEVICE).to(DTYPE)
    norm = Norm(torch.rand(size, device=DEVICE).to(DTYPE), 1e-6)
    wide = torch.randn(turns, 2 * size, size, device=DEVICE).to(DTYPE) * size**-0.5
    narrow = torch.randn(turns, size, size, device=DEVICE).to(DTYPE) * size**-0.5

    def chain(*, apart: bool) -> Tensor:
        stream = start.clone()
        for up, down in zip(wide, narrow, strict=True):
            hidden = project(gated, Projection.of(stream, up, norm=norm, act="silu"))
            if apart:
                torch.cuda.synchronize()
            project(tile, Projection.of(hidden, down, residual=stream))
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
