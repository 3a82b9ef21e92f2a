"""Page copies on a GPU: bit-exact, on streams of their own, from and to locked memory."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.executor.device import CopyStream, CudaDevice, Span
from asyncllm.executor.memory.kv_pool import HostPool
from asyncllm.executor.runner import ModelRunner
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.models.state import StateShape
from asyncllm.wire.messages import STATE_TO_DEVICE, STATE_TO_HOST, StepPlan, StepResult, unpack
from tests.cpu.attention.test_shared_pages import check_shared_pages
from tests.support.engine.waiting import gate, no_waiting
from tests.support.models.page_copies import (
    SHAPES,
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

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode")]

#: Of an 8B model with grouped heads: 2.25 MiB a page.
LARGE = Shape(36, 16, 8, 128, torch.bfloat16)


class Watched(CudaDevice):
    """Keeps its copy streams at hand: stores' first, then loads'."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[CopyStream] = []

    def copy_stream(self) -> CopyStream:
        self.streams.append(super().copy_stream())
        return self.streams[-1]

    def hold_copies(self, hold: Callable[[], None]) -> list[Span]:
        """Keep both streams waiting."""
        return [stream.run(hold) for stream in self.streams]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("staging_pages", [None, 1, 3])
def test_pages_come_back_bit_by_bit(shape: Shape, staging_pages: int | None) -> None:
    device = CudaDevice()
    tiers = Tiers(device, shape, staging_pages=staging_pages)
    before = tiers.bits()
    away, hosts = shuffled(20, seed=1)[:14], shuffled(24, seed=2)[:14]
    tiers.copier.launch(0, store(zip(away, hosts, strict=True)))
    tiers.wait_for_copies()
    assert torch.equal(tiers.host_bits()[hosts], before[away])

    tiers.clobber(range(20))
    device.event().synchronize()
    pages = shuffled(20, seed=3)[:14]
    tiers.copier.launch(1, load(zip(pages, hosts, strict=True)))
    tiers.wait_for_copies()
    ((first, first_seconds), (second, second_seconds)) = tiers.copier.completed(1)
    assert (first, second) == (0, 1)
    assert first_seconds > 0
    assert second_seconds > 0
    after = tiers.bits()
    assert torch.equal(after[pages], before[away])
    others = [page for page in range(20) if page not in pages]
    assert torch.all(after[others] == 0xA5)
    device.release()


def test_a_batch_in_many_pieces_keeps_its_staging_buffers_apart() -> None:
    """Large pages, both directions at once, far more of them than the buffers hold."""
    device = CudaDevice()
    tiers = Tiers(device, LARGE, num_pages=120, host_pages=120, staging_pages=4)
    before = tiers.bits()
    hosts = shuffled(120, seed=0)
    tiers.copier.launch(0, store(enumerate(hosts[:60])))
    tiers.wait_for_copies()
    out = store(zip(range(60, 120), hosts[60:], strict=True))
    back = load(zip(range(60), reversed(hosts[:60]), strict=True))
    tiers.copier.launch(1, np.concatenate([out, back]))
    tiers.wait_for_copies()
    assert [step for step, _ in tiers.copier.completed(1)] == [0, 1]
    assert torch.equal(tiers.host_bits()[hosts], before)
    assert torch.equal(tiers.bits()[:60], before[:60].flip(0))
    device.release()


def test_launching_and_polling_do_not_wait_for_the_device() -> None:
    device = Watched()
    tiers = Tiers(device)
    tiers.copier.warm_up()
    with no_waiting(), gate() as hold:
        held = device.hold_copies(hold)
        tiers.copier.launch(0, np.concatenate([store([(0, 0), (3, 5)]), load([(1, 1)])]))
        assert tiers.copier.completed(0) == ()
        assert not any(span.end.query() for span in held)
    tiers.wait_for_copies()
    assert [step for step, _ in tiers.copier.completed(0)] == [0]
    device.release()


