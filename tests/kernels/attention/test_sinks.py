"""Attention with sinks, against plain torch; ``tests/cpu/attention`` has the reference's own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from asyncllm.kernels import attention as in_torch
from asyncllm.kernels.types import AttentionSpec
from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.attention.decode import decode_attention
from asyncllm.kernels.triton.attention.decode_heads import decode_heads
from asyncllm.kernels.triton.attention.decode_launch import Cut
from asyncllm.kernels.triton.attention.prefill import prefill_attention
from tests.kernels.attention.test_decode import (
    SPLIT,
    WHOLE,
    assert_close,
    make_cache,
    make_newest,
    make_queries,
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


def make_sinks(spec: AttentionSpec, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """From those that hardly count to one that takes nearly all the weight."""
    return torch.linspace(-9.0, 9.0, spec.num_heads, device=DEVICE).to(dtype)


@pytest.mark.parametrize("cut", [WHOLE, SPLIT, None])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_decode(spec: AttentionSpec, cut: Cut | None) -> None:
    spec = replace(spec, has_sinks=True)
    cache, sinks = make_cache(spec, torch.float16), make_sinks(spec)
    q = make_queries(spec, torch.float16)
    expected = in_torch.decode_attention.reference(q, *cache, spec, sinks=sinks)
    without = in_torch.decode_attention.reference(q, *cache, spec)
    assert not torch.allclose(expected, without, atol=0.1)
    out = torch.full_like(expected, torch.nan)
    decode_attention(q, *cache, spec, sinks=sinks, out=out, cut=cut)
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
    expected = in_torch.decode_heads.reference(*newest, *copies[0], spec)
    out = decode_heads(*newest, *copies[1], spec, fused=fused, cut=SPLIT if fused else None)
    assert_close(out, expected)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(window=10),
        Case(group=5, num_kv_heads=1, head_dim=24, softcap=3.0),
        Case(dtype=torch.float32, group=8, num_kv_heads=1),
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
        out[: step.tokens].float(),
        expected[: step.tokens].float(),
        atol=tolerance,
        rtol=tolerance,
    )
