"""Reading a folder: what it says, both spellings of rotary settings, and what cannot be served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncllm.errors import ModelError
from asyncllm.executor.sim.shape import shape_of
from asyncllm.models import registry
from asyncllm.models.config.base import DecoderConfig, MoeConfig
from asyncllm.models.config.qwen3_next import Qwen3NextConfig
from asyncllm.models.rope import RopeConfig
from asyncllm.models.spec import ModelSpec, read_spec
from tests.support.models import tiny_models
from tests.support.models.configs import GEMMA4_26B_A4B, QWEN3_30B_A3B, QWEN36_27B, config_folder
from tests.support.models.tiny_models import edit_config


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return tiny_models.make("llama", tmp_path / "llama")


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_every_family_is_read(family: str, tmp_path: Path) -> None:
    spec = read_spec(tiny_models.make(family, tmp_path))
    assert spec.architecture in registry.ARCHITECTURES
    assert (spec.vocab_size, spec.hidden_size) == (384, 64)
    assert spec.max_position_embeddings == 1024
    assert spec.eos_token_ids == (tiny_models.EOS, tiny_models.OTHER_EOS)
    assert spec.bos_token_id == tiny_models.BOS
    assert spec.dtype == "float32"
    assert (spec.sampling.temperature, spec.sampling.top_p) == (0.7, 0.9)
    assert (spec.sampling.top_k, spec.sampling.repetition_penalty) == (20, None)


def test_bytes_of_the_kv_cache(tmp_path: Path) -> None:
    spec = read_spec(tiny_models.make("mistral", tmp_path))
    assert spec.kv_bytes_per_token(2) == 3 * 2 * 2 * 24 * 2


def test_end_tokens_of_both_files_count(llama: Path) -> None:
    edit_config(llama, eos_token_id=[7, 2])
    assert read_spec(llama).eos_token_ids == (2, 3, 7)
    (llama / "generation_config.json").unlink()
    spec = read_spec(llama)
    assert spec.eos_token_ids == (7, 2)
    assert spec.sampling.temperature is None
    edit_config(llama, eos_token_id=None, bos_token_id=None)
    assert read_spec(llama).eos_token_ids == ()
    assert read_spec(llama).bos_token_id is None


def test_sampling_values_are_those_of_generation_config(llama: Path) -> None:
    values = {"temperature": 0.3, "top_p": 0.8, "top_k": 9, "min_p": 0.1, "repetition_penalty": 1.2}
    (llama / "generation_config.json").write_text(json.dumps(values))
    assert msgspec.structs.asdict(read_spec(llama).sampling) == {"do_sample": None, **values}


def test_the_older_name_of_dtype(llama: Path) -> None:
    edit_config(llama, dtype=None, torch_dtype="bfloat16")
    assert read_spec(llama).dtype == "bfloat16"


def test_overrides_take_the_place_of_values(llama: Path) -> None:
    edit_config(llama, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    for name in ("rope_scaling", "rope_parameters"):
        spec = read_spec(llama, {name: yarn, "vocab_size": 300})
        assert isinstance(spec.config, DecoderConfig)
        rope = spec.config.rope(0)
        assert rope is not None
        assert (rope.rope_type, rope.rope_theta) == ("yarn", 5e5)
        assert (spec.max_position_embeddings, spec.vocab_size) == (4096, 300)
    with pytest.raises(ModelError, match="vocab_size"):
        read_spec(llama, {"vocab_size": "many"})


def test_overrides_reach_into_nested_configurations(llama: Path) -> None:
    outer = {"architectures": ["Gemma3ForConditionalGeneration"]}
    spec = read_spec(tiny_models.make("gemma3", llama.parent / "gemma3"))
    config = json.loads((llama.parent / "gemma3" / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**outer, "text_config": config}))
    changed = read_spec(llama, {"text_config": {"vocab_size": 300}})
    assert (changed.vocab_size, changed.hidden_size) == (300, spec.hidden_size)


#: What config.json of older transformers has where today's has ``rope_parameters`` and
#: ``layer_types``.
OLD_SPELLINGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10_000.0, "rope_scaling": None},
    "llama3": {
        "rope_theta": 500_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"rope_theta": 10_000},
    "gemma2": {"rope_theta": 10_000.0},
    "gemma3": {
        "rope_theta": 1_000_000,
        "rope_local_base_freq": 10_000,
        "rope_scaling": {"type": "linear", "factor": 8},
        "sliding_window_pattern": 6,
    },
    "phi3": {"rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
}


@pytest.mark.parametrize("family", OLD_SPELLINGS)
def test_both_spellings_mean_the_same(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path)
    new = _decoder(read_spec(folder))
    edit_config(folder, rope_parameters=None, layer_types=None, **OLD_SPELLINGS[family])
    old = _decoder(read_spec(folder))
    for layer in range(new.num_hidden_layers):
        assert old.rope(layer) == new.rope(layer)
        assert old.window(layer) == new.window(layer)


def test_qwen3_coder_is_a_qwen3_moe(tmp_path: Path) -> None:
    """With what its config.json has beyond, such as null for what is unused."""
    changes: dict[str, Any] = {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 262_144,
        "max_window_layers": 28,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "qkv_bias": False,
        "rope_scaling": None,
        "rope_theta": 10_000_000,
        "shared_expert_intermediate_size": 0,
        "sliding_window": None,
        "use_qk_norm": True,
        "use_sliding_window": False,
    }
    spec = read_spec(config_folder(tmp_path, QWEN3_30B_A3B, **changes))
    config = _decoder(spec)
    assert (spec.max_position_embeddings, _rope(config, 47).rope_theta) == (262_144, 1e7)
    assert all(isinstance(config, MoeConfig) and config.is_sparse(layer) for layer in range(48))
    assert shape_of("auto", spec).stored_params == pytest.approx(30.5e9, rel=0.01)


def test_gemma4_names_sizes_by_kind_or_by_layer(tmp_path: Path) -> None:
    by_kind = _decoder(read_spec(config_folder(tmp_path, GEMMA4_26B_A4B)))
    sizes = {str(i): {"head_dim": 512, "num_key_value_heads": 2} for i in range(5, 30, 6)}
    text = {**GEMMA4_26B_A4B["text_config"], "per_layer_config": sizes}
    text |= {"global_head_dim": None, "num_global_key_value_heads": None}
    by_layer = _decoder(read_spec(config_folder(tmp_path, GEMMA4_26B_A4B, text_config=text)))
    for config in (by_kind, by_layer):
        layers = [
            (config.window(i), config.head_size(i), config.kv_heads(i), config.values_are_keys(i))
            for i in range(30)
        ]
        assert layers == ([(1024, 256, 8, False)] * 5 + [(None, 512, 2, True)]) * 5


def test_bytes_of_the_kv_cache_of_layers_of_different_shapes(tmp_path: Path) -> None:
    spec = read_spec(config_folder(tmp_path, GEMMA4_26B_A4B))
    assert shape_of("auto", spec).stored_params == pytest.approx(25.2e9, rel=0.01)
    assert spec.kv_bytes_per_token(2) == 2 * 2 * (25 * 8 * 256 + 5 * 2 * 512)
    text = {**GEMMA4_26B_A4B["text_config"], "num_kv_shared_layers": 12}
    spec = read_spec(config_folder(tmp_path, GEMMA4_26B_A4B, text_config=text))
    assert spec.kv_bytes_per_token(2) == 2 * 2 * (15 * 8 * 256 + 3 * 2 * 512)
    assert [_decoder(spec).kv_source(i) for i in (17, 18, 23, 28, 29)] == [None, 16, 17, 16, 17]


def test_early_phi3_calls_longrope_su(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    folder = tiny_models.make("phi3", tmp_path)
    edit_config(
        folder,
        rope_parameters=None,
        rope_theta=10_000.0,
        rope_scaling={"type": "su", **factors},
        original_max_position_embeddings=256,
    )
    rope = _rope(_decoder(read_spec(folder)), 0)
    assert (rope.rope_type, rope.rotary_dim, rope.stretch) == ("longrope", 16, 4.0)


def test_yarn_lengthens_the_context(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    folder = tiny_models.make("qwen3", tmp_path)
    edit_config(folder, rope_parameters=None, rope_theta=1e6, rope_scaling=yarn)
    assert read_spec(folder).max_position_embeddings == 4096


def test_multimodal_gemma3_may_leave_out_defaults(tmp_path: Path) -> None:
    """As google/gemma-3-4b-it has it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    _write(
        tmp_path,
        architectures=["Gemma3ForConditionalGeneration"],
        eos_token_id=[1, 106],
        torch_dtype="bfloat16",
        text_config=text,
    )
    spec = read_spec(tmp_path)
    config = _decoder(spec)
    assert (spec.vocab_size, spec.kv_bytes_per_token(2)) == (262_208, 34 * 2 * 4 * 256 * 2)
    assert (spec.max_position_embeddings, spec.eos_token_ids) == (131_072, (1, 106))
    assert spec.dtype == "bfloat16"
    assert [config.window(layer) for layer in range(6)] == [1024] * 5 + [None]
    assert (_rope(config, 0).rope_theta, _rope(config, 0).stretch) == (10_000.0, 1.0)
    assert (_rope(config, 5).rope_theta, _rope(config, 5).stretch) == (1_000_000.0, 8.0)


