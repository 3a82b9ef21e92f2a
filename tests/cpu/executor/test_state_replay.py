"""Rows with drafts leave recurrent states as they are after what was right."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncllm.attention.paged import PagedBackend
from asyncllm.executor.device import CpuDevice
from asyncllm.executor.memory.copies import PageCopier
from asyncllm.executor.memory.kv_pool import HostPool, KVPool
from asyncllm.executor.runner import ModelRunner
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.eager import EagerForward
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.models.loading.loader import load_model
from asyncllm.models.spec import read_spec
from asyncllm.wire.messages import NO_TOKEN, Admit, RowParams, StepPlan, pack, unpack

PAGE_SIZE, SLOTS, MOST = 4, 3, 3
DEVICE = CpuDevice()
PROMPTS = [[5 + 3 * slot + i for i in range(6 + 5 * slot)] for slot in range(SLOTS)]


class Run:
    """Three sequences, whose states are in slots 1 to 3."""

    def __init__(self, folder: Path):
        model = load_model(folder, read_spec(folder), torch.float32, "cpu", max_length=40)
        pool = KVPool(model.cached_specs, 30, PAGE_SIZE, torch.float32, "cpu")
        self.states = StatePool(model.states, SLOTS, torch.float32, "cpu", SLOTS)
        table = SlotTable(SLOTS, 10, DEVICE, MOST)
        sampler = Sampler(SLOTS, 384, DEVICE)
        backend = PagedBackend(pool, DEVICE.upload)
        eager = EagerForward(model, backend, self.states, sampler, table, PAGE_SIZE, DEVICE)
        copier = PageCopier(pool, HostPool(pool, 0, DEVICE), DEVICE, states=self.states)
        self.runner = ModelRunner(eager, sampler, table, copier, self.states, DEVICE)
        self.step = 0
        admits = tuple(
            Admit(slot, pack(tokens), len(tokens), RowParams(temperature=0.0))
            for slot, tokens in enumerate(PROMPTS)
        )
        pages = [(slot, i, 10 * slot + i) for slot in range(SLOTS) for i in range(10)]
        self.tokens = [list(tokens) for tokens in PROMPTS]
        rows = [(slot, 0, len(tokens)) for slot, tokens in enumerate(PROMPTS)]
        self.run(rows, [], admits=admits, new_pages=pack(v for page in pages for v in page))

    def run(
        self,
        rows: list[tuple[int, int, int]],
        drafts: list[int],
        admits: tuple[Admit, ...] = (),
        new_pages: bytes = b"",
    ) -> None:
        plan = StepPlan(
            self.step,
            pack(value for row in rows for value in row),
            new_pages,
            admits,
            state_slots=pack(1 + slot for slot, *_ in rows),
            drafts=pack(drafts),
        )
        self.step += 1
        with torch.inference_mode():
            ticket = self.runner.launch(plan)
            ticket.wait()
            found = unpack(self.runner.collect(ticket).tokens).reshape(-1, len(rows)).T
        for (slot, *_), own in zip(rows, found.tolist(), strict=True):
            self.tokens[slot] += [token for token in own if token != NO_TOKEN]

    def row(self, slot: int, num_drafts: int = 0) -> tuple[int, int, int]:
        return slot, len(self.tokens[slot]) - 1, 1 + num_drafts

    def state(self, slot: int) -> tuple[Tensor, Tensor]:
        return self.states.inputs[1 + slot].clone(), self.states.matrices[1 + slot].clone()


@pytest.mark.parametrize("family", ["qwen3_next", "nemotron_h", "lfm2"])
def test_states_are_those_of_what_was_right(folder_of: Callable[[str], Path], family: str) -> None:
    plain = Run(folder_of(family))
    for _ in range(12):
        plain.run([plain.row(slot) for slot in range(SLOTS)], [])
    run = Run(folder_of(family))
    for wrong_at in (2, 0, 3):
        known = [len(tokens) for tokens in run.tokens]
        drafts = [plain.tokens[slot][known[slot] : known[slot] + MOST] for slot in (1, 2)]
        if wrong_at < MOST:
            drafts[0][wrong_at] = (drafts[0][wrong_at] + 1) % 384
        run.run([run.row(0), run.row(1, MOST), run.row(2, 2)], [*drafts[0], *drafts[1][:2]])
        got = [len(tokens) - old for tokens, old in zip(run.tokens, known, strict=True)]
        assert got == [1, wrong_at + 1, 3]
        for slot in range(SLOTS):
            count = len(run.tokens[slot])
            assert run.tokens[slot] == plain.tokens[slot][:count]
            again = Run(folder_of(family))
            while len(again.tokens[slot]) < count:
                again.run([again.row(slot)], [])
            for own, other in zip(run.state(slot), again.state(slot), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-4, atol=1e-4)
