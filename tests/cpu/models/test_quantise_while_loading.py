"""``--quantization fp8``: what a checkpoint becomes equals the same in the published format."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.kernels.quantized import quantize_fp8
from asyncllm.models.base import CausalLM
from asyncllm.models.loading import loader
from asyncllm.models.loading.loader import load_model
from asyncllm.models.loading.weight_stream import Reading, WeightStream
from asyncllm.models.quant.weight import Fp8Weight, QuantizedWeight
from asyncllm.models.spec import read_spec
from asyncllm.parallel.ranks import Alone, Apart, Ranks
from tests.support.models import quantized, tiny_models
from tests.support.models.dense_attention import DenseBackend, step
from tests.support.parallel.threads import run_ranks, same_everywhere

#: Of tensors in layers with two dimensions and more: those that stay in 16 bits.
IN_16_BITS = re.compile(
    r"_bias$|norm|conv1d|conv\.conv|in_proj_(a|b|ba)\.|(?<!input_)gate\.weight|router|pos_emb"
)
#: Parts of whole blocks, and a last block that is not whole.
BLOCKS = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
MLP = {**BLOCKS, "intermediate_size": 512, "num_hidden_layers": 2}
MOE = {**BLOCKS, "moe_intermediate_size": 256, "num_hidden_layers": 2, "max_shard_size": 10**9}
HYBRID: dict[str, Any] = {
    **MLP,
    **{"linear_num_key_heads": 1, "linear_num_value_heads": 2},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 256},
    "layer_types": ["linear_attention", "full_attention"],
}
#: Of each family, those overrides with which all weights stay quantised.
KEPT: dict[str, dict[str, Any]] = {
    "qwen3": MLP,
    "qwen3_5": HYBRID,
    "qwen3_next": {**HYBRID, "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "qwen3_moe": MOE,
    "glm4_moe": MOE,
}


def both(folder: Path, family: str, **overrides: Any) -> tuple[Path, Path, Path]:
    """A checkpoint in bf16; the same in the published format; and what that stands for."""
    dense = tiny_models.make(family, folder / "dense", **overrides)
    published, meant = folder / "published", folder / "meant"
    for each in (published, meant):
        shutil.copytree(dense, each)
    generator = np.random.default_rng(0)
    for file in dense.glob("*.safetensors"):
        weights = {name: weight.bfloat16() for name, weight in load_file(file).items()}
        save_file(weights, file)
        stored, values = dict(weights), {name: w.float() for name, w in weights.items()}
        for name, weight in weights.items():
            if (
                not re.search(r"\.layers\.|model_projection", name)
                or weight.dim() < 2
                or IN_16_BITS.search(name)
            ):
                continue
            matrices = weight.float().view(-1, *weight.shape[-2:])
            parts = [quantized.block_fp8(matrix, generator) for matrix in matrices]
            for field, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
                tensor = torch.stack([tensors[field] for tensors, _ in parts])
                stored[f"{name}{suffix}"] = tensor if weight.dim() == 3 else tensor[0]
            values[name] = torch.stack([value for _, value in parts]).view(weight.shape)
        save_file(stored, published / file.name)
        save_file(values, meant / file.name)
    _complete_index(published)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    tiny_models.edit_config(published, quantization_config=config)
    return dense, published, meant


def _complete_index(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = folder.glob("*.safetensors")
        names = {name: file.name for file in files for name in load_file(file)}
        index.write_text(json.dumps({"weight_map": names}))


def load(folder: Path, quantization: str | None = None, ranks: Ranks | None = None) -> CausalLM:
    spec = read_spec(folder, None, quantization)
    return load_model(folder, spec, torch.float32, "cpu", ranks=ranks)


def assert_equal(model: CausalLM, expected: CausalLM) -> None:
    wanted, found = expected.state_dict(), model.state_dict()
    assert list(found) == list(wanted)
    for name, tensor in found.items():
        assert tensor.dtype == wanted[name].dtype
        same = torch.equal(tensor.view(torch.uint8), wanted[name].view(torch.uint8))
        assert same, name


@pytest.mark.parametrize(
    "family",
    [
        *(
            "llama",
            "qwen3",
            "opt",
            "phi3",
            "glm",
            "gemma4",
            "starcoder2",
            "lfm2_moe",
            "granite_moe",
        ),
        *("qwen3_5", "qwen3_next", "qwen3_moe", "glm4_moe", "mixtral", "qwen3_moe_vision"),
        *("qwen3_5_moe_vision", "gpt_oss", "gemma4_moe", "qwen2_moe"),
    ],
)
def test_numbers_where_no_kernels_take_them(family: str, tmp_path: Path) -> None:
    dense, _, meant = both(tmp_path, family)
    assert_equal(load(dense, "fp8"), load(meant))


@pytest.fixture
def keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights stay quantised, as on a GPU; the kernels are their references in torch."""
    monkeypatch.setattr(loader, "can_keep", lambda *_: "all")