def test_copies_do_not_wait_for_the_steps() -> None:
    device = CudaDevice()
    tiers = Tiers(device)
    tiers.copier.warm_up()
    before = tiers.bits()
    with gate() as hold:
        hold()
        steps = device.event()
        tiers.copier.launch(0, np.concatenate([store([(4, 9), (5, 10)]), load([(0, 0)])]))
        tiers.wait_for_copies()
        assert not steps.query()
    assert [step for step, _ in tiers.copier.completed(0)] == [0]
    assert torch.equal(tiers.host_bits()[9:11], before[4:6])
    steps.synchronize()
    device.release()


def finish(runner: ModelRunner, plan: StepPlan) -> StepResult:
    ticket = runner.launch(plan)
    ticket.wait()
    return runner.collect(ticket)


def test_steps_do_not_wait_for_copies() -> None:
    device = Watched()
    tiers = Tiers(device)
    tiers.copier.warm_up()
    before = tiers.bits()
    runner, _ = runner_of(tiers)
    prompt: Any = {"admits": {0: [1, 2, 3]}, "rows": [(0, 0, 3)]}
    first = finish(runner, plan(0, **prompt))
    second = finish(runner, plan(1, rows=[(0, 3, 1)]))
    assert [unpack(result.tokens).tolist() for result in (first, second)] == [[7], [7]]

    with gate() as hold:
        held = device.hold_copies(hold)
        pages = store((page, page) for page in range(20))
        plans = [plan(2, pages, rows=[(0, 4, 1)])]
        plans += [plan(step, rows=[(0, step + 2, 1)]) for step in range(3, 20)]
        results = [finish(runner, each) for each in plans]
        assert not any(span.end.query() for span in held)
        assert [result.copied for result in results] == [()] * 18
        assert all(unpack(result.tokens).tolist() == [7] for result in results)

        ticket = runner.launch(plan(20))
        assert not ticket.done()
    ticket.wait()
    ((step, seconds),) = runner.collect(ticket).copied
    assert step == 2
    assert 0 < seconds < min(span.seconds() for span in held)  # waiting for others is not counted
    assert torch.equal(tiers.host_bits()[:20], before)
    device.release()


@pytest.mark.parametrize("depth", [1, 2])
def test_every_plan_is_acknowledged_once(depth: int) -> None:
    device = CudaDevice()
    tiers = Tiers(device)
    tiers.copier.warm_up()
    before = tiers.bits()
    runner, model = runner_of(tiers)

    def fail(failing: bool) -> Callable[[], None]:
        return lambda: setattr(model, "failing", failing)

    script: Any = Script(
        [
            plan(0, admits={0: [1, 2, 3]}, rows=[(0, 0, 3)]),
            fail(True),
            plan(1, store([(0, 0), (1, 7)]), rows=[(0, 3, 1)]),
            fail(False),
            plan(2, store([(2, 2)]), rows=[(0, 3, 1)]),
            plan(3, load([(5, 3)])),
            *(plan(step, store([(6, step)]), rows=[(0, step, 1)]) for step in range(4, 20)),
            plan(20),
        ]
    )
    worker_of(tiers, runner, depth).run(script)
    told = [(result.step, step) for result in script.results for step, _ in result.copied]
    assert sorted(step for _, step in told) == list(range(1, 20))
    assert all(own <= result for result, own in told)
    assert [result.step for result in script.results if result.error is not None] == [1]
    assert {1, 2, 3} <= {step for result, step in told if result <= 3}
    assert torch.equal(tiers.bits()[5], torch.zeros_like(before[5]))
    assert tiers.host_bits().any(dim=1).nonzero().flatten().tolist() == [0, 2, *range(4, 20)]


