"""Page copies between the tiers: every bit arrives, and every plan is acknowledged once."""

from __future__ import annotations

import gc
import mmap
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from asyncllm.errors import ModelError
from asyncllm.executor.device import CpuDevice, DeviceLost
from asyncllm.executor.memory.kv_pool import HostPool
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.models.spec import read_spec
from asyncllm.models.state import StateShape
from asyncllm.wire.channel import FLUSH
from asyncllm.wire.messages import STATE_TO_DEVICE, STATE_TO_HOST, StepPlan, unpack
from tests.support.models.page_copies import (
    SHAPES,
    HeldCopies,
    Script,
    Shape,
    Tiers,
    build,
    load,
    plan,
    runner_of,
    shuffled,
    state_copies,
    store,
    worker_of,
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("staging_pages", [None, 1, 3])
def test_pages_come_back_bit_by_bit(shape: Shape, staging_pages: int | None) -> None:
    tiers = Tiers(CpuDevice(), shape, staging_pages=staging_pages)
    before = tiers.bits()
    away = list(zip(shuffled(20, seed=1)[:14], shuffled(24, seed=2)[:14], strict=True))
    tiers.copier.launch(0, store(away))
    assert [step for step, _ in tiers.copier.completed(0)] == [0]
    assert torch.equal(tiers.bits(), before)

    tiers.clobber(range(20))
    pages, hosts = shuffled(20, seed=3)[:14], [host for _, host in away]
    tiers.copier.launch(1, load(zip(pages, hosts, strict=True)))
    assert [step for step, _ in tiers.copier.completed(1)] == [1]
    after = tiers.bits()
    assert torch.equal(after[pages], before[[page for page, _ in away]])
    others = [page for page in range(20) if page not in pages]
    assert torch.all(after[others] == 0xA5)


def test_both_directions_run_in_one_plan() -> None:
    tiers = Tiers(CpuDevice())
    before = tiers.bits()
    tiers.copier.launch(0, store([(4, 9)]))
    tiers.copier.launch(1, np.concatenate([load([(7, 9)]), store([(5, 8), (6, 2)])]))
    assert [step for step, _ in tiers.copier.completed(1)] == [0, 1]
    assert torch.equal(tiers.bits()[7], before[4])
    assert torch.equal(tiers.host_bits()[[8, 2, 9]], before[[5, 6, 4]])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("matrices", [True, False])
def test_states_come_back_bit_by_bit(shape: Shape, matrices: bool) -> None:
    """Of several host pages each, in runs and apart, while pages move in the same plan."""
    heads = (2, 4, 5) if matrices else ()
    layers = {0: StateShape(6, 3, *heads), 2: StateShape(3, 2, *heads)}
    states = StatePool(layers, 4, torch.bfloat16, "cpu")
    raw = [part.view(torch.uint8) for part in (states.inputs, states.matrices)]
    for part in raw:
        part.copy_(torch.randint(0, 256, part.shape, dtype=torch.uint8))
    size = -(-sum(part.shape[1] for part in raw) // Tiers(CpuDevice(), shape).pool.page_bytes)
    tiers = Tiers(CpuDevice(), shape, host_pages=3 * size + 9, states=states)
    before, pages_before = [part.clone() for part in raw], tiers.bits()
    hosts = shuffled(2 * size, seed=1)
    places = {3: hosts[:size], 1: hosts[size:], 2: list(range(2 * size, 3 * size))}
    out = state_copies(STATE_TO_HOST, places)
    tiers.copier.launch(0, np.concatenate([store([(4, 3 * size + 1)]), out]))
    for part in raw:
        part.fill_(0xA5)
    back = {slot: places[was] for slot, was in ((1, 3), (2, 2), (4, 1))}
    into = state_copies(STATE_TO_DEVICE, back)
    tiers.copier.launch(1, np.concatenate([into, load([(7, 3 * size + 1)])]))
    assert [step for step, _ in tiers.copier.completed(1)] == [0, 1]
    assert torch.equal(tiers.bits()[7], pages_before[4])
    for part, was in zip(raw, before, strict=True):
        assert torch.equal(part[[1, 2, 4]], was[[3, 2, 1]])
        assert torch.all(part[[0, 3]] == 0xA5)


def test_warming_up_changes_no_page() -> None:
    tiers = Tiers(CpuDevice())
    before = tiers.bits()
    tiers.copier.warm_up()
    assert torch.equal(tiers.bits(), before)
    assert tiers.copier.completed(0) == ()
    Tiers(CpuDevice(), host_pages=0).copier.warm_up()


def test_a_larger_batch_moves_in_pieces_of_the_staging_buffer() -> None:
    pieces: list[int] = []

    class Watch(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if function is torch.index_select:
                pieces.append(kwargs["out"].nbytes // tiers.pool.page_bytes)
            return function(*args, **(kwargs or {}))

    tiers = Tiers(CpuDevice(), staging_pages=3)
    hosts = shuffled(24, seed=0)[:20]
    with Watch():
        tiers.copier.launch(0, store(enumerate(hosts)))
    assert pieces == [3, 3, 3, 3, 3, 3, 2]
    assert torch.equal(tiers.host_bits()[hosts], tiers.bits())


# --- acknowledgments --------------------------------------------------------------------------


def serve(
    tiers: Tiers,
    messages: Iterable[StepPlan | bytes | Callable[[], None]],
    depth: int = 2,
    runner: Any = None,
) -> Script:
    script = Script(messages)
    channel: Any = script
    worker_of(tiers, runner or runner_of(tiers)[0], depth).run(channel)
    return script


PROMPT: dict[str, Any] = {"admits": {0: [1, 2, 3]}, "rows": [(0, 0, 3)]}


@pytest.mark.parametrize("depth", [1, 2])
def test_each_plan_is_acknowledged_in_its_own_result_at_the_earliest(depth: int) -> None:
    tiers = Tiers(CpuDevice())
    script = serve(
        tiers,
        [
            plan(0, **PROMPT),
            plan(1, store([(0, 0)]), rows=[(0, 3, 1)]),
            plan(2, store([(1, 1)])),
            plan(3, rows=[(0, 4, 1)]),
            plan(4),
            plan(5, store([(2, 2)]), load([(3, 0)]), rows=[(0, 5, 1)]),
        ],
        depth,
    )
    assert script.copied == [[], [1], [2], [], [], [5]]
    assert [unpack(result.tokens).tolist() for result in script.results] == [
        [7], [7], [], [7], [], [7],
    ]  # fmt: skip
    assert all(result.error is None for result in script.results)


def test_rows_do_not_wait_for_copies_and_are_told_when_they_are_done() -> None:
    device = HeldCopies()
    tiers = Tiers(device)

    def land(span: int) -> Callable[[], None]:
        return lambda: device.held[span].synchronize()

    script = serve(
        tiers,
        [
            plan(0, store([(0, 0)]), store([(1, 1)]), load([(2, 2)]), **PROMPT),
            plan(1, store([(3, 3)]), rows=[(0, 3, 1)]),
            land(2),  # all of plan 1
            land(0),  # half of plan 0
            plan(2, rows=[(0, 4, 1)]),
            land(1),
            plan(3, rows=[(0, 5, 1)]),
            plan(4, rows=[(0, 6, 1)]),
        ],
        depth=1,
    )
    assert script.copied == [[], [], [1], [0], []]
    assert script.results[2].copied == ((1, 0.25),)
    assert script.results[3].copied == ((0, 0.5),)  # of a store and a load


def test_a_plan_without_rows_waits_for_all_copies_before_it_and_its_own() -> None:
    device = HeldCopies()
    tiers = Tiers(device)
    before = tiers.bits()
    messages: list[StepPlan | bytes] = [
        plan(0, store([(0, 0)]), **PROMPT),
        plan(1, store([(1, 1)]), rows=[(0, 3, 1)]),
        plan(2, store([(2, 2)])),
        plan(3, store([(3, 3)]), rows=[(0, 4, 1)]),
        FLUSH,
        plan(4),
    ]
    script = serve(tiers, messages)
    assert script.copied == [[], [], [0, 1, 2], [], [3]]
    assert [len(result.tokens) for result in script.results] == [4, 4, 0, 4, 0]
    assert torch.equal(tiers.host_bits()[:4], before[:4])


def test_a_plan_without_rows_is_posted_as_soon_as_its_copies_have_landed() -> None:
    device = HeldCopies()
    tiers = Tiers(device)
    runner, _ = runner_of(tiers)
    ticket = runner.launch(plan(0, store([(0, 0)])))
    empty = runner.launch(plan(1))
    later = runner.launch(plan(2, store([(1, 1)])))
    assert not ticket.done()
    assert not empty.done()
    device.held[0].synchronize()
    assert ticket.done()
    assert empty.done()
    assert not later.done()
    assert [step for step, _ in runner.collect(ticket).copied] == [0]
    assert runner.collect(empty).copied == ()


def test_a_plan_is_never_acknowledged_in_the_result_of_an_earlier_one() -> None:
    runner, _ = runner_of(Tiers(CpuDevice()))
    rows = runner.launch(plan(0, **PROMPT))
    copies = runner.launch(plan(1, store([(0, 0)]), rows=[(0, 3, 1)]))
    assert runner.collect(rows).copied == ()
    assert [step for step, _ in runner.collect(copies).copied] == [1]


@pytest.mark.parametrize("held", [False, True])
def test_rows_that_fail_do_not_lose_the_acknowledgment(held: bool) -> None:
    device = HeldCopies() if held else CpuDevice()
    tiers = Tiers(device)
    runner, model = runner_of(tiers)

    def fail(failing: bool) -> Callable[[], None]:
        return lambda: setattr(model, "failing", failing)

    script = serve(
        tiers,
        [
            plan(0, **PROMPT),
            fail(True),
            plan(1, store([(0, 0)]), rows=[(0, 3, 1)]),
            fail(False),
            plan(2, rows=[(0, 3, 1)]),
            plan(3),
            plan(4),
        ],
        runner=runner,
    )
    assert [result.error for result in script.results] == [
        None, "RuntimeError('planted')", None, None, None,
    ]  # fmt: skip
    # Copies that are held run when plan 3 waits for them.
    assert script.copied == ([[], [], [], [1], []] if held else [[], [], [1], [], []])


@pytest.mark.parametrize(
    "copies", [store([(20, 0)]), store([(0, 24)]), load([(-1, 0)])], ids=["device", "host", "sign"]
)
def test_a_copy_that_cannot_be_launched_ends_the_worker(copies: np.ndarray) -> None:
    tiers = Tiers(CpuDevice())
    script: list[Any] = [plan(0, **PROMPT), plan(1, copies, rows=[(0, 3, 1)])]
    with pytest.raises(DeviceLost, match=r"copies of step 1.*not all of these pages exist"):
        serve(tiers, script)


def test_a_copy_that_fails_on_its_way_ends_the_worker() -> None:
    class BadEvent(HeldCopies):
        def copy_stream(self) -> Any:
            stream = super().copy_stream()

            def query() -> bool:
                raise RuntimeError("bus error")

            class Stream:
                def run(self, work: Callable[[], None], after: Any = None) -> Any:
                    span: Any = stream.run(work)
                    span.end.query = query
                    return span

            return Stream()

    tiers = Tiers(BadEvent())
    script: list[Any] = [plan(0, store([(0, 0)]), **PROMPT), plan(1, rows=[(0, 3, 1)])]
    with pytest.raises(DeviceLost, match="bus error"):
        serve(tiers, script)


# --- memory -----------------------------------------------------------------------------------


def test_memory_that_is_not_there_is_a_model_error() -> None:
    class Full(CpuDevice):
        def host_memory(self, num_bytes: int) -> torch.Tensor:
            raise RuntimeError("can't allocate memory\nsecond line")

    with pytest.raises(ModelError, match=r"GiB .* can't allocate memory \(a smaller host_kv_gib"):
        HostPool(Tiers(CpuDevice()).pool, 10, Full())


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def test_the_end_of_a_worker_gives_the_host_tier_back(folder_of: Callable[[str], Path]) -> None:
    folder = folder_of("llama")
    before = resident_bytes()
    worker = build(folder, host_kv_gib=0.25)
    assert resident_bytes() - before > 200 << 20
    page_bytes = 4 * read_spec(folder).kv_bytes_per_token(4)
    assert worker.limits.host_pages == 2**28 // page_bytes
    last = worker.limits.host_pages - 1
    script: Any = Script([plan(0, store([(0, 0), (1, last)])), plan(1, load([(2, last)]))])
    worker.run(script)
    assert script.copied == [[0], [1]]
    gc.collect()
    assert resident_bytes() - before < 100 << 20
    assert worker.limits is not None  # a worker that has ended may be kept; its memory may not


def test_a_lost_device_gives_the_memory_back_though_the_error_is_kept() -> None:
    released: list[bool] = []

    class Watched(CpuDevice):
        def release(self) -> None:
            released.append(copier() is None)

    tiers = Tiers(Watched())
    copier = weakref.ref(tiers.copier)
    worker = worker_of(tiers, runner_of(tiers)[0])
    script: Any = Script([plan(0, store([(0, 99)]))])
    del tiers
    with pytest.raises(DeviceLost) as caught:
        worker.run(script)
    assert released == [True]
    assert isinstance(caught.value.__cause__, ValueError)
