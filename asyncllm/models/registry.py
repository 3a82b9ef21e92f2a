"""The supported architectures. Imports no torch.

To add a model:

1. ``config.py``: a struct with the fields of its config.json, on top of ``DecoderConfig`` when it
   has rotary positions; defaults are those of its own configuration class.
2. ``families/<family>.py``: a ``CausalLM`` (``base.py``), for most families a ``DecoderLM`` that
   overrides what differs from Llama. Name modules as the checkpoint does, so that the loader finds
   its tensors.
3. One line in ``ARCHITECTURES`` below: the name that ``architectures`` has in config.json.
4. ``tests/support/models/tiny_models.py``: a tiny configuration; the parity tests then cover it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, NamedTuple

from asyncllm.errors import ModelError
from asyncllm.models import config

if TYPE_CHECKING:
    from asyncllm.models.base import CausalLM


class Entry(NamedTuple):
    """The class ``name`` in ``asyncllm.models.families.<module>``, and its config."""

    module: str
    name: str
    config: type[config.Config]


ARCHITECTURES = {
    "Gemma2ForCausalLM": Entry("gemma2", "Gemma2ForCausalLM", config.Gemma2Config),
    "Gemma3ForCausalLM": Entry("gemma3", "Gemma3ForCausalLM", config.Gemma3Config),
    "Gemma3ForConditionalGeneration": Entry("gemma3", "Gemma3ForCausalLM", config.Gemma3Config),
    "LlamaForCausalLM": Entry("llama", "LlamaForCausalLM", config.LlamaConfig),
    "MistralForCausalLM": Entry("mistral", "MistralForCausalLM", config.MistralConfig),
    "OPTForCausalLM": Entry("opt", "OPTForCausalLM", config.OPTConfig),
    "Phi3ForCausalLM": Entry("phi3", "Phi3ForCausalLM", config.Phi3Config),
    "Qwen2ForCausalLM": Entry("qwen2", "Qwen2ForCausalLM", config.Qwen2Config),
    "Qwen3ForCausalLM": Entry("qwen3", "Qwen3ForCausalLM", config.Qwen3Config),
    "Qwen3MoeForCausalLM": Entry("qwen3_moe", "Qwen3MoeForCausalLM", config.Qwen3MoeConfig),
}


def find(architecture: str) -> Entry:
    """The entry of an architecture.

    Raises:
        ModelError: it is not supported; the message lists those that are.
    """
    if architecture not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(f"architecture {architecture!r} is not supported; these are: {supported}")
    return ARCHITECTURES[architecture]


def model_class(architecture: str) -> type[CausalLM]:
    """The model of an architecture; imports its module, and with it torch.

    Raises:
        ModelError: as ``find``.
    """
    entry = find(architecture)
    module = importlib.import_module(f"asyncllm.models.families.{entry.module}")
    found: type[CausalLM] = getattr(module, entry.name)
    return found
