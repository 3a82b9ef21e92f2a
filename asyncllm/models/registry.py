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
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncllm.errors import ModelError
from asyncllm.models.config.base import Config
from asyncllm.models.config.gemma import Gemma2Config, Gemma3Config, GemmaConfig
from asyncllm.models.config.gemma4 import Gemma4Config, Gemma4UnifiedConfig
from asyncllm.models.config.glm import Glm4MoeConfig, GlmConfig
from asyncllm.models.config.gpt_oss import GptOssConfig
from asyncllm.models.config.granite import GraniteConfig, GraniteMoeConfig
from asyncllm.models.config.llama import LlamaConfig, SeedOssConfig, SmolLM3Config
from asyncllm.models.config.mistral import Ministral3Config, MistralConfig, MixtralConfig
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
        "qwen2",
        "Qwen2ForCausalLM",
        Qwen2Config,
        ("Qwen2ForCausalLM",),
        ("Qwen2Model",),
    ),
    Family(
        "Qwen2-VL, Qwen2.5-VL",
        "qwen2",
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
    Family("GLM-4", "glm", "GlmForCausalLM", GlmConfig, ("GlmForCausalLM",)),
    Family("GLM-4-0414", "glm", "Glm4ForCausalLM", GlmConfig, ("Glm4ForCausalLM",)),
    Family(
        "GLM-4.5, 4.6, 4.7",
        "glm",
        "Glm4MoeForCausalLM",
        Glm4MoeConfig,
        ("Glm4MoeForCausalLM",),
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


#: A pattern of names, and what those models need; the first that matches holds.
_NEEDS: Final = (
    (
        r"Deepseek(V2|V3|V4|VL)|Kimi|Glm4MoeLite|GlmMoeDsa|MiniCPM3|Mistral4|LongcatFlash",
        "multi-head latent attention (MLA)",
    ),
    (
        r"OlmoHybrid|KimiLinear",
        "layers with a recurrent state (delta nets of another kind)",
    ),
    (
        r"Mamba|Jamba|Bamba|FalconH1|NemotronH|Zamba|GraniteMoeHybrid|Lfm2|Plamo2|Rwkv|xLSTM"
        r"|RecurrentGemma|MiniMaxText|MiniMaxM1",
        "layers with a recurrent or convolutional state",
    ),
    (r"Gemma4\w*Assistant", "the keys and values of the model that it drafts for"),
    (r"Gemma3n", "layers that several residual streams share (AltUp)"),
    (r"Mllama", "layers that attend to images (cross-attention)"),
    (r"Phi4M(M|ultimodal)", "adapters (LoRA) for images and sound"),
    (r"Llama4", "chunked attention and its experts"),
    (r"T5|Bart|Whisper|Marian|Pegasus|Florence|Moonshine", "an encoder beside the decoder"),
    (r"\w*(Bert|Roberta|Deberta|Electra|MPNet)|XLM|Gemma3TextModel", "bidirectional attention"),
    (r"Cohere|Command", "attention and MLP side by side (a parallel block), with layer norms"),
    (
        r"GPTNeoX|GPTJ|Falcon(ForCausalLM|Model)|Phi(ForCausalLM|Model)",
        "attention and MLP side by side (a parallel block)",
    ),
    (r"Bloom|MPT", "attention biases by distance (ALiBi)"),
    (r"ChatGLM", "code that comes with the checkpoint; those named -hf do without it"),
    (r"\w+(For(Sequence|Token)Classification|RewardModel)", "a head that gives scores"),
)

#: How alike two names are that differ in spelling only.
_SAME_NAME: Final = 0.8


def lacking(architecture: str) -> str:
    """``": it needs X, which asyncllm does not have"``, or "" if that is not known."""
    for pattern, needs in _NEEDS:
        if re.match(pattern, architecture):
            return f": it needs {needs}, which asyncllm does not have"
    return ""


def nearest(architecture: str, served: Iterable[str]) -> str:
    """``"; the nearest that is served is X"``, or "" if none has a similar name."""
    candidates = {_stem(name): name for name in reversed(list(served))}
    stem = _stem(architecture)
    same_word = [other for other, name in candidates.items() if _word(name) == _word(architecture)]
    near = get_close_matches(stem, same_word, n=1, cutoff=0.0)
    near = near or get_close_matches(stem, candidates, n=1, cutoff=_SAME_NAME)
    return f"; the nearest that is served is {candidates[near[0]]}" if near else ""


def _stem(architecture: str) -> str:
    """Its name without what it is for, in small letters."""
    purpose = r"(for(causallm|conditionalgeneration|\w+classification)|lmheadmodel|model)$"
    return re.sub(purpose, "", architecture.lower())


def _word(architecture: str) -> str:
    """The first word of its name, which is that of its family: Qwen of Qwen3MoeForCausalLM."""
    found = re.match(r"[A-Z]+[a-z]*", architecture)
    return found.group() if found else architecture
