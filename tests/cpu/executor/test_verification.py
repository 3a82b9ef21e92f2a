"""A row that verifies a draft samples what decode rows sample one after the other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncllm.executor.device import CpuDevice
from asyncllm.executor.memory.copies import PageCopier
from asyncllm.executor.memory.kv_pool import HostPool
from asyncllm.executor.runner import ModelRunner
from asyncllm.executor.step.eager import EagerForward, StepForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.padded_steps import columns_of, unfolded
from asyncllm.executor.step.verification import Verification
from asyncllm.models.base import CausalLM
from asyncllm.wire.messages import NO_TOKEN, UNKNOWN_DRAFT, RowParams, StepPlan, pack, unpack
from tests.cpu.executor import test_graphs
from tests.cpu.executor.test_graphs import GREEDY, LOGPROBS, LockedDevice, make
from tests.cpu.executor.test_padded_steps import prepared

model, _no_cuda = test_graphs.model, test_graphs._no_cuda  # fixtures

DRAWN = RowParams(temperature=1.0, seed=3)
PENALISED = RowParams(temperature=0.0, repetition_penalty=1.7, logprobs=1)
#: (slot, start, length): decode rows, one of which verifies a draft, and a prompt.
OTHERS = [(0, 24, 1)]
PROMPT = [(3, 4, 16)]


def runner_of(model: CausalLM, params: RowParams, *, graphs: bool) -> ModelRunner:
    graphed, eager, device = make(model, params)
    forward: StepForward = eager
    if graphs:
        graphed.capture_first()
        while graphed.capture_next():
            pass
        forward = graphed
    return runner(model, forward, eager, device)


def runner(
    model: CausalLM, forward: StepForward, eager: EagerForward, device: LockedDevice
) -> ModelRunner:
    _, pool, states = prepared(model)
    copier = PageCopier(pool, HostPool(pool, 0, device), device)
    return ModelRunner(forward, eager.sampler, eager.table, copier, states, device)


def run(
    runner: ModelRunner, step: int, rows: list[tuple[int, int, int]], drafts: list[int]
) -> tuple[np.ndarray, dict[int, float]]:
    """Tokens [k, rows], and logprobs by their index."""
    flat = [value for row in rows for value in row]
    ticket = runner.launch(StepPlan(step, pack(flat), b"", (), drafts=pack(drafts)))
    ticket.wait()
    result = runner.collect(ticket)
    tokens = unpack(result.tokens).reshape(-1, len(rows))
    return tokens, {entry.row: entry.sampled for entry in result.logprobs}


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, LOGPROBS, PENALISED], ids=["greedy", "drawn", "logprobs", "penalised"]
)
@torch.inference_mode()
def test_a_draft_is_verified(model: CausalLM, params: RowParams, graphs: bool) -> None:
    plain = runner_of(model, params, graphs=False)
    wanted, logprobs = [], []
    for after in range(5):
        tokens, scores = run(plain, after, [(1, 25 + after, 1)], [])
        wanted.append(int(tokens[0, 0]))
        logprobs.append(scores.get(0))
    other = (wanted[0] + 1) % 300
    for draft, right in (
        (wanted[:2], 2),
        ([wanted[0], other], 1),
        ([other, wanted[1]], 0),
        ([wanted[0]], 1),
    ):
        verifying = runner_of(model, params, graphs=graphs)
        rows = [*OTHERS, (1, 25, 1 + len(draft)), *PROMPT]
        tokens, scores = run(verifying, 0, rows, draft)
        column = tokens[:, 1].tolist()
        assert column[: right + 1] == wanted[: right + 1]
        assert set(column[right + 1 :]) <= {NO_TOKEN}
        assert (tokens[0, [0, 2]] >= 0).all()
        assert (tokens[1:, [0, 2]] == NO_TOKEN).all()
        if params.logprobs >= 0:
            indices = [3 * after + 1 for after in range(right + 1)]
            assert sorted(scores) == sorted([0, 2, *indices])
            found = [scores[index] for index in indices]
            assert found == pytest.approx(logprobs[: right + 1], abs=1e-4)
        # The next row goes on from the last right token.
        tokens, _ = run(verifying, 1, [(1, 26 + right, 1)], [])
        assert tokens.tolist() == [[wanted[right + 1]]]


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("params", [GREEDY, DRAWN, PENALISED], ids=["greedy", "drawn", "penalised"])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@torch.inference_mode()
def test_steps_follow_before_the_result_is_known(
    model: CausalLM, params: RowParams, graphs: bool, on_device: bool
) -> None:
    """Three steps at once: each row starts where the one before got to, whatever was promised."""
    plain = runner_of(model, params, graphs=False)
    wanted = [int(run(plain, i, [(1, 25 + i, 1)], [])[0][0, 0]) for i in range(9)]
    for right in range(3):
        runner = runner_of(model, params, graphs=graphs)
        first = [*wanted[:right], *(token ^ 1 for token in wanted[right:2])]
        # What the second step drafts is right if it goes on after what was right of the first.
        second = wanted[right + 1 : right + 3]
        plans: list[tuple[list[tuple[int, int, int]], list[int], list[int]]] = [
            ([*OTHERS, (1, 25, 3), *PROMPT], first, []),
            ([(0, 25, 1), (1, 28, 3)], second, [1, 2, 2 - right]),
            ([(1, 31, 1), (0, 26, 1)], [], [0, 4, 0]),
        ]
        tickets = []
        for step, (rows, drafts, doubts) in enumerate(plans):
            if on_device:
                runner._table.drafted[1, : len(drafts)] = torch.tensor(drafts)
                drafts = [UNKNOWN_DRAFT] * len(drafts)
            flat = pack(value for row in rows for value in row)
            plan = StepPlan(step, flat, b"", (), drafts=pack(drafts), doubts=pack(doubts))
            tickets.append(runner.launch(plan))
        found = []
        for ticket, (rows, _, _) in zip(tickets, plans, strict=True):
            tokens = unpack(runner.collect(ticket).tokens).reshape(-1, len(rows))
            found += tokens[:, [slot for slot, _, _ in rows].index(1)].tolist()
        found = [token for token in found if token != NO_TOKEN]
        assert found == wanted[: right + 5]


def test_rows_with_drafts_have_a_column_for_each_sample(
    folder_of: Callable[[str], Path], model: CausalLM
) -> None:
    table, _, _ = prepared(model)
    rows = np.array([(0, 24, 1), (1, 25, 3), (2, 30, 2), (3, 0, 5), (4, 10, 10)], dtype=np.int32)
    step = StepRows.of(rows, table, None, np.array([7, 8, 9], dtype=np.int32))
    assert step.entries[0, :6].tolist() == [-1, -1, 7, 8, -1, 9]
    assert step.drafts is not None
    assert step.drafts.tolist() == [NO_TOKEN, 7, 8, NO_TOKEN, 9, NO_TOKEN, NO_TOKEN]
    assert step.sampling.tolist() == [0, 1, 1, 1, 2, 2, 4]
    assert step.sample_at.tolist() == [0, 1, 2, 3, 4, 5, 20]
    assert step.lengths.tolist() == [25, 26, 27, 28, 31, 32, 20]
    assert columns_of(step).tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert unfolded(step)[:, [0, 2]].tolist() == [
        *([0, 1], [1, 0], [1, 0], [1, 3], [2, 0], [2, 2], [3, 5], [4, 10])
    ]
    verification = Verification.of(step)
    assert verification is not None
    sampled = torch.tensor([1, 7, 5, 6, 9, 4, 3])
    right = verification.check(sampled, None, table, CpuDevice())
    assert right.tolist() == [1, 1]
    assert verification.wrong(step, right.numpy()).tolist() == [3]
    assert table.last_token[[1, 2]].tolist() == [5, 4]
    assert table.next_position[[1, 2]].tolist() == [27, 32]
