"""gpt-oss: its configuration as published, and experts in MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from asyncllm.errors import ModelError
from asyncllm.kernels.experts import mix_experts
from asyncllm.models.config.gpt_oss import GptOssConfig
from asyncllm.models.layers.moe import Experts
from asyncllm.models.loading import loader
from asyncllm.models.loading.loader import load_model
from asyncllm.models.quant.weight import Mxfp4Weight
from asyncllm.models.spec import read_spec
from asyncllm.parallel.ranks import Apart, Ranks
from tests.support.models import quantized, tiny_models

#: Of openai/gpt-oss-20b, shortened.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def test_the_published_configuration(tmp_path: Path) -> None:
    config = written(tmp_path, PUBLISHED)
    assert [config.window(layer) for layer in range(4)] == [128, None, 128, None]
    assert config.context_length == 131072
    rope = config.rope(0)
    assert rope is not None
    assert (rope.rope_type, rope.factor, rope.truncate) == ("yarn", 32.0, False)
    bare = written(tmp_path, PUBLISHED | {"rope_scaling": None, "layer_types": None})
    assert bare.rope(0) == rope
    assert [bare.window(layer) for layer in range(4)] == [128, None, 128, None]


def written(folder: Path, config: dict[str, Any]) -> GptOssConfig:
    (folder / "config.json").write_text(json.dumps(config))
    found = read_spec(folder).config
    assert isinstance(found, GptOssConfig)
    return found


def in_mxfp4(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales, and what they stand for: [experts, N, K]."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 16, (*shape[:2], shape[2] // 32, 32), np.uint8)
    exponents = generator.integers(118, 126, codes.shape[:3], np.uint8)
    meant = NUMBERS[codes] * 2.0 ** (exponents[..., None].astype(np.float32) - 127)
    blocks = codes[..., ::2] | codes[..., 1::2] << 4
    return tuple(map(torch.from_numpy, (blocks, exponents, meant.reshape(shape))))  # type: ignore[return-value]


def make(folder: Path, *, flat: bool = False, **overrides: Any) -> tuple[Path, Path]:
    """A checkpoint with experts in MXFP4, and one with what they stand for.

    Args:
        flat: blocks have three dimensions.
        overrides: as for ``tiny_models.make``.
    """
    dense = tiny_models.make("gpt_oss", folder / "dense", **overrides)
    weights, stored = load_file(dense / "model.safetensors"), dict[str, Tensor]()
    for seed, (name, weight) in enumerate(sorted(weights.items())):
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = weight
            continue
        blocks, scales, meant = in_mxfp4(weight.mT.shape, seed)
        expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert torch.equal(expected, meant.mT)
        weights[name] = meant.mT.contiguous()
        stored[f"{name}_blocks"] = blocks.flatten(2) if flat else blocks
        stored[f"{name}_scales"] = scales
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    packed = folder / "packed"
    shutil.copytree(dense, packed)
    save_file(stored, packed / "model.safetensors")
    tiny_models.edit_config(packed, quantization_config=PUBLISHED["quantization_config"])
    return packed, dense


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_mxfp4(dtype: torch.dtype, flat: bool, tmp_path: Path) -> None:
    models = [load_model(f, read_spec(f), dtype, "cpu") for f in make(tmp_path, flat=flat)]
    found, expected = (model.state_dict() for model in models)
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(("size", "inner"), [(1, 96), (2, 96), (2, 128), (4, 160)])
def test_experts_that_stay_in_mxfp4(
    size: int, inner: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has whole groups of columns, though not all have as many."""
    monkeypatch.setattr(loader, "can_keep", lambda *_: "all")
    packed, dense = make(tmp_path, intermediate_size=inner)
    each = [_layers(packed, Apart(rank, size)) for rank in range(size)]
    for kept, expected in zip(zip(*each, strict=True), _layers(dense), strict=True):
        x, weights = torch.randn(7, expected.hidden_size), torch.rand(7, 3)
        chosen = torch.randint(0, expected.count, (7, 3), dtype=torch.int32)
        total = torch.zeros_like(x)
        for experts in kept:
            assert isinstance(experts.gate_up_proj, Mxfp4Weight)
            assert isinstance(experts.down_proj, Mxfp4Weight)
            mix_experts(x, weights, chosen, experts.matrices(), total)
        wanted = mix_experts(x, weights, chosen, expected.matrices())
        torch.testing.assert_close(total, wanted, rtol=1e-5, atol=1e-5)


