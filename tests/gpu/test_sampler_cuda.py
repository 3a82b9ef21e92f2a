"""Sampler on a GPU: the tokens that a CPU gives, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from asyncllm.executor.draw import stream_of, uniforms
from asyncllm.executor.sampler import Sampler
from asyncllm.wire.messages import BAD_TOKEN, RowParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]

VOCAB = 50257


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raises where the host would wait for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def varied_params(count: int) -> list[RowParams]:
    """Sampling parameters of all kinds, mixed."""
    rng = np.random.default_rng(0)
    return [
        RowParams(
            temperature=float(rng.choice([0.0, 0.5, 1.0])),
            top_k=int(rng.choice([0, 20, 1000])),
            top_p=float(rng.choice([1.0, 0.9])),
            min_p=float(rng.choice([0.0, 0.02])),
            presence_penalty=float(rng.choice([0.0, 0.7])),
            frequency_penalty=float(rng.choice([0.0, 0.3])),
            repetition_penalty=float(rng.choice([1.0, 1.2])),
            seed=int(rng.integers(-(2**63), 2**63)),
            logprobs=int(rng.choice([-1, 5])),
            min_length=int(rng.choice([0, 100])),
            stop_ids=(3, 7),
        )
        for _ in range(count)
    ]


def test_uniforms_are_those_of_the_cpu() -> None:
    rng = np.random.default_rng(0)
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63, 10000))
    positions = torch.from_numpy(rng.integers(0, 2**20, 10000))
    on_gpu = uniforms(stream_of(seeds.cuda()), positions.cuda())
    assert torch.equal(on_gpu.cpu(), uniforms(stream_of(seeds), positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    count, steps = 96, 6
    params = varied_params(count)
    prompt = np.arange(40, dtype=np.int32)
    on_cpu, on_gpu = Sampler(count, VOCAB, "cpu"), Sampler(count, VOCAB, "cuda")
    slots = np.arange(count)
    generator = torch.Generator().manual_seed(0)
    different = 0
    for slot, each in enumerate(params):
        on_cpu.admit(slot, each, prompt, 30)
    with no_waiting():
        for slot, each in enumerate(params):
            on_gpu.admit(slot, each, prompt, 30)
    for step in range(steps):
        logits = (torch.randn(count, VOCAB, generator=generator) * 3).to(dtype)
        logits[step, 11] = torch.nan
        there = logits.cuda()
        lengths = np.full(count, 97 + step)
        want = on_cpu.sample(logits, slots, lengths)
        with no_waiting():
            got = on_gpu.sample(there, slots, lengths)
        assert got.tokens[step] == want.tokens[step] == BAD_TOKEN
        same = got.tokens.cpu() == want.tokens
        different += int((~same).sum())
        assert want.logprobs is not None
        assert got.logprobs is not None
        expected = {entry.row: entry for entry in want.logprobs.unpack()}
        for entry in got.logprobs.unpack():
            assert entry.top_logprobs == pytest.approx(expected[entry.row].top_logprobs, abs=1e-4)
            if same[entry.row]:
                assert entry.sampled == pytest.approx(expected[entry.row].sampled, abs=1e-4)
    # Sums are rounded differently, so a draw at the border between two tokens may differ.
    assert different <= 2


def test_greedy_takes_the_first_of_equal_scores() -> None:
    logits = torch.zeros(4, VOCAB, device="cuda", dtype=torch.bfloat16)
    logits[1, [411, 412, 50000]] = 2.0
    sampler = Sampler(4, VOCAB, "cuda")
    greedy = RowParams(0.0, 0, 1.0, 0.0, 0.0, 0.0, 1.0, 0, -1, 0, ())
    for slot in range(4):
        sampler.admit(slot, greedy, np.empty(0, dtype=np.int32), 0)
    with no_waiting():
        sampled = sampler.sample(logits, np.arange(4), np.zeros(4, dtype=np.int64))
    assert sampled.tokens.tolist() == [0, 411, 0, 0]