@pytest.mark.usefixtures("keep")
@pytest.mark.parametrize("family", KEPT)
def test_kept_weights_are_those_of_a_published_checkpoint(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, published, _ = both(tmp_path, family, **KEPT[family])
    for ranks in (Alone(), Apart(0, 2), Apart(1, 2)):
        if family in ("qwen3_5", "qwen3_next") and ranks.size > 1:
            continue  # one head of keys
        model = load(dense, "fp8", ranks)
        assert_equal(model, load(published, ranks=ranks))
        assert any(isinstance(module, Fp8Weight) for module in model.modules())
    # As on a GPU, in small pieces.
    reading = torch.device("cpu"), Reading(2, 1 << 16)
    monkeypatch.setattr(loader, "nullcontext", lambda: WeightStream(*reading))
    with torch.inference_mode():
        assert_equal(load(dense, "fp8"), load(published))


@pytest.mark.usefixtures("keep")
@pytest.mark.parametrize("family", ["qwen3_moe_vision", "gpt_oss"])
def test_experts_in_one_tensor_are_kept(family: str, tmp_path: Path) -> None:
    """Turned in the checkpoint; three ranks' shares are padded."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 1, "num_attention_heads": 8, "head_dim": 32}
    inner = "intermediate_size" if family == "gpt_oss" else "moe_intermediate_size"
    dense, _, meant = both(tmp_path, family, **sizes, num_key_value_heads=4, **{inner: 320})
    for ranks in (Alone(), Apart(0, 2), Apart(1, 2)):
        model = load(dense, "fp8", ranks)
        kept = [name for name, part in model.named_modules() if isinstance(part, QuantizedWeight)]
        assert {name.rpartition(".")[2] for name in kept} >= {"gate_up_proj", "down_proj"}

    def logits(folder: Path, quantization: str | None, ranks: Ranks | None = None) -> Tensor:
        rows = [(0, 0, [5, 6, 7]), (1, 0, list(range(10, 30)))]
        return torch.cat(step(load(folder, quantization, ranks), DenseBackend(), rows))

    with torch.inference_mode():
        expected = logits(meant, None)
    for size in (1, 2, 4):
        got = same_everywhere(run_ranks(size, lambda ranks: logits(dense, "fp8", ranks)))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("keep")
def test_dummy_weights(tmp_path: Path) -> None:
    dense = tiny_models.make("qwen3_5", tmp_path, **HYBRID)
    spec = read_spec(dense, None, "fp8")
    wanted = load(dense, "fp8").state_dict()
    for name, tensor in load_model(dense, spec, torch.float32, "cpu", "dummy").state_dict().items():
        assert (tensor.dtype, tensor.shape) == (wanted[name].dtype, wanted[name].shape), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (1153, 130), (2049, 7)])
def test_blocks(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.randint(-4, 4, shape, generator=generator)
    weight = (torch.randn(shape, generator=generator) * sizes).clamp(-6e4, 6e4).to(dtype)
    data, scale = quantize_fp8(weight)
    expected, _ = quantized.block_fp8(weight.float(), np.random.default_rng(0))
    assert torch.equal(data.view(torch.uint8), expected["weight"].view(torch.uint8))
    assert torch.equal(scale, expected["weight_scale_inv"])


@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-38, 3e38])
def test_numbers_at_the_ends(value: float) -> None:
    """Zeros and what is as small stay numbers, and the greatest numbers do not become infinite."""
    weight = torch.full((130, 4), value)
    data, scale = quantize_fp8(weight)
    again = data.float() * scale.repeat_interleave(128, 0)[:130]
    torch.testing.assert_close(again, weight, atol=1e-38, rtol=1e-6)


@pytest.mark.parametrize(
    ("stored", "wanted", "words"),
    [
        (None, "awq", "not quantised, and only fp8"),
        (None, "mxfp4", "not quantised, and only fp8"),
        (None, "fp9", "not quantised, and only fp8"),
        ("awq", "fp8", "quantised with awq, and are served as they are"),
        ("fp8", "gptq", "quantised with fp8, and are served as they are"),
    ],
)
def test_other_formats_are_refused(
    stored: str | None, wanted: str, words: str, tmp_path: Path
) -> None:
    folder = tiny_models.make("llama", tmp_path)
    if stored is not None:
        config = quantized.FORMATS[stored][1]
        tiny_models.edit_config(folder, quantization_config=config)
    with pytest.raises(ModelError, match=words) as refused:
        read_spec(folder, None, wanted)
    assert refused.value.param == "quantization"


def test_the_format_of_a_checkpoint_may_be_said(tmp_path: Path) -> None:
    folder = tiny_models.make("llama", tmp_path)
    tiny_models.edit_config(folder, quantization_config=quantized.FORMATS["fp8-blocks"][1])
    assert read_spec(folder, None, "fp8") == read_spec(folder)
