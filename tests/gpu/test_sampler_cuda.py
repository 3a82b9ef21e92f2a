"""Sampler on a GPU: the tokens that a CPU gives, without waiting for the device."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncllm.executor.device import CpuDevice, CudaDevice
from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.kernels.random_streams import stream_of, uniforms
from asyncllm.wire.messages import BAD_TOKEN, RowParams
from tests.support.engine.waiting import no_waiting
from tests.support.models.constraining import unpacked

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

VOCAB = 50257


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
    on_cpu, on_gpu = Sampler(count, VOCAB, CpuDevice()), Sampler(count, VOCAB, CudaDevice())
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
        expected = {entry.row: entry for entry in unpacked(want.logprobs)}
        for entry in unpacked(got.logprobs):
            assert entry.top_logprobs == pytest.approx(expected[entry.row].top_logprobs, abs=1e-4)
            if same[entry.row]:
                assert entry.sampled == pytest.approx(expected[entry.row].sampled, abs=1e-4)
    # Sums are rounded differently, so a draw at the border between two tokens may differ.
    assert different <= 2


def test_greedy_takes_the_first_of_equal_scores() -> None:
    logits = torch.zeros(4, VOCAB, device="cuda", dtype=torch.bfloat16)
    logits[1, [411, 412, 50000]] = 2.0
    sampler = Sampler(4, VOCAB, CudaDevice())
    greedy = RowParams(temperature=0.0)
    for slot in range(4):
        sampler.admit(slot, greedy, np.empty(0, dtype=np.int32), 0)
    with no_waiting():
        sampled = sampler.sample(logits, np.arange(4), np.zeros(4, dtype=np.int64))
    assert sampled.tokens.tolist() == [0, 411, 0, 0]


def test_a_row_does_not_depend_on_how_it_is_sampled() -> None:
    simple: dict[str, Any] = {
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logprobs": -1,
    }
    params = varied_params(128)
    params[::2] = [msgspec.structs.replace(each, **simple) for each in params[::2]]
    slots, lengths = np.arange(128), np.full(128, 200)
    sampler = Sampler(128, VOCAB, CudaDevice())
    for slot, each in enumerate(params):
        sampler.admit(slot, each, np.arange(5, dtype=np.int32), 5)
    sampler.flush()
    logits = (torch.randn(128, VOCAB, device="cuda") * 3).bfloat16()
    together = sampler.sample(logits, slots, lengths).tokens
    graphed = 0
    for slot in range(128):
        row = slice(slot, slot + 1)
        level = sampler.level(slots[row], lengths[row])
        if level is Level.EAGER:
            continue
        graphed += 1
        # Among padding, at the same place in memory as in a graph.
        keys = torch.full((2, 4), 128, dtype=torch.int32, device="cuda")
        keys[0, 0], keys[1] = slot, 200
        padded = logits[row].repeat(4, 1)
        for enough in range(level, Level.EAGER):
            tokens = sampler.draw(padded, keys[0], keys[1], Level(enough))
            assert tokens[0] == together[slot]
            assert (tokens[1:] == padded[0].argmax()).all()
    assert graphed >= 64


def test_sampling_takes_little_memory() -> None:
    rows, vocab = 256, 151_936
    params = varied_params(rows)
    sampler = Sampler(rows, vocab, CudaDevice())
    for slot, each in enumerate(params):
        sampler.admit(slot, each, np.arange(5, dtype=np.int32), 5)
    logits = torch.randn(rows, vocab, device="cuda", dtype=torch.bfloat16)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sampler.sample(logits, np.arange(rows), np.full(rows, 9))
    taken = torch.cuda.max_memory_allocated() - before
    # The logits themselves are 78 MB.
    assert taken < 120e6