def test_a_window_as_long_as_the_context_is_none(tmp_path: Path) -> None:
    """As in Phi-3-mini-128k, whose window is twice its context."""
    config = _decoder(read_spec(tiny_models.make("phi3", tmp_path, sliding_window=1024)))
    assert config.window(0) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["'MambaForCausalLM'", "recurrent"]),
        ({"architectures": []}, ["config.json", "architectures"]),
        ({"architectures": None}, ["config.json", "architectures"]),
        ({"hidden_size": None}, ["config.json", "hidden_size"]),
        ({"hidden_size": "many"}, ["config.json", "hidden_size"]),
        ({"num_attention_heads": 0}, ["config.json", "num_attention_heads"]),
        ({"num_key_value_heads": 3}, ["config.json", "num_key_value_heads (3)"]),
        ({"quantization_config": {"quant_method": "gguf"}}, ["config.json", "quant_method"]),
        ({"rope_scaling": {"type": "spiral"}}, ["config.json", "'spiral'", "llama3"]),
        ({"rope_scaling": {"type": "linear"}}, ["config.json", "'linear'", "'factor'"]),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ["config.json", "factor"]),
        ({"head_dim": 15}, ["config.json", "15"]),
        ({"rope_scaling": {"type": "yarn", "rope_theta": 1.0}}, ["rope_theta is 1.0"]),
        ({"rope_parameters": None, "rope_theta": 0}, ["rope_theta is 0.0"]),
        ({"rope_scaling": {"type": "linear", "factor": -2.0}}, ["factor", "-2.0", "positive"]),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}},
            ["original_max_position_embeddings is 0"],
        ),
        ({"rope_scaling": {"type": "yarn", "beta_fast": -3.0}}, ["beta_fast", "-3.0"]),
        ({"hidden_act": "gelu_new"}, ["config.json", "'gelu_new'", "silu"]),
        ({"eos_token_id": "</s>"}, ["config.json", "eos_token_id"]),
    ],
)
def test_what_cannot_be_served(changes: dict[str, Any], words: list[str], llama: Path) -> None:
    edit_config(llama, **changes)
    _assert_refused(llama, words)


