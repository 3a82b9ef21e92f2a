"""Plans that would corrupt KV are refused; sharing and copies that are sound are not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from asyncllm.errors import EngineDead
from asyncllm.executor.sim.device import SimDevice
from asyncllm.executor.sim.pages import BrokenPlan
from asyncllm.wire.messages import (
    STATE_TO_DEVICE,
    STATE_TO_HOST,
    TO_DEVICE,
    TO_HOST,
    Admit,
    StepPlan,
    pack,
)
from tests.support.engine.scheduling import limits
from tests.support.engine.sim_driver import (
    VOCAB,
    Driver,
    Row,
    admit,
    pages_of,
    simulate,
    two_full_pages,
)


def refuses(
    why: str, rows: list[Row], pages: list[Row] | None = None, **parts: Any
) -> Callable[[Driver], Awaitable[None]]:
    """After ``two_full_pages`` this plan ends the executor, and takes the plan before with it."""

    async def test(driver: Driver) -> None:
        await two_full_pages(driver)
        before = driver.send([])
        broken = driver.send(rows, pages, **parts)
        for future in (broken, before):
            with pytest.raises(EngineDead, match=why):
                await future
        with pytest.raises(EngineDead, match=why):
            await driver.send([])

    return test


NEW = (admit(1, [5] * 8),)


@pytest.mark.parametrize(
    "test",
    [
        refuses("slot 0, start 9", [(0, 9, 1)]),
        refuses("slot 0, start 7", [(0, 7, 1)]),
        refuses("slot 0, start 8, length 2", [(0, 8, 2)]),
        refuses("slot 0, start 8, length 0", [(0, 8, 0)]),
        refuses("two rows", [(0, 8, 1), (0, 9, 1)]),
        refuses("slots .1. have rows", [(1, 0, 1)]),
        refuses("slots .8. have rows", [(8, 0, 1)]),
        refuses("slots .-1. have rows", [(-1, 0, 1)]),
        refuses("no slot 8", [], admits=(admit(8, [5]),)),
        refuses("vocabulary", [], admits=(admit(1, [VOCAB]),)),
        refuses("65 tokens", [], admits=(admit(1, [5] * 65),)),
        refuses("0 tokens", [], admits=(admit(1, []),)),
        refuses("page 64", [], [(0, 3, 64)]),
        refuses("page -1", [], [(0, 3, -1)]),
        refuses("index 4, after 3", [], [(0, 4, 10)]),
        refuses("slot 1 is given a page", [], [(1, 0, 10)]),
        refuses("with pages for 0", [(1, 0, 8)], admits=NEW),
        refuses("with pages for 4", [(1, 0, 8)], pages_of(1, [8]), admits=NEW),
        refuses("start 8, length 1", [(1, 8, 1)], pages_of(1, [8, 9, 10]), admits=NEW),
        refuses("room", [(0, 8, 200)]),
        refuses("other tokens", [(1, 4, 4)], pages_of(1, [8, 9]), admits=NEW),
        refuses("other tokens", [(1, 4, 4)], pages_of(1, [1, 9]), admits=NEW),
        refuses("other tokens", [(1, 2, 6)], pages_of(1, [8, 9]), admits=NEW),
        refuses(
            "other tokens", [(1, 4, 4)], pages_of(1, [0, 9]), admits=(admit(1, [5, 5, 6, 5] * 2),)
        ),
        refuses("there is no such page", [], copies=[(TO_HOST, 0, 16)]),
        refuses("there is no such page", [], copies=[(TO_HOST, 64, 0)]),
        refuses("no direction", [], copies=[(2, 0, 0)]),
        refuses("device page is not full", [], copies=[(TO_HOST, 2, 0)]),
        refuses("host page is not full", [], copies=[(TO_DEVICE, 9, 0)]),
        refuses("in use", [], copies=[(TO_HOST, 0, 0), (TO_HOST, 1, 0)]),
        refuses("being filled", [], copies=[(TO_HOST, 0, 0), (TO_DEVICE, 9, 0)]),
    ],
)
def test_broken_plans_are_refused(test: Callable[[Driver], Awaitable[None]]) -> None:
    simulate(test)


def test_steps_come_in_order() -> None:
    async def test(driver: Driver) -> None:
        driver.next_step = 1
        with pytest.raises(EngineDead, match="step 0 was due"):
            await driver.send([])

    simulate(test)


def test_a_prefix_is_shared_by_those_who_have_it() -> None:
    async def test(driver: Driver) -> None:
        await two_full_pages(driver)
        longer = admit(1, [5] * 8 + [6] * 3)
        assert len(await driver.tokens([(1, 8, 3)], pages_of(1, [0, 1, 8]), (longer,))) == 1
        # A full hit computes its last token once more.
        assert await driver.tokens([(2, 7, 1)], pages_of(2, [0, 1, 9]), (admit(2, [5] * 8),))
        # Computed by one row of a step, read by another.
        pages = pages_of(3, [10, 11]) + pages_of(4, [10, 11, 12])
        await driver.tokens(
            [(3, 0, 8), (4, 8, 1)], pages, (admit(3, [3] * 8), admit(4, [3] * 8 + [4]))
        )

    simulate(test)


def test_a_page_given_away_too_early_is_noticed() -> None:
    async def test(driver: Driver) -> None:
        await two_full_pages(driver)
        await driver.step([(1, 0, 6)], pages_of(1, [1, 8]), (admit(1, [6] * 6),))
        for start in range(8, 11):
            await driver.step([(0, start, 1)])
        with pytest.raises(EngineDead, match="page 1 at index 1"):
            await driver.send([(0, 11, 1)])

    simulate(test)


def test_pages_come_back_from_the_host_with_their_content() -> None:
    async def test(driver: Driver) -> None:
        await two_full_pages(driver)
        await driver.step([], copies=[(TO_HOST, 0, 3), (TO_HOST, 1, 4)])
        # Somebody else uses the pages meanwhile.
        await driver.step([(1, 0, 8)], pages_of(1, [0, 1]), (admit(1, [6] * 8),))
        await driver.step([], copies=[(TO_DEVICE, 8, 3), (TO_DEVICE, 9, 4)])
        await driver.step([(2, 8, 1)], pages_of(2, [8, 9, 10]), (admit(2, [5] * 9),))
        with pytest.raises(EngineDead, match="other tokens"):
            await driver.send([(3, 8, 1)], pages_of(3, [9, 8, 11]), (admit(3, [5] * 9),))

    simulate(test)


@pytest.mark.parametrize(
    ("copies", "rows", "pages", "admits"),
    [
        # A row reads a page that is being loaded,
        ([(TO_DEVICE, 8, 3)], [(1, 4, 1)], pages_of(1, [8, 9]), (admit(1, [5] * 5),)),
        # or writes one that is being loaded or stored.
        ([(TO_DEVICE, 2, 3)], [(0, 8, 1)], [], ()),
        ([(TO_HOST, 1, 5)], [(1, 0, 8)], pages_of(1, [8, 1]), (admit(1, [5] * 8),)),
    ],
)
def test_no_step_meets_a_copy(
    copies: list[Row], rows: list[Row], pages: list[Row], admits: tuple[Admit, ...]
) -> None:
    async def beside(driver: Driver) -> None:
        await two_full_pages(driver)
        await driver.step([], copies=[(TO_HOST, 0, 3)])

    async def same_plan(driver: Driver) -> None:
        await beside(driver)
        with pytest.raises(EngineDead, match="while a copy is at it"):
            await driver.send(rows, pages, admits, copies)

    async def copy_first(driver: Driver) -> None:
        await beside(driver)
        copying = driver.send([], copies=copies)
        with pytest.raises(EngineDead, match="while a copy is at it"):
            await driver.send(rows, pages, admits)
        with pytest.raises(EngineDead):
            await copying

    async def rows_first(driver: Driver) -> None:
        await beside(driver)
        if admits:
            return  # what they find in the page they are refused for anyway
        running = driver.send(rows, pages, admits)
        with pytest.raises(EngineDead, match="while a copy is at it"):
            await driver.send([], copies=copies)
        with pytest.raises(EngineDead):
            await running

    async def acknowledged(driver: Driver) -> None:
        await beside(driver)
        await driver.step([], copies=copies)
        await driver.step(rows, pages, admits)

    for test in (same_plan, copy_first, rows_first, acknowledged):
        simulate(test)


# -- recurrent states ------------------------------------------------------------------------------

LIMITS = limits(num_states=3, max_num_seqs=3)


def with_states(
    device: SimDevice,
    rows: list[Row],
    slots: list[int],
    copies: tuple[int, ...] = (),
    admits: tuple[Admit, ...] = (),
) -> None:
    step = device._next_step
    pages = [value for row in admits for page in pages_of(row.slot, [row.slot]) for value in page]
    device.take(
        StepPlan(
            step,
            pack([value for row in rows for value in row]),
            pack(pages),
            admits,
            state_copies=pack(copies),
            state_slots=pack(slots),
        )
    )


def test_a_row_goes_on_from_the_state_of_just_the_tokens_before() -> None:
    device = SimDevice(LIMITS)
    with_states(device, [(0, 0, 3)], [1], admits=(admit(0, [5, 6, 7]),))
    with_states(device, [(0, 3, 1)], [2], (1, 3, 3, 2))  # its state has moved


@pytest.mark.parametrize(
    ("why", "slots", "copies"),
    [
        ("from the state in slot 2, which is that of 0 tokens", [2], ()),
        ("from the state in slot 2, which is that of 2 tokens", [2], (1, 3)),
        ("slot 3, which is that of 3 tokens, but of others", [3], ()),
        ("state slot 0", [0], ()),
        ("state slot 4", [4], ()),
        ("not one for each", [], ()),
        ("not one for each", [1, 2], ()),
        ("no slot 4", [1], (1, 4)),
        ("no slot 0", [1], (1, 0)),
        ("no state in slot 0", [1], (0, 2)),
    ],
)
def test_a_row_that_goes_on_from_another_state_is_refused(
    why: str, slots: list[int], copies: tuple[int, ...]
) -> None:
    device = SimDevice(LIMITS)
    admits = admit(0, [5, 6, 7]), admit(1, [5, 5]), admit(2, [5, 6, 8])
    if why.endswith("of 0 tokens"):
        with_states(device, [(0, 0, 3)], [1], admits=admits[:1])
    else:
        with_states(device, [(0, 0, 3), (1, 0, 2), (2, 0, 3)], [1, 2, 3], admits=admits)
    with pytest.raises(BrokenPlan, match=why):
        with_states(device, [(0, 3, 1)], slots, copies)


def moved(device: SimDevice, entries: list[tuple[int, int, int]], *rows: Row) -> None:
    """A plan with copies of states, and decode rows on state slot 1."""
    copies = pack(value for entry in entries for value in entry)
    flat = pack(value for row in rows for value in row)
    device.take(
        StepPlan(device._next_step, flat, b"", (), copies, state_slots=pack([1] * len(rows)))
    )


def saved(slot: int, *hosts: int) -> list[tuple[int, int, int]]:
    return [(STATE_TO_HOST, slot, host) for host in hosts]


def loaded(slot: int, *hosts: int) -> list[tuple[int, int, int]]:
    return [(STATE_TO_DEVICE, slot, host) for host in hosts]


ON_HOST = limits(num_states=3, max_num_seqs=3, host_pages=6, state_pages=2)


def report(device: SimDevice, *entries: tuple[int, int, int]) -> None:
    device.report([np.array(entries, dtype=np.int32).reshape(-1, 3)])


def test_a_state_comes_back_from_the_host_to_another_slot() -> None:
    device = SimDevice(ON_HOST)
    with_states(device, [(0, 0, 3)], [2], admits=(admit(0, [5, 6, 7]),))
    report(device)
    moved(device, saved(2, 4, 1))
    report(device, *saved(2, 4, 1))
    moved(device, loaded(1, 4, 1))
    report(device, *loaded(1, 4, 1))
    moved(device, [], (0, 3, 1))


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        (loaded(1, 4), "do not exist"),
        (loaded(4, 4, 1), "do not exist"),
        (loaded(1, 1, 4), "do not have a state"),
        (loaded(1, 4, 2), "do not have a state"),
        (loaded(1, 0, 3), "do not have a state"),
        (saved(3, 0, 3), "cannot be copied"),
        (saved(1, 0, 3) + loaded(1, 4, 1), "copy is at state slot 1 already"),
        (saved(1, 0, 3) + loaded(2, 0, 3), "do not have a state"),
    ],
)
def test_a_copy_of_a_state_that_is_not_there_is_refused(
    entries: list[tuple[int, int, int]], why: str
) -> None:
    device = SimDevice(ON_HOST)
    with_states(device, [(0, 0, 3)], [1], admits=(admit(0, [5, 6, 7]),))
    moved(device, saved(1, 4, 1))
    for acknowledged in ([], saved(1, 4, 1)):
        report(device, *acknowledged)
    with pytest.raises(BrokenPlan, match=why):
        moved(device, entries)


def test_nobody_uses_a_state_slot_while_a_copy_is_at_it() -> None:
    for entries in (saved(1, 4, 1), loaded(1, 2, 3)):
        device = SimDevice(ON_HOST)
        with_states(device, [(0, 0, 3)], [1], admits=(admit(0, [5, 6, 7]),))
        moved(device, saved(1, 2, 3))
        for acknowledged in ([], saved(1, 2, 3)):
            report(device, *acknowledged)
        with pytest.raises(BrokenPlan, match="while a copy is at it"):
            moved(device, entries, (0, 3, 1))
