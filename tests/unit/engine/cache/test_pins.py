"""Pins: who may pin how much, what is evicted in which order, and what a pin never does."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from asyncllm.engine.cache.lazy_heap import LazyHeap
from asyncllm.engine.cache.manager import KVCacheManager
from tests.support.engine.scheduling import sequence


def serve(
    cache: KVCacheManager,
    tokens: list[int],
    *,
    salt: str = "",
    tenant: str = "",
    until: float | None = None,
    cold: bool = False,
) -> tuple[int, int]:
    """One sequence from its admission to its end: pages that it found, and pages pinned."""
    seq = sequence(1, tokens, cache_salt=salt)
    cache.hold(seq.kv, cache.match(seq.kv))
    found = len(seq.kv.pages)
    assert cache.extend(seq.kv, len(tokens)), "a pin never keeps a page from a sequence"
    cache.begin(seq.kv, len(tokens))
    cache.computed(seq.kv, len(tokens))
    pinned = 0 if until is None else cache.pin(seq.kv, len(tokens), tenant, until)
    cache.release(seq.kv, len(tokens), cold=cold)
    return found, pinned


def found(cache: KVCacheManager, tokens: list[int], salt: str = "") -> int:
    return len(cache.match(sequence(1, [*tokens, -1], cache_salt=salt).kv).pages)


def flood(cache: KVCacheManager, num_pages: int, first: int = 1000) -> None:
    for token in range(first, first + num_pages):
        serve(cache, [token])


@pytest.fixture
def cache() -> KVCacheManager:
    """Ten pages of one token; a tenant may pin four, all together eight."""
    return KVCacheManager(10, 1, max_pinned_share=0.4)


def test_what_is_pinned_is_evicted_last(cache: KVCacheManager) -> None:
    assert serve(cache, [1, 2, 3], until=5.0) == (0, 3)
    flood(cache, 50)
    assert found(cache, [1, 2, 3]) == 3
    assert cache.pins.num_evicted == 0


def test_a_pin_ends_with_its_time(cache: KVCacheManager) -> None:
    serve(cache, [1, 2, 3], until=5.0)
    cache.expire_pins(4.9)
    flood(cache, 20)
    cache.expire_pins(5.0)
    assert (cache.pins.num_pages, found(cache, [1, 2, 3])) == (0, 3), "it is as all others now"
    flood(cache, 10, 2000)
    assert found(cache, [1, 2, 3]) == 0
    assert cache.pins.num_evicted == 0, "its time was over"


def test_pins_give_way_from_the_first_to_end_and_from_the_end_of_its_path(
    cache: KVCacheManager,
) -> None:
    serve(cache, [1, 2, 3], tenant="a", until=9.0)
    serve(cache, [4, 5, 6], tenant="b", until=5.0)
    assert cache.num_available == 10, "pinned pages are there for who needs them"
    held = sequence(1, [7] * 5)
    cache.hold(held.kv, cache.match(held.kv))
    assert cache.extend(held.kv, 5)
    assert (found(cache, [1, 2, 3]), found(cache, [4, 5, 6])) == (3, 2)
    assert (cache.pins.num_pages, cache.pins.num_evicted) == (5, 1)
    assert cache.extend(held.kv, 9)
    assert (found(cache, [1, 2, 3]), found(cache, [4, 5, 6])) == (1, 0)
    assert (cache.pins.held_by("a"), cache.pins.held_by("b")) == (1, 0)


def test_the_next_turn_takes_the_pin_over_and_pages_count_once(cache: KVCacheManager) -> None:
    assert serve(cache, [1, 2], until=5.0) == (0, 2)
    assert serve(cache, [1, 2, 3], until=6.0) == (2, 3)
    assert serve(cache, [1, 2, 4], until=7.0) == (2, 3)
    assert (cache.pins.num_pages, cache.pins.held_by("")) == (4, 4)
    cache.expire_pins(6.0)
    assert cache.pins.num_pages == 3, "of the path to 3, one page was left"
    cache.expire_pins(7.0)
    assert cache.pins.num_pages == 0


def test_a_pin_is_not_shortened(cache: KVCacheManager) -> None:
    serve(cache, [1, 2], until=50.0)
    assert serve(cache, [1, 2, 3], until=5.0) == (2, 3)
    cache.expire_pins(6.0)
    assert cache.pins.num_pages == 2


def test_a_tenant_pins_no_more_than_its_share_whatever_it_asks(cache: KVCacheManager) -> None:
    assert serve(cache, [1, 2, 3, 4, 5, 6], tenant="a", until=9.0) == (0, 4)
    for token in range(7, 30):
        assert serve(cache, [token], tenant="a", until=9.0)[1] == 0
    assert found(cache, [1, 2, 3, 4]) == 4, "what was promised stays"
    assert serve(cache, [1, 2, 3, 4, 5], tenant="a", until=10.0) == (4, 4), "it is renewed"
    assert cache.pins.held_by("a") == 4


def test_all_tenants_together_have_a_share(cache: KVCacheManager) -> None:
    for tenant, pages, expected in ("a", 4, 4), ("b", 4, 4), ("c", 2, 0):
        path = [ord(tenant) + i for i in range(pages)]
        assert serve(cache, path, tenant=tenant, until=9.0)[1] == expected
    assert cache.pins.num_pages == 8


def test_a_shared_page_counts_for_who_keeps_it_longest(cache: KVCacheManager) -> None:
    serve(cache, [1, 2, 3], tenant="a", until=5.0)
    serve(cache, [1, 2, 4], tenant="b", until=6.0)
    assert (cache.pins.held_by("a"), cache.pins.held_by("b")) == (1, 3)
    serve(cache, [1, 2, 5], tenant="c", until=5.5)
    assert (cache.pins.held_by("b"), cache.pins.held_by("c")) == (3, 1)
    assert cache.pins.num_pages == 5


def test_a_pin_keeps_pages_of_its_salt_only(cache: KVCacheManager) -> None:
    serve(cache, [1, 2, 3], salt="mine", until=5.0)
    serve(cache, [1, 2, 3])
    flood(cache, 20)
    assert (found(cache, [1, 2, 3], "mine"), found(cache, [1, 2, 3])) == (3, 0)


def test_nothing_is_pinned_without_a_share_or_a_cache() -> None:
    for cache in (KVCacheManager(10, 1), KVCacheManager(10, 1, prefix_caching=False)):
        assert serve(cache, [1, 2, 3], until=5.0) == (0, 0)
        assert (cache.pins.num_pages, cache.pins.num_pins) == (0, 0)


def test_the_pins_of_forgotten_pages_are_gone(cache: KVCacheManager) -> None:
    first, second = sequence(1, [1, 2, 3]), sequence(2, [1, 2, 3, 4])
    cache.hold(first.kv, cache.match(first.kv))
    cache.extend(first.kv, 3)
    cache.begin(first.kv, 3)
    cache.computed(first.kv, 3)
    cache.hold(second.kv, cache.match(second.kv))
    assert cache.pin(second.kv, 3, "", 5.0) == 3
    cache.discard(first.kv)
    assert cache.pins.num_pages == 0
    assert cache.pin(second.kv, 3, "", 6.0) == 0
    cache.release(second.kv, 3)
    assert cache.num_free == 10


# -- short-lived prefixes --------------------------------------------------------------------------


def test_what_only_a_short_lived_request_used_goes_first(cache: KVCacheManager) -> None:
    serve(cache, [1, 2, 3])
    for token in range(1000, 1040):
        serve(cache, [1, 2, token, token], cold=True)
    assert found(cache, [1, 2, 3]) == 3
    assert found(cache, [1, 2, 1039, 1039]) == 4, "as long as there is room"


def test_what_another_has_used_as_well_stays(cache: KVCacheManager) -> None:
    short = sequence(1, [1, 2, 3])
    cache.hold(short.kv, cache.match(short.kv))
    cache.extend(short.kv, 3)
    cache.begin(short.kv, 3)
    cache.computed(short.kv, 3)
    serve(cache, [1, 2, 4])
    cache.release(short.kv, 3, cold=True)
    flood(cache, 7)
    assert (found(cache, [1, 2]), found(cache, [1, 2, 3])) == (2, 2)


def test_short_lived_pages_go_in_the_order_of_their_last_use(cache: KVCacheManager) -> None:
    for token in range(10):
        serve(cache, [token], cold=True)
    serve(cache, [0, -1], cold=True)  # takes a page of another
    flood(cache, 3)
    kept = [token for token in range(10) if found(cache, [token])]
    assert kept == [0, 5, 6, 7, 8, 9]


def test_short_lived_pages_are_not_copied_to_the_host() -> None:
    cache = KVCacheManager(3, 1, host_pages=24)
    serve(cache, [1, 2, 3], cold=True)
    assert cache.back_up(9).nodes == []
    serve(cache, [1, 2])
    assert len(cache.back_up(9).nodes) == 2, "it has been used again"


# -- with a host tier ------------------------------------------------------------------------------


@pytest.fixture
def tiers() -> KVCacheManager:
    """Ten pages of one token, four of which are to be free or saved; all may be pinned."""
    return KVCacheManager(10, 1, host_pages=32, max_pinned_share=1.0)


def save(cache: KVCacheManager, most: int = 99) -> list[int]:
    """Save what is next to be evicted: their tokens."""
    copies = cache.back_up(most)
    cache.backed_up(copies)
    return [int.from_bytes(node.key, "little") for node in copies.nodes]


def test_pinned_pages_are_passed_over_as_long_as_others_can_be_saved(tiers: KVCacheManager) -> None:
    serve(tiers, [1, 2, 3], until=5.0)
    serve(tiers, [4, 5, 6, 7, 8, 9, 10])
    assert save(tiers) == [10, 9, 8, 7]
    serve(tiers, [11, 12, 13, 14])
    assert save(tiers) == [6, 5, 4, 14]
    assert (tiers.pins.num_evicted, tiers.num_dropped) == (0, 0)


def test_pinned_pages_are_saved_before_they_give_way(tiers: KVCacheManager) -> None:
    serve(tiers, [1, 2, 3, 4, 5], until=9.0)
    serve(tiers, [6, 7, 8, 9, 10], until=5.0)
    assert save(tiers) == [10, 9, 8, 7], "the pin that ends first, from the end of its path"
    serve(tiers, [11, 12, 13])
    assert (tiers.pins.num_evicted, tiers.num_dropped) == (3, 0)
    match = tiers.match(sequence(1, [6, 7, 8, 9, 10, -1]).kv)
    assert (len(match.pages), len(match.host)) == (2, 3)
    assert save(tiers) == [13, 12, 11], "they are evicted before all that is pinned"


def test_pages_whose_pin_ended_are_saved_before_others_that_are_ahead(
    tiers: KVCacheManager,
) -> None:
    serve(tiers, [1, 2, 3], until=5.0)
    serve(tiers, [4, 5, 6, 7, 8, 9, 10])
    assert save(tiers) == [10, 9, 8, 7]
    assert save(tiers) == []
    tiers.expire_pins(5.0)
    assert save(tiers, 2) == [3, 2]
    assert save(tiers) == [1]
    serve(tiers, [11, 12, 13])
    assert (found(tiers, [4, 5, 6, 7, 8, 9, 10]), tiers.num_dropped) == (7, 0)


def test_nothing_is_saved_as_long_as_short_lived_pages_can_go(tiers: KVCacheManager) -> None:
    serve(tiers, [1, 2, 3, 4, 5, 6])
    for token in range(10, 40, 4):
        serve(tiers, list(range(token, token + 4)), cold=True)
        assert save(tiers) == []
    assert (found(tiers, [1, 2, 3, 4, 5, 6]), tiers.num_dropped) == (6, 0)
    serve(tiers, [38, 39])
    assert save(tiers) == [6, 5], "as few are left"


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_pinned_no_page_is_lost_that_there_was_time_to_save(seed: int) -> None:
    """A step takes no more pages than are to be free or saved, and copies are fast."""
    rng = random.Random(seed)
    cache = KVCacheManager(60, 1, host_pages=96, max_pinned_share=rng.choice([0.1, 0.25, 1.0]))
    for now in range(1500):
        first = rng.randrange(40)
        tokens = [first, *(first + 100 * rng.randrange(3) for _ in range(rng.randrange(12)))]
        until, cold = now + rng.expovariate(1 / 40), rng.random() < 0.2
        pins = not cold and rng.random() < 0.4
        serve(cache, tokens, tenant=rng.choice("ab"), until=until if pins else None, cold=cold)
        cache.expire_pins(now)
        save(cache)
        assert cache.num_dropped == 0
    assert cache.pins.num_pins > 100
    assert cache.num_evicted > 1000
    assert cache.num_host_used > 0


# -- cost ------------------------------------------------------------------------------------------


def test_a_pin_and_its_end_cost_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, with as many pins as pages: expiry looks at ended pins only."""
    num_pages = 2000
    cache = KVCacheManager(num_pages, 1, max_pinned_share=1.0)
    for token in range(num_pages):
        serve(cache, [token], until=10.0 + token)
    calls: Counter[str] = Counter()
    peek = LazyHeap.peek

    def counted(heap: LazyHeap[object]) -> object:
        calls["peek"] += 1
        return peek(heap)

    monkeypatch.setattr(LazyHeap, "peek", counted)
    for now in range(10):
        cache.expire_pins(now)
    assert calls["peek"] == 2 * 10
    cache.expire_pins(10.0 + num_pages)
    assert cache.pins.num_pages == 0
    assert calls["peek"] <= 5 * num_pages