@pytest.mark.parametrize("factor", [2.0, 0, "half"])
def test_a_share_of_a_head_that_is_none(factor: object, tmp_path: Path) -> None:
    folder = tiny_models.make("glm4", tmp_path)
    edit_config(folder, rope_parameters={"rope_type": "default", "partial_rotary_factor": factor})
    _assert_refused(folder, ["config.json", f"partial_rotary_factor is {factor!r}"])


def test_families_that_rotate_whole_heads_ignore_a_share_as_transformers_does(llama: Path) -> None:
    expected = _rope(_decoder(read_spec(llama)), 0).rotary_dim
    edit_config(llama, partial_rotary_factor=0.5)
    assert _rope(_decoder(read_spec(llama)), 0).rotary_dim == expected


def test_ministral3_says_how_it_turns(tmp_path: Path) -> None:
    folder = tiny_models.make("ministral3", tmp_path)
    edit_config(folder, rope_parameters=None)
    _assert_refused(folder, ["config.json", "rope_parameters are missing"])


def test_unknown_layer_types(tmp_path: Path) -> None:
    folder = tiny_models.make("gemma2", tmp_path)
    edit_config(folder, layer_types=["linear_attention"] * 4)
    _assert_refused(folder, ["config.json", "'linear_attention'"])
    edit_config(folder, layer_types=["full_attention"])
    _assert_refused(folder, ["config.json", "layer_types has 1 entries for 4 layers"])
    edit_config(folder, layer_types=["full_attention"] * 5)
    _assert_refused(folder, ["config.json", "layer_types has 5 entries for 4 layers"])


