"""What is said of architectures that are not served."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

#: A pattern of names, and what those models need; the first that matches holds.
_NEEDS: Final = (
    (
        r"Deepseek(V2|V3|V4|VL)|Kimi|Glm4MoeLite|GlmMoeDsa|MiniCPM3|Mistral4|LongcatFlash",
        "multi-head latent attention (MLA)",
    ),
    (r"OlmoHybrid|KimiLinear", "layers with a recurrent state (delta nets of another kind)"),
    (
        r"Mamba|Jamba|Bamba|FalconH1|Zamba|Lfm2Vl|Plamo2|Rwkv|xLSTM"
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
