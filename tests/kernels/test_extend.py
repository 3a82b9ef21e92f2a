"""Attention of rows of several new tokens, against dense attention of each row by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.attention.base import AttentionSpec
from asyncllm.kernels.extend import ExtendRows, extend_attention_reference
from tests.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.extend import choose_blocks, extend_attention
from asyncllm.kernels.triton.extend_tiles import find_tiles

#: Triton's interpreter has no product of bfloat16 matrices.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
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
            ExtendRows(self.slots, self.starts, self.q_offsets),
            self.case.spec,
        )

    def check(self) -> Tensor:
        expected = extend_attention_reference(*self.arguments())[: self.tokens].float()
        tolerance = TOLERANCE[self.case.dtype]
        # What is best on this GPU, and what any GPU can do.
        for blocks in (None, choose_blocks(self.q)) if DEVICE == "cuda" else (None,):
            out = torch.full(self.q.shape, torch.nan, dtype=self.q.dtype, device=DEVICE)
            extend_attention(*self.arguments(), out=out, blocks=blocks)
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


def test_tiles_cover_rows_and_the_longest_come_first() -> None:
    rows = [(1, 9), (0, 0), (70, 16), (0, 33), *[(2, 1)] * 300]
    step = Step(Case(num_kv_heads=1, group=1, head_dim=16), rows)
    tiles = find_tiles(step.slots, step.starts, step.q_offsets, 1000, 16)
    count = int(tiles[0, 0])
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


@pytest.mark.skipif(DEVICE == "cpu", reason="large")
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
    extend_attention(*first.arguments(), out=answer)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        extend_attention(q, keys, values, table, again(rows), spec, out=answer)
    q[: len(second.q)] = second.q
    keys[: len(second.keys)] = second.keys
    values[: len(second.values)] = second.values
    table[:, : second.table.shape[1]] = second.table
    rows.slots.copy_(second.slots)
    rows.starts.copy_(second.starts)
    rows.q_offsets.copy_(second.q_offsets)
    graph.replay()
    expected = extend_attention_reference(*second.arguments())
    torch.testing.assert_close(answer[:650], expected, atol=1e-2, rtol=1e-2)


def again(rows: ExtendRows) -> ExtendRows:
    """The same, of which nothing has been found out."""
    return ExtendRows(rows.slots, rows.starts, rows.q_offsets)
