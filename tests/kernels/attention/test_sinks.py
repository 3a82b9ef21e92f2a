"""Attention with sinks, against plain torch; ``tests/cpu/attention`` has the reference's own."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from asyncllm.kernels import attention as in_torch
from asyncllm.kernels.types import AttentionSpec
from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.attention.decode import decode_attention, decode_heads
from asyncllm.kernels.triton.attention.decode_launch import Cut
from asyncllm.kernels.triton.attention.prefill import prefill_attention
from asyncllm.kernels.triton.attention.sinks import apply_sinks
from tests.kernels.attention.test_decode import (
    SPLIT,
    WHOLE,
    assert_close,
    make_cache,
    make_newest,
    make_queries,
    make_sinks,
    make_spec,
)
from tests.kernels.attention.test_prefill import TOLERANCE, Case, Step

SPECS = [
    make_spec(),
    make_spec(window=20),
    make_spec(num_heads=10, window=1),
    make_spec(softcap=2.0),
    make_spec(num_heads=8, num_kv_heads=1, head_dim=80),
]


@pytest.mark.parametrize("cut", [WHOLE, SPLIT, None])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_decode(spec: AttentionSpec, cut: Cut | None) -> None:
    spec = replace(spec, has_sinks=True)
    cache, sinks = make_cache(spec, torch.float16), make_sinks(spec)
    q = make_queries(spec, torch.float16)
    expected = in_torch.decode_attention.reference(q, cache, spec, sinks=sinks)
    without = in_torch.decode_attention.reference(q, cache, spec)
    assert not torch.allclose(expected, without, atol=0.1)
    out = torch.full_like(expected, torch.nan)
    decode_attention(q, cache, spec, sinks=sinks, out=out, cut=cut)
    assert_close(out, expected)
    assert (out[cache.lengths == 0] == 0).all()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("spec", SPECS[:3], ids=str)
def test_decode_of_projections(spec: AttentionSpec, fused: bool) -> None:
    spec = replace(spec, has_sinks=True)
    cache = make_cache(spec, torch.float16, new=1)
    newest = make_newest(spec, torch.float16, cache, "rotary")
    newest = newest._replace(encoding=newest.encoding._replace(sinks=make_sinks(spec)))
    copies = [cache._replace(keys=cache.keys.clone(), values=cache.values.clone()) for _ in "ab"]
    expected = in_torch.decode_heads.reference(*newest, copies[0], spec)
    out = decode_heads(*newest, copies[1], spec, fused=fused, cut=SPLIT if fused else None)
    assert_close(out, expected)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(window=10),
        Case(group=5, num_kv_heads=1, head_dim=24, softcap=3.0),
        Case(dtype=torch.float32, group=8, num_kv_heads=1),
        Case(group=8, window=10),
        Case(group=4, head_dim=128),
    ],
    ids=str,
)
def test_prefill(case: Case) -> None:
    step = Step(case, [(130, 3), (0, 0), (0, 3), (7, 90), (0, 1)], padding=4)
    q, keys, values, table, rows, spec = step.arguments()
    spec = replace(spec, has_sinks=True)
    sinks = make_sinks(spec, case.dtype)
    pages = keys, values, table
    expected = in_torch.prefill_attention.reference(q, *pages, rows, spec, sinks=sinks)
    out = torch.full(step.q.shape, torch.nan, dtype=case.dtype, device=DEVICE)
    prefill_attention(q, *pages, rows, spec, sinks=sinks, out=out)
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(
        out[: step.tokens].float(), expected[: step.tokens].float(), atol=tolerance, rtol=tolerance
    )


#: One rounding, which Triton's interpreter does by truncation.
ROUNDING = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize(
    ("tokens", "num_heads", "head_dim"),
    [(0, 4, 64), (1, 1, 64), (3, 5, 24), (5, 64, 64), (2, 40, 128), (2, 3, 256), (1, 2, 2000)],
)
def test_sinks_after_attention(
    tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Scaling attention without sinks is the same as a softmax in which sinks take part."""
    scores = 4 * torch.randn(tokens, num_heads, 7, device=DEVICE, dtype=torch.float64)
    values = torch.randn(tokens, num_heads, 7, head_dim, device=DEVICE, dtype=torch.float64)
    sinks = torch.linspace(-9.0, 9.0, num_heads, device=DEVICE).to(dtype)

    def attend(weights: torch.Tensor) -> torch.Tensor:
        return torch.einsum("thk,thkd->thd", weights, values)

    out = attend(scores.softmax(dim=-1)).to(dtype)
    expected = attend(in_torch.softmax_with_sinks(scores, sinks[:, None]))
    lse = (scores.logsumexp(dim=-1) / math.log(2)).float()
    in_place = out.clone()
    in_torch.apply_sinks.reference(in_place, lse, sinks)
    apply_sinks(out, lse, sinks)
    tolerance = 2 * ROUNDING[dtype]
    for actual in (out, in_place):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)


# Where exp2 overflows to infinity, as it should.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("run", [apply_sinks, in_torch.apply_sinks.reference])
def test_no_factor_is_nan_or_above_1(run: Callable[..., None]) -> None:
    """Whatever the log-sum-exp of tokens that nobody attended. -50,000 is FlashInfer's infinity."""
    sums = [torch.nan, torch.inf, 3e38, 0.0, -5e4, -3e38, -torch.inf]
    lse = torch.tensor(sums, device=DEVICE)[:, None].repeat(1, 3)
    sinks = torch.tensor([-9.0, 0.0, 9.0], device=DEVICE)
    out = torch.ones(len(sums), 3, 64, device=DEVICE)
    out[4] = 0.0
    before = out.clone()
    run(out, lse, sinks)
    assert bool(((out >= 0) & (out <= before)).all())
    assert bool((out[:3] == 1).all())
    assert bool((out[5:] == 0).all())
    zeros = torch.zeros(2, 3, 64, device=DEVICE)
    out = torch.full_like(zeros, torch.nan)
    run(out, zeros[..., 0].contiguous(), sinks)
    assert bool(out.isnan().all())
