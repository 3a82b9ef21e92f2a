"""How many pages a step sends to the host."""

from __future__ import annotations

import pytest

from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.scheduling.copies import MOST_SAVED, MOST_SAVING_SECONDS, PageCopies
from asyncllm.engine.scheduling.timing.prefill_room import StepShape
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from asyncllm.wire.messages import unpack
from tests.support.engine.scheduling import sequence


def full(page_copy_seconds: float) -> PageCopies:
    """Of a cache without a free page, 500 of whose pages are to be saved."""
    cache = KVCacheManager(8000, 1, host_pages=4000)
    seq = sequence(1, 8000)
    cache.hold(seq.kv, cache.match(seq.kv))
    assert cache.extend(seq.kv, 8000)
    cache.begin(seq.kv, 8000)
    cache.computed(seq.kv, 8000)
    cache.release(seq.kv, 8000)
    return PageCopies(cache, StepTimeModel(page_copy_seconds))


def saved(copies: PageCopies, step: int, num_tokens: int) -> int:
    copies.back_up(num_tokens)
    return len(unpack(copies.send(step), 3))


@pytest.mark.parametrize("num_tokens", [1, 100])
def test_a_step_saves_as_many_pages_as_it_fills_and_some_more(num_tokens: int) -> None:
    copies = full(0.0)
    for step in range(2):
        assert saved(copies, step, num_tokens) == MOST_SAVED + num_tokens
    assert [saved(copies, step, 400) for step in range(2, 4)] == [
        500 - 2 * (MOST_SAVED + num_tokens),
        0,
    ]


def test_a_newcomer_waits_for_what_is_saved_before_its_pages_are_taken() -> None:
    copies = full(0.0)
    copies.back_up(400)
    assert copies.save_before(464)
    assert copies.save_before(3000), "more than is saved ahead"
    assert copies.send(0)
    copies.done(0, 0.1)
    assert not copies.save_before(3000)
    assert saved(copies, 1, 0) == 0, "as many are ahead"


def test_nobody_waits_for_copies_that_take_longer_than_computing() -> None:
    copies = full(1.0)
    for tokens in (100, 200, 400) * 10:
        copies._times.observe(StepShape(tokens, tokens, tokens**2 / 2), 1e-3 * tokens)
    assert copies._times.fitted
    assert not copies.save_before(3000)


def test_a_slow_bus_is_not_sent_more_than_it_can_move_soon() -> None:
    copies = full(1.1 * MOST_SAVING_SECONDS / MOST_SAVED)
    assert saved(copies, 0, 0) == MOST_SAVED
    assert saved(copies, 1, 0) == 0
    copies.done(0, 1.1 * MOST_SAVING_SECONDS)
    assert saved(copies, 1, 0) == MOST_SAVED
