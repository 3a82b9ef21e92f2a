"""Heads draft after each step what they draft for the whole sequence at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.executor.device import CpuDevice
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.drafter import HeadDrafter
from asyncllm.executor.step.eager import EagerForward, StepForward
from asyncllm.executor.step.graphs import GraphedForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.padded_steps import PaddedSteps
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.models.loading.loader import load_model
from asyncllm.models.spec import read_spec
from asyncllm.wire.messages import Admit, RowParams, pack
from tests.cpu.models.test_eagle3 import load, read_states, reference
from tests.support.engine.fake_graphs import Graph, use_fake_graphs
from tests.support.engine.scheduling import limits
from tests.support.models import eagle3, tiny_models

PAGE_SIZE, MOST, LENGTH = 4, 3, 64
DEVICE = CpuDevice()
PROMPTS = [np.random.default_rng(i).integers(4, 380, n).tolist() for i, n in enumerate([19, 7, 30])]


class Run:
    """Sequences in slots, with what they have so far, and a reference of their drafts."""

    def __init__(self, target: Path, head: Path, *, graphs: bool = False):
        self.model = model = load(target, head)
        self.plain = reference(target, head)
        pool = KVPool(model.cached_specs, 40, PAGE_SIZE, torch.float32, "cpu")
        self.table = SlotTable(len(PROMPTS), LENGTH // PAGE_SIZE, DEVICE, MOST)
        states = StatePool({}, 0, torch.float32, "cpu")
        self.sampler = Sampler(len(PROMPTS), 384, DEVICE)
        backend: Any = PagedBackend(pool, DEVICE.upload) if graphs else SdpaBackend(pool)
        parts = model, backend, states, self.sampler, self.table, PAGE_SIZE, DEVICE
        self.forward: StepForward = EagerForward(*parts)
        assert model.head is not None
        sizes = [1, 2, 3] if graphs else []
        parts_of_head = model.head, backend, self.table, PAGE_SIZE, DEVICE, LENGTH, sizes
        self.drafter = HeadDrafter(*parts_of_head)
        if graphs:
            padded = PaddedSteps(model, backend, states, self.table, PAGE_SIZE, len(PROMPTS), 64)
            only_one = limits(max_decode_steps=1, multi_step_rows=0)
            graphed = GraphedForward(padded, self.forward, only_one, drafter=self.drafter)
            graphed.capture_first()
            while graphed.capture_next():
                pass
            self.forward = graphed
        self.tokens = [list(prompt) for prompt in PROMPTS]
        pages = iter(np.random.default_rng(9).permutation(40).tolist())
        for slot, prompt in enumerate(PROMPTS):
            params = RowParams(temperature=0.0)
            known = self.table.admit(Admit(slot, pack(prompt), len(prompt), params))
            self.sampler.admit(slot, params, known, len(prompt))
            new = [[slot, index, next(pages)] for index in range(10)]
            self.table.add_pages(np.array(new, dtype=np.int32))

    def step(self, rows: list[tuple[int, int, int]], drafts: list[int] | None = None) -> None:
        """Run rows (slot, start, q_len), and take in what they sampled."""
        self.sampler.flush()
        with torch.inference_mode():
            step = StepRows.of(
                np.array(rows, dtype=np.int32), self.table, drafts=np.array(drafts or [])
            )
            samples = self.forward(step)
            assert samples is not None
            assert samples.taken is not None
            tokens = samples.tokens[0]
            verified, counts = [], []
            columns = samples.columns
            sampled = (tokens if columns is None else tokens[columns]).tolist()
            for row in dict.fromkeys(step.sampling.tolist()):
                own = np.flatnonzero(step.sampling == row)
                right = 0
                while right < len(own) - 1:
                    assert step.drafts is not None
                    if sampled[own[right]] != step.drafts[own[right]]:
                        break
                    right += 1
                if len(own) > 1:
                    verified.append(row)
                    counts.append(right)
                slot = rows[row][0]
                self.tokens[slot] += [sampled[at] for at in own[: right + 1]]
                self.table.last_token[slot] = self.tokens[slot][-1]
            rights = (np.array(verified), torch.tensor(counts)) if verified else None
            self.drafter.draft(step, tokens, samples.columns, samples.taken, rights, MOST)

    def check(self, slots: list[int]) -> None:
        for slot in slots:
            ids = self.tokens[slot]
            read = read_states(self.model, torch.tensor(ids[:-1]))
            wanted = self.plain.drafts(ids, read, MOST)
            assert self.table.drafted[slot].tolist() == wanted

    def start(self, slot: int) -> int:
        return len(self.tokens[slot]) - 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("drafter")
    target = tiny_models.make("llama", folder / "target", num_hidden_layers=4)
    return target, eagle3.write(folder / "head", reads=(1, 2, 3))


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_follow_every_kind_of_row(
    folders: tuple[Path, Path], graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts whole and in chunks, decode rows, and rows that verify drafts, right and wrong."""
    use_fake_graphs(monkeypatch)
    run = Run(*folders, graphs=graphs)
    Graph.replays = 0
    run.step([(0, 0, 19), (1, 0, 5)])
    run.check([0])
    run.step([(0, 19, 1), (1, 5, 2), (2, 0, 10)])
    run.check([0, 1])
    run.step([(2, 10, 13)])
    # What comes next, to draft the right thing.
    ahead = Run(*folders)
    ahead.step([(0, 0, 19)])
    for _ in range(6):
        ahead.step([(0, ahead.start(0), 1)])
    start = run.start(0)
    right = ahead.tokens[0][start + 1 :]
    wrong = (right[1] + 1) % 384
    run.step([(1, run.start(1), 1), (0, start, 4), (2, 23, 7)], [right[0], wrong, right[2]])
    assert run.start(0) == start + 2
    run.check([0, 1, 2])
    start = run.start(0)
    run.step([(0, start, 3)], right[2:4])
    assert run.start(0) == start + 3
    assert run.tokens[0] == ahead.tokens[0][: len(run.tokens[0])]
    run.check([0])
    assert Graph.replays == (4 + 3 if graphs else 0)  # of steps, and of what drafts after them


