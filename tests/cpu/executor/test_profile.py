"""The steps whose memory is measured before the KV cache is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm import demo
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.executor.device import CpuDevice
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.executor.memory.profile import StepSize, captured_step, largest_steps, measure_step
from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.eager import EagerForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.models.loading.loader import load_model
from asyncllm.models.spec import read_spec

VOCAB = 256


def tables(size: StepSize) -> tuple[SlotTable, Sampler]:
    device = CpuDevice()
    pages = -(-size.row_tokens // size.page_size)
    return SlotTable(size.rows, pages, device), Sampler(size.rows, VOCAB, device)


def shape(step: StepRows) -> tuple[int, int, int]:
    """Rows, tokens, and rows that sample."""
    return len(step.rows), step.entries.shape[1], len(step.sampling)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (
            StepSize(rows=8, tokens=64, row_tokens=1024, captured_tokens=12, page_size=16),
            [(1, 64, 1), (8, 64, 8)],
        ),
        (
            StepSize(rows=8, tokens=64, row_tokens=16, captured_tokens=12, page_size=16),
            [(4, 64, 4), (8, 64, 8)],
        ),
        (StepSize(rows=4, tokens=64, row_tokens=4, captured_tokens=12, page_size=16), [(4, 16, 4)]),
        (
            StepSize(rows=8, tokens=8, row_tokens=64, captured_tokens=12, page_size=16),
            [(1, 8, 1), (8, 8, 8)],
        ),
        (
            StepSize(rows=1, tokens=32, row_tokens=64, captured_tokens=12, page_size=16),
            [(1, 32, 1)],
        ),
    ],
)
def test_one_step_has_long_rows_and_one_has_many(
    size: StepSize, expected: list[tuple[int, int, int]]
) -> None:
    table, sampler = tables(size)
    steps = largest_steps(size, VOCAB, table, sampler)
    assert [shape(step) for step in steps] == expected


def test_every_row_makes_the_sampler_do_all_it_can() -> None:
    size = StepSize(rows=4, tokens=16, row_tokens=16, captured_tokens=12, page_size=16)
    table, sampler = tables(size)
    for step in largest_steps(size, VOCAB, table, sampler):
        assert sampler.level(step.slots, step.lengths) is Level.EAGER
    captured = captured_step(size, table, sampler)
    assert shape(captured) == (4, 12, 4)
    assert sampler.level(captured.slots, captured.lengths) is Level.GREEDY


def test_the_steps_run_over_a_single_page() -> None:
    folder = Path(demo.path())
    spec, device = read_spec(folder), CpuDevice()
    size = StepSize(rows=3, tokens=90, row_tokens=64, captured_tokens=12, page_size=16)
    table = SlotTable(size.rows, 4, device)
    with torch.inference_mode():
        model = load_model(folder, spec, torch.float32, "cpu")
        sampler = Sampler(size.rows, spec.vocab_size, device)
        pool = KVPool(model.attention_specs, 1, 16, torch.float32, "cpu")
        states = StatePool(model.states, 1, torch.float32, "cpu")
        forward = EagerForward(model, SdpaBackend(pool), states, sampler, table, 16, device)
        steps = [*largest_steps(size, spec.vocab_size, table, sampler)]
        steps.append(captured_step(size, table, sampler))
        for step in steps:
            samples = forward(step)
            assert samples is not None
            assert samples.tokens.shape == (1, len(step.rows))
            assert (samples.tokens >= 0).all()


class SharedDevice(CpuDevice):
    """Passes for a GPU that another engine may use, too."""

    def __init__(self) -> None:
        super().__init__()
        self.is_held = False

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        assert not self.is_held
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    def check(self) -> None:
        assert not self.is_held

    empty_cache = check


def test_measuring_excludes_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels whose programs wait for each other must not meet those of another stream."""
    for name in ("memory_reserved", "max_memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    folder = Path(demo.path())
    spec, device = read_spec(folder), SharedDevice()
    size = StepSize(rows=3, tokens=90, row_tokens=64, captured_tokens=12, page_size=16)
    planned: list[bool] = []

    class Backend(SdpaBackend):
        def plan(self, *args: Any) -> Any:
            planned.append(device.is_held)
            return super().plan(*args)

    with torch.inference_mode():
        model = load_model(folder, spec, torch.float32, "cpu")
        measure_step(model, spec, Backend, size, torch.float32, device)
    assert planned == [True] * 3
