"""Attention over 8-bit pages: kernels against plain torch in float32, for scales of all sorts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.kernels import attention as in_torch
from asyncllm.kernels.attention import to_pages
from asyncllm.kernels.types import AttentionSpec, DecodeRows, HeadEncoding
from tests.support.kernels.device import DEVICE, needs_fp8, on_hopper

pytest.importorskip("triton")

from asyncllm.kernels.triton.attention import decode_hopper, prefill_hopper
from asyncllm.kernels.triton.attention.decode import decode_attention, decode_heads
from asyncllm.kernels.triton.attention.decode_launch import UNENCODED, Cut
from asyncllm.kernels.triton.attention.prefill import prefill_attention
from asyncllm.kernels.triton.qk_norm_rope import encode_heads
from tests.kernels.attention.test_decode import (
    KINDS,
    SPLIT,
    WHOLE,
    check_overlap,
    make_cache,
    make_newest,
    make_queries,
    make_sinks,
    make_spec,
)
from tests.kernels.attention.test_prefill import Case, Step

pytestmark = needs_fp8

#: Triton's interpreter multiplies no bfloat16 matrices.
HALF = torch.bfloat16 if DEVICE == "cuda" else torch.float16
E4M3 = torch.float8_e4m3fn
#: Powers of two and others; some clip most numbers, or make nearly all of them subnormal.
SCALES = {"one": (1.0, 1.0), "measured": (2**-5, 2**-6), "odd": (0.037, 0.0113)}
#: Of rows, so that there are more than ``decode`` is as fast for.
ROW_LENGTHS = (0, 1, 2, 16, 17, 63, 64, 65, 66, 0, 127, 128, 129, 130, 500, 1000, 1337, 640, 641)
ADVERSARIAL = {"clipped": (2**-9, 2**-10), "tiny": (40.0, 25.0), "far": (3e-4, 60.0)}


def make_scales(heads: int, kind: str = "odd") -> Tensor:
    """[2, heads], other ones for each head."""
    of = torch.tensor({**SCALES, **ADVERSARIAL}[kind])[:, None]
    return (of * torch.tensor([1.0, 2.0, 0.5, 4.0])[torch.arange(heads) % 4]).to(DEVICE)


def in_8_bits(cache: DecodeRows, scales: Tensor) -> DecodeRows:
    """The same cache in 8 bits; what is NaN stays so."""
    keys, values = to_pages(cache.keys, scales[0]), to_pages(cache.values, scales[1])
    return cache._replace(keys=keys, values=values, scales=scales)


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 4e-3) -> None:
    assert actual.isfinite().all()
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < tolerance * (4 if actual.dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize(
    ("spec", "cut", "kind"),
    [
        *((make_spec(), WHOLE, kind) for kind in (*SCALES, *ADVERSARIAL)),
        *((make_spec(head_dim=24), SPLIT, kind) for kind in ("measured", "far")),
        (make_spec(window=20), SPLIT, "odd"),
        (make_spec(softcap=2.0, num_heads=8), SPLIT, "odd"),
    ],
    ids=str,
)
def test_decodes_like_the_reference(spec: AttentionSpec, cut: Cut, kind: str) -> None:
    cache = in_8_bits(make_cache(spec, HALF), make_scales(spec.num_kv_heads, kind))
    q, sinks = make_queries(spec, HALF), make_sinks(spec)
    expected = in_torch.decode_attention.reference(q.float(), cache, spec, sinks=sinks)
    assert_close(decode_attention(q, cache, spec, sinks=sinks, cut=cut), expected)


@pytest.mark.parametrize("kind", ["odd", "clipped", "far"])
@pytest.mark.parametrize("heads", ["whole", "values"])
@pytest.mark.parametrize("fused", [False, True])
def test_decoded_heads_are_what_a_later_step_reads(fused: bool, heads: str, kind: str) -> None:
    """The newest token counts as it is written, whichever kernel encodes it."""
    spec = make_spec()
    scales = make_scales(spec.num_kv_heads, kind)
    cache = in_8_bits(make_cache(spec, HALF, new=1), scales)
    newest = make_newest(spec, HALF, cache, heads)
    qkv, encoding, positions, written = newest
    copy = cache._replace(keys=cache.keys.clone(), values=cache.values.clone())
    q = encode_heads(qkv.clone(), spec, encoding, positions, *copy[:2], written, scales)
    cut = SPLIT if fused else None
    out = decode_heads(*newest, cache, spec, cut=cut, fused=fused)
    for mine, other in zip(cache[:2], copy[:2], strict=True):
        if heads != "values":  # sums in another order
            assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    expected = in_torch.decode_attention.reference(q.float(), cache, spec)
    assert_close(out.view(q.shape), expected)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *((Case(HALF), kind) for kind in (*SCALES, *ADVERSARIAL)),
        (Case(HALF, window=10, page_size=7), "far"),
        (Case(HALF, softcap=3.0, head_dim=80), "odd"),
    ],
    ids=str,
)
def test_prompts_attend_like_the_reference(case: Case, kind: str) -> None:
    step = Step(case, [(130, 3), (0, 37), (7, 20)])
    scales = make_scales(case.num_kv_heads, kind)
    q, keys, values, *rest = step.arguments()
    pages = to_pages(keys, scales[0]), to_pages(values, scales[1])
    sinks = make_sinks(case.spec)
    more: dict[str, Any] = {"scales": scales, "sinks": sinks}
    expected = in_torch.prefill_attention.reference(q.float(), *pages, *rest, **more)
    assert_close(prefill_attention(q, *pages, *rest, **more), expected)


@on_hopper
@pytest.mark.parametrize("kind", ["odd", "clipped", "far"])
@pytest.mark.parametrize(
    "case",
    [
        Case(head_dim=128),
        Case(head_dim=128, num_kv_heads=8, group=4),
        Case(head_dim=128, num_kv_heads=1, group=7, page_size=64),
        Case(head_dim=128, window=100),
        Case(head_dim=128, softcap=3.0, page_size=32),
        Case(torch.float16, head_dim=128),
        Case(head_dim=64, num_kv_heads=8, group=8),
        Case(head_dim=64, window=100),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "rows",
    [[(0, 1)], [(64, 64), (63, 65), (1, 31)], [(700, 130), (0, 3), (0, 0), (7, 900)], [(4000, 40)]],
    ids=str,
)
def test_the_kernel_for_hopper_attends_prompts_like_the_reference(
    rows: list[tuple[int, int]], case: Case, kind: str
) -> None:
    step = Step(case, rows, padding=5)
    scales = make_scales(case.num_kv_heads, kind)
    q, keys, values, *rest = step.arguments()
    pages = to_pages(keys, scales[0]), to_pages(values, scales[1])
    assert prefill_hopper.supports(q, pages[0], case.spec)
    more: dict[str, Any] = {"scales": scales, "sinks": make_sinks(case.spec, case.dtype)}
    tokens = slice(0, step.tokens)
    expected = in_torch.prefill_attention.reference(q.float(), *pages, *rest, **more)[tokens]
    for _ in range(2):  # the second time with what the first left behind
        assert_close(prefill_attention(q, *pages, *rest, **more)[tokens], expected)


def all_numbers(scale: Tensor) -> Tensor:
    """[tokens, 4, 16]: numbers around every e4m3 number and half way between, times a scale."""
    codes = torch.arange(0, 127, dtype=torch.uint8).view(E4M3).float()
    between = (codes[1:] + codes[:-1]) / 2
    positive = torch.cat((codes, between, between * 1.01, between * 0.99, codes * 1e6, codes + 20))
    numbers = torch.cat((positive, -positive))
    numbers = numbers[: len(numbers) // 64 * 64].view(-1, 4, 16)
    return numbers.to(DEVICE) * scale[:, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_numbers_are_rounded_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """To the nearest e4m3 number, ties to even; those beyond the largest become the largest."""
    spec = AttentionSpec(0, 4, 4, 16, 1.0)
    scales = torch.tensor([[1.0, 0.25, 8.0, 2**-8], [0.5, 4.0, 2**-6, 1.0]], device=DEVICE)
    k, v = (all_numbers(scale).to(dtype) for scale in scales)
    k[0, 0, 0] = torch.inf
    if DEVICE == "cuda":  # the interpreter has no NaN of 8 bits
        v[1, 2, 3] = torch.nan
    qkv = torch.cat((torch.zeros_like(k), k, v), dim=1).flatten(1)
    tokens = len(qkv)
    where = torch.arange(tokens, device=DEVICE)
    keys, values = (torch.zeros(tokens, 1, 4, 16, device=DEVICE).to(E4M3) for _ in range(2))
    at = where, keys, values, where, scales
    encode_heads(qkv, spec, HeadEncoding(None, None, None), *at)
    for found, heads, scale in zip((keys, values), (k, v), scales, strict=True):
        expected = to_pages(heads, scale)
        both = found.squeeze(1).float(), expected.float()
        torch.testing.assert_close(*both, rtol=0.0, atol=0.0, equal_nan=True)
    assert keys[0, 0, 0, 0].item() == 448.0
    assert values[1, 0, 2, 3].isnan() == (DEVICE == "cuda")


@on_hopper
@pytest.mark.parametrize("kind", ["odd", "clipped", "far"])
@pytest.mark.parametrize("cut", [(1, 4096), (8, 128)])
@pytest.mark.parametrize(
    "heads",
    [(32, 8, 128), (8, 8, 128), (10, 2, 128), (64, 4, 128), (64, 8, 64), (32, 8, 64), (6, 2, 64)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_for_hopper_decodes_like_the_reference(
    dtype: torch.dtype, heads: tuple[int, int, int], cut: tuple[int, int], kind: str
) -> None:
    spec = make_spec(*heads)
    cache = make_cache(spec, dtype, row_lengths=ROW_LENGTHS)
    cache = in_8_bits(cache, make_scales(spec.num_kv_heads, kind))
    q, sinks = make_queries(spec, dtype, len(ROW_LENGTHS)), make_sinks(spec, dtype)
    expected = in_torch.decode_attention.reference(q.float(), cache, spec, sinks=sinks)
    for _ in range(2):  # the second time with what the first left behind
        out = torch.full_like(q, torch.nan)
        of = UNENCODED._replace(sinks=sinks)
        decode_hopper.launch(q, q.stride(0), q.stride(1), of, cache, spec, out, pieces=cut)
        assert_close(out, expected)
        assert (out[cache.lengths == 0] == 0).all()


@on_hopper
@pytest.mark.parametrize("kind", ["odd", "clipped", "far"])
@pytest.mark.parametrize("heads", KINDS)
@pytest.mark.parametrize("sizes", [(32, 8, 128), (64, 8, 64)], ids=str)
def test_the_kernel_for_hopper_encodes_what_it_reads(
    sizes: tuple[int, int, int], heads: str, kind: str
) -> None:
    spec = make_spec(*sizes)
    scales = make_scales(spec.num_kv_heads, kind)
    cache = in_8_bits(make_cache(spec, HALF, new=1, row_lengths=ROW_LENGTHS), scales)
    newest = make_newest(spec, HALF, cache, heads)
    qkv, encoding, positions, written = newest
    copy = cache._replace(keys=cache.keys.clone(), values=cache.values.clone())
    assert decode_hopper.supports(qkv, cache, spec)
    q = encode_heads(qkv.clone(), spec, encoding, positions, *copy[:2], written, scales)
    out = decode_heads(*newest, cache, spec)
    # A sum of squares in another order may round a key to the next e4m3 number.
    for mine, other in zip(cache[:2], copy[:2], strict=True):
        same = mine.view(torch.uint8) == other.view(torch.uint8)
        assert same.float().mean() > 0.999
    expected = in_torch.decode_attention.reference(q.float(), cache, spec)
    assert_close(out.view(q.shape), expected)


@on_hopper
def test_launches_that_overlap() -> None:
    spec = make_spec(32, 8, 128)
    lengths = torch.randint(1, 300, (60,)).tolist()
    cache = make_cache(spec, torch.bfloat16, new=1, row_lengths=(0, *lengths, 1, 1300))
    check_overlap(spec, in_8_bits(cache, make_scales(8)), 10)
