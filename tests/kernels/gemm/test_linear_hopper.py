"""Projections on the kernels for Hopper GPUs, and chains of kernels that overlap on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels.tuning import (
    GemvTile,
    RegisterSkinnyTile,
    Shape,
    SmemResidentTile,
    Tile,
    TmaSplitTile,
    TmaTile,
    tma_split_stages,
)
from asyncllm.kernels.types import Norm
from tests.support.kernels.device import DEVICE, GPU, on_hopper
from tests.support.kernels.linear_case import AROUND, DTYPE, Case, poison

pytest.importorskip("triton")
from asyncllm.kernels.triton.gemm.linear import fits, project
from asyncllm.kernels.triton.gemm.projection import Projection

SMEM_RESIDENT = [
    SmemResidentTile(1, 128, 1, 4),
    SmemResidentTile(1, 64, 1, 8, pdl_late=True),
    SmemResidentTile(2, 256, 1, 4),
    SmemResidentTile(4, 64, 1, 8),
    SmemResidentTile(1, 64, 1, 4, separate_norm=True),
    SmemResidentTile(2, 64, 2, 4, pdl_late=True, separate_norm=True),
    SmemResidentTile(1, 128, 4, 8, separate_norm=True),
]
TMA = [
    TmaTile(1, 1, 64, 1, 8, 4),
    TmaTile(1, 1, 64, 1, 3, 2),
    TmaTile(2, 1, 128, 1, 2, 2),
    TmaTile(3, 1, 64, 2, 3, 3),
    TmaTile(1, 2, 64, 1, 3, 2),
    TmaTile(1, 2, 64, 1, 3, 2, stagger=True),
    TmaTile(1, 2, 64, 2, 2, 2),
]
TMA_SPLIT = [
    TmaSplitTile(1, 1, 4),
    TmaSplitTile(2, 1, 5),
    TmaSplitTile(3, 1, 4),
    TmaSplitTile(1, 2, 8),
    TmaSplitTile(2, 2, 4),
    TmaSplitTile(3, 4, 4),
]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


@on_hopper
class TestHopper:
    """Gluon's kernels, of 512 columns."""

    @pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
    @pytest.mark.parametrize("tile", [*SMEM_RESIDENT, *TMA], ids=str)
    def test_everything_around_the_product(
        self, tile: SmemResidentTile | TmaTile, around: dict[str, Any]
    ) -> None:
        for rows, size in ((1, 80), (13, 144), (50, 336)):
            case = Case(rows, size, 512, DTYPE, **around)
            assert fits(tile, case.x, Shape(size, 512, case.norm is not None, ""))
            case.check(case.run(tile))

    @pytest.mark.parametrize("around", AROUND, ids=lambda around: "-".join(around) or "plain")
    @pytest.mark.parametrize("tile", TMA_SPLIT, ids=str)
    def test_everything_around_many_rows(self, tile: TmaSplitTile, around: dict[str, Any]) -> None:
        if "act" in around:
            tile = tile._replace(splits=1)
        for rows, size in ((20, 336), (70, 80), (130, 144), (224, 1008), (251, 336)):
            if tma_split_stages(rows, tile.parts) >= tile.stages:
                case = Case(rows, size, 1024, DTYPE, **around)
                assert fits(tile, case.x, Shape(size, 1024, case.norm is not None, ""))
                case.check(case.run(tile))

    @pytest.mark.parametrize("rows", [66, 128])
    def test_many_programs_share_a_tile(self, rows: int) -> None:
        case = Case(rows, 93, 1024, DTYPE, residual=True, bias=True)
        case.check(case.run(TmaSplitTile(1, 8, 2)))

    @pytest.mark.parametrize("tile", [*SMEM_RESIDENT, *TMA, *TMA_SPLIT[:3]], ids=str)
    def test_float16(self, tile: SmemResidentTile | TmaTile | TmaSplitTile) -> None:
        case = Case(20, 144, 512, torch.float16, act="gelu")
        case.check(case.run(tile))

    @pytest.mark.parametrize(
        "tile", [SmemResidentTile(8, 64, 1, 4), TmaTile(1, 4, 64, 1, 3, 2)], ids=str
    )
    @pytest.mark.parametrize("rows", [5, 16, 30])
    def test_odd_sizes(self, tile: SmemResidentTile | TmaTile, rows: int) -> None:
        case = Case(rows, 93, 1024, DTYPE, residual=True, bias=True)
        case.check(case.run(tile))

    @pytest.mark.parametrize("tile", [SMEM_RESIDENT[0], TMA[0]], ids=str)
    @pytest.mark.parametrize("act", ["silu", "gelu", "gelu_pytorch_tanh", "relu"])
    def test_activations(self, tile: SmemResidentTile | TmaTile, act: str) -> None:
        case = Case(10, 144, 512, DTYPE, act=act)
        case.check(case.run(tile))

    @pytest.mark.parametrize("tile", [SMEM_RESIDENT[-1], TMA[-1], TmaSplitTile(2, 2, 3)], ids=str)
    def test_shared_tiles_can_be_launched_again(self, tile: Tile) -> None:
        case = Case(40, 640, 512, DTYPE)
        first = case.run(tile)
        assert all(torch.equal(case.run(tile), first) for _ in range(10))


