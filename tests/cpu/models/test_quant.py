"""Quantised checkpoints: as exact as what their weights stand for, and refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from asyncllm import AsyncLLM
from asyncllm.errors import ModelError
from asyncllm.kernels.linear import linear
from asyncllm.kernels.types import Mxfp4Matrix
from asyncllm.models.base import CausalLM
from asyncllm.models.layers.moe import Experts, SparseMoE
from asyncllm.models.loading import allocate, loader
from asyncllm.models.loading.loader import load_model
from asyncllm.models.quant.config import Quantization, parse_quantization
from asyncllm.models.quant.weight import Fp8Weight, Int4Weight, QuantizedWeight
from asyncllm.models.spec import read_spec
from tests.support.models import quantized, tiny_models
from tests.support.models.dense_attention import DenseBackend, step
from tests.support.models.reference import GREEDY, answers, check
from tests.support.text import tokenizers as tokenizers_for_tests

#: Several blocks of 128, the last of them partial.
WIDE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 64}
#: Fused projections have parts of whole blocks.
BLOCKS: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "head_dim": 128}


@pytest.mark.parametrize("name", quantized.FORMATS)
@pytest.mark.parametrize(
    ("family", "overrides"),
    [("qwen3", WIDE), ("llama", {}), ("phi3", {}), ("opt", {}), ("glm", {})],
)
def test_weights_are_what_they_stand_for(
    name: str, family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    folder, dense = quantized.make(name, tmp_path, family, **overrides)
    _assert_equal(_load(folder), _load(dense))


@pytest.mark.parametrize("name", ["compressed-tensors", "fp8-blocks", "awq", "gptq-ordered"])
async def test_greedy_tokens(name: str, tmp_path: Path) -> None:
    folder, dense = quantized.make(name, tmp_path)
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    async with AsyncLLM(folder, device="cpu", dtype="float32") as llm:
        for answer in answers(dense)[2:6]:
            check(await llm.generate(answer.prompt, GREEDY), answer)


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq"])
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_experts(family: str, name: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "max_shard_size": 10**9}
    folder, dense = quantized.make(name, tmp_path, family, **sizes)
    _assert_equal(_load(folder), _load(dense))


@pytest.mark.parametrize("blocked", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_experts_in_one_tensor(turned: bool, blocked: bool, tmp_path: Path) -> None:
    """As Qwen3-VL's are published, and as transformers writes them."""
    dense = tiny_models.make("qwen3_moe_vision", tmp_path / "dense", hidden_size=160)
    file, stored = dense / "model.safetensors", dict[str, Tensor]()
    weights = load_file(file)
    for name, weight in weights.items():
        if ".experts." not in name:
            stored[name] = weight
            continue
        weight = weight if turned else weight.mT
        scales, meant, generator = list[Tensor](), list[Tensor](), np.random.default_rng(0)
        data = list[Tensor]()
        for expert in weight:
            quantize = quantized.block_fp8 if blocked else quantized.tensor_fp8
            parts, value = quantize(expert.contiguous(), generator)
            data.append(parts["weight"])
            scales.append(parts["weight_scale_inv" if blocked else "weight_scale"])
            meant.append(value)
        weights[name] = torch.stack(meant).contiguous()
        stored[name] = torch.stack(data)
        stored[f"{name}_scale_inv"] = torch.stack(scales)
        stored[f"{name}_activation_scale"] = torch.ones(1)
    save_file(weights, file, {"format": "pt"})
    folder = tmp_path / "quantised"
    shutil.copytree(dense, folder)
    save_file(stored, folder / "model.safetensors")
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    tiny_models.edit_config(folder, quantization_config=config)
    _assert_equal(_load(folder), _load(dense))
    scale = next(name for name in stored if name.endswith("_scale_inv"))
    quantized.edit(folder, lambda tensors: tensors | {scale: torch.ones(2, 3)})
    _assert_refused(folder, ["_scale_inv has shape [2, 3]"])


def _parts(name: str) -> bool:
    return name.endswith(("weight_scale_inv", "qzeros", "g_idx"))


