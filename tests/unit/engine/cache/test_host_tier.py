"""The host tier: together with the device it is one larger cache, and it copies no more than that
takes."""

from __future__ import annotations

import random
from collections import deque
from typing import NamedTuple

import pytest

from asyncllm.engine.cache.lazy_heap import LazyHeap
from asyncllm.engine.cache.manager import Copies, KVCacheManager
from asyncllm.engine.scheduling.sequence import Sequence
from tests.support.engine.scheduling import sequence


class Outcome(NamedTuple):
    hits: int
    saved: int
    loaded: int
    dropped: int


def begin(cache: KVCacheManager, id: int, tokens: list[int]) -> tuple[Sequence, int, int]:
    """A sequence with pages for all its tokens; how many it found on the device and the host."""
    seq = sequence(id, tokens)
    match = cache.match(seq.kv)
    cache.hold(seq.kv, match)
    if match.host:
        copies = cache.load(seq.kv, match)
        assert copies is not None
        cache.loaded(copies)
    assert cache.extend(seq.kv, len(tokens))
    cache.begin(seq.kv, len(tokens))
    cache.computed(seq.kv, len(tokens))
    return seq, len(match.pages), len(match.host)


def serve(cache: KVCacheManager, id: int, tokens: list[int]) -> tuple[int, int]:
    seq, device, host = begin(cache, id, tokens)
    cache.release(seq.kv, len(tokens))
    return device, host


def converse(num_pages: int, host_pages: int) -> Outcome:
    """Turns of many conversations; a page is a token.

    A few requests overlap. Each takes some steps, which save pages, and each copy takes a step.
    """
    rng = random.Random(5)
    cache = KVCacheManager(num_pages, 1, host_pages=host_pages)
    inside: deque[Sequence] = deque()
    flying: deque[Copies] = deque()
    histories: list[list[int]] = []
    hits = saved = loaded = 0
    for turn in range(1000):
        if len(histories) < 60 or rng.random() < 0.3:
            histories.append([])
        # Recent conversations more often, old ones now and then.
        history = histories[-1 - min(int(rng.expovariate(1 / 25)), len(histories) - 1)]
        if len(history) > 200:
            history.clear()
        history += rng.choices(range(1000), k=rng.randint(10, 30))
        seq, device, host = begin(cache, turn, list(history))
        inside.append(seq)
        hits, loaded = hits + device + host, loaded + host
        for _ in range(2):
            flying.append(cache.back_up(60))
            saved += len(flying[-1].nodes)
            if len(flying) > 1:
                cache.backed_up(flying.popleft())
        if len(inside) > 3:
            old = inside.popleft()
            cache.release(old.kv, len(old.tokens))
        assert cache.num_host_used <= host_pages
    return Outcome(hits, saved, loaded, cache.num_dropped)


@pytest.mark.parametrize("host_pages", [750, 1500, 3000])
def test_device_and_host_together_are_one_cache_of_both_sizes(host_pages: int) -> None:
    alone, whole = converse(1500, 0).hits, converse(1500 + host_pages, 0).hits
    both = converse(1500, host_pages)
    assert whole > 1.1 * alone
    assert both.hits - alone > 0.8 * (whole - alone)
    assert both.hits > 0.96 * whole
    assert both.loaded > 0


def test_a_device_that_is_large_enough_copies_nothing() -> None:
    outcome = converse(100_000, 1000)
    assert outcome.hits == converse(100_000, 0).hits
    assert (outcome.saved, outcome.loaded, outcome.dropped) == (0, 0, 0)


def test_pages_are_saved_only_just_ahead_of_their_eviction() -> None:
    cache = KVCacheManager(1600, 1, host_pages=800)  # 100 are to be free or saved
    serve(cache, 1, list(range(500)))
    assert not cache.back_up(99).nodes, "there is room enough"
    serve(cache, 2, list(range(1000, 2020)))
    copies = cache.back_up(99)
    assert [node.depth for node in copies.nodes] == list(range(500, 480, -1))
    assert not cache.back_up(99).nodes
    cache.backed_up(copies)
    assert not cache.back_up(99).nodes, "that is enough"
    serve(cache, 3, list(range(3000, 3100)))
    assert (cache.num_evicted, cache.num_dropped) == (20, 0)
    assert cache.num_host_used == 20
    assert len(cache.back_up(999).nodes) == 100
    assert serve(cache, 4, list(range(500))) == (480, 19), "of a full hit, the last is computed"


