"""Which graphs serve a step, with graphs that run their step again when they are replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.attention.paged import PagedBackend
from asyncllm.executor.device import CpuDevice
from asyncllm.executor.memory.copies import PageCopier
from asyncllm.executor.memory.kv_pool import HostPool
from asyncllm.executor.runner import ModelRunner
from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step import graphs
from asyncllm.executor.step.eager import EagerForward, Samples
from asyncllm.executor.step.graph_kinds import FEW_ROWS, GraphKinds, Kind
from asyncllm.executor.step.graphs import GraphedForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.padded_steps import (
    FREE_TOKENS,
    MIXED_TOKENS,
    PaddedSteps,
    Size,
    row_buckets,
)
from asyncllm.models.base import CausalLM
from asyncllm.models.loading.loader import load_model
from asyncllm.models.spec import read_spec
from asyncllm.wire.messages import Admit, RowParams, StepPlan, pack
from tests.cpu.executor.test_padded_steps import PAGE_SIZE, SLOTS, prepared
from tests.support.engine.scheduling import limits

GREEDY = RowParams(temperature=0.0)
LOGPROBS = RowParams(temperature=0.0, logprobs=2)
VOCAB_SIZE = 384  # of tiny models
DECODES = [(slot, 20 + slot, 1) for slot in range(5)]
MIXED = [(0, 20, 1), (1, 25, 1), (2, 0, 20), (3, 4, 9)]


class LockedDevice(CpuDevice):
    """As on a GPU, whoever holds the lock must not take it again, and later steps change nothing
    that was downloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = Lock()

    def exclusive(self) -> AbstractContextManager[object]:
        assert not self.lock.locked()
        return self.lock

    def check(self) -> None:
        with self.exclusive():
            pass

    def download(self, tensor: Tensor) -> np.ndarray:
        return super().download(tensor).copy()


class Graph:
    """Records what is run between its begin and end, and runs it again."""

    recording: Graph | None = None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert Graph.recording is None
        Graph.recording = self
        self.run: Callable[[], tuple[Tensor, ...]] | None = None
        self.outputs: tuple[Tensor, ...] = ()

    def capture_end(self) -> None:
        Graph.recording = None

    def replay(self) -> None:
        assert self.run is not None
        for output, value in zip(self.outputs, self.run(), strict=True):
            output.copy_(value)


