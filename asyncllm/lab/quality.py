"""How far the scores of a quantised model are from those of the model in 16 bits, and those with an
8-bit KV cache from those with one in the type of the computation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.llm.async_llm import AsyncLLM
from asyncllm.system.terminal import LoadingBar
from asyncllm.types import Prompt, PromptLogprob, SamplingParams

#: Begun texts of several kinds; the reference goes on with each.
PROMPTS: Final = (
    "The harbour was quiet when the last ferry came in. Two people left it: a woman with a heavy "
    "suitcase, and a boy who counted the lamps along the quay. Nobody had come to meet them, so",
    "Question: A train leaves at 9:40 and travels 210 km at 84 km/h. When does it arrive?\nAnswer: "
    "210 / 84 is 2.5, so the journey takes 2 hours and 30 minutes. The train arrives at",
    'def merge(left, right):\n    """Merge two sorted lists into one."""\n    merged = []\n'
    "    while left and right:\n        source = left if left[0] <= right[0] else right\n",
    "Photosynthesis turns light into chemical energy. In the first stage, pigments in the leaf "
    "absorb light, water is split, and oxygen is released. In the second stage,",
    '{"orders": [{"id": 1041, "customer": "Meyer", "items": [{"name": "lamp", "price": 39.5, '
    '"count": 2}]}, {"id": 1042, "customer":',
    "Die Stadt liegt an einem breiten Fluss, den man an drei Stellen überqueren kann. Im Sommer "
    "kommen viele Gäste, und am Abend sitzen sie",
    "To: all staff\nSubject: Moving the office\n\nDear colleagues,\n\non 3 March we will move to "
    "the new building. Please pack your desk by Friday noon, and",
    "1. Wash the rice until the water stays clear.\n2. Bring a litre of water to the boil and add "
    "salt.\n3. Chop the onions while the water heats.\n4.",
)
#: Tokens with which the reference goes on.
MAX_TOKENS: Final = 64
#: Tokens of texts over which an 8-bit KV cache is compared, and how many of their last ones are.
LENGTHS: Final = (1024, 8192, 30_000)
LAST: Final = 512
#: Sampled answers of so many tokens make up these texts, so many of them at once.
PART: Final = 256
PARTS: Final = 64


class Quality(msgspec.Struct, frozen=True):
    """Differences between two models on the same tokens.

    Attributes:
        tokens: that were compared.
        mean, p99: of the absolute difference of a token's logprob.
        same: the share of positions at which both find the same token likeliest.
    """

    tokens: int
    mean: float
    p99: float
    same: float

    def lines(self) -> list[str]:
        """The differences as text."""
        return [
            f"difference of logprobs  mean {self.mean:.4f}, p99 {self.p99:.4f}",
            f"same likeliest token    {100 * self.same:.2f} %",
        ]


async def measure_quality(
    reference: EngineConfig, quantized: EngineConfig, prompts: Sequence[Prompt] = PROMPTS
) -> Quality:
    """Load both models, one after the other, and compare their scores of the same texts.

    The texts are the prompts, with what the reference answers at temperature 0.

    Raises:
        ModelError: a model cannot be served, or they have different vocabularies.
        BadRequest: a prompt cannot be served.
    """
    async with AsyncLLM(config=reference, progress=LoadingBar()) as llm:
        texts = await asyncio.gather(*(_continued(llm, prompt) for prompt in prompts))
        expected = await _scores(llm, texts)
        vocabulary = llm.limits.vocab_size
    async with AsyncLLM(config=quantized, progress=LoadingBar()) as llm:
        if llm.limits.vocab_size != vocabulary:
            raise ModelError(
                f"the models have vocabularies of {vocabulary} and {llm.limits.vocab_size} tokens: "
                "they are not the same model"
            )
        return compare(expected, await _scores(llm, texts))


class CacheQuality(Quality, frozen=True):
    """Differences that an 8-bit KV cache makes to the last tokens of a text of so many tokens."""

    length: int


async def measure_cache(
    config: EngineConfig, prompts: Sequence[Prompt] = PROMPTS
) -> list[CacheQuality]:
    """Load the model with a KV cache in the type of the computation, and with that of ``config``.

    The texts are prompts and what the model samples after them, again and again. They have
    ``LENGTHS`` tokens, as far as sequences may be so long, or else the most that they may have.

    Raises:
        ModelError, BadRequest: as ``measure_quality``.
    """
    plain = msgspec.structs.replace(config, kv_cache_dtype="auto")
    async with AsyncLLM(config=plain, progress=LoadingBar()) as llm:
        longest = llm.limits.max_model_len - 1
        lengths = [n for n in LENGTHS if n <= longest] or [longest]
        text = await _long_text(llm, prompts, lengths[-1])
        expected = [await _scores(llm, [text[:n]]) for n in lengths]
    async with AsyncLLM(config=config, progress=LoadingBar()) as llm:
        if (limit := llm.limits.max_model_len - 1) < longest:
            lengths = [n for n in lengths if n <= limit]
        found = [await _scores(llm, [text[:n]]) for n in lengths]
    compared = (compare(a[-LAST:], b[-LAST:]) for a, b in zip(expected, found, strict=False))
    return [
        CacheQuality(**msgspec.structs.asdict(one), length=length)
        for length, one in zip(lengths, compared, strict=True)
    ]


async def _long_text(llm: AsyncLLM, prompts: Sequence[Prompt], length: int) -> list[int]:
    """So many tokens of prompts and sampled answers, one after the other."""
    begun = [await llm.encode_prompt(prompt) for prompt in prompts]
    text: list[int] = []
    seed = 0
    while len(text) < length:
        parts = []
        for _ in range(min(-(-(length - len(text)) // PART), PARTS)):
            ids = begun[seed % len(begun)][: llm.limits.max_model_len - PART - 1]
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=PART)
            parts.append((ids, llm.generate(ids, params)))
            seed += 1
        answers = await asyncio.gather(*(answer for _, answer in parts))
        for (ids, _), answer in zip(parts, answers, strict=True):
            text += [*ids, *answer.token_ids]
    return text[:length]


async def _continued(llm: AsyncLLM, prompt: Prompt) -> list[int]:
    """The tokens of a prompt and of its answer."""
    ids = await llm.encode_prompt(prompt)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    answer = await llm.generate(ids, params)
    return [*ids, *answer.token_ids][: llm.limits.max_model_len - 1]


async def _scores(llm: AsyncLLM, texts: Sequence[list[int]]) -> list[PromptLogprob]:
    """Of each token of each text but the first ones."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    answers = await asyncio.gather(*(llm.generate(ids, params) for ids in texts))
    scores = [score for answer in answers for score in answer.prompt_logprobs or ()]
    return [score for score in scores if score is not None]


def compare(expected: Sequence[PromptLogprob], found: Sequence[PromptLogprob]) -> Quality:
    """The differences between two models' scores of the same tokens."""
    pairs = list(zip(expected, found, strict=True))
    errors = np.abs([one.logprob - other.logprob for one, other in pairs])
    same = [one.top[0][0] == other.top[0][0] for one, other in pairs]
    mean, p99 = float(errors.mean()), float(np.quantile(errors, 0.99))
    return Quality(tokens=len(pairs), mean=mean, p99=p99, same=float(np.mean(same)))
