"""How far logprobs in bfloat16 are from those in float32: the engine's, and transformers' own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from asyncllm import AsyncLLM, SamplingParams
from tests.support.models import tiny_models

PARAMS = SamplingParams(
    temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0, prompt_logprobs=0
)


class Errors(NamedTuple):
    """Mean absolute differences to transformers in float32, over prompts and answers."""

    engine: float
    transformers: float


async def errors(
    folder: Path, prompts: list[list[int]], device: str, reference: Path | None = None
) -> Errors:
    """Serve a folder in bfloat16, all prompts at once.

    Args:
        device: "cuda" or "cpu", for all three.
        reference: the folder that transformers reads; the same by default.
    """
    options: dict[str, Any] = {"device": device, "dtype": "bfloat16", "max_model_len": 1024}
    if device == "cuda":
        options["gpu_memory_utilization"] = 0.4
    async with AsyncLLM(folder, **options) as llm:
        answers = await asyncio.gather(*(llm.generate(prompt, PARAMS) for prompt in prompts))
    wholes, found = [], []
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.prompt_logprobs is not None
        assert answer.logprobs is not None
        entries = [*answer.prompt_logprobs[1:], *answer.logprobs]
        wholes.append(prompt + answer.token_ids)
        found += [entry.logprob for entry in entries if entry is not None]
    exact = _logprobs(reference or folder, wholes, torch.float32, device)
    rounded = _logprobs(reference or folder, wholes, torch.bfloat16, device)
    got = torch.tensor(found)
    return Errors((got - exact).abs().mean().item(), (rounded - exact).abs().mean().item())


def _logprobs(folder: Path, wholes: list[list[int]], dtype: torch.dtype, device: str) -> Tensor:
    """Of every token but the first of each sequence, by transformers; float32 on the CPU."""
    model = tiny_models.reference(folder, dtype).to(device)
    parts = []
    for whole in wholes:
        ids = torch.tensor([whole], device=device)
        with torch.inference_mode():
            scores = model(ids).logits[0, :-1].float().log_softmax(-1)
        parts.append(scores.gather(1, ids[0, 1:, None])[:, 0].cpu())
    return torch.cat(parts)