def test_drafts_beyond_the_pages_write_nowhere(folders: tuple[Path, Path]) -> None:
    run = Run(*folders)
    run.table._num_pages[1] = 2  # of 7 tokens, which leaves room for one
    run.step([(1, 0, 7)])
    before = run.table.drafted[1].tolist()
    assert (
        before[0]
        == run.plain.drafts(
            run.tokens[1], read_states(run.model, torch.tensor(run.tokens[1][:-1])), 1
        )[0]
    )
    drafter: Any = run.drafter
    keys, _ = drafter._backend._kv.layer(4)
    kept = keys.clone()
    run.step([(1, 7, 1)])
    changed = (keys != kept).flatten(2).any(2).nonzero()
    page = run.table.block_table[1, 1].item()
    assert changed.tolist() == [[page, 3]]


def test_a_head_may_read_final_states_of_all_tokens(folder_of: Callable[[str], Path]) -> None:
    """Also where a step needs the last layer for a few of its tokens only."""
    folder = folder_of("qwen3_next")
    model: Any = load_model(folder, read_spec(folder), torch.float32, "cpu", max_length=40)
    head: Any = SimpleNamespace(reads=(model.config.num_hidden_layers,), spec=None)
    head.features = lambda read: model.final(*read)
    pool = KVPool(model.cached_specs, 8, PAGE_SIZE, torch.float32, "cpu")
    states = StatePool(model.states, 1, torch.float32, "cpu")
    table = SlotTable(1, 8, DEVICE)
    sampler = Sampler(1, 384, DEVICE)
    backend = PagedBackend(pool, DEVICE.upload)
    known = table.admit(Admit(0, pack(PROMPTS[1]), 7, RowParams(temperature=0.0)))
    sampler.admit(0, RowParams(temperature=0.0), known, 7)
    table.add_pages(np.array([[0, i, i] for i in range(4)], dtype=np.int32))
    model.head = head
    forward = EagerForward(model, backend, states, sampler, table, PAGE_SIZE, DEVICE)
    step = StepRows.of(np.array([[0, 0, 7]], dtype=np.int32), table, np.ones(1, dtype=np.int32))
    with torch.inference_mode():
        samples = forward(step)
    assert samples is not None
    assert samples.taken is not None
    assert samples.taken.features is not None
    assert samples.taken.features.shape == (7, 64)
