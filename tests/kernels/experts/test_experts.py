"""Mixtures of experts against the same in plain torch, in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from asyncllm.kernels import experts as in_torch
from asyncllm.kernels.triton.experts.mixing import mix_experts
from asyncllm.kernels.triton.experts.routing import choose_experts, group_rows, most_blocks
from asyncllm.kernels.types import GatedExperts, Routing
from tests.support.kernels.device import DEVICE

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize(("count", "top_k"), [(128, 8), (5, 2), (60, 4), (3, 3), (1, 1)])
def test_choices(scores: str, count: int, top_k: int) -> None:
    logits = torch.randn(7, count, device=DEVICE)
    bias = torch.randn(count, device=DEVICE) if scores == "sigmoid" else None
    for normalize in (False, True):
        routing = Routing(top_k, scores, normalize, 1.5)  # type: ignore[arg-type]
        weights, experts = choose_experts(logits, routing, torch.float32, bias)
        same_weights, same = in_torch.choose_experts.reference(logits, routing, torch.float32, bias)
        assert experts.tolist() == same.tolist()
        torch.testing.assert_close(weights, same_weights)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_choices_exist_whatever_the_logits(value: float) -> None:
    logits = torch.full((2, 12), value, device=DEVICE)
    _, experts = choose_experts(logits, Routing(3, "softmax", True), torch.float32)
    assert 0 <= experts.min() <= experts.max() < 12


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(("tokens", "top_k", "count"), [(1, 1, 1), (1, 8, 128), (300, 4, 6)])
def test_groups(tokens: int, top_k: int, count: int, block: int) -> None:
    experts = torch.rand(tokens, count, device=DEVICE).argsort(1)[:, :top_k].int()
    order, blocks, _ = group_rows(experts.contiguous(), count, block)
    assert order.tolist() == experts.flatten().argsort(stable=True).tolist()
    assert len(blocks) == most_blocks(tokens * top_k, count, block)
    at = 0
    for expert, start, end in blocks.tolist():
        if expert < 0:
            break
        assert start == at < end <= start + block
        assert {experts.flatten()[i].item() for i in order[start:end]} == {expert}
        at = end
    assert at == tokens * top_k


def random_experts(count: int, inner: int, hidden: int, kind: str) -> GatedExperts:
    gate_up, down = torch.randn(count, 2 * inner, hidden), torch.randn(count, hidden, inner)
    experts = GatedExperts(gate_up / hidden**0.5, down / inner**0.5)
    if kind == "clamped":
        biases = torch.randn(count, 2 * inner), torch.randn(count, hidden)
        return GatedExperts(*experts[:2], *biases, "clamped", paired=True, alpha=1.7, limit=2.0)
    return experts._replace(act=kind)


def to(experts: GatedExperts, dtype: torch.dtype) -> GatedExperts:
    moved = (t.to(DEVICE, dtype) if isinstance(t, Tensor) else t for t in experts)
    return GatedExperts(*moved)  # type: ignore[arg-type]


def assert_near(got: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}[got.dtype]
    error = (got.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "clamped"])
@pytest.mark.parametrize(
    ("tokens", "top_k", "count", "inner", "hidden"),
    [(1, 2, 4, 32, 64), (9, 2, 3, 48, 80), (70, 1, 2, 24, 136), (40, 3, 8, 64, 64)],
)
def test_mixtures(
    tokens: int, top_k: int, count: int, inner: int, hidden: int, kind: str, dtype: torch.dtype
) -> None:
    experts = random_experts(count, inner, hidden, kind)
    x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    chosen = torch.rand(tokens, count).argsort(1)[:, :top_k].int().contiguous()
    chosen[tokens // 2 :] = chosen[0].clone()  # experts without rows, and with many
    weights = torch.rand(tokens, top_k)
    expected = in_torch.mix_experts.reference(x, weights, chosen, experts, residual.clone())
    device = [t.to(DEVICE) for t in (x.to(dtype), weights.to(dtype), chosen, residual.to(dtype))]
    got = mix_experts(*device[:3], to(experts, dtype), device[3])
    assert_near(got, expected)