def _layers(folder: Path, ranks: Ranks | None = None) -> list[Experts]:
    model = load_model(folder, read_spec(folder), torch.float32, "cpu", ranks=ranks)
    return [module for module in model.modules() if isinstance(module, Experts)]


def test_a_scale_of_mxfp4_that_kernels_do_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "can_keep", lambda *_: "all")
    folder, _ = make(tmp_path)
    stored = load_file(folder / "model.safetensors")
    stored["model.layers.1.mlp.experts.down_proj_scales"][0, 3, 1] = 131
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"scaled by 2\^4; at most 2\^1"):
        load_model(folder, read_spec(folder), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("field", "change", "words"),
    [
        ("down_proj_scales", None, "has no scales"),
        ("down_proj_scales", lambda t: t[0, 0, 0], "down_proj_scales []"),
        ("down_proj_scales", lambda t: t[:, 1:], "down_proj_scales [8, 63, 3]"),
        ("down_proj_scales", lambda t: t.float(), "has no scales"),
        ("down_proj_blocks", lambda t: t[..., :8], "has shape [8, 64, 3, 8]"),
        ("down_proj_blocks", lambda t: t[0], "has shape [64, 3, 16]"),
        ("down_proj_blocks", None, "unexpected"),
        ("gate_up_proj_bias", None, "missing"),
        ("sinks", None, "missing"),
    ],
)
def test_what_does_not_fit_is_named(field: str, change: Any, words: str, tmp_path: Path) -> None:
    folder, _ = make(tmp_path)
    name = f"model.layers.1.{'self_attn' if field == 'sinks' else 'mlp.experts'}.{field}"

    def edited(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensor = tensors.pop(name)
        return tensors if change is None else tensors | {name: change(tensor).contiguous()}

    quantized.edit(folder, edited)
    with pytest.raises(ModelError) as refused:
        load_model(folder, read_spec(folder), torch.float32, "cpu")
    assert words in str(refused.value)


@pytest.mark.parametrize("packed", ["gate_up_proj", "down_proj"])
def test_square_experts_of_which_some_are_in_mxfp4(packed: str, tmp_path: Path) -> None:
    """Those in 16 bits are stored the other way round, which their shape does not show."""
    folder, dense = make(tmp_path, intermediate_size=64)
    whole = load_file(dense / "model.safetensors")
    kept = {n: t for n, t in whole.items() if ".experts." in n and n.endswith("_proj")}
    kept = {name: tensor for name, tensor in kept.items() if not name.endswith(packed)}

    def edited(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        parts = {f"{name}_{part}" for name in kept for part in ("blocks", "scales")}
        return {name: t for name, t in tensors.items() if name not in parts} | kept

    quantized.edit(folder, edited)
    found, expected = (
        load_model(f, read_spec(f), torch.float32, "cpu").state_dict() for f in (folder, dense)
    )
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_a_matrix_in_16_and_in_4_bits(tmp_path: Path) -> None:
    folder, _ = make(tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    quantized.edit(folder, lambda tensors: tensors | {name: torch.ones(8, 96, 64)})
    with pytest.raises(ModelError, match="is in the checkpoint in 4 bits, too"):
        load_model(folder, read_spec(folder), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"swiglu_limit": -1.0}, "swiglu_limit -1.0"),
        ({"rope_scaling": {**PUBLISHED["rope_scaling"], "factor": 1e30}}, "a context of 4.096e+33"),
    ],
)
def test_wrong_settings_are_named(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError) as refused:
        written(tmp_path, PUBLISHED | fields)
    assert words in str(refused.value)


@pytest.mark.parametrize("fields", [{"intermediate_size": 33}, {"hidden_size": 50}])
def test_rows_that_the_matmul_of_experts_does_not_take(
    fields: dict[str, int], tmp_path: Path
) -> None:
    folder = tiny_models.make("gpt_oss", tmp_path, **fields)
    with pytest.raises(ModelError, match="no multiples of 16 bytes"):
        load_model(folder, read_spec(folder), torch.float32, "cpu")
