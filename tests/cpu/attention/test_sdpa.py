"""SdpaBackend against a dense float64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.attention.sdpa import QUERY_BLOCK, SdpaBackend
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.kernels.types import AttentionSpec
from tests.support.models.attending import attend

DIM = 16
#: Reads of a position that the row has not written show as NaN.
POISON = math.nan


@dataclass
class Case:
    """Rows over randomly placed pages whose earlier tokens are cached already."""

    pool: KVPool
    table: Tensor
    rows: np.ndarray
    qkv: list[Tensor]  # per row [start + q_len, heads + 2 * kv_heads, DIM]
    heads: int
    kv_heads: int

    def fused(self, order: list[int]) -> Tensor:
        """q, k and v of the new tokens."""
        return torch.cat([self.qkv[i][self.rows[i, 1] :] for i in order])

    def run(self, spec: AttentionSpec, order: list[int] | None = None) -> list[Tensor]:
        """The output of each row, computed in one batch of the rows in ``order``."""
        order = list(range(len(self.rows))) if order is None else order
        backend = SdpaBackend(self.pool)
        rows = self.rows[order]
        out = attend(backend, self.fused(order), spec, rows, self.table, self.pool.page_size)
        by_row = dict(zip(order, out.split(rows[:, 2].tolist()), strict=True))
        return [by_row[i] for i in sorted(order)]

    def reference(self, i: int, spec: AttentionSpec) -> Tensor:
        """Dense attention of row i in float64, every head and query by itself."""
        qkv = self.qkv[i].double()
        group = self.heads // self.kv_heads
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        positions = torch.arange(len(qkv))
        distance = positions[:, None] - positions[None, :]
        seen = distance >= 0
        if spec.window is not None:
            seen &= distance < spec.window
        scores = scores.masked_fill(~seen, -math.inf)
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return out[self.rows[i, 1] :]


def make_case(
    seed: int,
    lens: list[tuple[int, int]],
    *,
    page_size: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    poison: float = POISON,
    layers: int = 2,
) -> Case:
    """Rows of ``lens`` (start, q_len) in random slots and pages; all else is poison."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    slots = rng.permutation(len(lens) + 3)[: len(lens)]
    max_pages = max(-(-(start + q_len) // page_size) for start, q_len in lens) + 1
    num_pages = len(lens) * max_pages + 1
    specs = [AttentionSpec(layer, heads, kv_heads, DIM, 1.0) for layer in range(layers)]
    pool = KVPool(specs, num_pages, page_size, dtype, "cpu")
    pool.storage.fill_(poison)
    free = rng.permutation(num_pages).tolist()
    table = torch.zeros(len(lens) + 3, max_pages, dtype=torch.int32)
    qkv = []
    for slot, (start, q_len) in zip(slots, lens, strict=True):
        row = torch.randn(start + q_len, heads + 2 * kv_heads, DIM).to(dtype)
        qkv.append(row)
        for page in range(-(-(start + q_len) // page_size)):
            table[slot, page] = free.pop()
        for position in range(start):
            page = int(table[slot, position // page_size])
            for layer in range(layers):
                for side, begin in enumerate((heads, heads + kv_heads)):
                    pool.layer(layer)[side][page, position % page_size] = row[
                        position, begin : begin + kv_heads
                    ]
    rows = np.array([(s, *span) for s, span in zip(slots, lens, strict=True)], dtype=np.int32)
    return Case(pool, table, rows, qkv, heads, kv_heads)


def make_spec(
    case: Case, layer: int = 0, window: int | None = None, softcap: float | None = None
) -> AttentionSpec:
    return AttentionSpec(layer, case.heads, case.kv_heads, DIM, 0.3, window, softcap)


def check(case: Case, spec: AttentionSpec, atol: float = 1e-5) -> None:
    for i, out in enumerate(case.run(spec)):
        torch.testing.assert_close(out.double(), case.reference(i, spec), rtol=0, atol=atol)


def random_lens(seed: int, rows: int, longest: int) -> list[tuple[int, int]]:
    """A shuffled mix of decode rows, whole prompts and chunks with earlier context."""
    rng = np.random.default_rng(seed)
    lens = []
    for _ in range(rows):
        start, q_len = int(rng.integers(0, longest)), int(rng.integers(2, 24))
        lens.append([(start, 1), (0, q_len), (start, q_len)][rng.integers(3)])
    return lens


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 7, 1000])
def test_mixed_rows(seed: int, page_size: int, softcap: float | None, window: int | None) -> None:
    case = make_case(seed, random_lens(seed, 9, 70), page_size=page_size)
    check(case, make_spec(case, window=window, softcap=softcap))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_query_head_groups(kv_heads: int, softcap: float | None) -> None:
    case = make_case(kv_heads, random_lens(5, 6, 40), heads=8, kv_heads=kv_heads)
    check(case, make_spec(case, softcap=softcap))


@pytest.mark.parametrize("window", [None, 9])
def test_bfloat16(window: int | None) -> None:
    case = make_case(1, random_lens(1, 9, 70), dtype=torch.bfloat16)
    # Outputs are of order 1, where bfloat16 has steps of 2 ** -7.
    check(case, make_spec(case, window=window), atol=4 * 2**-7)
    check(case, make_spec(case, window=window, softcap=2.0), atol=2**-7)


@pytest.mark.parametrize("window", [None, 40, QUERY_BLOCK])
@pytest.mark.parametrize("start", [0, 33])
def test_chunk_longer_than_a_query_block(start: int, window: int | None) -> None:
    case = make_case(2, [(start, 2 * QUERY_BLOCK + 5), (20, 1)], page_size=16, layers=1)
    check(case, make_spec(case, window=window))
    check(case, make_spec(case, window=window, softcap=3.0))


def test_many_decode_rows_form_padded_groups() -> None:
    case = make_case(3, [(start, 1) for start in range(60)], layers=1)
    spec = make_spec(case)
    plan = SdpaBackend(case.pool).plan(case.rows, case.table)
    reads = plan.reads(None, True, torch.float32)
    assert 1 < len(reads.groups) < 15
    assert any(group.bias is not None for group in reads.groups)
    check(case, spec)


def test_groups_gather_a_bounded_number_of_tokens() -> None:
    case = make_case(4, [(31, 1)] * 40, layers=1)
    backend = SdpaBackend(case.pool)
    backend._group_tokens = 64
    groups = backend.plan(case.rows, case.table).reads(None, True, torch.float32).groups
    assert [group.end - group.begin for group in groups] == [2] * 20
    assert all(group.bias is None for group in groups)


def test_layers_with_and_without_a_window_share_a_plan() -> None:
    case = make_case(5, random_lens(7, 8, 50))
    backend = SdpaBackend(case.pool)
    plan = backend.plan(case.rows, case.table)
    order = list(range(len(case.rows)))
    for layer, window in ((0, 6), (1, None)):
        spec = make_spec(case, layer, window=window)
        out = attend(
            backend, case.fused(order), spec, case.rows, case.table, case.pool.page_size, plan=plan
        )
        want = torch.cat([case.reference(i, spec) for i in order])
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)


def test_a_row_does_not_depend_on_its_batch() -> None:
    lens = random_lens(11, 10, 60)
    spec = make_spec(make_case(6, lens))
    together = make_case(6, lens).run(spec)
    backwards = make_case(6, lens).run(spec, order=list(reversed(range(10))))
    for i in range(10):
        (alone,) = make_case(6, lens).run(spec, order=[i])
        torch.testing.assert_close(alone, together[i], rtol=0, atol=2e-6)
        torch.testing.assert_close(alone, backwards[i], rtol=0, atol=2e-6)


def test_broken_row_stays_alone() -> None:
    """NaN in one row's K and V reaches neither its neighbours nor the next owner of its pages."""
    lens = [(5, 1), (17, 1), (0, 6), (9, 4), (20, 1)]
    case = make_case(7, lens)
    case.qkv[1].fill_(math.nan)
    spec = make_spec(case)
    out = case.run(spec)
    assert out[1].isnan().all()
    for i in (0, 2, 3, 4):
        torch.testing.assert_close(out[i].double(), case.reference(i, spec), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stale", [1e4, math.inf])
def test_stale_pages_do_not_leak(stale: float) -> None:
    case = make_case(8, random_lens(13, 9, 50), poison=stale)
    check(case, make_spec(case))
    check(case, make_spec(case, layer=1, window=5))


def test_new_tokens_are_written_to_their_pages_only() -> None:
    case = make_case(9, [(3, 1), (0, 6), (5, 4)], page_size=4)
    before = [torch.stack(case.pool.layer(layer)) for layer in range(2)]
    case.run(make_spec(case, layer=1))
    after = [torch.stack(case.pool.layer(layer)) for layer in range(2)]
    assert torch.equal(before[0].isnan(), after[0].isnan())
    changed = (before[1].isnan() & ~after[1].isnan()).all(-1).all(-1).sum().item()
    assert changed == 2 * (1 + 6 + 4)
    slot, start, _ = case.rows[2]
    for position in range(start, start + 4):
        page = int(case.table[slot, position // 4])
        keys, values = case.pool.layer(1)
        row = case.qkv[2][position]
        assert torch.equal(keys[page, position % 4], row[case.heads : -case.kv_heads])
        assert torch.equal(values[page, position % 4], row[-case.kv_heads :])


def test_decode_continues_a_prefill() -> None:
    """A prompt in chunks, then tokens one by one, equals the whole sequence at once."""
    whole = make_case(10, [(0, 40)])
    spec = make_spec(whole, window=12)
    want = whole.reference(0, spec)
    slot = int(whole.rows[0, 0])
    backend = SdpaBackend(whole.pool)
    at = 0
    for q_len in (13, 1, 9, 11, 1, 1, 1, 3):
        rows = np.array([[slot, at, q_len]], dtype=np.int32)
        qkv = whole.qkv[0][at : at + q_len]
        out = attend(backend, qkv, spec, rows, whole.table, whole.pool.page_size)
        torch.testing.assert_close(out.double(), want[at : at + q_len], rtol=0, atol=1e-5)
        at += q_len


def test_pool_bytes() -> None:
    sizes = ((2, 8), (2, 8), (1, 24), (1, 24))  # the last layer has no pages
    sources = (None, None, None, 2)
    specs = [
        AttentionSpec(layer, 4, *size, 1.0, shares=source)
        for layer, (size, source) in enumerate(zip(sizes, sources, strict=True))
    ]
    pool = KVPool(specs, 5, 16, torch.bfloat16, "cpu")
    assert pool.page_bytes == 2 * 16 * (2 * 8 + 2 * 8 + 24) * 2
    assert pool.storage.nbytes == 5 * pool.page_bytes
    for layer, size in enumerate(sizes[:3]):
        keys, values = pool.layer(layer)
        assert keys.shape == values.shape == (5, 16, *size)
        assert keys.is_contiguous()
        assert values.is_contiguous()
        keys.fill_(2 * layer + 1)
        values.fill_(2 * layer + 2)
    found = [int(part.unique()) for layer in range(3) for part in pool.layer(layer)]
    assert found == [1, 2, 3, 4, 5, 6], "nothing overlaps"
