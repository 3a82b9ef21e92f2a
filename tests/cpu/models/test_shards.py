"""Models that are divided among ranks compute what the whole model computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.models.loading import loader
from asyncllm.models.loading.loader import load_model, make_model
from asyncllm.models.quant.weight import QuantizedWeight
from asyncllm.models.spec import read_spec
from asyncllm.parallel.ranks import Apart, Ranks
from tests.cpu.models.test_parity import VARIANTS
from tests.support.models import quantized, tiny_models
from tests.support.models.dense_attention import DenseBackend, step
from tests.support.parallel.threads import run_ranks, same_everywhere

#: Sums of other parts differ in their last bits.
TOLERANCE = 5e-5
#: Experts that four ranks can divide.
LARGER: dict[str, dict[str, Any]] = {
    "glm4_moe": {"moe_intermediate_size": 32},
    "qwen2_moe": {"moe_intermediate_size": 32},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_the_whole_model(variant: str, tmp_path: Path) -> None:
    family, overrides = VARIANTS[variant]
    folder = tiny_models.make(family, tmp_path, **{**overrides, **LARGER.get(family, {})})
    _assert_equal_logits(folder, 4 if variant == family else 2)


@pytest.mark.parametrize("vocab_size", [381, 5])
def test_a_vocabulary_is_padded(vocab_size: int, tmp_path: Path) -> None:
    for tied in (True, False):
        folder = tmp_path / str(tied)
        changes = {"vocab_size": vocab_size, "tie_word_embeddings": tied}
        tiny_models.make("llama", folder, **changes)
        _assert_equal_logits(folder, 4, vocab_size)


def test_ranks_share_a_head_of_keys(tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8}
    _assert_equal_logits(tiny_models.make("olmo2", tmp_path, **sizes), 8)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize(
    ("family", "name"),
    [*(("qwen3", name) for name in quantized.FORMATS), ("phi3", "awq"), ("phi3", "fp8-blocks")],
)
def test_quantised_matrices_are_divided(
    family: str, name: str, keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    if family == "phi3":
        del heads["head_dim"]
    folder, _ = quantized.make(name, tmp_path, family, **sizes, **heads)
    monkeypatch.setattr(loader, "can_keep", lambda *_: "all" if keep else "none")
    if keep:
        dtypes = {"gptq-ordered": 1}
        kept = [_quantized_names(folder, Apart(rank, 2)) for rank in range(2)]
        assert kept[0] == kept[1]
        assert len(kept[0]) >= 4 - dtypes.get(name, 0)
    _assert_equal_logits(folder, 2)


@pytest.mark.parametrize(
    ("name", "size", "features"),
    [
        *((name, 2, 160) for name in quantized.FORMATS if name != "gptq-ordered"),
        *(("fp8-blocks", *sizes) for sizes in ((1, 160), (4, 320))),
        ("awq", 4, 320),
    ],
)
def test_experts_are_divided_between_scales(
    name: str, size: int, features: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of them, a scale has 128 or 32: ranks have different numbers of them, or even none."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": features}
    folder, _ = quantized.make(name, tmp_path, "glm4_moe", **sizes)
    monkeypatch.setattr(loader, "can_keep", lambda *_: "all")
    for rank in range(size):
        assert {
            "model.layers.2.mlp.experts.gate_up_proj",
            "model.layers.2.mlp.experts.down_proj",
        } <= set(_quantized_names(folder, Apart(rank, size)))
    _assert_equal_logits(folder, size)


def test_blocks_of_scales_are_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values are one matrix there, whose total is a multiple of a block."""
    sizes = {"hidden_size": 1536, "intermediate_size": 1024, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8}
    folder, _ = quantized.make("fp8-blocks", tmp_path, "phi3", **sizes, **heads)
    monkeypatch.setattr(loader, "can_keep", lambda *_: "all")
    assert "model.layers.0.self_attn.qkv_proj.weight" in _quantized_names(folder, Apart(0, 1))
    names = _quantized_names(folder, Apart(1, 8))
    assert "model.layers.0.self_attn.qkv_proj.weight" not in names


@pytest.mark.parametrize(
    ("size", "changes", "words"),
    [
        (3, {}, "tp 3 does not divide num_attention_heads 4"),
        (8, {}, "tp 8 does not divide num_attention_heads 4"),
        (2, {"intermediate_size": 97}, "tp 2 does not divide intermediate_size 97"),
        (
            4,
            {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 3},
            "tp 4 is not a multiple of num_key_value_heads 3",
        ),
    ],
)
def test_what_cannot_be_divided_is_named(
    size: int, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    spec = read_spec(tiny_models.make("llama", tmp_path, **changes))
    with pytest.raises(ModelError, match=words) as refused:
        make_model(spec, torch.float32, torch.device("meta"), ranks=Apart(0, size))
    assert refused.value.param == "tp"


def _assert_equal_logits(folder: Path, size: int, vocab_size: int = 384) -> None:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(4, vocab_size, (n,), generator=generator).tolist() for n in (60, 3)]
    rows = [(slot, 0, ids) for slot, ids in enumerate(prompts)]

    def logits(ranks: Ranks | None = None) -> Tensor:
        model = load_model(folder, read_spec(folder), torch.float32, "cpu", ranks=ranks)
        return torch.cat(step(model, DenseBackend(), rows))

    with torch.inference_mode():
        expected = logits()
    got = same_everywhere(run_ranks(size, logits))
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < TOLERANCE


def _quantized_names(folder: Path, ranks: Ranks) -> list[str]:
    model = load_model(folder, read_spec(folder), torch.float32, "cpu", ranks=ranks)
    return [name for name, part in model.named_modules() if isinstance(part, QuantizedWeight)]
