"""What is said of an architecture that is not served."""

from __future__ import annotations

import pytest

from asyncllm.errors import ModelError
from asyncllm.models.registry import find


def refusal(architecture: str) -> str:
    with pytest.raises(ModelError, match=f"architecture '{architecture}' is not supported") as told:
        find(architecture)
    return str(told.value)


@pytest.mark.parametrize(
    ("architecture", "near"),
    [
        ("Qwen3NextVLForConditionalGeneration", "Qwen3NextForCausalLM"),
        ("Gemma3nForConditionalGeneration", "Gemma3ForCausalLM"),
        ("Llama4ForConditionalGeneration", "LlamaForCausalLM"),
        ("PhiForCausalLM", "Phi3ForCausalLM"),
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("MistralForCausaLM", "MistralForCausalLM"),
        ("mixtralforcausallm", "MixtralForCausalLM"),
        ("Quen3ForCausalLM", "Qwen3ForCausalLM"),
    ],
)
def test_the_nearest_is_of_the_same_family(architecture: str, near: str) -> None:
    assert f"; the nearest that is served is {near}; " in refusal(architecture)


@pytest.mark.parametrize(
    "architecture", ["MambaForCausalLM", "JambaForCausalLM", "MPTForCausalLM", "GPT2LMHeadModel"]
)
def test_no_other_family_is_named(architecture: str) -> None:
    assert "nearest" not in refusal(architecture)


@pytest.mark.parametrize(
    ("architecture", "needs"),
    [
        ("DeepseekV3ForCausalLM", "multi-head latent attention"),
        ("GPTNeoXForCausalLM", "attention and MLP side by side"),
        ("BloomForCausalLM", "attention biases by distance"),
        ("MllamaForConditionalGeneration", "layers that attend to images"),
        ("Phi4MMForCausalLM", "adapters"),
        ("ChatGLMModel", "code that comes with the checkpoint; those named -hf"),
        ("FalconH1ForCausalLM", "layers with a recurrent or convolutional state"),
    ],
)
def test_what_it_needs_is_said(architecture: str, needs: str) -> None:
    assert f"it needs {needs}" in refusal(architecture)
