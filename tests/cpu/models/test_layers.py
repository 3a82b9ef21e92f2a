"""Building blocks against transformers' own, and their corner cases."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Gemma4TextConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from asyncllm.errors import ModelError
from asyncllm.kernels import activation
from asyncllm.kernels.attention import encode_heads
from asyncllm.kernels.types import AttentionSpec, HeadEncoding, Routing
from asyncllm.models.base import CausalLM
from asyncllm.models.config.base import ACTIVATIONS, check_activation
from asyncllm.models.config.gemma4 import Gemma4Config
from asyncllm.models.first_layers import first_layers, layer_kinds
from asyncllm.models.layers.embedding import Embedding
from asyncllm.models.layers.moe import Experts, SparseMoE
from asyncllm.models.layers.norm import Float32RMSNorm, GemmaRMSNorm, RMSNorm
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.rotary import rotary_frequencies, rotary_table
from asyncllm.models.layers.router import BalancedRouter, Router
from asyncllm.models.loading.loader import make_model
from asyncllm.models.rope import RopeConfig
from asyncllm.models.spec import read_spec
from tests.support.models import tiny_models

FLOAT32 = Placement(torch.float32, torch.device("cpu"))
BFLOAT16 = Placement(torch.bfloat16, torch.device("cpu"))

ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "yarn", "factor": 40.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    {"rope_type": "yarn", "factor": 8.0, "mscale": 0.7, "mscale_all_dim": 1.0},
    {"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5},
    {"rope_type": "longrope", "short_factor": [1.5] * 32, "long_factor": [3.0] * 32},
    {
        "rope_type": "longrope",
        "short_factor": [1.0] * 32,
        "long_factor": [2.0] * 32,
        "attention_factor": 1.2,
    },
]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("length", [2048, 8192])
def test_rotary_frequencies(rope: dict[str, Any], length: int) -> None:
    """``length`` is below and above the original context."""
    given = {"rope_theta": 500_000.0, "original_max_position_embeddings": 4096, **rope}
    theirs = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=8192,
        rope_parameters=dict(given),
    )
    frequencies, amplitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](theirs, seq_len=length)
    ours = RopeConfig(rotary_dim=64, max_position_embeddings=8192, **given)
    got, got_amplitude = rotary_frequencies(ours, length)
    torch.testing.assert_close(got, frequencies, rtol=1e-6, atol=0)
    assert got_amplitude == pytest.approx(amplitude)


@pytest.mark.parametrize(("share", "factor"), [(0.25, None), (0.5, 8.0), (1.0, 2.0)])
def test_proportional_frequencies(share: float, factor: float | None) -> None:
    """transformers rotates all pairs, the last ones by nothing."""
    given = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": share}
    given |= {} if factor is None else {"factor": factor}
    heads: dict[str, Any] = {"num_attention_heads": 2, "head_dim": 64, "global_head_dim": 128}
    ropes = {"full_attention": given, "sliding_attention": {"rope_type": "default"}}
    theirs = Gemma4TextConfig(num_hidden_layers=6, rope_parameters=deepcopy(ropes), **heads)
    frequencies, _ = ROPE_INIT_FUNCTIONS["proportional"](theirs, layer_type="full_attention")
    rotated = int(64 * share)
    assert not frequencies[rotated:].any()
    sizes: dict[str, Any] = {"num_key_value_heads": 1, "intermediate_size": 1, "hidden_size": 128}
    rope = Gemma4Config(num_hidden_layers=6, rope_parameters=ropes, **sizes, **heads).rope(5)
    got, amplitude = rotary_frequencies(rope, 100)
    torch.testing.assert_close(got, frequencies[:rotated], rtol=1e-6, atol=0)
    assert (amplitude, rope.spread) == (1.0, 128)


@pytest.mark.parametrize("distance", [None, 6])
def test_rotation_leaves_lengths_and_the_rest_of_a_head_alone(distance: int | None) -> None:
    rope = RopeConfig(
        rope_type="default",
        rope_theta=10_000.0,
        rotary_dim=8,
        max_position_embeddings=64,
        original_max_position_embeddings=64,
    )
    table = rotary_table(rope, 64, torch.device("cpu"))
    x = torch.randn(3, 2, 12)
    spec = AttentionSpec(
        0, num_heads=2, num_kv_heads=1, head_dim=12, scale=1.0, pair_distance=distance
    )
    qkv = torch.cat((x, torch.randn(3, 2, 12)), dim=1).flatten(1)
    keys, values = torch.zeros(2, 3, 1, 1, 12)
    encoding, positions = HeadEncoding(None, None, table), torch.tensor([0, 5, 63])
    turned = encode_heads(qkv, spec, encoding, positions, keys, values, torch.arange(3))
    assert torch.equal(turned[0], x[0])
    alone = [8, 9, 10, 11] if distance is None else [4, 5, 10, 11]
    assert torch.equal(turned[..., alone], x[..., alone])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(turned[1], x[1])


@pytest.mark.parametrize("place", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(RMSNorm, LlamaRMSNorm), (GemmaRMSNorm, Gemma2RMSNorm), (Float32RMSNorm, Gemma4RMSNorm)],
)
def test_norms_round_as_in_transformers(ours: Any, theirs: Any, place: Placement) -> None:
    norm, reference = ours(64, 1e-6, place), theirs(64, eps=1e-6).to(place.dtype)
    weight = torch.randn(64)
    with torch.no_grad():
        norm.weight.copy_(weight)
        reference.weight.copy_(weight)
        x = torch.randn(50, 4, 64).to(place.dtype)
        torch.testing.assert_close(norm(x), reference(x), rtol=1e-6, atol=1e-6)


def test_embedding_survives_ids_outside_the_table() -> None:
    embedding = Embedding(4, 3, FLOAT32)
    with torch.no_grad():
        embedding.weight.copy_(torch.arange(12.0).view(4, 3))
    got = embedding(torch.tensor([-2, 0, 3, 99]))
    assert got[:, 0].tolist() == [0, 0, 9, 9]


def test_embedding_scale_is_rounded_to_the_dtype() -> None:
    """sqrt(3072) = 55.43 is 55.5 in bfloat16; so transformers multiplies by 55.5."""
    embedding = Embedding(100, 1, BFLOAT16, scale=3072**0.5)
    weight = torch.randn(100, 1).bfloat16()
    with torch.no_grad():
        embedding.weight.copy_(weight)
    assert torch.equal(embedding(torch.arange(100)), weight * 55.5)


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("tokens", [1, 2, 50])
def test_experts(tokens: int, normalize: bool) -> None:
    """Also with experts that no token, or every token, chooses."""
    router = Router(16, 8, FLOAT32, Routing(2, "softmax", normalize))
    moe = SparseMoE(router, Experts(8, 16, 24, "silu", FLOAT32), FLOAT32)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.5)
        router.weight[3] = 0
        x = torch.randn(tokens, 16)
        torch.testing.assert_close(moe(x), _one_by_one(moe, x), rtol=1e-4, atol=1e-5)


def _one_by_one(moe: SparseMoE, x: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row, token in enumerate(x):
        weights, chosen = (moe.gate.weight @ token).softmax(-1).topk(moe.gate.routing.top_k)
        if moe.gate.routing.normalize:
            weights = weights / weights.sum()
        for weight, expert in zip(weights, chosen.tolist(), strict=True):
            gate, up = (moe.experts.gate_up_proj[expert] @ token).chunk(2)
            hidden = torch.nn.functional.silu(gate) * up
            out[row] += weight * (moe.experts.down_proj[expert] @ hidden)
    return out


def test_the_bias_of_a_sigmoid_router_chooses_but_does_not_weigh() -> None:
    router = BalancedRouter(4, 3, FLOAT32, Routing(2, "sigmoid", True, factor=2.0))
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[2.0, 0, 0, 0], [1.0, 0, 0, 0], [0.0, 0, 0, 0]]))
        router.e_score_correction_bias.copy_(torch.tensor([0.0, -9.0, 0.0]))
        weights, experts, _ = router.route(torch.tensor([[1.0, 5.0, 5.0, 5.0]]))
    scores = torch.tensor([2.0, 0.0]).sigmoid()
    assert experts.tolist() == [[0, 2]]
    torch.testing.assert_close(weights[0], 2 * scores / scores.sum())


def test_unknown_activations() -> None:
    with pytest.raises(ModelError, match=r"'snake'.*silu"):
        check_activation("snake")
    assert set(ACTIVATIONS) == set(activation.ACTIVATIONS)


def make(family: str, folder: Path, **config: int) -> CausalLM:
    spec = read_spec(tiny_models.make(family, folder, **config))
    return make_model(spec, torch.bfloat16, torch.device("meta"))


@pytest.mark.parametrize("family", ["llama", "opt", "olmoe"])
def test_three_of_many_that_are_alike(family: str, tmp_path: Path) -> None:
    model = make(family, tmp_path, num_hidden_layers=9)
    short = first_layers(model)
    assert len(layer_kinds(short)) == len(short.attention_specs) == 3
    # The model itself stays as it is.
    assert len(layer_kinds(model)) == 9
    parameters = dict(model.named_parameters())
    assert all(parameters[name] is own for name, own in short.named_parameters())


@pytest.mark.parametrize(
    ("family", "layers"),
    [
        ("gemma3", 8),  # five of six have a window
        ("smollm3", 6),  # every fourth has no positions
        ("glm4_moe", 4),  # the first has no experts
    ],
)
def test_every_kind_of_layer_is_there(family: str, layers: int, tmp_path: Path) -> None:
    model = make(family, tmp_path, num_hidden_layers=12)
    short = first_layers(model)
    assert set(layer_kinds(short)) == set(layer_kinds(model))
    assert len(layer_kinds(short)) == layers


def test_a_model_of_few_layers_stays_whole(tmp_path: Path) -> None:
    model = make("llama", tmp_path, num_hidden_layers=3)
    assert first_layers(model) is model