@pytest.mark.parametrize("tile", [SMEM_RESIDENT[0], TMA[0]], ids=str)
def test_only_what_the_kernels_for_hopper_can_take(tile: SmemResidentTile | TmaTile) -> None:
    x = torch.empty(4, 512, dtype=torch.bfloat16)
    assert fits(tile, x, Shape(72, 512, norm=True, epilogue=""))
    assert not fits(tile, x[:, :480], Shape(72, 480, norm=True, epilogue=""))
    assert not fits(tile, x.float(), Shape(72, 512, norm=True, epilogue=""))
    assert not fits(tile, x, Shape(72, 512, norm=True, epilogue="gated"))
    assert not fits(tile, torch.empty(4, 520, dtype=x.dtype)[:, :512], Shape(72, 512, True, ""))
    assert not fits(SmemResidentTile(1, 128, 2, 4), x, Shape(72, 512, norm=True, epilogue=""))
    assert not fits(TmaTile(1, 1, 64, 1, 4, 1), x, Shape(72, 512, norm=True, epilogue=""))
    assert not fits(TmaTile(1, 1, 64, 1, 9, 4), x, Shape(72, 512, norm=True, epilogue=""))


def test_only_what_the_kernel_for_many_rows_can_take() -> None:
    x = torch.empty(100, 512, dtype=torch.bfloat16)
    shape = Shape(4096, 512, norm=True, epilogue="")
    assert fits(TmaSplitTile(1, 2, 4), x, shape, max_waiting=128)
    assert not fits(TmaSplitTile(1, 2, 4), x, shape, max_waiting=127)  # which all wait for some
    assert fits(TmaSplitTile(1, 1, 4), x, shape, max_waiting=1)
    assert fits(TmaSplitTile(2, 2, 4), x, shape._replace(epilogue="residual"), max_waiting=64)
    assert fits(TmaSplitTile(1, 1, 4), x, shape._replace(epilogue="residual"), max_waiting=1)
    assert not fits(TmaSplitTile(2, 2, 4), x, shape._replace(epilogue="gated"))
    assert not fits(TmaSplitTile(2, 1, 4), x, shape._replace(size=4100))
    assert not fits(TmaSplitTile(2, 2, 5), x, shape)  # more stages than blocks
    assert not fits(TmaSplitTile(3, 1, 7), x, shape)  # or than shared memory has room for
    assert not fits(TmaSplitTile(1, 1, 4), x[:, :500], shape._replace(columns=500))
    assert not fits(TmaSplitTile(1, 1, 4), x.float(), shape)


def is_hopper() -> bool:
    return GPU is not None and GPU.is_hopper


@pytest.mark.skipif(DEVICE == "cpu", reason="kernels overlap on a GPU only")
@pytest.mark.parametrize(
    ("rows", "tile"),
    [
        (1, GemvTile(2, 1024, 4)),
        (1, GemvTile(4, 1024, 4, pdl_late=True)),
        (5, RegisterSkinnyTile(8, 512, True, 4, 2)),
        (5, RegisterSkinnyTile(16, 256, False, 4, 2, pdl_late=True)),
        (5, SmemResidentTile(1, 128, 1, 4)),
        (16, SmemResidentTile(2, 256, 1, 4, pdl_late=True)),
        (40, SmemResidentTile(4, 64, 1, 8)),
        (40, SmemResidentTile(1, 128, 4, 4, separate_norm=True)),
        (16, TmaTile(2, 1, 64, 1, 3, 3)),
        (40, TmaTile(1, 1, 64, 2, 3, 2)),
        (40, TmaTile(1, 1, 64, 1, 3, 3, stagger=True)),
        (100, TmaSplitTile(1, 1, 4)),
        (150, TmaSplitTile(3, 1, 4)),
        (200, TmaSplitTile(1, 2, 4)),
        (250, TmaSplitTile(2, 2, 4)),
    ],
    ids=str,
)
def test_overlapping_kernels_wait_for_each_other(
    rows: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chain in a graph, where kernels overlap, gives what one kernel at a time gives."""
    if isinstance(tile, SmemResidentTile | TmaTile | TmaSplitTile) and not is_hopper():
        pytest.skip("needs a Hopper GPU")
    monkeypatch.undo()  # poisoning would come between the kernels
    size, turns = 512, 30
    gated = tile._replace(splits=1) if isinstance(tile, TmaSplitTile) else tile
    start = torch.randn(rows, size, device=DEVICE).to(DTYPE)
    norm = Norm(torch.rand(size, device=DEVICE).to(DTYPE), 1e-6)
    wide = torch.randn(turns, 2 * size, size, device=DEVICE).to(DTYPE) * size**-0.5
    narrow = torch.randn(turns, size, size, device=DEVICE).to(DTYPE) * size**-0.5

    def chain(*, apart: bool) -> Tensor:
        stream = start.clone()
        for up, down in zip(wide, narrow, strict=True):
            hidden = project(gated, Projection(stream, up, norm=norm, act="silu"))
            if apart:
                torch.cuda.synchronize()
            project(tile, Projection(hidden, down, residual=stream))
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
