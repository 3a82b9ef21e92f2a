"""All memory but three percent, many rows, and requests of every kind at once."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.text.grammar import Regex
from tests.support.models.successor import WIDE, config_of
from tests.support.text.tokenizers import byte_level

pytestmark = [pytest.mark.gpu, pytest.mark.whole_gpu, pytest.mark.timeout(600)]

VOCAB, SHARE = 151_936, 0.97

#: Qwen3-0.6B, and 8B with few layers: the weights differ, activations and logits do not.
MODELS = {
    "0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "num_hidden_layers": 28,
    },
    "8B": {**WIDE, "num_hidden_layers": 4},
}

#: Every way to sample: inside of graphs, and outside with each change of the scores.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 0.8, "min_p": 0.05},
    {"temperature": 0.0, "logprobs": 20},
    {"temperature": 0.8, "logprobs": 3, "repetition_penalty": 1.2},
    {"temperature": 0.8, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {7: 5.0, 9: -100.0}},
    {"temperature": 0.8, "min_tokens": 20, "stop_token_ids": (11,), "ignore_eos": False},
    {"temperature": 0.8, "bad_words": ("a", "the")},
    {"temperature": 0.8, "grammar": Regex("[a-z]{1,60}")},
    {"temperature": 0.0, "prompt_logprobs": 2},
]


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config_of(MODELS[request.param], VOCAB)))
    (tmp_path / "tokenizer.json").write_text(byte_level())
    return tmp_path


@pytest.fixture
def free_before() -> int:
    """Free memory once this process has its context."""
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return free


def requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(count)
    return [
        (
            [rng.randrange(300) for _ in range(rng.choice([1, 20, 150, 600]))],
            SamplingParams(
                **{"max_tokens": rng.randint(20, 80), "seed": i, "ignore_eos": True}
                | KINDS[i % len(KINDS)]
            ),
        )
        for i in range(count)
    ]


async def least_free(until: asyncio.Event) -> tuple[int, int]:
    """The least free memory that is seen, and what PyTorch had reserved then."""
    least = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    while not until.is_set():
        await asyncio.sleep(0.02)
        least = min(least, (torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()))
    return least


@pytest.mark.parametrize("rows", [256, 1024])
async def test_mixed_traffic_stays_within_its_share(
    rows: int, folder: Path, free_before: int, caplog: pytest.LogCaptureFixture
) -> None:
    _, total = torch.cuda.mem_get_info()
    done = asyncio.Event()
    options: dict[str, Any] = {"gpu_memory_utilization": SHARE, "max_num_seqs": rows}
    with caplog.at_level(logging.WARNING, "asyncllm"):
        async with AsyncLLM(
            folder, device="cuda", load_format="dummy", max_model_len=2048, **options
        ) as llm:
            watching = asyncio.create_task(least_free(done))
            answers = await asyncio.gather(
                *(llm.generate(*request) for request in requests(3 * rows // 2))
            )
            done.set()
            least, reserved = await watching
    assert all(answer.token_ids and answer.finish_reason for answer in answers)
    taken = free_before - least
    assert taken <= SHARE * total, f"{reserved} reserved of {taken}; the rest is the driver's"
    assert [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ] == []