@pytest.fixture(autouse=True)
def _no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class Stream:
        def __init__(self, device: object) -> None: ...

        def synchronize(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(graphs, "borrowed", lambda tensor: tensor)
    run = GraphedForward._run

    def recorded(self: GraphedForward, *args: Any) -> Any:
        outputs = run(self, *args)
        graph = Graph.recording
        if graph is not None:
            graph.outputs = outputs[:2]
            graph.run = lambda: run(self, *args)[:2]
        return outputs

    monkeypatch.setattr(GraphedForward, "_run", recorded)
    yield
    assert Graph.recording is None


@pytest.fixture(scope="module")
def model(folder_of: Callable[[str], Path]) -> CausalLM:
    folder = folder_of("qwen3")
    return load_model(folder, read_spec(folder), torch.float32, "cpu", max_length=40)


def make(model: CausalLM, params: RowParams) -> tuple[GraphedForward, EagerForward, LockedDevice]:
    """A forward without graphs yet, and the one that runs what they do not."""
    device = LockedDevice()
    table, pool, states = prepared(model)
    sampler = Sampler(SLOTS, VOCAB_SIZE, device)
    for slot in range(SLOTS):
        known = np.random.default_rng(slot).integers(4, 300, 20).astype(np.int32)
        table.admit(Admit(slot, pack(known.tolist()), 20, params))
        sampler.admit(slot, params, known, 20)
    sampler.flush()
    backend = PagedBackend(pool, device.upload)
    eager = EagerForward(model, backend, states, sampler, table, PAGE_SIZE, device)
    padded = PaddedSteps(model, backend, states, table, PAGE_SIZE, SLOTS, 128)
    sizes = limits(max_decode_steps=3, multi_step_rows=8)
    return GraphedForward(padded, eager, sizes), eager, device


def tokens(samples: Samples | None, count: int) -> list[list[int]]:
    assert samples is not None
    columns = range(count) if samples.columns is None else samples.columns.tolist()
    return [[int(row[column]) for column in columns] for row in samples.tokens]


@pytest.mark.parametrize("params", [GREEDY, LOGPROBS], ids=["greedy", "logprobs"])
@pytest.mark.parametrize("captured", ["first", "all"])
@pytest.mark.parametrize(
    ("rows", "decode_steps"), [(DECODES, 1), (DECODES, 3), (DECODES[:1], 3), (MIXED, 1)]
)
@torch.inference_mode()
def test_steps_yield_the_same_with_the_graphs_that_there_are(
    model: CausalLM,
    rows: list[tuple[int, int, int]],
    decode_steps: int,
    captured: str,
    params: RowParams,
) -> None:
    forward, _, _ = make(model, params)
    forward.capture_first()
    while captured == "all" and forward.capture_next():
        pass
    count = sum(start + length >= 20 for _, start, length in rows)
    step = StepRows.of(np.array(rows, dtype=np.int32), forward._table)
    found = tokens(forward(step, decode_steps), count)
    _, eager, _ = make(model, params)
    one_by_one = []
    for i in range(decode_steps):
        step = StepRows.of(np.array(rows, dtype=np.int32), eager.table).continued(i)
        one_by_one += tokens(eager(step), count)
    assert found == one_by_one


@torch.inference_mode()
def test_a_step_hurries_the_capture_of_its_size(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward, _, _ = make(model, GREEDY)
    forward.capture_first()
    captured: list[Kind] = []
    capture = GraphedForward._capture

    def noted(self: GraphedForward, kind: Kind) -> None:
        captured.append(kind)
        capture(self, kind)

    monkeypatch.setattr(GraphedForward, "_capture", noted)
    forward(StepRows.of(np.array(DECODES[:2], dtype=np.int32), forward._table), 3)
    forward.capture_next()
    [kind] = captured
    assert (kind.size.rows, kind.decode_steps) == (2, 3)


@torch.inference_mode()
def test_a_capture_that_fails_is_tried_again_and_then_given_up(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward, _, device = make(model, GREEDY)
    forward.capture_first()
    count = forward.count
    begin, failures = Graph.capture_begin, [True, False, True, True, True]

    def fail(self: Graph, **options: Any) -> None:
        if failures.pop(0):
            raise RuntimeError("another thread has waited for the device\nmore")
        begin(self, **options)

    monkeypatch.setattr(Graph, "capture_begin", fail)
    assert forward.capture_next()
    assert forward.count == count + 1
    assert not forward.capture_next()
    assert not failures
    assert "no other can be captured: another thread has waited" in caplog.text
    assert not device.lock.locked()
    assert not forward.capture_next()


@torch.inference_mode()
def test_the_first_capture_is_tried_again_in_another_pool(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch refuses a pool that its only graph has left."""
    pools: list[object] = []
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    forward, _, _ = make(model, GREEDY)
    begin = Graph.capture_begin

    def fail(self: Graph, pool: object, capture_error_mode: str) -> None:
        pools.append(pool)
        if len(pools) == 1:
            raise RuntimeError("another thread has waited for the device")
        begin(self, pool, capture_error_mode)

    monkeypatch.setattr(Graph, "capture_begin", fail)
    forward.capture_first()
    assert pools[:2] == [0, 1]
    assert set(pools[1:]) == {1}
    assert forward.count == len(pools) - 1


@torch.inference_mode()
def test_a_kernel_that_cannot_be_compiled_leaves_the_graphs_that_there_are(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward, _, _ = make(model, GREEDY)
    forward.capture_first()

    def fail(self: PaddedSteps, *_: Any) -> Any:
        raise ValueError("no such register")

    monkeypatch.setattr(PaddedSteps, "run", fail)
    assert not forward.capture_next()
    assert "no other can be captured: no such register" in caplog.text


@torch.inference_mode()
def test_no_other_engine_launches_a_step_during_a_capture_or_a_step(
    model: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor while the step runs once before it is captured."""
    forward, _, device = make(model, GREEDY)
    locked: list[bool] = []

    def noted(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            locked.append(device.lock.locked())
            return run(*args)

        return call

    monkeypatch.setattr(PaddedSteps, "run", noted(PaddedSteps.run))
    forward.capture_first()
    assert forward.capture_next()
    assert len(locked) >= 2 * forward.count  # each graph's step runs, and is captured
    _, pool, states = prepared(model)
    copier = PageCopier(pool, HostPool(pool, 0, device), device)
    parts = forward._sampler, forward._table, copier, states
    runner = ModelRunner(noted(forward), *parts, device)
    runner.launch(StepPlan(0, pack([0, 20, 1]), b"", ()))
    assert all(locked)


def sizes(max_rows: int, max_tokens: int) -> tuple[list[Size], list[Size]]:
    decode = [Size(rows, rows, False) for rows in row_buckets(max_rows)]
    rows = sorted({min(32, max_rows), max_rows})
    mixed = [Size(n, m, True) for n in MIXED_TOKENS if n <= max_tokens for m in rows]
    return decode, mixed


@pytest.mark.parametrize("max_rows", [1, 5, 40, 256, 1024])
@pytest.mark.parametrize("max_tokens", [0, 64, 1536, 8192])
def test_every_step_has_a_graph_at_first_and_one_of_its_size_later(
    max_rows: int, max_tokens: int
) -> None:
    decode, mixed = sizes(max_rows, max_tokens)
    kinds = GraphKinds(decode, mixed, max_decode_steps=4, multi_step_rows=8)
    first, others = kinds.first(), kinds.others()
    assert len(set(first + others)) == len(first) + len(others)
    for size in decode + mixed:
        for level in Level:
            wanted = Kind(size, kinds.level(level, size))
            assert wanted in first + others
            larger = [
                Kind(other, kinds.level(level, other))
                for other in (mixed if size.mixed else decode)
                if other.tokens >= size.tokens and other.rows >= size.rows
            ]
            assert set(larger) & set(first)
    for size in decode:
        if size.rows <= 8:
            assert Kind(size, Level.GREEDY, 4) in first + others


@pytest.mark.parametrize(("max_rows", "max_tokens"), [(256, 8192), (1024, 1536)])
def test_a_first_step_is_padded_to_less_than_twice_its_tokens_where_that_costs(
    max_rows: int, max_tokens: int
) -> None:
    decode, mixed = sizes(max_rows, max_tokens)
    first = GraphKinds(decode, mixed, 4, 8).first()
    for size in decode + mixed:
        fits = [
            kind.size.tokens
            for kind in first
            if kind.size.mixed == size.mixed and kind.size.tokens >= size.tokens
        ]
        if size.mixed:
            assert min(fits) < 2 * max(size.tokens, FREE_TOKENS)
        else:
            assert min(fits) < (4 if size.rows <= FEW_ROWS else 2) * size.rows


def test_the_largest_step_is_captured_first_as_others_reuse_its_memory() -> None:
    decode, mixed = sizes(256, 8192)
    assert GraphKinds(decode, mixed, 4, 8).first()[0].size == mixed[-1]