def test_pages_evicted_before_they_could_be_saved_are_counted() -> None:
    cache = KVCacheManager(100, 1, host_pages=400)
    serve(cache, 1, list(range(100)))
    copies = cache.back_up(10)
    assert len(copies.nodes) == 10
    cache.backed_up(copies)
    serve(cache, 2, list(range(1000, 1030)))
    assert (cache.num_evicted, cache.num_dropped) == (30, 20)
    assert cache.num_host_used == 0, "nothing below a page that is lost can be found"


def test_a_page_above_host_pages_goes_last() -> None:
    """Its host pages would be lost with it, and the last page of another prompt is but one."""
    cache = KVCacheManager(100, 1, host_pages=400)
    first, second = list(range(60)), list(range(100, 140))
    serve(cache, 1, first)
    serve(cache, 2, second)
    cache.backed_up(cache.back_up(20))
    serve(cache, 3, list(range(200, 230)))
    assert (cache.num_evicted, cache.num_dropped) == (30, 10)
    assert (parts(cache, [*first, -1]), parts(cache, [*second, -1])) == ((40, 20), (30, 0))
    cache.backed_up(cache.back_up(1, soon=99))
    serve(cache, 4, list(range(300, 331)))
    assert parts(cache, [*first, -1]) == (39, 21), "what has been saved can go"
    serve(cache, 5, list(range(400, 499)))
    assert parts(cache, [*first, -1]) == (1, 0), "there is nothing else"


def test_what_can_be_taken_without_a_loss() -> None:
    cache = KVCacheManager(100, 1, host_pages=400)
    serve(cache, 1, list(range(60)))
    assert cache.num_expendable() == 40
    copies, others = cache.back_up(5, soon=99), cache.back_up(5, soon=99)
    assert cache.num_expendable() == 40
    cache.backed_up(others)
    assert cache.num_expendable() == 40, "they are evicted after those below them"
    cache.backed_up(copies)
    assert cache.num_expendable() == 50


def test_the_copy_of_a_page_in_use_gives_its_place_up_first() -> None:
    cache = KVCacheManager(40, 1, host_pages=80)  # 10 of them for copies of what the device has
    prompts = [list(range(100 * id, 100 * id + 10)) for id in range(11)]
    for id, prompt in enumerate(3 * prompts):
        assert sum(serve(cache, id, prompt)) == (9 if id >= 11 else 0), "none is ever lost"
        cache.backed_up(cache.back_up(99))
        assert cache.num_dropped == 0
    assert cache.num_host_used == 80


def test_a_full_tier_gives_up_what_was_used_least_recently() -> None:
    cache = KVCacheManager(16, 1, host_pages=32)  # 4 of them for copies of what the device has
    for id in range(20):
        cache.backed_up(cache.back_up(99))
        serve(cache, id, [100 * id + i for i in range(4)])
    found = [sum(parts(cache, [100 * id + i for i in range(5)])) for id in range(20)]
    assert found == [0] * 8 + [4] * 12


def parts(cache: KVCacheManager, tokens: list[int]) -> tuple[int, int]:
    """How many pages are on the device, and then on the host."""
    match = cache.match(sequence(99, tokens).kv)
    return len(match.pages), len(match.host)


def test_a_path_is_evicted_without_asking_the_heap_for_each_page(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = KVCacheManager(5000, 1, host_pages=5000)
    for id in range(2):
        serve(cache, id, list(range(10_000 * id, 10_000 * id + 2500)))
    calls = 0

    def counted(heap: LazyHeap[object]) -> object:
        nonlocal calls
        calls += 1
        return pop(heap)

    pop = LazyHeap.pop
    monkeypatch.setattr(LazyHeap, "pop", counted)
    serve(cache, 2, list(range(50_000, 52_600)))
    assert cache.num_evicted == 2600
    assert calls == 2
