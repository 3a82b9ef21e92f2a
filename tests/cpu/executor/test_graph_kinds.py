"""Which steps are captured, and in which order."""

from __future__ import annotations

import pytest

from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.step.graph_kinds import FEW_ROWS, GraphKinds, Kind
from asyncllm.executor.step.padded_steps import FREE_TOKENS, MIXED_TOKENS, Size, row_buckets


def sizes(max_rows: int, max_tokens: int) -> tuple[list[Size], list[Size]]:
    decode = [Size(rows, rows, False) for rows in row_buckets(max_rows)]
    rows = sorted({min(32, max_rows), max_rows})
    mixed = [Size(n, m, True) for n in MIXED_TOKENS if n <= max_tokens for m in rows]
    return decode, mixed


@pytest.mark.parametrize("max_rows", [1, 5, 40, 256, 1024])
@pytest.mark.parametrize("max_tokens", [0, 64, 1536, 8192])
def test_every_step_has_a_graph_at_first_and_one_of_its_size_later(
    max_rows: int, max_tokens: int
) -> None:
    decode, mixed = sizes(max_rows, max_tokens)
    kinds = GraphKinds(decode, mixed, max_decode_steps=4, multi_step_rows=8)
    first, others = kinds.first(), kinds.others()
    assert len(set(first + others)) == len(first) + len(others)
    for size in decode + mixed:
        for level in Level:
            wanted = Kind(size, kinds.level(level, size))
            assert wanted in first + others
            larger = [
                Kind(other, kinds.level(level, other))
                for other in (mixed if size.mixed else decode)
                if other.tokens >= size.tokens and other.rows >= size.rows
            ]
            assert set(larger) & set(first)
    for size in decode:
        if size.rows <= 8:
            assert Kind(size, Level.GREEDY, 4) in first + others


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(256, 8192), (1024, 1536)])
def test_a_first_step_is_padded_to_less_than_twice_its_tokens_where_that_costs(
    max_rows: int, max_tokens: int
) -> None:
    decode, mixed = sizes(max_rows, max_tokens)
    first = GraphKinds(decode, mixed, 4, 8).first()
    for size in decode + mixed:
        fits = [
            kind.size.tokens
            for kind in first
            if kind.size.mixed == size.mixed and kind.size.tokens >= size.tokens
        ]
        if size.mixed:
            assert min(fits) < 2 * max(size.tokens, FREE_TOKENS)
        else:
            assert min(fits) < (4 if size.rows <= FEW_ROWS else 2) * size.rows


def test_the_largest_step_is_captured_first_as_others_reuse_its_memory() -> None:
    decode, mixed = sizes(256, 8192)
    assert GraphKinds(decode, mixed, 4, 8).first()[0].size == mixed[-1]
