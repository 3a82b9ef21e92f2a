"""Checkpoints under other names, their config.json as published, and values that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from asyncllm import LLM
from asyncllm.errors import ModelError
from asyncllm.executor.sim.shape import shape_of
from asyncllm.models import registry
from asyncllm.models.config.base import DecoderConfig
from asyncllm.models.config.mistral import Ministral3Config
from asyncllm.models.loading.loader import load_model, make_model
from asyncllm.models.spec import ModelSpec, read_spec
from tests.support.models import tiny_models
from tests.support.models.tiny_models import edit_config
from tests.support.text import tokenizers as tokenizers_for_tests

#: Fields of published config.json files, and what is read from them: (window and rotary dimension
#: of the first layers, context).
PUBLISHED: dict[str, tuple[dict[str, Any], list[tuple[int | None, int | None]], int]] = {
    "microsoft/phi-4": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "num_hidden_layers": 40,
            "max_position_embeddings": 16384,
            "original_max_position_embeddings": 16384,
            "rope_theta": 250000,
            "rope_scaling": None,
            "sliding_window": None,
            "vocab_size": 100352,
        },
        [(None, 128)] * 2,
        16384,
    ),
    "microsoft/Phi-4-mini-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"],
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_hidden_layers": 32,
            "max_position_embeddings": 131072,
            "original_max_position_embeddings": 4096,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1] * 48,
                "long_factor": [2.5] * 48,
            },
            "sliding_window": 262144,
            "tie_word_embeddings": True,
            "vocab_size": 200064,
        },
        [(None, 96)] * 2,
        131072,
    ),
    "HuggingFaceTB/SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"],
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "num_hidden_layers": 36,
            "max_position_embeddings": 65536,
            "no_rope_layers": [1, 1, 1, 0] * 9,
            "rope_theta": 5000000.0,
            "vocab_size": 128256,
        },
        [(None, 128)] * 3 + [(None, None)],
        65536,
    ),
    "allenai/Olmo-3-7B": (
        {
            "architectures": ["Olmo3ForCausalLM"],
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "num_hidden_layers": 32,
            "max_position_embeddings": 65536,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "attention_factor": 1.2079441541679836,
            },
            "rope_theta": 500000,
            "sliding_window": 4096,
            "vocab_size": 100278,
        },
        [(4096, 128)] * 3 + [(None, 128)],
        65536,
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": (
        {
            "architectures": ["Qwen2_5_VLForConditionalGeneration"],
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "num_hidden_layers": 28,
            "max_position_embeddings": 128000,
            "rope_theta": 1000000.0,
            "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
            "sliding_window": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": False,
            "vocab_size": 152064,
        },
        [(None, 128)] * 2,
        128000,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str, tmp_path: Path) -> None:
    fields, layers, context = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = _decoder(read_spec(tmp_path))
    for layer, (window, rotary_dim) in enumerate(layers):
        rope = config.rope(layer)
        assert (config.window(layer), rope and rope.rotary_dim) == (window, rotary_dim)
    assert config.context_length == context


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv is 8.0"]),
        ("olmoe", {"num_experts_per_tok": 9}, ["num_experts_per_tok is 9", "num_experts is 8"]),
        ("glm4_moe", {"n_group": 3}, ["n_group 3", "8 experts"]),
        ("glm4_moe", {"n_group": 8, "topk_group": 8}, ["n_group 8"]),
        ("glm4_moe", {"n_group": 2, "topk_group": 3}, ["topk_group is 3 of 2"]),
        ("glm4_moe", {"n_group": 4, "topk_group": 1}, ["topk_group is 1", "2 experts", "3"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers has 2 entries for 4 layers"]),
        ("gemma", {"use_bidirectional_attention": True}, ["bidirectional"]),
        ("qwen2", {"is_causal": False}, ["bidirectional"]),
        ("qwen3", {"rope_parameters": {"rope_type": "mrope"}}, ["'mrope'"]),
        ("mixtral", {"num_local_experts": 4096}, ["num_local_experts 4096", "8 experts"]),
        ("granite", {"hidden_act": "snake"}, ["'snake'"]),
        ("starcoder2", {"sliding_window": -1}, ["sliding_window"]),
        ("gemma4", {"use_bidirectional_attention": "all"}, ["bidirectional"]),
        ("gemma4", {"num_kv_shared_layers": 4}, ["is 4 of 5", "layer 1 has no full_attention"]),
        ("gemma4", {"num_kv_shared_layers": 6}, ["num_kv_shared_layers is 6"]),
        ("gemma4_moe", {"top_k_experts": 9}, ["top_k_experts is 9", "num_experts is 8"]),
        ("gemma4_moe", {"moe_intermediate_size": None}, ["needs num_experts"]),
    ],
)
def test_values_that_are_refused(
    family: str, changes: dict[str, Any], words: list[str], tmp_path: Path
) -> None:
    folder = tiny_models.make(family, tmp_path)
    edit_config(folder, **changes)
    with pytest.raises(ModelError) as caught:
        load_model(folder, read_spec(folder), torch.float32, "cpu")
    assert all(word in str(caught.value) for word in words), caught.value


def test_projections_that_no_layer_uses_are_not_read(tmp_path: Path) -> None:
    """Published checkpoints have those of layers that read the keys and values of others."""
    folder = tiny_models.make("gemma4", tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    shared = "model.layers.4.self_attn."
    assert f"{shared}k_proj.weight" not in weights
    for name in ("k_proj.weight", "k_norm.weight", "v_proj.weight"):
        weights[shared + name] = torch.zeros(7)
    save_file(weights, file, metadata={"format": "pt"})
    load_model(folder, read_spec(folder), torch.float32, "cpu")
    weights["model.layers.3.self_attn.o_proj.bias"] = torch.zeros(7)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"unexpected 'model.layers.3.self_attn.o_proj.bias'"):
        load_model(folder, read_spec(folder), torch.float32, "cpu")


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_the_simulated_device_knows_the_number_of_parameters(family: str, tmp_path: Path) -> None:
    """Of matrices, without those of positions."""
    spec = read_spec(tiny_models.make(family, tmp_path))
    model = make_model(spec, torch.bfloat16, torch.device("meta"))
    named = model.named_parameters()
    matrices = {name: p for name, p in named if p.dim() > 1 and not name.endswith("_bias")}
    count = sum(p.numel() for name, p in matrices.items() if "embed_positions" not in name)
    assert shape_of("auto", spec).stored_params == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("DeepseekV3ForCausalLM", ["latent attention"]),
        ("OlmoHybridForCausalLM", ["recurrent", "Olmo3ForCausalLM"]),
        ("Gemma3nForConditionalGeneration", ["share", "Gemma3ForCausalLM"]),
        ("LlamaForSequenceClassification", ["gives scores", "LlamaForCausalLM"]),
        ("ModernBertModel", ["bidirectional"]),
        ("Gemma3TextModel", ["bidirectional", "Gemma3ForCausalLM"]),
        ("Unheard", ["'Unheard'", "asyncllm models"]),
    ],
)
def test_an_unknown_architecture_is_told_what_it_lacks(name: str, words: list[str]) -> None:
    with pytest.raises(ModelError) as caught:
        registry.find(name)
    assert all(word in str(caught.value) for word in words), caught.value


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    folder = tiny_models.make("glm4_moe", tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}, file)
    load_model(folder, read_spec(folder), torch.float32, "cpu")
    save_file(weights | {"model.layers.4.eh_proj.weight": torch.ones(64, 128)}, file)
    with pytest.raises(ModelError, match="unexpected"):
        load_model(folder, read_spec(folder), torch.float32, "cpu")


def test_the_heads_that_predict_further_tokens_of_qwen_are_not_loaded(tmp_path: Path) -> None:
    folder = tiny_models.make("qwen3_5", tmp_path)
    file = folder / "model.safetensors"
    further = {
        "mtp.fc.weight": torch.ones(64, 128),
        "mtp.layers.0.mlp.up_proj.weight": torch.ones(9),
    }
    save_file(load_file(file) | further, file)
    load_model(folder, read_spec(folder), torch.float32, "cpu")


def test_the_outer_configuration_says_whether_embeddings_are_tied(tmp_path: Path) -> None:
    folder = tiny_models.make("mistral3_vision", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, text_config=config["text_config"] | {"tie_word_embeddings": True})
    assert load_model(folder, read_spec(folder), torch.float32, "cpu").lm_head is not None


def test_a_projection_that_is_not_the_embedding_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_models.make("llama3", tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    embedding = weights["model.embed_tokens.weight"]
    save_file(weights | {"lm_head.weight": embedding.clone()}, file)
    assert load_model(folder, read_spec(folder), torch.float32, "cpu").lm_head is None
    assert not caplog.records
    save_file(weights | {"lm_head.weight": -embedding}, file)
    projection = load_model(folder, read_spec(folder), torch.float32, "cpu").lm_head
    assert projection is not None
    assert isinstance(projection.weight, torch.Tensor)
    assert torch.equal(projection.weight, tiny_models.reference(folder).lm_head.weight)
    assert "differs from the token embedding" in caplog.text


def test_an_embedding_model_may_lack_the_projection_it_claims(tmp_path: Path) -> None:
    folder = sentence_transformers(tmp_path, {"pooling_mode_lasttoken": True})
    edit_config(folder, architectures=["Qwen3ForCausalLM"])
    assert not read_spec(folder).config.tie_word_embeddings
    assert load_model(folder, read_spec(folder), torch.float32, "cpu").lm_head is None
    (folder / "modules.json").unlink()
    with pytest.raises(ModelError, match=r"missing 'lm_head\.weight'"):
        load_model(folder, read_spec(folder), torch.float32, "cpu")


def test_experts_as_transformers_5_writes_them(tmp_path: Path) -> None:
    family = "qwen3_moe_vision"
    published = tiny_models.make(family, tmp_path / "published")
    saved = tmp_path / "saved"
    tiny_models.save(tiny_models.reference(published), saved, 10**9)
    of_both = [
        load_model(folder, read_spec(folder), torch.float32, "cpu").state_dict()
        for folder in (published, saved)
    ]
    name = "model.language_model.layers.0.mlp.experts.down_proj"
    shapes = [load_file(f / "model.safetensors")[name].shape for f in (published, saved)]
    assert shapes[0] != shapes[1]
    assert all(torch.equal(tensor, of_both[1][name]) for name, tensor in of_both[0].items())


def test_queries_are_scaled_in_either_spelling_of_rotary_settings(tmp_path: Path) -> None:
    folder = tiny_models.make("ministral3", tmp_path)
    config = read_spec(folder).config
    assert isinstance(config, Ministral3Config)
    rope = config.rope_parameters
    edit_config(folder, rope_parameters=None, rope_scaling=rope)
    other = read_spec(folder).config
    assert isinstance(other, Ministral3Config)
    assert other.query_scaling == config.query_scaling == (0.5, 64)


def test_text_of_another_type_than_mistral(tmp_path: Path) -> None:
    folder = tiny_models.make("mistral3_vision", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    edit_config(folder, text_config=config["text_config"] | {"model_type": "mistral4"})
    with pytest.raises(ModelError, match="'mistral4' is not supported"):
        read_spec(folder)


@pytest.mark.parametrize("family", ["qwen2_5_vision", "qwen3_vision", "qwen3_moe_vision"])
def test_defaults_of_text_parts_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = tiny_models.make(family, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    theirs = type(transformers.AutoConfig.from_pretrained(folder).text_config)()
    for name in ("rope_parameters", "rms_norm_eps"):
        del text[name]
    edit_config(folder, text_config=text)
    ours = _decoder(read_spec(folder))
    rope = ours.rope(0)
    assert rope is not None
    assert rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps


def test_images_are_refused_in_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_models.make("qwen3_vision", tmp_path)
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    with LLM(folder, device="cpu", dtype="float32"):
        pass
    lines = [record.getMessage() for record in caplog.records if "images" in record.getMessage()]
    assert lines == [
        "Qwen3VLForConditionalGeneration: only its text part is served; requests with images are "
        "refused"
    ]


POOLING = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": False}
TRANSFORMER = {"name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
TOKENS = [5, 6, 7, 8]


def sentence_transformers(folder: Path, pooling: dict[str, Any], *further: str) -> Path:
    """A folder with a backbone alone, its pooling and further modules."""
    tiny_models.make("qwen3", folder)
    (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    save_file(bare, folder / "model.safetensors")
    edit_config(folder, architectures=["Qwen3Model"], tie_word_embeddings=False)
    kinds = ["Pooling", *further]
    modules = [
        {"name": kind, "path": f"{i}_{kind}/", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds, 1)
    ]
    (folder / "modules.json").write_text(json.dumps([TRANSFORMER, *modules]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING | pooling))
    return folder


@pytest.mark.parametrize(
    ("pooling", "further", "wanted"),
    [
        ({"pooling_mode_lasttoken": True}, ["Normalize"], {"pooling": "last", "normalize": True}),
        ({"pooling_mode_mean_tokens": True}, [], {"pooling": "mean", "normalize": False}),
        ({"pooling_mode": "lasttoken"}, [], {"pooling": "last", "normalize": False}),
    ],
)
def test_vectors_are_made_as_sentence_transformers_does(
    pooling: dict[str, Any], further: list[str], wanted: dict[str, Any], tmp_path: Path
) -> None:
    folder = sentence_transformers(tmp_path, pooling, *further)
    with LLM(folder, device="cpu", dtype="float32") as llm:
        got = llm.embed(TOKENS)
        np.testing.assert_allclose(got, llm.embed(TOKENS, **wanted), atol=1e-5)
        other = llm.embed(TOKENS, pooling="mean" if wanted["pooling"] == "last" else "last")
        assert not np.allclose(got, other, atol=1e-3)
        assert np.isclose(np.linalg.norm(got), 1.0) == wanted["normalize"]


@pytest.mark.parametrize(
    ("pooling", "further", "words"),
    [
        ({"pooling_mode_cls_token": True}, [], ["1_Pooling", "cls_token"]),
        ({"pooling_mode_lasttoken": True}, ["Dense"], ["modules.json", "'Dense'"]),
        ({}, [], ["1_Pooling", "lasttoken"]),
    ],
)
def test_vectors_that_are_made_in_another_way(
    pooling: dict[str, Any], further: list[str], words: list[str], tmp_path: Path
) -> None:
    folder = sentence_transformers(tmp_path, pooling, *further)
    with pytest.raises(ModelError) as caught:
        LLM(folder, device="cpu")
    assert all(word in str(caught.value) for word in words), caught.value


def _decoder(spec: ModelSpec) -> DecoderConfig:
    assert isinstance(spec.config, DecoderConfig)
    return spec.config
