"""Attention of rows of several new tokens, against dense attention of each row by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import attention as in_torch
from asyncllm.kernels.attention import encode_heads
from asyncllm.kernels.types import AttentionSpec, DecodeRows, HeadEncoding, PrefillRows
from tests.support.kernels.device import DEVICE, GPU

pytest.importorskip("triton")

from asyncllm.kernels.triton.attention import prefill, prefill_tiles
from asyncllm.kernels.triton.attention.decode import decode_attention
from asyncllm.kernels.triton.attention.prefill import choose_blocks, prefill_attention
from asyncllm.kernels.triton.attention.prefill_tiles import find_tiles

#: Triton's interpreter has no product of bfloat16 matrices.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
UNCHANGED = HeadEncoding(None, None, None)
LARGE = pytest.mark.skipif(DEVICE == "cpu", reason="large")
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = HALF
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    window: int | None = None
    softcap: float | None = None
    page_size: int = 16

    @property
    def spec(self) -> AttentionSpec:
        heads, scale = self.group * self.num_kv_heads, self.head_dim**-0.5
        return AttentionSpec(
            0, heads, self.num_kv_heads, self.head_dim, scale, self.window, self.softcap
        )


@dataclass
class Step:
    """Rows of (start, tokens) over pages that hold NaN wherever no row may look."""

    case: Case
    rows: list[tuple[int, int]]
    padding: int = 0

    def __post_init__(self) -> None:
        case, count = self.case, len(self.rows)
        spec = case.spec
        used = [-(-(start + n) // case.page_size) for start, n in self.rows]
        width = max(used) + 1
        order = torch.randperm(count * width, device=DEVICE).to(torch.int32)
        self.table = order.view(count, width)
        self.slots = torch.randperm(count, device=DEVICE)
        shape = (count * width, case.page_size, case.num_kv_heads, case.head_dim)
        self.keys, self.values = (
            torch.full(shape, torch.nan, dtype=case.dtype, device=DEVICE) for _ in range(2)
        )
        for slot, (start, n) in zip(self.slots.tolist(), self.rows, strict=True):
            at = torch.arange(start + n, device=DEVICE)
            cells = self.table[slot][at // case.page_size].long() * case.page_size
            cells += at % case.page_size
            for pages in (self.keys, self.values):
                new = torch.randn(start + n, *shape[2:], device=DEVICE).to(case.dtype)
                pages.flatten(0, 1)[cells] = new
        self.starts = torch.tensor([s for s, _ in self.rows], dtype=torch.int32, device=DEVICE)
        counts = torch.tensor([0, *(n for _, n in self.rows)], dtype=torch.int32)
        self.q_offsets = counts.cumsum(0, dtype=torch.int32).to(DEVICE)
        self.tokens = int(counts.sum())
        # A view, as queries beside their keys and values are; NaN where there is no row's token.
        width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        qkv = torch.randn(self.tokens + self.padding, width, device=DEVICE).to(case.dtype)
        qkv[self.tokens :] = torch.nan
        self.q = qkv.unflatten(-1, (-1, spec.head_dim))[:, : spec.num_heads]

    def arguments(self) -> tuple[Any, ...]:
        return (
            self.q,
            self.keys,
            self.values,
            self.table,
            PrefillRows(self.slots, self.starts, self.q_offsets),
            self.case.spec,
        )

    def check(self) -> Tensor:
        expected = in_torch.prefill_attention.reference(*self.arguments())[: self.tokens].float()
        tolerance = TOLERANCE[self.case.dtype]
        # What is best on this GPU, and what any GPU can do.
        for blocks in (None, choose_blocks(self.q)) if DEVICE == "cuda" else (None,):
            out = torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=DEVICE)
            prefill_attention(*self.arguments(), out=out, blocks=blocks)
            torch.testing.assert_close(
                out[: self.tokens].float(), expected, atol=tolerance, rtol=tolerance
            )
        return out


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([(0, 1)], id="one_token"),
        pytest.param([(0, 70)], id="a_prompt"),
        pytest.param([(15, 1), (16, 1), (63, 1), (64, 1)], id="decodes"),
        pytest.param([(64, 64), (63, 65), (1, 31)], id="ends_of_blocks"),
        pytest.param([(0, 0), (5, 9), (0, 0), (0, 0), (33, 40), (0, 0)], id="rows_without_tokens"),
        pytest.param([(130, 3), (0, 3), (7, 90)], id="mixed"),
    ],
)
def test_rows_of_all_sorts(rows: list[tuple[int, int]]) -> None:
    Step(Case(), rows).check()


@pytest.mark.parametrize(
    "case",
    [
        Case(window=1),
        Case(window=10),
        Case(window=64),
        Case(window=1000),
        Case(softcap=3.0),
        Case(window=20, softcap=3.0),
        Case(group=1),
        Case(group=3),
        Case(group=5, num_kv_heads=1),
        Case(group=8, num_kv_heads=1),
        Case(page_size=1),
        Case(page_size=7),
        Case(page_size=64),
        Case(head_dim=16),
        Case(head_dim=512, group=8, num_kv_heads=1),
        Case(head_dim=80),
        Case(head_dim=128),
        Case(head_dim=256, num_kv_heads=1),
        Case(dtype=torch.float16),
        Case(dtype=torch.float32),
        Case(dtype=torch.float32, window=20, head_dim=40),
    ],
    ids=str,
)
def test_layers_of_all_sorts(case: Case) -> None:
    Step(case, [(0, 40), (70, 20), (50, 1)]).check()


def test_tokens_of_no_row_are_left_alone() -> None:
    step = Step(Case(), [(3, 20), (0, 5)], padding=60)
    assert bool(step.check()[step.tokens :].isnan().all())


def test_many_rows() -> None:
    Step(Case(num_kv_heads=1, group=1, head_dim=16), [(i % 5, i % 3) for i in range(300)]).check()


def test_tiles_are_programs_of_the_only_dimension_without_a_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grids: list[tuple[int, int, int]] = []
    monkeypatch.setattr(prefill, "_launch", lambda grid, *_: grids.append(grid))
    monkeypatch.setattr(prefill_tiles, "_launch", lambda *_, **__: None)
    spec = Case(group=64, head_dim=16).spec
    pages = torch.empty(1, 16, 2, 16, device="meta")
    one = torch.zeros(2, dtype=torch.int32, device="meta")
    q = torch.empty(70_000, 128, 16, device="meta")
    rows = PrefillRows(one[:1], one[:1], one)
    prefill_attention(q, pages, pages, one.view(1, 2), rows, spec, blocks=choose_blocks(q))
    assert grids == [(2 * 70_001, 1, 1)]


def test_tiles_cover_rows_and_the_longest_come_first() -> None:
    rows = [(1, 9), (0, 0), (70, 16), (0, 33), *[(2, 1)] * 300]
    step = Step(Case(num_kv_heads=1, group=1, head_dim=16), rows)
    tiles = find_tiles(PrefillRows(step.slots, step.starts, step.q_offsets), 1000, 16)
    count, pieces = tiles[0, :2].tolist()
    assert pieces == 1
    found = tiles[1 : 1 + count].tolist()
    offsets = step.q_offsets.tolist()
    expected = [
        [at, min(at + 16, end), start - first, slot, start + n]
        for (start, n), slot, first, end in zip(
            rows, step.slots.tolist(), offsets, offsets[1:], strict=False
        )
        for at in range(first, end, 16)
    ]
    assert sorted(found) == sorted(expected)
    lengths = [end + shift for _, end, shift, *_ in found]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("rows", "room", "pieces"),
    [
        pytest.param([(8000, 10)], 16, 16, id="alone"),
        pytest.param([(1000, 48)], 16, 5, id="three_tiles"),
        pytest.param([(1000, 16 * 9)], 16, 1, id="nine_tiles"),
        pytest.param([(100, 10)], 16, 1, id="short"),
        pytest.param([(5, 1)] * 200 + [(4000, 48)], 16, 1, id="overlapping_decode_rows"),
        pytest.param([(5, 1)] * 3 + [(4000, 48)], 16, 5, id="overlapping_few_decode_rows"),
    ],
)
def test_few_tiles_are_cut(rows: list[tuple[int, int]], room: int, pieces: int) -> None:
    step = Step(Case(num_kv_heads=1, group=1, head_dim=16), rows)
    count = len(rows) - 1
    longer = PrefillRows(step.slots[count:], step.starts[count:], step.q_offsets[count:])
    tiles = find_tiles(longer, 1000, 16, room)
    assert int(tiles[0, 1]) == pieces


@LARGE
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 5])
def test_many_tokens(group: int, head_dim: int) -> None:
    case = Case(group=group, head_dim=head_dim)
    Step(case, [(0, 700), (1000, 300), (511, 1), (0, 0), (3, 900)], padding=100).check()


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are CUDA's")
@pytest.mark.parametrize("head_dim", [64, 256])
def test_a_captured_launch_serves_other_rows(head_dim: int) -> None:
    case = Case(head_dim=head_dim)
    first, second = Step(case, [(0, 700), (3, 20)]), Step(case, [(9, 650), (0, 0)])
    q, keys, values, table, rows, spec = first.arguments()
    answer = torch.empty_like(q)
    prefill_attention(*first.arguments(), out=answer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        prefill_attention(q, keys, values, table, again(rows), spec, out=answer)
    q[: len(second.q)] = second.q
    keys[: len(second.keys)] = second.keys
    values[: len(second.values)] = second.values
    table[:, : second.table.shape[1]] = second.table
    rows.slots.copy_(second.slots)
    rows.starts.copy_(second.starts)
    rows.q_offsets.copy_(second.q_offsets)
    graph.replay()
    expected = in_torch.prefill_attention.reference(*second.arguments())
    torch.testing.assert_close(answer[:650], expected, atol=1e-2, rtol=1e-2)


#: Rows of 8 K/V heads with 4 heads each, 32 tokens to a tile, that 132 programs cut into pieces.
CUT = [
    pytest.param([(4000, 30)], id="more_than_blocks"),
    pytest.param([(2000, 1)], id="one_token"),
    pytest.param([(600, 155)], id="few_blocks"),
    pytest.param([(0, 0), (5000, 64), (100, 20), (0, 0), (1500, 9)], id="of_all_lengths"),
    pytest.param([(900, 60), (0, 0), (3000, 190)], id="two_pieces"),
]


@LARGE
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("rows", CUT)
def test_tiles_are_cut_into_pieces(rows: list[tuple[int, int]], head_dim: int) -> None:
    partial, _, arrivals = workspace(head_dim)
    for softcap in (None, 3.0):
        partial.fill_(torch.nan)
        case = Case(num_kv_heads=8, group=4, head_dim=head_dim, softcap=softcap)
        Step(case, rows, padding=40).check()
        assert not partial.isnan().all()  # so there have been pieces
        assert not arrivals.any()


@LARGE
@pytest.mark.parametrize("window", [1, 100, 700, 2000, 100_000])
def test_windows_are_cut_into_pieces(window: int) -> None:
    case = Case(num_kv_heads=8, group=3, head_dim=128, window=window)
    Step(case, [(3000, 100), (90, 30), (0, 0), (1, 1)], padding=40).check()
    assert not workspace(128)[2].any()


def workspace(head_dim: int) -> tuple[Tensor, ...]:
    """Of the kernel for Hopper."""
    from asyncllm.kernels.triton.attention import prefill_hopper

    if GPU is None or not GPU.is_hopper:
        pytest.skip("another kernel attends here")
    return prefill_hopper.workspace_of(torch.device("cuda", 0), GPU.multiprocessors, head_dim)


@pytest.mark.skipif(DEVICE == "cpu", reason="graphs are CUDA's")
def test_a_captured_launch_cuts_other_rows_otherwise() -> None:
    case = Case(num_kv_heads=8, group=4, head_dim=128)
    steps = [
        Step(case, [(4000, 384), (0, 0)]),
        Step(case, [(700, 64), (3, 20)]),
        Step(case, [(0, 0), (0, 0)]),
        Step(case, [(2900, 100), (1, 1)]),
    ]
    q, keys, values, table, rows, spec = steps[0].arguments()
    answer = torch.empty_like(q)
    prefill_attention(*steps[0].arguments(), out=answer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        tiles = again(rows)
        for _ in range(4):  # layers
            prefill_attention(q, keys, values, table, tiles, spec, out=answer)
    expected = [
        in_torch.prefill_attention.reference(*step.arguments())[: step.tokens] for step in steps
    ]
    sources = [[x.clone() for x in tensors_of(step)] for step in steps]
    for _ in range(5):
        for step, tensors, result in zip(steps[::-1], sources[::-1], expected[::-1], strict=True):
            for target, source in zip(tensors_of(steps[0]), tensors, strict=True):
                target[tuple(slice(n) for n in source.shape)] = source
            answer.fill_(torch.nan)
            graph.replay()
            torch.testing.assert_close(answer[: step.tokens], result, atol=1e-2, rtol=1e-2)
            assert bool(answer[step.tokens :].isnan().all())


@LARGE
@pytest.mark.parametrize("rows", [[(1000, 155)], [(3000, 40), (128, 1), (0, 300)]])
def test_new_keys_and_values_are_written_just_before(rows: list[tuple[int, int]]) -> None:
    case = Case(num_kv_heads=8, group=4, head_dim=128)
    steps = [Step(case, rows) for _ in range(6)]
    none = torch.zeros(steps[0].tokens, dtype=torch.int64, device=DEVICE)
    expected = [in_torch.prefill_attention.reference(*step.arguments()) for step in steps]
    shared = PrefillRows(steps[0].slots, steps[0].starts, steps[0].q_offsets)
    work = []
    for step in steps:
        cells = new_cells(step)
        k, v = (pages.flatten(0, 1)[cells] for pages in (step.keys, step.values))
        work.append((torch.cat([step.q, k, v], dim=1).flatten(1), cells))

    def layers() -> list[Tensor]:
        outs = []
        for step, (qkv, cells) in zip(steps, work, strict=True):
            pages = step.keys, step.values
            q = encode_heads(qkv, case.spec, UNCHANGED, none, *pages, cells)
            outs.append(prefill_attention(q, *pages, step.table, shared, case.spec))
        return outs

    for step in steps:  # all have the slots of the first
        step.table[shared.slots] = step.table[step.slots]
    layers()
    graph = torch.cuda.CUDAGraph()
    shared = again(shared)
    with torch.cuda.graph(graph):
        outs = layers()
    for _ in range(10):
        for step, (_, cells), out in zip(steps, work, outs, strict=True):
            step.keys.flatten(0, 1)[cells] = torch.nan
            step.values.flatten(0, 1)[cells] = torch.nan
            out.fill_(torch.nan)
        graph.replay()
        for out, result in zip(outs, expected, strict=True):
            torch.testing.assert_close(out, result, atol=1e-2, rtol=1e-2)


def new_cells(step: Step) -> Tensor:
    """Where each new token's key and value are in the flattened pages; int64 [tokens]."""
    size, found = step.case.page_size, []
    for slot, (start, n) in zip(step.slots.tolist(), step.rows, strict=True):
        at = torch.arange(start, start + n, device=DEVICE)
        found.append(step.table[slot][at // size].long() * size + at % size)
    return torch.cat(found)


def tensors_of(step: Step) -> list[Tensor]:
    return [
        *(step.q, step.keys, step.values, step.table),
        *(step.slots, step.starts, step.q_offsets),
    ]


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        pytest.param([5, 1, 40], [(30, 20), (0, 0), (3, 1)], id="few"),
        pytest.param([300 + i for i in range(100)], [(700, 155)], id="many", marks=LARGE),
        pytest.param([900, 1, 30], [(0, 0), (5000, 100)], id="overlapping_pieces", marks=LARGE),
    ],
)
def test_decode_rows_overlap_longer_ones(lengths: list[int], rows: list[tuple[int, int]]) -> None:
    case = Case(num_kv_heads=2 if DEVICE == "cpu" else 8, head_dim=64)
    step = Step(case, [*((n - 1, 1) for n in lengths), *rows], padding=3)
    count = len(lengths)
    q, keys, values, table, _, spec = step.arguments()
    longer = PrefillRows(step.slots[count:], step.starts[count:], step.q_offsets[count:])
    expected = in_torch.prefill_attention.reference(*step.arguments())[: step.tokens]
    # Behind decode rows is padding, which are tokens of longer rows.
    total = torch.zeros(min(count + 2, len(q)), dtype=torch.int32, device=DEVICE)
    total[:count] = torch.tensor(lengths, dtype=torch.int32)
    slots = torch.zeros_like(total)
    slots[:count] = step.slots[:count]
    for _ in range(20 if DEVICE == "cuda" else 1):
        out = torch.full(q.shape, torch.nan, dtype=q.dtype, device=DEVICE)
        prefill_attention(q, keys, values, table, longer, spec, out=out)
        several = q[: len(total)], DecodeRows(keys, values, table, slots, total), spec
        decode_attention(*several, out=out[: len(total)], overlaps_previous=True)
        torch.testing.assert_close(out[: step.tokens], expected, atol=1e-2, rtol=1e-2)
        assert bool(out[step.tokens :].isnan().all())


def again(rows: PrefillRows) -> PrefillRows:
    """The same, of which nothing has been found out."""
    return PrefillRows(rows.slots, rows.starts, rows.q_offsets)