def test_a_state_is_loaded_only_when_nothing_before_reads_its_slot() -> None:
    """Steps and copies from slot to slot are in the order of plans; the copy's stream waits."""
    device = CudaDevice()
    states = StatePool({0: StateShape(64, 3, 4, 64, 64)}, 4, torch.bfloat16, device.torch_device)
    states.warm_up(device.upload)
    tiers = Tiers(device, host_pages=300, states=states)
    size = -(-sum(len(part) for part in states.bytes_of(1)) // tiers.pool.page_bytes)
    for slot in range(5):
        for part in states.bytes_of(slot):
            part.fill_(slot)
    hosts = shuffled(300, seed=1)[:size]
    tiers.copier.launch(0, state_copies(STATE_TO_HOST, {3: hosts}))
    tiers.wait_for_copies()
    with no_waiting(), gate() as hold:
        hold()
        states.copy(np.array([(1, 2)], dtype=np.int32), device.upload)
        tiers.copier.launch(1, state_copies(STATE_TO_DEVICE, {1: hosts}))
        assert [step for step, _ in tiers.copier.completed(1)] in ([], [0])
    tiers.wait_for_copies()
    torch.cuda.synchronize()
    assert [int(part.max()) for slot in (1, 2, 3) for part in states.bytes_of(slot)] == [
        3, 3, 1, 1, 3, 3,
    ]  # fmt: skip
    device.release()


def test_host_memory_is_locked_until_the_release() -> None:
    device = CudaDevice()
    tiers = Tiers(device)
    odd = HostPool(tiers.pool, 1, device)  # neighbours share no page of the system
    storages = [tiers.host.storage, odd.storage]
    assert [is_locked(storage) for storage in storages] == [True, True]
    tiers.copier.launch(0, store([(0, 0)]))
    device.release()
    assert [is_locked(storage) for storage in storages] == [False, False]
    device.release()
    # The same memory can be locked again, by another engine.
    again = CudaDevice()
    assert is_locked(HostPool(tiers.pool, 3, again).storage)
    again.release()


def is_locked(storage: torch.Tensor) -> bool:
    """``is_pinned`` does not know of memory that CUDA was told to lock."""
    cudart = torch.cuda.cudart()
    if cudart.cudaHostUnregister(storage.data_ptr()) != cudart.cudaError.success:
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")  # CUDA reports the error once more
        return False
    length = -(-storage.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert cudart.cudaHostRegister(storage.data_ptr(), length, 0) == cudart.cudaError.success
    return True


def test_a_first_row_can_begin_behind_pages_from_the_host_tier(
    folder_of: Callable[[str], Path],
) -> None:
    check_shared_pages(build(folder_of("llama"), device="cuda", dtype="float32", host_kv_gib=0.001))


def test_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints GB/s; asserts only that the bits are right."""
    device = CudaDevice()
    count = 400  # 900 MiB
    tiers = Tiers(device, LARGE, num_pages=2 * count, host_pages=2 * count)
    tiers.copier.warm_up()
    before = tiers.bits()
    in_order, scattered = list(range(count)), shuffled(count, seed=0)
    pages = shuffled(2 * count, seed=1)
    lines = []

    def timed(step: int, name: str, copies: np.ndarray) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        tiers.copier.launch(step, copies)
        tiers.wait_for_copies()
        end.record()
        end.synchronize()
        ((_, seconds),) = tiers.copier.completed(step)
        moved = len(copies) * tiers.pool.page_bytes / 1e9
        wall = start.elapsed_time(end) / 1e3
        lines.append(f"{name}: {moved / seconds:.1f} GB/s a stream, {moved / wall:.1f} in all")

    for step, (name, hosts) in enumerate([("in order", in_order), ("scattered", scattered)]):
        timed(2 * step, f"store {name}", store(zip(pages, hosts, strict=False)))
        timed(2 * step + 1, f"load {name}", load(zip(pages, hosts, strict=False)))
    timed(
        4,
        "both ways",
        np.concatenate(
            [
                store(zip(pages[count:], range(count, 2 * count), strict=True)),
                load(zip(pages, scattered, strict=False)),
            ]
        ),
    )
    with capsys.disabled():
        print("", *lines, sep="\n")
    assert torch.equal(tiers.bits(), before)
    assert torch.equal(tiers.host_bits()[count:], before[pages[count:]])
    device.release()
