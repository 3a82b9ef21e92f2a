"""Attention in CUDA graphs: each backend, against dense attention in float64."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from asyncllm.attention.base import ForwardBatch, GraphBackend, GraphRows
from asyncllm.kernels.types import PrefillRows
from tests.gpu.test_attention_cuda import (
    BF16,
    BOTH,
    CAP,
    NAMES,
    PLAIN,
    WINDOW,
    make_backend,
    random_rows,
    remembered,
)
from tests.support.engine.waiting import gate
from tests.support.kernels.paged_sequences import DEVICE, NUM_SLOTS, Case, Layer, PagedSequences
from tests.support.models.attending import forward_batch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from asyncllm.config import AttentionName

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # kernels that are not built are compiled
]

#: Steps that the engine keeps with the executor.
IN_FLIGHT = 2
NOTHING = np.zeros((0, 3), dtype=np.int32)
CASES = [
    *(Case(BF16, 128, group) for group in (1, 2, 4, 8)),
    Case(BF16, 128, 4, page_size=1),
    Case(BF16, 128, 4, num_kv_heads=8),
    Case(BF16, 64, 2, (PLAIN, WINDOW, CAP, BOTH)),
    Case(BF16, 64, 4, (PLAIN, WINDOW, CAP, BOTH)),
    Case(BF16, 256, 4, (PLAIN, WINDOW)),
    Case(BF16, 512, 8),
]


def _zeros(count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=DEVICE)


class Step:
    """The buffers of one step in a graph, and its plan."""

    def __init__(
        self, world: PagedSequences, backend: GraphBackend, tokens: int, rows: int, mixed: bool
    ) -> None:
        self._world = world
        self._backend = backend
        self._mixed = mixed
        self._slots, self._lengths, self._starts = (_zeros(rows, torch.int32) for _ in range(3))
        self._offsets = _zeros(rows + 1, torch.int32)
        self._ids, self._positions, self._written = (_zeros(tokens, torch.int64) for _ in range(3))
        self._written.fill_(-1)
        self._qkv = [
            torch.zeros(tokens, spec.projected_size, dtype=world.case.dtype, device=DEVICE)
            for spec in world.specs
        ]
        # Page-locking memory may wait for the GPU; so do it before, for as many steps as are in
        # flight.
        self._pinned = [
            [torch.zeros(rows + 1, dtype=torch.int32).pin_memory() for _ in range(4)]
            for _ in range(IN_FLIGHT)
        ]
        self._fills = 0
        prefill = PrefillRows(self._slots, self._starts, self._offsets) if mixed else None
        planned = GraphRows(tokens, self._slots, self._lengths, prefill)
        self._plan = backend.graph_plan(planned, world.block_table)
        backend.before_replay(self._plan, NOTHING)

    def run(self) -> list[Tensor]:
        # As every step does, begin with a kernel that waits for all before it: K and V of the step
        # before are read early.
        self._positions.add_(0)
        tokens = self._ids, self._positions, self._written
        batch = ForwardBatch(*tokens, None, self._backend, self._plan)
        return [
            self._backend.forward(qkv, spec, self._world.encoding, batch)
            for spec, qkv in zip(self._world.specs, self._qkv, strict=True)
        ]

    def fill(self, rows: np.ndarray, layers: list[Layer]) -> None:
        """Prepare a replay for these rows."""
        self._backend.before_replay(self._plan, rows)
        world, count = self._world, len(self._slots)
        batch = forward_batch(
            self._backend, rows, world.block_table, world.case.page_size, plan=self._plan
        )
        padded = np.zeros((count, 3), dtype=np.int32)
        padded[: len(rows)] = rows
        slots, starts, q_lens = padded.T
        single = int((q_lens == 1).cumprod().sum())
        lengths = np.where(np.arange(count) < single, starts + q_lens, 0)
        offsets = np.concatenate([[0], q_lens.cumsum()]).clip(min=single)
        arrays = slots, lengths, starts, offsets
        targets = self._slots, self._lengths, self._starts, self._offsets
        buffers = self._pinned[self._fills % IN_FLIGHT]
        self._fills += 1
        for target, array, pinned in zip(targets, arrays, buffers, strict=True):
            pinned[: len(array)] = torch.from_numpy(array.astype(np.int32))
            target.copy_(pinned[: len(array)], non_blocking=True)
        num_tokens = len(batch.positions)
        self._positions.zero_()[:num_tokens] = batch.positions
        self._written.fill_(-1)[:num_tokens] = batch.slot_mapping
        for target, layer in zip(self._qkv, layers, strict=True):
            target.fill_(torch.nan)[:num_tokens] = layer.qkv.flatten(1)


class Graph:
    """Some steps of one size, captured as they are when serving: nothing runs before."""

    def __init__(
        self,
        world: PagedSequences,
        backend: GraphBackend,
        tokens: int,
        rows: int,
        mixed: bool,
        count: int = 1,
    ) -> None:
        self._specs = world.specs
        self._steps = [Step(world, backend, tokens, rows, mixed) for _ in range(count)]
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            self._graph.capture_begin(capture_error_mode="relaxed")
            try:
                self._outs = [step.run() for step in self._steps]
            finally:
                self._graph.capture_end()

    def replay(self, *steps: tuple[np.ndarray, list[Layer]]) -> list[list[Tensor]]:
        """The answers of all layers in each step, [tokens, heads, head_dim]."""
        for step, (rows, layers) in zip(self._steps, steps, strict=True):
            step.fill(rows, layers)
        self._graph.replay()
        return [
            [
                out.view(-1, spec.num_heads, spec.head_dim).clone()
                for out, spec in zip(outs, self._specs, strict=True)
            ]
            for outs in self._outs
        ]


def check(layers: list[Layer], answers: list[Tensor]) -> None:
    for layer, answer in zip(layers, answers, strict=True):
        layer.check(answer[: len(layer.qkv)])


def make_graph_backend(world: PagedSequences, name: AttentionName) -> GraphBackend:
    backend = make_backend(world, name)
    assert isinstance(backend, GraphBackend)
    return backend


def decode_rows(count: int, rng: np.random.Generator) -> list[tuple[int, int, int]]:
    slots = rng.permutation(NUM_SLOTS)[:count].tolist()
    return [(slot, int(rng.integers(0, 4000 if slot % 5 == 0 else 700)), 1) for slot in slots]


def check_a_mixed_graph(
    tokens: int, rows: int, case: Case, name: AttentionName, seeds: int
) -> None:
    """One graph attends random rows, other ones for each seed."""
    first = PagedSequences(case)
    graph = Graph(first, make_graph_backend(first, name), tokens, rows, mixed=True)
    for seed in range(seeds):
        world = PagedSequences(case, seed)
        step = random_rows(np.random.default_rng(seed), world)
        layers = world.step(step)
        # One cache for all seeds: the graph keeps its addresses.
        first.pool.storage.copy_(world.pool.storage)
        first.block_table.copy_(world.block_table)
        [answers] = graph.replay((step, layers))
        check(layers, answers)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("tokens", "rows"), [(1280, 32), (1280, 200), (2560, 20)])
def test_a_mixed_graph_serves_any_rows(
    tokens: int, rows: int, case: Case, name: AttentionName
) -> None:
    check_a_mixed_graph(tokens, rows, case, name, seeds=5)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("size", [1, 4, 24, 64])
def test_a_decode_graph_serves_any_rows(size: int, case: Case, name: AttentionName) -> None:
    world = PagedSequences(case)
    backend = make_graph_backend(world, name)
    graph = Graph(world, backend, size, size, mixed=False)
    rng = np.random.default_rng(size)
    lengths: dict[int, int] = {}
    rows = decode_rows(min(size, NUM_SLOTS), rng)
    remembered(rows, world)
    lengths = {slot: start for slot, start, _ in rows}
    for count in (len(rows), 1, max(1, len(rows) // 2)):
        chosen = rng.permutation(list(lengths))[:count].tolist()
        step = np.array([(slot, lengths[slot], 1) for slot in chosen], dtype=np.int32)
        for slot in chosen:
            lengths[slot] += 1
        layers = world.step(step)
        [answers] = graph.replay((step, layers))
        check(layers, answers)
        if name == "flashinfer":  # which is told that padding has no keys
            for answer in answers:
                assert bool((answer[count:] == 0).all()), "padding"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [2, 4])
def test_several_decode_steps_in_one_graph(group: int, name: AttentionName) -> None:
    world = PagedSequences(Case(BF16, 64, group, (PLAIN, WINDOW)))
    backend = make_graph_backend(world, name)
    graph = Graph(world, backend, 8, 8, mixed=False, count=4)
    rows = remembered(decode_rows(6, np.random.default_rng(1)), world)
    for _ in range(3):
        steps = []
        for _ in range(4):
            steps.append((rows.copy(), world.step(rows)))
            rows[:, 1] += 1
        for (_, layers), answers in zip(steps, graph.replay(*steps), strict=True):
            check(layers, answers)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("group", [2, 4])
def test_replays_in_flight_do_not_disturb_each_other(group: int, name: AttentionName) -> None:
    """Graphs of several sizes and steps launched kernel by kernel, while the GPU does not move."""
    world = PagedSequences(Case(BF16, 64, group, (PLAIN, WINDOW)))
    backend = make_graph_backend(world, name)
    graphs = {
        False: Graph(world, backend, NUM_SLOTS, NUM_SLOTS, mixed=False),
        True: Graph(world, backend, 512, 32, mixed=True),
    }
    rng = np.random.default_rng(3)
    lengths = dict.fromkeys(range(NUM_SLOTS), 0)
    steps: list[tuple[np.ndarray, list[Layer]]] = []
    for number in range(18):
        running = [slot for slot, length in lengths.items() if length > 0]
        rows = [(slot, lengths[slot], 1) for slot in rng.permutation(running).tolist()]
        if number % 3 == 0:
            rows.append((number, 0, int(rng.integers(2, 200))))
        for slot, _, count in rows:
            lengths[slot] += count
        step = np.array(rows, dtype=np.int32)
        steps.append((step, world.step(step)))

    def run() -> Iterator[list[Tensor]]:
        for number, (step, layers) in enumerate(steps):
            if number % 5 == 4:
                plan = backend.plan(step, world.block_table)
                yield [layer.run(backend, plan) for layer in layers]
            else:
                [answer] = graphs[number % 3 == 0].replay((step, layers))
                yield answer

    # Loading a kernel and getting memory may wait for the GPU, so it is only busy at first, and all
    # answers are kept: then there is memory for as many.
    kept: list[list[Tensor]] = []
    launches = run()
    for _ in range(0, len(steps), IN_FLIGHT):
        torch.cuda._sleep(10_000_000)
        kept += islice(launches, IN_FLIGHT)
        torch.cuda.synchronize()
    del kept
    answers: list[list[Tensor]] = []
    launches = run()
    while len(answers) < len(steps):
        with gate() as hold:
            hold()
            answers += islice(launches, IN_FLIGHT)
            assert not torch.cuda.current_stream().query(), "a launch waited for the GPU"
        torch.cuda.synchronize()
    for (_, layers), given in zip(steps, answers, strict=True):
        check(layers, given)