@pytest.mark.parametrize("name", ["fp8-blocks", "gptq-ordered"])
def test_a_matrix_in_two_files(name: str, tmp_path: Path) -> None:
    folder, dense = quantized.make(name, tmp_path)
    quantized.shard(folder, _parts)
    _assert_equal(_load(folder), _load(dense))


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay quantised, as on a GPU; the kernels are their references in torch."""
    monkeypatch.setattr(loader, "can_keep", lambda *_: "all")


@pytest.mark.usefixtures("keep")
@pytest.mark.parametrize("name", quantized.FORMATS)
@pytest.mark.parametrize("family", ["qwen3", "phi3", "glm4"])
def test_kept_weights_give_the_same_logits(name: str, family: str, tmp_path: Path) -> None:
    wide = BLOCKS if family != "phi3" else {"hidden_size": 512, "intermediate_size": 512}
    folder, dense = quantized.make(name, tmp_path, family, num_hidden_layers=2, **wide)
    model, expected = _load(folder), _load(dense)
    kept = _kept(model)
    assert len(kept) == (6 if name in ("compressed-tensors", "fp8-blocks") else 8)
    kind = Int4Weight if name.startswith(("awq", "gptq")) else Fp8Weight
    assert {type(weight) for weight in kept} == {kind}
    rows = [(0, 0, [5, 6, 7]), (1, 0, list(range(10, 30)))]
    got, wanted = (step(each, DenseBackend(), rows) for each in (model, expected))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_small_weights_are_expanded(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels for 16 bits are faster; other weights of the same layers stay quantised."""
    monkeypatch.setattr(loader, "can_keep", lambda *_: "large")
    monkeypatch.setattr(allocate, "LARGE", 1024 * 512)
    folder, dense = quantized.make("fp8-blocks", tmp_path, family, num_hidden_layers=2, **BLOCKS)
    model, expected = _load(folder), _load(dense)
    assert {tuple(weight.shape) for weight in _kept(model)} == {(1024, 512)}
    rows = [(0, 0, [5, 6, 7]), (1, 0, list(range(10, 30)))]
    got, wanted = (step(each, DenseBackend(), rows) for each in (model, expected))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("keep")
@pytest.mark.parametrize("name", ["compressed-tensors", "fp8-blocks"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_delta_nets_and_gated_heads_stay_quantised(name: str, family: str, tmp_path: Path) -> None:
    """All but the projections that yield a number for each head, as in published checkpoints."""
    heads = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}
    dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 256}
    layers = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2}
    folder, dense = quantized.make(name, tmp_path, family, **BLOCKS, **heads, **dims, **layers)
    model, expected = _load(folder), _load(dense)
    for layer, names in enumerate((("in_proj", "out_proj"), ("qkv_proj", "o_proj"))):
        mixer = model.get_submodule(f"model.layers.{layer}.self_attn")
        kept = [name for name, part in mixer.named_modules() if isinstance(part, QuantizedWeight)]
        assert kept == [f"{name}.weight" for name in names]
    rows = [(0, 0, [5, 6, 7]), (1, 0, list(range(10, 30)))]
    got, wanted = (step(each, DenseBackend(), rows) for each in (model, expected))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("keep")
@pytest.mark.parametrize("name", quantized.FORMATS)
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_kept_experts_give_the_same_logits(name: str, family: str, tmp_path: Path) -> None:
    sizes = {**BLOCKS, "moe_intermediate_size": 128, "max_shard_size": 10**9}
    folder, dense = quantized.make(name, tmp_path, family, **sizes)
    model, expected = _load(folder), _load(dense)
    is_partial = name in ("compressed-tensors", "fp8-blocks")  # without the MLP of layer 1
    for path, experts in model.named_modules():
        if isinstance(experts, Experts):
            # Those of ordered columns are in another order for each expert.
            is_kept = name != "gptq-ordered" and not (is_partial and ".1." in path)
            assert len(_kept(experts)) == 2 * is_kept, path
    rows = [(0, 0, [5, 6, 7]), (1, 0, list(range(10, 30)))]
    got, wanted = (step(each, DenseBackend(), rows) for each in (model, expected))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("keep")
