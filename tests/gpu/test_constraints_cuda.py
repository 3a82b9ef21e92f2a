"""Constraints on a GPU: the tokens that a CPU gives, however steps are captured and overlapped."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.errors import ConstraintError
from asyncllm.executor.device import CpuDevice, CudaDevice
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.wire.messages import BAD_TOKEN, RowParams
from tests.gpu.test_graphs import answers, tokens, workload
from tests.support.engine.waiting import gate, no_waiting
from tests.support.models.constraining import row_params

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

VOCAB = 50257


def varied_params(count: int, *, followed: bool) -> list[RowParams]:
    """Constraints of all kinds, mixed; those that follow tokens are greedy."""
    rng = np.random.default_rng(1)
    params = []
    for _ in range(count):
        changes: dict[str, Any] = {
            "temperature": 0.0 if followed else float(rng.choice([0.0, 1.0])),
            "top_p": float(rng.choice([1.0, 0.9])),
            "repetition_penalty": float(rng.choice([1.0, 1.3])),
            "frequency_penalty": float(rng.choice([0.0, 0.5])),
            "seed": int(rng.integers(2**62)),
            "logprobs": int(rng.choice([-1, 2])),
            "min_length": int(rng.choice([0, 100])),
            "stop_ids": (3, 7),
        }
        if rng.random() < 0.6:
            ids = rng.choice(VOCAB, size=rng.integers(1, 300), replace=False).tolist()
            changes["bias"] = {token: float(rng.normal() * 4) for token in ids}
        if rng.random() < 0.6:
            changes["allowed"] = rng.choice(VOCAB, size=20_000, replace=False).tolist()
        if followed:
            changes["bad_words"] = [tuple(rng.choice(40, size=2).tolist()) for _ in range(600)]
        params.append(row_params(VOCAB, **changes))
    return params


@pytest.mark.parametrize("followed", [False, True])
def test_tokens_are_those_of_the_cpu(followed: bool) -> None:
    count, steps = 80, 6
    params = varied_params(count, followed=followed)
    prompt = np.arange(40, dtype=np.int32)
    on_cpu, on_gpu = Sampler(count, VOCAB, CpuDevice()), Sampler(count, VOCAB, CudaDevice())
    for slot, each in enumerate(params):
        on_cpu.admit(slot, each, prompt, 30)
    with no_waiting():
        for slot, each in enumerate(params):
            on_gpu.admit(slot, each, prompt, 30)
    generator = torch.Generator().manual_seed(0)
    slots = np.arange(count)
    different, found = 0, set()
    for step in range(steps):
        logits = torch.randn(count, VOCAB, generator=generator).bfloat16()
        if followed:  # so that words are met
            logits[:, :40] += 9
        logits[step, 11] = torch.nan
        there, lengths = logits.cuda(), np.full(count, 97 + step)
        want = on_cpu.sample(logits, slots, lengths).tokens
        with no_waiting():  # but for the event, which is no synchronization
            got = on_gpu.sample(there, slots, lengths).tokens
        assert got[step] == want[step] == BAD_TOKEN
        different += int((got.cpu() != want).sum())
        found |= set(want.tolist())
    # Sums and products are rounded differently, which may decide; and then what follows, too.
    assert different <= 4
    assert len(found) > 20


def test_the_forward_is_not_waited_for() -> None:
    """Masks are filled while the device is busy with what was launched before."""
    sampler = Sampler(2, VOCAB, CudaDevice())
    params = row_params(VOCAB, bad_words=[(1, 2)], temperature=0.0)
    for slot in range(2):
        sampler.admit(slot, params, np.zeros(1, dtype=np.int32), 1)
    logits = torch.randn(2, VOCAB, device="cuda")
    slots, lengths = np.arange(2), np.ones(2, dtype=np.int64)
    for step in range(3):
        sampler.sample(logits, slots, lengths + step)
    torch.cuda.synchronize()
    with gate() as hold:
        hold()
        before = torch.cuda.Event()
        before.record()
        sampler.sample(logits, slots, lengths + 3)
        assert not before.query()
    torch.cuda.synchronize()


CONSTRAINED: dict[str, Any] = {
    "temperature": 0.8,
    "logit_bias": {7: 3.0, 20: -5.0},
    "bad_words": (*((i, i + 1) for i in range(4, 200)), (9,), (11,)),
    "allowed_token_ids": tuple(range(4, 290)),
    "presence_penalty": 0.3,
}


async def test_overlap_multi_step_and_batching_do_not_show(
    folder_of: Callable[[str], Path],
) -> None:
    free = workload(12, temperature=0.7)
    requests = [*workload(13, **CONSTRAINED), *free]
    folder = folder_of("qwen3")
    options = {"dtype": "float32"}
    expected = tokens(await answers(folder, requests, **options))
    for changed in (
        {"cuda_graphs": False},
        {"steps_in_flight": 1},
        {"max_decode_steps": 1},
        {"max_decode_steps": 3, "page_size": 2},
        {"max_num_seqs": 5},
        {"prefill_chunk": 16},
        {"kv_cache_tokens": 1024, "page_size": 4},
    ):
        assert tokens(await answers(folder, requests, **options, **changed)) == expected, changed
    assert tokens(await answers(folder, free, **options)) == expected[13:]


async def test_what_leaves_no_token_fails_alone(folder_of: Callable[[str], Path]) -> None:
    dead = SamplingParams(max_tokens=9, allowed_token_ids=(50,), bad_words=((50, 50, 50),))
    async with AsyncLLM(folder_of("qwen3"), device="cuda", max_model_len=256) as llm:
        with pytest.raises(ConstraintError):
            await llm.generate([5, 6, 7], dead)
        completion = await llm.generate([5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True))
        assert len(completion.token_ids) == 9


def test_sampling_takes_little_memory() -> None:
    rows, vocab = 256, 151_936
    sampler = Sampler(rows, vocab, CudaDevice())
    params = row_params(
        vocab,
        bias={5: 1.0},
        allowed=range(100_000),
        bad_words=[(1, 2)],
        repetition_penalty=1.1,
        top_p=0.9,
        logprobs=5,
    )
    for slot in range(rows):
        sampler.admit(slot, params, np.arange(5, dtype=np.int32), 5)
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sampler.sample(logits, np.arange(rows), np.full(rows, 9))
    taken = torch.cuda.max_memory_allocated() - before
    # The logits themselves are 78 MB.
    assert taken < 120e6
