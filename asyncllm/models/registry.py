"""The supported architectures. Imports no torch.

To add a model:

1. ``config/``: a struct with the fields of its config.json, on top of ``DecoderConfig`` when it has
   rotary positions; defaults are those of its own configuration class.
2. ``families/``: a ``CausalLM`` (``base.py``), for most families a ``DecoderLM`` or
   ``MoeDecoderLM`` that overrides what differs from Llama. Name modules as the checkpoint does, so
   that the loader finds its tensors.
3. A ``Family`` in ``FAMILIES`` below, with the names that ``architectures`` has in config.json.
4. ``tests/support/models/tiny_models.py``: a tiny configuration; the parity tests then cover it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from asyncllm.errors import ModelError
from asyncllm.models.config.base import Config
from asyncllm.models.config.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from asyncllm.models.config.gemma4 import Gemma4Config, Gemma4UnifiedConfig
from asyncllm.models.config.glm import Glm4MoeConfig, GlmConfig
from asyncllm.models.config.gpt_oss import GptOssConfig
from asyncllm.models.config.granite import GraniteConfig, GraniteHybridConfig, GraniteMoeConfig
from asyncllm.models.config.lfm2 import Lfm2Config, Lfm2MoeConfig
from asyncllm.models.config.llama import LlamaConfig, SeedOssConfig, SmolLM3Config
from asyncllm.models.config.mistral import Ministral3Config, MistralConfig, MixtralConfig
from asyncllm.models.config.nemotron_h import NemotronHConfig
from asyncllm.models.config.olmo import Olmo2Config, Olmo3Config, OlmoeConfig
from asyncllm.models.config.opt import OPTConfig
from asyncllm.models.config.phi3 import Phi3Config
from asyncllm.models.config.qwen import (
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)
from asyncllm.models.config.qwen3_next import Qwen3_5Config, Qwen3_5MoeConfig, Qwen3NextConfig
from asyncllm.models.config.starcoder2 import Starcoder2Config
from asyncllm.models.unsupported import lacking, nearest

if TYPE_CHECKING:
    from asyncllm.models.base import CausalLM


class Family(NamedTuple):
    """Checkpoints that one class serves.

    Attributes:
        title: for people.
        module, name: the class ``name`` in ``asyncllm.models.families.<module>``.
        config: the type of its config.json.
        architectures: names of language models.
        backbones: names of models without an output projection, for embeddings.
        multimodal: names of models whose text part is served.
    """

    title: str
    module: str
    name: str
    config: type[Config]
    architectures: tuple[str, ...]
    backbones: tuple[str, ...] = ()
    multimodal: tuple[str, ...] = ()


FAMILIES = (
    Family("OPT", "opt", "OPTForCausalLM", OPTConfig, ("OPTForCausalLM",)),
    Family(
        "Llama 2, 3",
        "llama",
        "LlamaForCausalLM",
        LlamaConfig,
        ("LlamaForCausalLM",),
        ("LlamaModel",),
    ),
    Family("SmolLM3", "llama", "LlamaForCausalLM", SmolLM3Config, ("SmolLM3ForCausalLM",)),
    Family("Seed-OSS", "llama", "SeedOssForCausalLM", SeedOssConfig, ("SeedOssForCausalLM",)),
    Family(
        "Mistral, Ministral",
        "mistral",
        "MistralForCausalLM",
        MistralConfig,
        ("MistralForCausalLM", "MinistralForCausalLM"),
        ("MistralModel",),
    ),
    Family(
        "Mistral 3, Ministral 3",
        "mistral",
        "Ministral3ForCausalLM",
        Ministral3Config,
        ("Ministral3ForCausalLM",),
        multimodal=("Mistral3ForConditionalGeneration",),
    ),
    Family("Mixtral", "mistral", "MixtralForCausalLM", MixtralConfig, ("MixtralForCausalLM",)),
    Family(
        "Qwen2, Qwen2.5",
        "llama",
        "Qwen2ForCausalLM",
        Qwen2Config,
        ("Qwen2ForCausalLM",),
        ("Qwen2Model",),
    ),
    Family(
        "Qwen2-VL, Qwen2.5-VL",
        "llama",
        "Qwen2ForCausalLM",
        Qwen2VLConfig,
        (),
        multimodal=("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"),
    ),
    Family(
        "Qwen2-MoE", "qwen_moe", "Qwen2MoeForCausalLM", Qwen2MoeConfig, ("Qwen2MoeForCausalLM",)
    ),
    Family(
        "Qwen3", "qwen3", "Qwen3ForCausalLM", Qwen3Config, ("Qwen3ForCausalLM",), ("Qwen3Model",)
    ),
    Family(
        "Qwen3-VL",
        "qwen3",
        "Qwen3ForCausalLM",
        Qwen3VLConfig,
        (),
        multimodal=("Qwen3VLForConditionalGeneration",),
    ),
    Family(
        "Qwen3-MoE, Qwen3-Coder",
        "qwen_moe",
        "Qwen3MoeForCausalLM",
        Qwen3MoeConfig,
        ("Qwen3MoeForCausalLM",),
    ),
    Family(
        "Qwen3-VL-MoE",
        "qwen_moe",
        "Qwen3MoeForCausalLM",
        Qwen3VLMoeConfig,
        (),
        multimodal=("Qwen3VLMoeForConditionalGeneration",),
    ),
    Family(
        "Qwen3-Next, Qwen3-Coder-Next",
        "qwen3_next",
        "Qwen3NextForCausalLM",
        Qwen3NextConfig,
        ("Qwen3NextForCausalLM",),
    ),
    Family(
        "Qwen3.5, 3.6, 3.8",
        "qwen3_next",
        "Qwen3_5ForCausalLM",
        Qwen3_5Config,
        ("Qwen3_5ForCausalLM",),
        multimodal=("Qwen3_5ForConditionalGeneration",),
    ),
    Family(
        "Qwen3.5-MoE, 3.6-MoE",
        "qwen3_next",
        "Qwen3_5ForCausalLM",
        Qwen3_5MoeConfig,
        ("Qwen3_5MoeForCausalLM",),
        multimodal=("Qwen3_5MoeForConditionalGeneration",),
    ),
    Family("LFM2", "lfm2", "Lfm2ForCausalLM", Lfm2Config, ("Lfm2ForCausalLM",)),
    Family("LFM2-MoE", "lfm2", "Lfm2ForCausalLM", Lfm2MoeConfig, ("Lfm2MoeForCausalLM",)),
    Family("Gemma", "gemma", "GemmaForCausalLM", GemmaConfig, ("GemmaForCausalLM",)),
    Family(
        "Gemma 2",
        "gemma",
        "Gemma2ForCausalLM",
        Gemma2Config,
        ("Gemma2ForCausalLM",),
        ("Gemma2Model",),
    ),
    Family(
        "Gemma 3",
        "gemma",
        "Gemma3ForCausalLM",
        Gemma3Config,
        ("Gemma3ForCausalLM",),
        multimodal=("Gemma3ForConditionalGeneration",),
    ),
    Family(
        "Gemma 4",
        "gemma4",
        "Gemma4ForCausalLM",
        Gemma4Config,
        ("Gemma4ForCausalLM",),
        multimodal=("Gemma4ForConditionalGeneration",),
    ),
    Family(
        "Gemma 4 12B",
        "gemma4",
        "Gemma4ForCausalLM",
        Gemma4UnifiedConfig,
        ("Gemma4UnifiedForCausalLM",),
        multimodal=("Gemma4UnifiedForConditionalGeneration",),
    ),
    Family("Phi-3, Phi-4", "phi3", "Phi3ForCausalLM", Phi3Config, ("Phi3ForCausalLM",)),
    Family("OLMo 2", "olmo", "Olmo2ForCausalLM", Olmo2Config, ("Olmo2ForCausalLM",)),
    Family("OLMo 3", "olmo", "Olmo2ForCausalLM", Olmo3Config, ("Olmo3ForCausalLM",)),
    Family("OLMoE", "olmo", "OlmoeForCausalLM", OlmoeConfig, ("OlmoeForCausalLM",)),
    Family("Granite 3", "granite", "GraniteForCausalLM", GraniteConfig, ("GraniteForCausalLM",)),
    Family(
        "Granite 3 MoE",
        "granite",
        "GraniteForCausalLM",
        GraniteMoeConfig,
        ("GraniteMoeForCausalLM", "GraniteMoeSharedForCausalLM"),
    ),
    Family(
        "Granite 4",
        "granite",
        "GraniteHybridForCausalLM",
        GraniteHybridConfig,
        ("GraniteMoeHybridForCausalLM",),
    ),
    Family(
        "Nemotron-H, Nemotron 3 Nano",
        "nemotron_h",
        "NemotronHForCausalLM",
        NemotronHConfig,
        ("NemotronHForCausalLM",),
    ),
    Family("GLM-4", "glm", "GlmForCausalLM", GlmConfig, ("GlmForCausalLM",)),
    Family("GLM-4-0414", "glm", "Glm4ForCausalLM", GlmConfig, ("Glm4ForCausalLM",)),
    Family(
        "GLM-4.5, 4.6, 4.7", "glm", "Glm4MoeForCausalLM", Glm4MoeConfig, ("Glm4MoeForCausalLM",)
    ),
    Family("gpt-oss", "gpt_oss", "GptOssForCausalLM", GptOssConfig, ("GptOssForCausalLM",)),
    Family(
        "StarCoder2",
        "starcoder2",
        "Starcoder2ForCausalLM",
        Starcoder2Config,
        ("Starcoder2ForCausalLM",),
    ),
)

#: The family of each name that ``architectures`` may have.
ARCHITECTURES = {
    name: family
    for family in FAMILIES
    for name in (*family.architectures, *family.backbones, *family.multimodal)
}


def find(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        ModelError: it is not supported; the message says what it lacks, if that is known, and the
            name of the nearest one that is.
    """
    if architecture not in ARCHITECTURES:
        lacks, near = lacking(architecture), nearest(architecture, ARCHITECTURES)
        raise ModelError(
            f"architecture {architecture!r} is not supported{lacks}{near}; "
            "'asyncllm models' lists those that are"
        )
    return ARCHITECTURES[architecture]


def is_backbone(architecture: str) -> bool:
    """Whether its checkpoints have no output projection."""
    return architecture in find(architecture).backbones


def is_multimodal(architecture: str) -> bool:
    """Whether only the text part of its checkpoints is served."""
    return architecture in find(architecture).multimodal


def model_class(architecture: str) -> type[CausalLM]:
    """The model of an architecture; imports its module, and with it torch.

    Raises:
        ModelError: as ``find``.
    """
    family = find(architecture)
    module = importlib.import_module(f"asyncllm.models.families.{family.module}")
    found: type[CausalLM] = getattr(module, family.name)
    return found
