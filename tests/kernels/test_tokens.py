"""Token look-up against its reference."""

from __future__ import annotations

import pytest
import torch

from asyncllm.kernels import tokens as in_torch
from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.tokens import (
    enter_pages,
    fill_pages,
    locate_tokens,
    settle_input,
    verify_drafts,
)


@pytest.mark.parametrize("count", [0, 1, 7, 700])
@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_matches_reference(page_size: int, count: int) -> None:
    slots, max_pages = 9, 50
    block_table = torch.randint(2**31 - 1, (slots + 1, max_pages), device=DEVICE).int()
    last_token = torch.randint(150_000, (slots + 1,), device=DEVICE)
    entries = torch.stack(
        (
            torch.randint(-1, 3, (count,), device=DEVICE),
            torch.randint(slots, (count,), device=DEVICE),
            torch.randint(-1, max_pages * page_size, (count,), device=DEVICE),
        )
    ).int()
    entries[2, ::5] = -1
    entries[1, ::5] = slots  # padding is in the dummy slot
    actual = locate_tokens(entries, last_token, block_table, page_size)
    expected = in_torch.locate_tokens.reference(entries, last_token, block_table, page_size)
    for found, right in zip(actual, expected, strict=True):
        assert found.dtype == torch.int64
        assert found.is_contiguous()
        assert found.tolist() == right.tolist()


@pytest.mark.parametrize("count", [0, 1, 7, 700])
def test_enters_pages(count: int) -> None:
    slots, max_pages = 9, 100
    block_table = torch.randint(2**31 - 1, (slots, max_pages), device=DEVICE).int()
    cells = torch.randperm(slots * max_pages, device=DEVICE)[:count]
    pages = torch.randint(2**31 - 1, (count,), device=DEVICE)
    new_pages = torch.stack((cells // max_pages, cells % max_pages, pages), dim=1).int()
    expected = block_table.clone()
    in_torch.enter_pages.reference(new_pages, expected)
    enter_pages(new_pages[: count // 2], block_table)
    enter_pages(new_pages[count // 2 :], block_table)  # which may begin anywhere
    assert torch.equal(block_table, expected)


@pytest.mark.parametrize("counts", [[], [0], [3], [0, 1, 600, 0, 0, 512, 7, 0]], ids=str)
@pytest.mark.parametrize("skipped", [0, 1])
def test_lists_pages(counts: list[int], skipped: int) -> None:
    slots, max_pages = 9, 640
    block_table = torch.randint(2**31 - 1, (slots, max_pages), device=DEVICE).int()
    chosen = torch.randperm(slots, device=DEVICE)[: len(counts)].int()
    offsets = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    rows = zip(chosen.tolist(), counts, strict=True)
    expected = [page for slot, count in rows for page in block_table[slot, :count].tolist()]
    # Arguments may begin anywhere, and there may be more room than pages.
    padded = torch.cat([torch.zeros(skipped, dtype=torch.int32, device=DEVICE), chosen])[skipped:]
    for launch in (fill_pages, in_torch.fill_pages.reference):
        pages = torch.full((len(expected) + 5,), -1, dtype=torch.int32, device=DEVICE)
        launch(block_table, padded, offsets, pages)
        assert pages[: len(expected)].tolist() == expected


@pytest.mark.parametrize("count", [0, 1, 300])
def test_settles_the_input_of_a_step(count: int) -> None:
    flat = torch.randint(1000, (2 * count + 1,), device=DEVICE).int()
    next_position = torch.randint(100, (9,), device=DEVICE)
    drafted = torch.randint(150_000, (9, 5), device=DEVICE)
    fixes = torch.stack(
        (
            torch.randperm(len(flat), device=DEVICE)[:count],
            torch.randint(9, (count,), device=DEVICE),
            torch.randint(-5, 100, (count,), device=DEVICE),
            torch.randint(20, (count,), device=DEVICE),
        ),
        dim=1,
    ).int()
    expected = flat.clone()
    in_torch.settle_input.reference(expected, fixes, next_position, drafted)
    settle_input(flat, fixes, next_position, drafted)
    assert flat.tolist() == expected.tolist()


@pytest.mark.parametrize("most", [0, 1, 5])
def test_verifies_drafts(most: int) -> None:
    count, slots, vocab_size = 8, 9, 2
    tokens = torch.randint(-2, vocab_size, (count * 7,), device=DEVICE)
    last_token = torch.randint(vocab_size, (slots,), device=DEVICE)
    next_position = torch.randint(100, (slots,), device=DEVICE)
    drafted = torch.randint(vocab_size, (slots, 5), device=DEVICE)
    rows = torch.cat(
        (
            torch.randperm(slots, device=DEVICE)[:count, None],
            torch.randint(100, (count, 1), device=DEVICE),
            torch.randint(9, (count, 1), device=DEVICE),
            7 * torch.arange(count, device=DEVICE)[:, None],
            torch.randint(-2, vocab_size, (count, most), device=DEVICE),
        ),
        dim=1,
    ).int()
    expected = last_token.clone(), next_position.clone()
    right = in_torch.verify_drafts.reference(tokens, rows, *expected, drafted)
    assert (
        verify_drafts(tokens, rows, last_token, next_position, drafted).tolist() == right.tolist()
    )
    assert last_token.tolist() == expected[0].tolist()
    assert next_position.tolist() == expected[1].tolist()
    assert right.dtype == torch.int32
