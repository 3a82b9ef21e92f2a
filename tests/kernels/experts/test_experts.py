"""Mixtures of experts against the same in plain torch, in float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from asyncllm.kernels import experts as in_torch
from asyncllm.kernels.quantized import dequantize_mxfp4, pack_int4, pack_mxfp4, unpack_mxfp4
from asyncllm.kernels.triton.experts.mixing import choose_tiles, mix_experts, ordered_mix_experts
from asyncllm.kernels.triton.experts.routing import choose_experts, group_rows, most_blocks
from asyncllm.kernels.types import (
    ExpertWeight,
    Fp8Matrix,
    Gated,
    GatedExperts,
    Int4Matrix,
    Mxfp4Matrix,
    Routing,
)
from tests.support.kernels.device import DEVICE

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


ROUTINGS = {
    "probabilities": (128, Routing(8, "softmax", False)),
    "normalised": (60, Routing(4, "softmax", True)),
    "sharpened": (128, Routing(8, "softmax", True, sharpness=0.02)),
    "scaled": (128, Routing(8, "sigmoid", True, 2.5)),
    "scores as they are": (5, Routing(2, "sigmoid", False)),
    "all": (3, Routing(3, "softmax", False)),
    "one": (1, Routing(1, "sigmoid", True)),
    "best groups": (160, Routing(6, "softmax", False, 16.0, groups=8, top_groups=3)),
    "sums of two": (256, Routing(8, "sigmoid", True, 2.5, groups=8, top_groups=4)),
    "odd groups": (15, Routing(4, "sigmoid", True, groups=5, top_groups=2)),
    "a shared expert": (128, Routing(8, "sigmoid", True, 1.5, shared=1)),
    "shared experts": (64, Routing(6, "softmax", False, groups=4, top_groups=2, shared=2)),
    "a gate": (60, Routing(4, "softmax", True, shared=3, has_gate=True)),
    "a gate of none": (60, Routing(4, "softmax", False, has_gate=True)),
}
#: The interpreter takes some milliseconds for each.
TOKENS = 10 if DEVICE == "cpu" else 4097


@pytest.mark.parametrize("name", ROUTINGS)
def test_choices(name: str) -> None:
    """Of random logits, and of some that are often equal."""
    count, routing = ROUTINGS[name]
    bias = torch.randn(count, device=DEVICE) if routing.scores == "sigmoid" else None
    factors = torch.rand(count, device=DEVICE) if routing.sharpness != 1.0 else None
    random = torch.randn(TOKENS, count + routing.has_gate, device=DEVICE)
    equal = random.abs().round()  # the scores of -1 and 1 add up to those of -2 and 2, but for bits
    for logits, added in ((random, bias), (random.bfloat16(), None), (equal, None)):
        for tokens in (1, TOKENS):
            arguments = logits[:tokens], routing, torch.float32, added, factors
            weights, experts = choose_experts(*arguments)
            same_weights, same = in_torch.choose_experts.reference(*arguments)
            assert experts.tolist() == same.tolist()
            torch.testing.assert_close(weights, same_weights)


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_choices_exist_whatever_the_logits(value: float) -> None:
    logits = torch.full((2, 12), value, device=DEVICE)
    _, experts = choose_experts(logits, Routing(3, "softmax", True), torch.float32)
    assert 0 <= experts.min() <= experts.max() < 12


@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize(
    ("tokens", "top_k", "count"), [(2, 1, 1), (2, 8, 128), (300, 4, 6), (600, 7, 20)]
)
def test_groups(tokens: int, top_k: int, count: int, block: int) -> None:
    experts = torch.rand(tokens, count, device=DEVICE).argsort(1)[:, :top_k].int()
    order, blocks, _ = group_rows(experts.contiguous(), count, block)
    assert order is not None
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
    experts = GatedExperts(count, gate_up / hidden**0.5, down / inner**0.5)
    if kind == "clamped":
        biases = torch.randn(count, 2 * inner), torch.randn(count, hidden)
        return GatedExperts(*experts[:3], *biases, "clamped", paired=True, alpha=1.7, limit=2.0)
    return experts._replace(act=kind)


def converted(weight: ExpertWeight, dtype: torch.dtype) -> ExpertWeight:
    """On the device; what is not quantised in that dtype."""
    if isinstance(weight, Tensor):
        return weight.to(DEVICE, dtype)
    moved: Any = [t.to(DEVICE) if isinstance(t, Tensor) else t for t in weight]
    matrix: ExpertWeight = type(weight)(*moved)
    return matrix


def to(experts: GatedExperts, dtype: torch.dtype) -> GatedExperts:
    count, gate_up, down, *rest = experts
    moved: Any = [t.to(DEVICE, dtype) if isinstance(t, Tensor) else t for t in rest]
    return GatedExperts(count, converted(gate_up, dtype), converted(down, dtype), *moved)


def rounded(experts: GatedExperts, dtype: torch.dtype) -> GatedExperts:
    """In float32, with what is not quantised rounded to that dtype."""
    parts: Any = [
        t.to(dtype).float() if isinstance(t, Tensor) and t.is_floating_point() else t
        for t in experts
    ]
    return GatedExperts(*parts)


def check(
    experts: GatedExperts,
    tokens: int,
    top_k: int,
    hidden: int,
    dtype: torch.dtype,
    tolerance: float = 0.0,
) -> None:
    """Against the reference in float32, with experts without rows, and with many."""
    x, residual = torch.randn(tokens, hidden), torch.randn(tokens, hidden)
    chosen = torch.rand(tokens, experts.num_experts).argsort(1)[:, :top_k].int().contiguous()
    chosen[tokens // 2 :] = chosen[0].clone()
    weights = torch.rand(tokens, top_k)
    x, weights, residual = (t.to(dtype).float() for t in (x, weights, residual))
    reference = in_torch.mix_experts.reference
    expected = reference(x, weights, chosen, rounded(experts, dtype), residual.clone())
    x, weights, residual = (t.to(DEVICE, dtype) for t in (x, weights, residual))
    got = mix_experts(x, weights, chosen.to(DEVICE), to(experts, dtype), residual)
    tolerance = (
        tolerance or {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}[dtype]
    )
    error = (got.cpu().double() - expected.double()).norm() / expected.double().norm()
    assert error < tolerance, error


SHAPES = [(1, 2, 4, 32, 64), (9, 2, 3, 48, 80), (70, 1, 2, 24, 136), (40, 3, 8, 64, 64)]


@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expert_beside_is_weighted(dtype: torch.dtype, tokens: int) -> None:
    """The logits of its weight are a column of others."""
    experts = to(random_experts(4, 48, 80, "silu"), dtype)
    x, beside, residual = (torch.randn(tokens, 80).to(DEVICE, dtype) for _ in range(3))
    logit = torch.randn(tokens, 5).to(DEVICE, dtype)[:, 4:]
    chosen = torch.tensor([[0, 2]] * tokens, dtype=torch.int32, device=DEVICE)
    weights = torch.rand(tokens, 2).to(DEVICE, dtype)
    without = mix_experts(x, weights, chosen, experts).double()
    for start in (None, residual.clone()):
        got = mix_experts(x, weights, chosen, experts, start, Gated(beside, logit))
        expected = without + beside * logit.double().sigmoid()
        expected = expected if start is None else expected + residual
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["silu", "gelu", "clamped"])
@pytest.mark.parametrize(("tokens", "top_k", "count", "inner", "hidden"), SHAPES)
def test_mixtures(
    tokens: int, top_k: int, count: int, inner: int, hidden: int, kind: str, dtype: torch.dtype
) -> None:
    check(random_experts(count, inner, hidden, kind), tokens, top_k, hidden, dtype)


@pytest.mark.parametrize(
    ("top_k", "inner", "hidden", "dtype"),
    [
        (3, 40, 1032, torch.bfloat16),  # chunks of columns end within an expert
        (2, 12, 20, torch.float32),  # sixteen bytes are four columns
        (3, 344, 48, torch.bfloat16),
        (1, 2056, 16, torch.bfloat16),
    ],
)
def test_one_token(top_k: int, inner: int, hidden: int, dtype: torch.dtype) -> None:
    check(random_experts(8, inner, hidden, "silu"), 1, top_k, hidden, dtype)


def as_fp8(weight: Tensor, *, blocked: bool) -> Fp8Matrix:
    rows = weight.flatten(0, 1)
    if not blocked:
        scale = rows.abs().amax(1, keepdim=True) / 448
        return Fp8Matrix((rows / scale).to(torch.float8_e4m3fn), scale)
    scale = torch.rand(len(rows) // 128, -(-rows.shape[1] // 128)) / 100 + 0.01
    wide = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, : rows.shape[1]]
    return Fp8Matrix((rows / wide).clamp(-448, 448).to(torch.float8_e4m3fn), scale)


def as_int4(weight: Tensor, group: int) -> Int4Matrix:
    rows = weight.flatten(0, 1)
    codes = torch.randint(0, 16, rows.shape, dtype=torch.uint8)
    groups = (rows.shape[1] // group, len(rows))
    zero = torch.randint(0, 17, groups, dtype=torch.uint8)
    return Int4Matrix(pack_int4(codes, group), torch.rand(groups).half() / 8, zero)


def as_mxfp4(weight: Tensor) -> Mxfp4Matrix:
    experts, rows, columns = weight.shape
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
    return pack_mxfp4(blocks, torch.randint(118, 126, blocks.shape[:3], dtype=torch.uint8))


FORMATS: dict[str, Callable[[Tensor], ExpertWeight]] = {
    "fp8 blocks": partial(as_fp8, blocked=True),
    "fp8 rows": partial(as_fp8, blocked=False),
    "int4 in groups of 128": partial(as_int4, group=128),
    "int4 in groups of 32": partial(as_int4, group=32),
    "mxfp4": as_mxfp4,
}


@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.parametrize("kind", ["silu", "clamped"])
@pytest.mark.parametrize("form", FORMATS)
def test_quantised_mixtures(form: str, kind: str, tokens: int) -> None:
    experts = random_experts(3, 128, 384, kind)
    assert isinstance(experts.gate_up, Tensor)
    assert isinstance(experts.down, Tensor)
    make = FORMATS[form]
    experts = experts._replace(gate_up=make(experts.gate_up), down=make(experts.down))
    # With 8 bits, inner features and x are rounded to four significant bits.
    check(experts, tokens, 2, 384, torch.bfloat16, 0.07 if "fp8" in form else 0.0)


@pytest.mark.parametrize("form", ["dense", "fp8 blocks"])
@pytest.mark.parametrize("tokens", [150, 301])
def test_prompts(tokens: int, form: str) -> None:
    """Hopper has other kernels for so many rows of an expert."""
    experts = random_experts(3, 128, 256, "silu")
    if form != "dense":
        make = FORMATS[form]
        experts = experts._replace(gate_up=make(experts.gate_up), down=make(experts.down))  # type: ignore[arg-type]
    check(experts, tokens, 2, 256, torch.bfloat16, 0.07 if "fp8" in form else 0.0)


@pytest.mark.parametrize("tokens", [3, 8, 24, 200])
def test_mxfp4_has_the_same_numbers_in_every_tile(tokens: int) -> None:
    experts = random_experts(3, 128, 384, "clamped")
    assert isinstance(experts.gate_up, Tensor)
    assert isinstance(experts.down, Tensor)
    experts = experts._replace(gate_up=as_mxfp4(experts.gate_up), down=as_mxfp4(experts.down))
    check(experts, tokens, 2, 384, torch.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "top_k", "inner", "hidden"),
    [(1, 4, 160, 352), (1, 8, 128, 256), (1, 1, 64, 544), (9, 4, 96, 288), (18, 2, 64, 544)],
)
def test_few_tokens_in_mxfp4(tokens: int, top_k: int, inner: int, hidden: int) -> None:
    """GPUs have a kernel for one, which cuts rows into pieces, and Hopper GPUs one for few rows of
    an expert in blocks of eight: of some sizes, the last pieces and blocks are short."""
    experts = random_experts(9, inner, hidden, "clamped")
    assert isinstance(experts.gate_up, Tensor)
    assert isinstance(experts.down, Tensor)
    experts = experts._replace(gate_up=as_mxfp4(experts.gate_up), down=as_mxfp4(experts.down))
    check(experts, tokens, top_k, hidden, torch.bfloat16)


def test_tiles_of_mxfp4_never_have_wgmma() -> None:
    """Its operand's bytes are not in the order that the conversion to 16 bits needs."""
    experts = random_experts(3, 128, 384, "clamped")
    assert isinstance(experts.gate_up, Tensor)
    experts = experts._replace(gate_up=as_mxfp4(experts.gate_up))
    x = torch.empty(1, 384, dtype=torch.bfloat16)
    for rows in range(1, 1000):
        block, *tiles = choose_tiles(rows, experts, x)
        assert all(tile.warps < 4 or block <= 8 for tile in tiles), rows