@pytest.mark.parametrize("name", ["compressed-tensors", "awq"])
def test_a_shared_expert_in_another_format_is_an_mlp(name: str, tmp_path: Path) -> None:
    sizes = {**BLOCKS, "moe_intermediate_size": 128, "max_shard_size": 10**9}
    folder, dense = quantized.make(name, tmp_path, "glm4_moe", **sizes)
    moe = _load(folder).get_submodule("model.layers.2.mlp")
    assert isinstance(moe, SparseMoE)
    assert (moe.experts.shared, moe.shared_expert) == (2, None)

    def mixed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        meant = load_file(dense / "model.safetensors")
        kept = {key: value for key, value in weights.items() if ".shared_experts." not in key}
        return kept | {key: value for key, value in meant.items() if ".shared_experts." in key}

    quantized.edit(folder, mixed)
    model, expected = _load(folder), _load(dense)
    moe = model.get_submodule("model.layers.2.mlp")
    assert isinstance(moe, SparseMoE)
    assert (moe.experts.shared, len(_kept(moe.experts))) == (0, 2)
    rows = [(0, 0, [5, 6, 7]), (1, 0, list(range(10, 30)))]
    got, wanted = (step(each, DenseBackend(), rows) for each in (model, expected))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("keep")
def test_what_kernels_do_not_take_is_dequantised(tmp_path: Path) -> None:
    # Fused parts of no whole blocks; then parts whose columns are in different orders.
    folder, dense = quantized.make("fp8-blocks", tmp_path / "a", **WIDE)
    model = _load(folder)
    assert not any("qkv_proj" in name for name in _names(model))
    folder, dense = quantized.make("gptq-ordered", tmp_path / "b")
    path = "model.layers.0.self_attn.q_proj."

    def swap(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors, _ = quantized.gptq(weights.pop("meant"), np.random.default_rng(1), order_seed=5)
        return weights | {path + field: tensor for field, tensor in tensors.items()}

    weight = load_file(dense / "model.safetensors")[path + "weight"]
    quantized.edit(folder, lambda weights: swap(weights | {"meant": weight}))
    names = _names(_load(folder))
    assert "model.layers.0.self_attn.qkv_proj.weight" not in names
    assert "model.layers.1.self_attn.qkv_proj.weight" in names


@pytest.mark.usefixtures("keep")
@pytest.mark.parametrize("name", quantized.FORMATS)
def test_dummy_weights(name: str, tmp_path: Path) -> None:
    folder, _ = quantized.make(name, tmp_path, **BLOCKS)
    (folder / "model.safetensors").unlink()
    spec = read_spec(folder)
    first, second = (load_model(folder, spec, torch.bfloat16, "cpu", "dummy") for _ in range(2))
    kept = _kept(first)
    assert len(kept) == (10 if name in ("compressed-tensors", "fp8-blocks") else 12)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor.view(torch.uint8), second.state_dict()[name].view(torch.uint8))
    for weight in kept:
        identity, matrix = torch.eye(weight.shape[1]), weight.matrix()
        assert not isinstance(matrix, Mxfp4Matrix)
        assert linear(identity, matrix).std().item() == pytest.approx(0.02, rel=0.1)


def test_a_bias_of_zeros_without_use(tmp_path: Path) -> None:
    folder, dense = quantized.make("gptq", tmp_path, "llama")
    bias = "model.layers.0.mlp.up_proj.bias"
    quantized.edit(folder, lambda weights: weights | {bias: torch.zeros(96)})
    _assert_equal(_load(folder), _load(dense))
    quantized.edit(folder, lambda weights: weights | {bias: torch.ones(96)})
    _assert_refused(folder, [bias, "unexpected"])


def _drop(weights: dict[str, Tensor], field: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in weights.items() if name != f"{_MODULE}.{field}"}


_MODULE = "model.layers.2.mlp.down_proj"