def test_layers_of_nemotron(tmp_path: Path) -> None:
    folder = tiny_models.make("nemotron_h", tmp_path)
    edit_config(
        folder, layers_block_type=None, hybrid_override_pattern="MEM*E-", num_hidden_layers=6
    )
    config = read_spec(folder).config
    assert [config.has_attention(layer) for layer in range(6)] == [False] * 3 + [True] + [False] * 2
    assert [config.state(layer) is not None for layer in range(6)] == [True, False, True] + [
        False
    ] * 3
    for wrong, words in (
        ({"hybrid_override_pattern": "MXM*E-"}, ["hybrid_override_pattern has 'X'"]),
        ({"hybrid_override_pattern": None}, ["neither layers_block_type nor"]),
        ({"num_hidden_layers": 7}, ["hybrid_override_pattern has 6 entries for 7 layers"]),
        ({"mlp_hidden_act": "silu"}, ["mlp_hidden_act is 'silu'", "only 'relu2'"]),
        ({"mamba_hidden_act": "relu"}, ["mamba_hidden_act is 'relu'"]),
        ({"moe_latent_size": 32}, ["moe_latent_size"]),
        ({"n_groups": 3}, ["mamba_num_heads (8)", "n_groups (3)"]),
    ):
        before = json.loads((folder / "config.json").read_text())
        edit_config(folder, **wrong)
        _assert_refused(folder, ["config.json", *words])
        (folder / "config.json").write_text(json.dumps(before))


@pytest.mark.parametrize("family", ["qwen3_5", "lfm2", "granite_hybrid"])
def test_recurrent_layers_have_the_one_activation_that_is_built(
    family: str, tmp_path: Path
) -> None:
    folder = tiny_models.make(family, tmp_path)
    edit_config(folder, hidden_act="gelu")
    _assert_refused(folder, ["config.json", "hidden_act is 'gelu'", "only 'silu'"])


def test_longrope_needs_a_factor_for_every_frequency(tmp_path: Path) -> None:
    folder = tiny_models.make("phi3", tmp_path)
    scaling = {"type": "longrope", "short_factor": [1.0] * 6, "long_factor": [1.0] * 5}
    edit_config(folder, rope_scaling=scaling, partial_rotary_factor=0.75)
    _assert_refused(folder, ["config.json", "long_factor has 5 values, not 6"])


def test_broken_files(llama: Path, tmp_path: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        (llama / name).write_text('{"temperature": ')
        _assert_refused(llama, [name, "not valid JSON"])
        (llama / name).write_text("[]")
        _assert_refused(llama, [name, "not a JSON object"])
        (llama / name).write_bytes(b"\xff\xfe")
        _assert_refused(llama, [name, "not valid JSON"])
        if name != "config.json":
            (llama / name).unlink()
    _assert_refused(tmp_path / "nowhere", ["there is no folder", "nowhere"])


def test_the_modules_around_the_models_import_without_torch() -> None:
    names = "config", "loading.hub", "registry", "rope", "spec"
    code = "; ".join(f"import asyncllm.models.{name}" for name in names)
    _run(f"{code}; import sys; assert 'torch' not in sys.modules")


@pytest.mark.parametrize("architecture", registry.ARCHITECTURES)
def test_a_family_imports_no_other(architecture: str) -> None:
    module = registry.find(architecture).module
    others = {entry.module for entry in registry.ARCHITECTURES.values()} - {module}
    source = Path(registry.__file__).with_name("families").joinpath(f"{module}.py").read_text()
    assert not [name for name in others if f"asyncllm.models.families.{name} " in source]


def test_classes_are_found_by_architecture() -> None:
    for architecture, entry in registry.ARCHITECTURES.items():
        assert registry.model_class(architecture).__name__ == entry.name
    with pytest.raises(ModelError, match="'Unheard'"):
        registry.model_class("Unheard")


def _decoder(spec: ModelSpec) -> DecoderConfig:
    assert isinstance(spec.config, DecoderConfig)
    return spec.config


def _rope(config: DecoderConfig, layer: int) -> RopeConfig:
    rope = config.rope(layer)
    assert rope is not None
    return rope


def _write(folder: Path, **config: Any) -> None:
    (folder / "config.json").write_text(json.dumps(config))


def _run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def _assert_refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        read_spec(folder)
    for word in words:
        assert word in str(caught.value)


def test_the_state_of_a_model_with_delta_nets_does_not_grow_and_is_float32(tmp_path: Path) -> None:
    """That of Qwen3.6-27B: 48 layers of 48 matrices of 128 x 128, and 4 inputs of each channel."""
    spec = read_spec(config_folder(tmp_path, QWEN36_27B))
    channels = 2 * 16 * 128 + 48 * 128
    assert spec.state_bytes(2) == 48 * (48 * 128 * 128 * 4 + 4 * channels * 2)
    assert spec.kv_bytes_per_token(2) == 16 * 2 * 4 * 256 * 2
    assert isinstance(spec.config, Qwen3NextConfig)
    assert spec.config.state(3) is None
    rope = spec.config.rope(3)
    assert rope is not None
    assert rope.rotary_dim == 64
