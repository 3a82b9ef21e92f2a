"""Logits equal those of transformers: prompts in one go, in chunks, mixed, and decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.attention.base import ForwardBatch
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.kernels.types import AttentionSpec, HeadEncoding
from asyncllm.models.base import CausalLM
from asyncllm.models.loading.loader import load_model
from asyncllm.models.spec import read_spec
from tests.support.models import tiny_models
from tests.support.models.dense_attention import DenseBackend, step

TOLERANCE = 5e-5
CHUNK = 16
DECODED = 8

#: Settings that change what a family computes, beyond those of its tiny model.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in tiny_models.FAMILIES},
    "opt-350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-plain": (
        "opt",
        {
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
            "_remove_final_layer_norm": True,
        },
    ),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "llama-dynamic": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}},
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-no-window": ("qwen2", {"use_sliding_window": False}),
    "qwen3-yarn": (
        "qwen3",
        {
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
            },
        },
    ),
    "mistral3-scaled": ("mistral3_vision", {"text_config": "ministral3"}),
    "smollm3-window": ("smollm3", {"use_sliding_window": True, "sliding_window": 32}),
    "granite-experts-alone": ("granite_moe", {"shared_intermediate_size": 0}),
    "granite-two-shared-experts": (
        "granite_moe",
        {"shared_intermediate_size": 192, "num_experts_per_tok": 4},
    ),
    "granite4-dense": (
        "granite_hybrid",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": [0.5, 1.5],
        },
    ),
    "granite4-groups": ("granite_hybrid", {"mamba_n_groups": 2}),
    "nemotron-dense": (
        "nemotron_h",
        {
            "layers_block_type": ["full_attention", "mlp", "linear_attention", "mlp"],
            "mlp_hidden_act": "silu",
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
        },
    ),
    "glm4-moe-plain": (
        "glm4_moe",
        {"use_qk_norm": False, "first_k_dense_replace": 0, "n_shared_experts": 3},
    ),
    "glm4-moe-groups": (
        "glm4_moe",
        {"n_group": 4, "topk_group": 3, "num_experts_per_tok": 5, "n_shared_experts": 2},
    ),
    "qwen2-moe-window": (
        "qwen2_moe",
        {"use_sliding_window": True, "sliding_window": 32, "norm_topk_prob": True},
    ),
    "qwen2-moe-shared-expert": ("qwen2_moe", {"shared_expert_intermediate_size": 24}),
    "starcoder2-plain": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "qwen3-moe-raw": (
        "qwen3_moe",
        {
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": None,
            "use_sliding_window": True,
            "sliding_window": 32,
        },
    ),
    "gemma2-uncapped": (
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
    ),
    "gemma4-separate-values": (
        "gemma4",
        {"attention_k_eq_v": False, "use_double_wide_mlp": False, "num_kv_shared_layers": 3},
    ),
    "gemma4-biases": (
        "gemma4",
        {
            "attention_bias": True,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 5000.0,
                    "partial_rotary_factor": 0.5,
                    "factor": 4.0,
                },
            },
        },
    ),
    "gemma4-inputs-alone": ("gemma4", {"num_kv_shared_layers": 0}),
    "gemma4-experts-and-inputs": ("gemma4_moe", {"hidden_size_per_layer_input": 8}),
    "phi3-window": ("phi3", {"sliding_window": 40}),
    "phi3-long": (
        "phi3",
        {
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
                "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            },
        },
    ),
}


@pytest.fixture(scope="module", params=VARIANTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = VARIANTS[request.param]
    return tiny_models.make(family, tmp_path_factory.mktemp(request.param), **overrides)


def test_logits_equal_those_of_transformers(folder: Path) -> None:
    # Longer than every window, and than the original context of every stretched one.
    sequences = [_random_ids(100 + DECODED, seed=1), _random_ids(77 + DECODED, seed=2)]
    expected = _reference(folder, sequences)
    model = _load(folder)
    runs = {"whole": _run_whole, "chunks": _run_chunks, "decode": _run_decode}
    for name, run in runs.items():
        for got, wanted in zip(run(model, sequences), expected, strict=True):
            assert (got - wanted).abs().max() < TOLERANCE, name


def _run_whole(model: CausalLM, sequences: list[list[int]]) -> list[Tensor]:
    """Every sequence in one step."""
    return step(model, DenseBackend(), [(slot, 0, ids) for slot, ids in enumerate(sequences)])


def _run_chunks(model: CausalLM, sequences: list[list[int]]) -> list[Tensor]:
    """A chunk of every sequence in each step."""
    return _run_pieces(model, [_cut(ids, CHUNK) for ids in sequences])


def _run_decode(model: CausalLM, sequences: list[list[int]]) -> list[Tensor]:
    """The prompt in one step, then a token a step; the second sequence starts in between."""
    first, second = ([ids[:-DECODED], *([token] for token in ids[-DECODED:])] for ids in sequences)
    return _run_pieces(model, [first, [[], [], [], *second]])


def _run_pieces(model: CausalLM, pieces: list[list[list[int]]]) -> list[Tensor]:
    """Step by step, the next piece of every sequence that has one; empty pieces wait."""
    backend = DenseBackend()
    done = [0] * len(pieces)
    logits: list[list[Tensor]] = [[] for _ in pieces]
    for turn in range(max(map(len, pieces))):
        due = [(slot, p[turn]) for slot, p in enumerate(pieces) if turn < len(p) and p[turn]]
        rows = [(slot, done[slot], piece) for slot, piece in due]
        for (slot, piece), row in zip(due, step(model, backend, rows), strict=True):
            logits[slot].append(row)
            done[slot] += len(piece)
    return [torch.cat(rows) for rows in logits]


def test_longrope_takes_its_short_factors_when_sequences_stay_short(tmp_path: Path) -> None:
    family, overrides = VARIANTS["phi3-long"]
    folder = tiny_models.make(family, tmp_path, **overrides)
    ids = _random_ids(64, seed=4)
    [got] = _run_whole(_load(folder, max_length=64), [ids])
    [expected] = _reference(folder, [ids])
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_bfloat16_logits_are_near(family: str, tmp_path: Path) -> None:
    """As near as rounding allows: transformers itself is about 0.013 from its float32 logits.

    With this seed, rounding sends few tokens to another expert.
    """
    folder = tiny_models.make(family, tmp_path, seed=1, dtype=torch.bfloat16)
    ids = _random_ids(40, seed=5)
    [got] = _run_whole(_load(folder, dtype=torch.bfloat16), [ids])
    [expected] = _reference(folder, [ids], dtype=torch.bfloat16)
    spread = expected.float().std().item()
    assert got.dtype == torch.bfloat16
    assert (got.float() - expected.float()).abs().mean().item() < 0.03 * spread


def test_only_sampled_rows_have_hidden_states(tmp_path: Path) -> None:
    model = _load(tiny_models.make("llama", tmp_path))
    backend = DenseBackend()
    plan = backend.plan(np.array([(0, 0, 5)], dtype=np.int32), torch.empty(0))
    ids, positions = torch.tensor([5, 6, 7, 8, 9]), torch.arange(5)
    for rows in ([4], [], [0, 3]):
        batch = ForwardBatch(
            ids, positions, ids, torch.tensor(rows, dtype=torch.int64), backend, plan
        )
        hidden = model(batch)
        assert hidden.shape == (len(rows), 64)
        assert model.logits(hidden).shape == (len(rows), 384)


class _ShapesOnly:
    """An ``AttentionBackend`` for tensors without values."""

    def plan(self, rows: np.ndarray, block_table: Tensor) -> None: ...
    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        assert qkv.shape == (len(batch.input_ids), spec.projected_size)
        return qkv[:, : spec.num_heads * spec.head_dim]


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_a_step_never_asks_for_values(family: str, tmp_path: Path) -> None:
    """On the meta device there are none. On a GPU asking would wait, and no graph could be made."""
    spec = read_spec(tiny_models.make(family, tmp_path))
    model = load_model(tmp_path, spec, torch.bfloat16, "meta")
    ids = torch.empty(7, dtype=torch.int64, device="meta")
    states = StatePool(model.states, 1, torch.bfloat16, "meta")
    rows = states.of_step(np.array([(0, 0, 7)]), np.array([1]), torch.from_numpy)
    batch = ForwardBatch(ids, ids, ids, ids[:2], _ShapesOnly(), None, states=rows)
    assert model.logits(model(batch)).shape == (2, 384)


def _load(
    folder: Path, dtype: torch.dtype = torch.float32, max_length: int | None = None
) -> CausalLM:
    return load_model(folder, read_spec(folder), dtype, "cpu", max_length=max_length)


def _reference(
    folder: Path, sequences: list[list[int]], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    model = tiny_models.reference(folder, dtype)
    with torch.inference_mode():
        return [model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences]


def _random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, 384, (count,), generator=generator).tolist()


def _cut(ids: list[int], size: int) -> list[list[int]]:
    return [ids[at : at + size] for at in range(0, len(ids), size)]