@pytest.mark.parametrize(
    ("name", "field", "words"),
    [
        ("compressed-tensors", "weight_scale", [_MODULE, "weight_scale"]),
        ("awq", "scales", [_MODULE, "scales"]),
        ("gptq", "qzeros", [_MODULE, "qzeros"]),
        ("gptq-ordered", "g_idx", [_MODULE, "g_idx"]),
        ("gptq", "qweight", [f"{_MODULE}.weight", "missing"]),
    ],
)
def test_a_missing_tensor(name: str, field: str, words: list[str], tmp_path: Path) -> None:
    folder, _ = quantized.make(name, tmp_path, "llama")
    quantized.edit(folder, lambda weights: _drop(weights, field))
    _assert_refused(folder, words)


@pytest.mark.parametrize(
    ("name", "field", "tensor", "words"),
    [
        ("fp8-blocks", "weight_scale_inv", torch.ones(3, 1), ["weight_scale_inv", "[3, 1]"]),
        ("awq", "qzeros", torch.ones(3, 9, dtype=torch.int32), ["qzeros", "[3, 9]", "[3, 8]"]),
        ("gptq", "scales", torch.ones(5, 64).half(), ["qzeros", "[5, 8]"]),
        (
            "gptq",
            "qweight",
            torch.ones(12, 72, dtype=torch.int32),
            ["scales", "[3, 64]", "[3, 72]"],
        ),
        ("gptq-ordered", "g_idx", torch.zeros(96, dtype=torch.int32), ["g_idx", "same size"]),
    ],
)
def test_a_tensor_that_does_not_fit(
    name: str, field: str, tensor: Tensor, words: list[str], tmp_path: Path
) -> None:
    folder, _ = quantized.make(name, tmp_path, "llama")
    quantized.edit(folder, lambda weights: weights | {f"{_MODULE}.{field}": tensor})
    _assert_refused(folder, [_MODULE, *words])


_GROUP = quantized.FORMATS["compressed-tensors"][1]["config_groups"]["group_0"]


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"quant_method": "awq", "bits": 8}, "bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version"),
        ({"quant_method": "gptq", "bits": 8}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 12}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"bits": 8}}}, "dynamic.+:a.bits"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "format"),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "config_groups": {"a": {"weights": {**_GROUP["weights"], "num_bits": 4}}},
            },
            "config_groups.a.weights.num_bits",
        ),
        ({"quant_method": "fp8", "modules_to_not_convert": [3]}, "modules_to_not_convert"),
    ],
)
def test_what_is_not_supported_is_named(config: dict[str, Any], field: str, tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    tiny_models.edit_config(folder, quantization_config=config)
    with pytest.raises(
        ModelError, match=rf"config.json: quantization_config\.{field} is".replace("+", r"\+")
    ):
        read_spec(folder)


def test_no_quantization() -> None:
    assert parse_quantization(None) is None
    assert parse_quantization({}) is None


@pytest.mark.parametrize(
    ("entry", "module", "ignored"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("mlp.gate", "model.layers.3.mlp.gate", True),
        ("mlp.gate", "model.layers.3.mlp.gate_proj", False),
        ("re:.*mlp[.]up.*", "model.layers.3.mlp.up_proj", True),
        ("re:mlp", "model.layers.3.mlp.up_proj", False),
    ],
)
def test_ignored_modules(entry: str, module: str, ignored: bool) -> None:
    assert Quantization(method="fp8", ignored=(entry,)).ignores(module) == ignored


def _load(folder: Path) -> CausalLM:
    return load_model(folder, read_spec(folder), torch.float32, "cpu")


def _names(model: CausalLM) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, QuantizedWeight)]


def _kept(model: nn.Module) -> list[QuantizedWeight]:
    return [part for part in model.modules() if isinstance(part, QuantizedWeight)]


def _assert_equal(model: CausalLM, expected: CausalLM) -> None:
    wanted = expected.state_dict()
    assert list(model.state_dict()) == list(wanted)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name


def _assert_refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(ModelError) as refused:
        _load(folder)
    for word in words:
        assert word in str(refused.value)