@pytest.mark.parametrize("columns", [32, 128, 160, 192, 2880])
def test_mxfp4_is_repacked_without_a_change(columns: int) -> None:
    blocks = torch.randint(0, 256, (2, 3, columns // 32, 16), dtype=torch.uint8)
    scales = torch.randint(100, 129, (2, 3, columns // 32), dtype=torch.uint8)
    packed = pack_mxfp4(blocks, scales)
    expected = dequantize_mxfp4(blocks, scales).float().flatten(0, 1)
    assert torch.equal(unpack_mxfp4(packed)[:, :columns], expected)
    assert not unpack_mxfp4(packed)[:, columns:].any()


@pytest.mark.parametrize("form", ["dense", *FORMATS])
def test_a_token_gets_the_same_bits_whatever_the_others_are(form: str) -> None:
    """In a step of as many tokens, however many of the others share its experts."""
    experts = random_experts(4, 128, 256, "silu")
    if form != "dense":
        make = FORMATS[form]
        experts = experts._replace(gate_up=make(experts.gate_up), down=make(experts.down))  # type: ignore[arg-type]
    experts = to(experts, torch.bfloat16)
    x = torch.randn(24, 256).to(DEVICE, torch.bfloat16)
    weights = torch.rand(24, 2).to(DEVICE, torch.bfloat16)
    chosen = torch.rand(24, 4).argsort(1)[:, :2].int().contiguous().to(DEVICE)
    together = mix_experts(x, weights, chosen, experts)
    for i in (0, 7, 23):
        others = torch.arange(24, device=DEVICE) != i
        other_x, other_chosen = x.clone(), chosen.clone()
        other_x[others] = torch.randn(23, 256).to(DEVICE, torch.bfloat16)
        other_chosen[others] = chosen[i]
        among_others = mix_experts(other_x, weights, other_chosen, experts)
        assert torch.equal(among_others[i], together[i])


@pytest.mark.usefixtures("products_in_order")
@pytest.mark.parametrize("form", ["dense", *FORMATS])
def test_a_token_gets_the_same_bits_in_any_step_where_sums_have_one_order(form: str) -> None:
    count, hidden = (300, 384) if DEVICE == "cuda" else (6, 128)
    experts = random_experts(4, 128, hidden, "clamped" if form == "mxfp4" else "silu")
    if form != "dense":
        make = FORMATS[form]
        experts = experts._replace(gate_up=make(experts.gate_up), down=make(experts.down))  # type: ignore[arg-type]
    experts = to(experts, torch.bfloat16)
    x = torch.randn(count, hidden).to(DEVICE, torch.bfloat16)
    weights = torch.rand(count, 2).to(DEVICE, torch.bfloat16)
    chosen = torch.rand(count, 4).argsort(1)[:, :2].int().contiguous().to(DEVICE)
    together = ordered_mix_experts(x, weights, chosen, experts)
    for start, end in ((0, 1), (2, count), (count // 2, count)):
        part = x[start:end], weights[start:end], chosen[start:end], experts
        assert torch.equal(ordered_mix_experts(*part), together[start:end])
