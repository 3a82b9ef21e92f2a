"""Attention in one order: each token has the same bits in a prompt, in any chunk and by itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import attention as in_torch
from asyncllm.kernels.types import AttentionSpec, DecodeRows, PrefillRows
from tests.support.kernels.device import DEVICE, needs_fp8

pytest.importorskip("triton")

from asyncllm.kernels.triton.attention.ordered import (
    ordered_decode_attention,
    ordered_prefill_attention,
)
from asyncllm.kernels.triton.attention.ordered_parts import BOUNDS, PIECES, count_pieces

pytestmark = pytest.mark.usefixtures("products_in_order")

#: Triton's interpreter has no product of bfloat16 matrices.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
PLAIN = AttentionSpec(0, num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
PAGE_SIZE = 16


class Sequence:
    """Queries, and pages in shuffled order; what follows the last token is NaN."""

    def __init__(self, length: int, spec: AttentionSpec, sinks: bool = False, fp8: bool = False):
        pages = -(-length // PAGE_SIZE) + 1
        self.length, self.spec = length, spec
        self.table = torch.randperm(2 * pages, device=DEVICE).to(torch.int32).view(2, pages)
        shape = (2 * pages, PAGE_SIZE, spec.num_kv_heads, spec.head_dim)
        self.keys, self.values = (
            torch.full(shape, torch.nan, dtype=HALF, device=DEVICE) for _ in range(2)
        )
        at = torch.arange(length, device=DEVICE)
        cells = self.table[1][at // PAGE_SIZE].long() * PAGE_SIZE + at % PAGE_SIZE
        for cache in (self.keys, self.values):
            cache.flatten(0, 1)[cells] = torch.randn(length, *shape[2:], device=DEVICE).to(HALF)
        self.q = torch.randn(length, spec.num_heads, spec.head_dim, device=DEVICE).to(HALF)
        self.scales = None
        if fp8:
            self.scales = torch.rand(2, spec.num_kv_heads, device=DEVICE) / 50
            self.keys = in_torch.to_pages(self.keys, self.scales[0])
            self.values = in_torch.to_pages(self.values, self.scales[1])
        self.sinks = torch.randn(spec.num_heads, device=DEVICE).to(HALF) if sinks else None

    def chunk(self, start: int, end: int, reference: bool = False) -> Tensor:
        """As tokens of a longer row."""
        numbers = (torch.tensor(n, device=DEVICE) for n in ([1], [start], [0, end - start]))
        rows = PrefillRows(*(n.to(torch.int32) for n in numbers))
        args = self.q[start:end], self.keys, self.values, self.table, rows, self.spec
        attend = ordered_prefill_attention
        if reference:
            attend = in_torch.prefill_attention.reference
        return attend(*args, scales=self.scales, sinks=self.sinks)

    def alone(self, positions: list[int]) -> Tensor:
        """As rows of one token."""
        at = torch.tensor(positions, device=DEVICE)
        slots = torch.ones(len(at), dtype=torch.int32, device=DEVICE)
        pages = self.keys, self.values, self.table
        rows = DecodeRows(*pages, slots, (at + 1).to(torch.int32), self.scales)
        return ordered_decode_attention(self.q[at], rows, self.spec, sinks=self.sinks)


@pytest.mark.parametrize(
    ("spec", "sinks", "fp8"),
    [
        pytest.param(PLAIN, False, False, id="plain"),
        pytest.param(replace(PLAIN, num_heads=6, head_dim=40), True, False, id="sinks"),
        pytest.param(replace(PLAIN, window=70), False, False, id="window"),
        pytest.param(replace(PLAIN, softcap=5.0, num_kv_heads=4), False, False, id="softcap"),
        pytest.param(PLAIN, True, True, id="8 bits", marks=needs_fp8),
        pytest.param(replace(PLAIN, head_dim=128), False, True, id="wide", marks=needs_fp8),
    ],
)
def test_a_token_has_the_same_bits_in_any_chunk_and_alone(
    spec: AttentionSpec, sinks: bool, fp8: bool
) -> None:
    torch.manual_seed(0)
    sequence = Sequence(170, spec, sinks, fp8)
    whole = sequence.chunk(0, 170)
    torch.testing.assert_close(
        whole.float(), sequence.chunk(0, 170, reference=True).float(), atol=4e-3, rtol=4e-3
    )
    for cuts in ((0, 1, 129, 170), (0, 77, 170)):
        parts = [sequence.chunk(*cut) for cut in pairwise(cuts)]
        assert torch.equal(torch.cat(parts), whole)
    if DEVICE == "cuda":  # a sum in another order shows in few of many numbers
        assert torch.equal(sequence.alone(list(range(170))), whole)
    positions = [0, 1, 31, 32, 127, 128, 169]
    together = sequence.alone(positions)
    assert torch.equal(together, whole[positions])
    for i, position in enumerate(positions):
        assert torch.equal(sequence.alone([position])[0], together[i])


def test_padding_is_zero() -> None:
    assert not Sequence(20, PLAIN).alone([5, -1])[1].any()


def test_pieces_cover_every_position() -> None:
    assert [count_pieces(length) for length in (1, 128, 129, 4096, 4097)] == [1, 1, 2, 32, 33]
    assert count_pieces(2**17) == sum(
        (end - begin) // size
        for begin, end, size in zip((0, *BOUNDS), (*BOUNDS, 2**17), PIECES, strict=True)
    )
