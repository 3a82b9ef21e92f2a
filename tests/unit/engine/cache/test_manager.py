"""The cache manager, driven as a scheduler drives it, over pages that remember what they hold."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.engine.cache.manager import Copies, KVCacheManager
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.wire.messages import BAD_TOKEN, StepResult, pack
from tests.support.engine.scheduling import check_books, scheduler, sequence, tree_nodes

#: What a page holds, by offset: the salt and all tokens up to there.
Content = dict[int, tuple[bytes, tuple[int, ...]]]

FAMILIES = {family: [family * 3 + (i * i) % 7 for i in range(40)] for family in range(3)}
FAMILY, LENGTH = st.sampled_from(sorted(FAMILIES)), st.integers(1, 30)
SALT = st.sampled_from(["", "", "a"])
HOW = ("release", "release", "pin", "pin", "cold", "discard", "again")


class Inside:
    """A sequence with pages. ``flight`` are the ends of its chunks whose steps are under way."""

    def __init__(self, seq: Sequence, computed: int, *, loading: bool):
        self.seq = seq
        self.computed = self.landed = computed
        self.loading = loading
        self.flight: list[int] = []


class ManagerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.num_sequences = 0
        self.waiting: list[Sequence] = []
        self.inside: list[Inside] = []
        self.saves: list[Copies] = []
        self.loads: list[tuple[Inside, Copies]] = []
        self.pages: dict[int, Content] = {}
        self.host: dict[int, Content] = {}

    @initialize(
        num_pages=st.integers(2, 40),
        page_size=st.integers(1, 4),
        host_pages=st.sampled_from([0, 3, 40, 160]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def begin(self, num_pages: int, page_size: int, host_pages: int, caching: bool) -> None:
        self.cache = KVCacheManager(
            num_pages,
            page_size,
            prefix_caching=caching,
            host_pages=host_pages if caching else 0,
            max_pinned_share=0.4,
        )
        self.time = 0.0

    # -- what pages hold -------------------------------------------------------------------------

    def write(self, seq: Sequence, start: int, end: int) -> None:
        size, copies = self.cache.page_size, [*self.saves, *(copies for _, copies in self.loads)]
        moving = {page for batch in copies for page, _ in batch.pages}
        others = {
            page for other in self.inside if other.seq is not seq for page in other.seq.kv.pages
        }
        for position in range(start, end):
            page = seq.kv.pages[position // size]
            assert page not in moving
            assert page not in others, "nobody else reads what is being written"
            content = seq.kv.salt, tuple(seq.tokens[: position + 1])
            self.pages.setdefault(page, {})[position % size] = content

    def check(self, content: Content, seq: Sequence, index: int, tokens: int) -> None:
        """That many tokens of the page at ``index`` of the block table are the sequence's."""
        start = index * self.cache.page_size
        for offset in range(min(self.cache.page_size, tokens - start)):
            assert content[offset] == (seq.kv.salt, tuple(seq.tokens[: start + offset + 1]))

    # -- what a scheduler does -------------------------------------------------------------------

    @rule(family=FAMILY, length=LENGTH, own=st.integers(0, 3), salt=SALT)
    def add(self, family: int, length: int, own: int, salt: str) -> None:
        self.num_sequences += 1
        tokens = FAMILIES[family][:length] + [100 + self.num_sequences] * own
        self.waiting.append(sequence(self.num_sequences, tokens, cache_salt=salt))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99))
    def look(self, which: int) -> None:
        """Who has looked before finds what anybody else finds."""
        seq = self.waiting[which % len(self.waiting)]
        other = sequence(0, list(seq.tokens))
        other.kv.salt = seq.kv.salt
        match, fresh = self.cache.match(seq.kv), self.cache.match(other.kv)
        assert (match.pages, match.host, match.pending) == (fresh.pages, fresh.host, fresh.pending)
        assert match.num_known == fresh.num_known

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 99), load=st.sampled_from([True, True, False]))
    def enter(self, which: int, load: bool) -> None:
        seq = self.waiting[which % len(self.waiting)]
        match, cache = self.cache.match(seq.kv), self.cache
        found = len(match.pages) + len(match.host)
        assert found * cache.page_size < len(seq.tokens), "something is left to compute"
        known = [self.pages[page] for page in match.pages]
        known += [self.host[node.host] for node in match.host]
        for index, content in enumerate(known):
            self.check(content, seq, index, len(seq.tokens))
        if match.pending is not None:
            return
        for inside in self.inside:
            own = inside.seq.kv.pages
            flying = {own[i // cache.page_size] for i in range(inside.landed, inside.computed)}
            assert not flying & set(match.pages), "nobody finds what has not been written yet"
        self.waiting.remove(seq)
        cache.hold(seq.kv, match)
        if load and match.host:
            copies = cache.load(seq.kv, match)
            if copies is not None:
                assert seq.kv.num_shared == found == len(seq.kv.pages)
                inside = Inside(seq, found * cache.page_size, loading=True)
                self.loads.append((inside, copies))
                self.inside.append(inside)
                for page, _ in copies.pages:
                    self.pages[page] = {}
            else:
                cache.release(seq.kv, 0)
            return
        shared, available = len(match.pages), cache.num_available
        if cache.extend(seq.kv, len(seq.tokens)):
            assert seq.kv.num_shared == shared
            assert len(seq.kv.pages) == cache.pages_for(len(seq.tokens))
            self.inside.append(Inside(seq, shared * cache.page_size, loading=False))
        else:
            enough = cache.pages_for(len(seq.tokens)) - shared <= available
            assert not enough or self.saves or self.loads, "only copies keep a cached page there"
            cache.release(seq.kv, 0)
            assert (seq.kv.pages, seq.kv.node) == ([], None)

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 99), most=st.integers(1, 20))
    def compute(self, which: int, most: int) -> None:
        """A chunk, or if all is known the next token."""
        inside = self.inside[which % len(self.inside)]
        seq, start = inside.seq, inside.computed
        if inside.loading:
            return
        for index in range(self.cache.pages_for(start)):
            self.check(self.pages[seq.kv.pages[index]], seq, index, start)
        if start == len(seq.tokens):
            if inside.flight or not self.grow(seq, start + 1):
                return
            seq.tokens.append(start % 5)
            self.write(seq, start, start + 1)
            inside.computed = inside.landed = start + 1
            return
        if not self.cache.extend(seq.kv, len(seq.tokens)):
            return
        end = min(start + most, len(seq.tokens))
        self.write(seq, start, end)
        self.cache.begin(seq.kv, end)
        inside.computed = end
        inside.flight.append(end)

    def grow(self, seq: Sequence, length: int) -> bool:
        if length <= len(seq.kv.pages) * self.cache.page_size:
            return True
        held, available = list(seq.kv.pages), self.cache.num_available
        page = self.cache.grow(seq.kv)
        assert seq.kv.pages == (held if page is None else [*held, page])
        assert page is not None or available == 0 or self.saves or self.loads
        return page is not None

    @rule(family=FAMILY, length=LENGTH, done=st.integers(0, 5), salt=SALT, stay=st.booleans())
    def serve(self, family: int, length: int, done: int, salt: str, stay: bool) -> None:
        """As far as it goes at once: a prompt, and so many tokens more."""
        num_inside = len(self.inside)
        self.add(family, length, 0, salt)
        self.enter(-1, True)
        if len(self.inside) > num_inside:
            for _ in range(done + 1):
                self.compute(-1, length)
                while self.inside[-1].flight:
                    self.land_one(self.inside[-1])
            if not stay:
                self.leave(-1, "release")

    @precondition(lambda self: any(inside.flight for inside in self.inside))
    @rule(which=st.integers(0, 99))
    def land(self, which: int) -> None:
        flying = [inside for inside in self.inside if inside.flight]
        self.land_one(flying[which % len(flying)])

    def land_one(self, inside: Inside) -> None:
        inside.landed = inside.flight.pop(0)
        self.cache.computed(inside.seq.kv, inside.landed)

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 99))
    def commit(self, which: int) -> None:
        inside = self.inside[which % len(self.inside)]
        if not inside.loading:
            self.cache.commit(inside.seq.kv, inside.landed)

    @precondition(lambda self: self.inside)
    @rule(which=st.integers(0, 99), how=st.sampled_from(HOW))
    def leave(self, which: int, how: str) -> None:
        inside = self.inside.pop(which % len(self.inside))
        seq = inside.seq
        if how == "pin" and not inside.loading:
            landed = 0 if inside.flight else inside.landed
            num_pinned = self.cache.pin(seq.kv, landed, "", self.time + which)
            assert num_pinned <= seq.kv.num_shared
        if how == "discard" and not inside.loading:
            self.cache.discard(seq.kv)  # from a step in flight on, nothing has landed
        else:
            while inside.flight:
                self.land_one(inside)
            self.cache.release(seq.kv, 0 if inside.loading else inside.landed, cold=how == "cold")
        assert (seq.kv.pages, seq.kv.node, seq.kv.first_own) == ([], None, None)
        if how == "again":
            self.waiting.append(seq)

    @rule(most=st.integers(1, 12), done=st.booleans())
    def back_up(self, most: int, done: bool) -> None:
        copies = self.cache.back_up(most)
        assert len(copies.pages) == len(copies.nodes) <= most
        for page, host in copies.pages:
            self.host[host] = dict(self.pages[page])
        self.saves.append(copies)
        if done:
            self.backed_up(-1)

    @precondition(lambda self: self.saves)
    @rule(which=st.integers(0, 99))
    def backed_up(self, which: int) -> None:
        copies = self.saves.pop(which % len(self.saves))
        for page, host in copies.pages:
            assert self.host[host] == self.pages[page], "it stayed as it was"
        self.cache.backed_up(copies)

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 99))
    def loaded(self, which: int) -> None:
        inside, copies = self.loads.pop(which % len(self.loads))
        for page, host in copies.pages:
            self.pages[page] = dict(self.host[host])
        self.cache.loaded(copies)
        inside.loading = False

    @rule(seconds=st.integers(1, 50))
    def time_passes(self, seconds: int) -> None:
        self.time += seconds
        self.cache.expire_pins(self.time)

    # -- the books -------------------------------------------------------------------------------

    @invariant()
    def books_balance(self) -> None:
        under_way = bool(self.saves or self.loads)
        books = SimpleNamespace(cache=self.cache, _copies=SimpleNamespace(outstanding=under_way))
        check_books(cast(Scheduler, books), [inside.seq for inside in self.inside])
        cache = self.cache
        assert cache.num_available == cache.num_free + cache.num_cached
        assert cache.pins.num_pages <= 2 * int(0.4 * cache.num_pages)
        if not cache.prefix_caching:
            assert cache.num_in_use == sum(len(inside.seq.kv.pages) for inside in self.inside)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.inside:
            self.leave(0, "release")
        while self.saves:
            self.backed_up(0)
        while self.loads:
            self.loaded(0)
        cache = self.cache
        assert cache.num_in_use == 0
        last = sequence(0, [999] * cache.num_pages * cache.page_size)
        cache.hold(last.kv, cache.match(last.kv))
        assert cache.extend(last.kv, len(last.tokens)), "every page can be had"
        assert cache.num_free == cache.num_cached == cache.pins.num_pages == 0
        assert all(node.host >= 0 for node in tree_nodes(cache) if node.parent is not None)
        cache.release(last.kv, 0)
        assert cache.num_free == cache.num_pages


TestManagerMachine = pytest.mark.slow(ManagerMachine.TestCase)
TestManagerMachine.settings = settings(max_examples=120, stateful_step_count=50, derandomize=True)


@pytest.mark.parametrize("seed", range(12))
def test_the_same_at_random(seed: int) -> None:
    """Longer than hypothesis goes, and always under pressure."""
    rng, machine = random.Random(seed), ManagerMachine()
    machine.begin(rng.randint(8, 30), rng.randint(1, 4), rng.choice([0, 5, 60, 120]), True)
    for _ in range(3000):
        which = rng.randrange(99)
        match rng.randrange(11):
            case 0 | 1:
                salt = rng.choice(["", "", "a"])
                machine.add(rng.randrange(3), rng.randint(1, 30), rng.randint(0, 3), salt)
            case 2 | 3 if machine.waiting:
                machine.enter(which, rng.random() < 0.8)
            case 4 | 5 if machine.inside:
                machine.compute(which, rng.randint(1, 20))
            case 6 if any(inside.flight for inside in machine.inside):
                machine.land(which)
            case 7 if machine.inside:
                machine.leave(which, rng.choice(HOW))
            case 8:
                machine.back_up(rng.randint(1, 8), rng.random() < 0.5)
            case 9 if machine.saves:
                machine.backed_up(which)
            case 9 if machine.loads:
                machine.loaded(which)
            case 10:
                machine.time_passes(rng.randint(1, 9))
        del machine.waiting[: len(machine.waiting) - 8]
        while len(machine.inside) > 5:
            machine.leave(0, rng.choice(["release", "again", "discard"]))
        machine.books_balance()
    machine.teardown()


# -- cases ----------------------------------------------------------------------------------------


def run(cache: KVCacheManager, seq: Sequence, *, failed: bool = False) -> int:
    """One sequence from its admission to its end; how many pages it found."""
    match = cache.match(seq.kv)
    assert match.pending is None
    cache.hold(seq.kv, match)
    found = len(seq.kv.pages)
    assert cache.extend(seq.kv, len(seq.tokens))
    cache.begin(seq.kv, len(seq.tokens))
    if failed:
        cache.discard(seq.kv)
    else:
        cache.computed(seq.kv, len(seq.tokens))
        cache.release(seq.kv, len(seq.tokens))
    return found


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.sampled_from(["", "a"])),
        max_size=20,
    ),
    st.integers(1, 4),
)
@settings(max_examples=120, derandomize=True)
def test_with_room_for_all_the_longest_known_prefix_is_found(
    requests: list[tuple[list[int], str]], page_size: int
) -> None:
    cache = KVCacheManager(1000, page_size)
    known: set[tuple[str, tuple[int, ...]]] = set()
    for id, (tokens, salt) in enumerate(requests):
        wholes = [(salt, tuple(tokens[:end])) for end in range(0, len(tokens) + 1, page_size)][1:]
        expected = sum(prefix in known for prefix in wholes if len(prefix[1]) < len(tokens))
        assert run(cache, sequence(id, tokens, cache_salt=salt)) == expected
        known |= set(wholes)
        assert cache.num_cached == len(known)
        assert cache.num_in_use == 0


def test_what_cannot_be_given_whole_is_not_given_at_all() -> None:
    cache = KVCacheManager(4, 2)
    assert run(cache, sequence(1, [1, 1, 2, 2, 3])) == 0
    assert (cache.num_free, cache.num_cached) == (2, 2)
    seq = sequence(2, 9)
    cache.hold(seq.kv, cache.match(seq.kv))
    assert not cache.extend(seq.kv, 9)
    assert (cache.num_free, cache.num_cached, seq.kv.pages) == (2, 2, [])
    assert cache.extend(seq.kv, 8)
    assert cache.num_evicted == 2


def test_a_preempted_sequence_finds_its_own_pages_again() -> None:
    cache = KVCacheManager(8, 2)
    seq = sequence(1, list(range(9)))
    assert run(cache, seq) == 0
    assert run(cache, seq) == 4


def test_users_of_what_is_forgotten_keep_it_and_its_pages_go_with_the_last_of_them() -> None:
    cache = KVCacheManager(8, 1)
    first, second, third = (sequence(id, [1, 2, 3, 4][: id + 1]) for id in (1, 2, 3))
    cache.hold(first.kv, cache.match(first.kv))
    cache.extend(first.kv, 2)
    cache.begin(first.kv, 2)
    cache.computed(first.kv, 2)
    cache.hold(second.kv, cache.match(second.kv))
    cache.extend(second.kv, 3)
    cache.begin(second.kv, 3)
    pages = list(second.kv.pages)
    assert pages[0] == first.kv.pages[0]
    cache.discard(first.kv)
    assert cache.num_cached == 0
    assert cache.match(third.kv).pages == []
    cache.computed(second.kv, 3)
    assert second.kv.pages == pages
    assert cache.match(third.kv).pages == [], "it lies beyond what is forgotten"
    assert cache.num_in_use == 3
    cache.release(second.kv, 3)
    assert cache.num_free == 8


def test_a_page_that_is_computed_again_keeps_its_copy_on_the_host() -> None:
    cache = KVCacheManager(4, 1, host_pages=32)
    run(cache, sequence(1, [1, 2, 3]))
    cache.backed_up(cache.back_up(9))
    run(cache, sequence(2, [9, 9, 9, 9]))
    assert (cache.num_host_used, cache.num_free) == (3, 0)
    again = sequence(3, [1, 2, 3])
    match = cache.match(again.kv)
    assert (len(match.pages), len(match.host)) == (0, 2)
    assert run(cache, again) == 0  # as if loading did not pay
    assert cache.num_host_used == 3
    assert len(cache.back_up(9).pages) == 1, "only what is left of the other"


def test_a_load_that_nobody_waits_for_any_more_goes_on() -> None:
    cache = KVCacheManager(3, 1, host_pages=32)
    run(cache, sequence(1, [1, 2, 3]))
    cache.backed_up(cache.back_up(9))
    run(cache, sequence(2, [9, 9, 9]))
    again = sequence(3, [1, 2, 3])
    copies = cache.load(again.kv, cache.match(again.kv))
    assert copies is not None
    cache.release(again.kv, 0)
    assert (cache.num_in_use, cache.num_cached) == (2, 1), "the copies write there"
    other = sequence(4, [1, 2, 3])
    assert cache.match(other.kv).pending is copies.nodes[-1]
    cache.loaded(copies)
    assert (cache.num_in_use, cache.num_cached) == (0, 3)
    assert run(cache, other) == 2


def test_what_fails_after_it_was_committed_is_forgotten() -> None:
    """It left the batch while a row of it was in flight, which failed."""
    cache = KVCacheManager(8, 2)
    seq = sequence(1, [1])
    cache.hold(seq.kv, cache.match(seq.kv))
    cache.extend(seq.kv, 5)
    cache.begin(seq.kv, 1)
    cache.computed(seq.kv, 1)
    seq.tokens.extend([2, 3, 4])
    cache.commit(seq.kv, 3)
    cache.discard(seq.kv)
    assert cache.num_free == 8


def test_what_was_generated_is_found_behind_pages_that_another_computed() -> None:
    cache = KVCacheManager(12, 1)
    first, second = sequence(1, [1, 2, 3]), sequence(2, [1, 2, 3])
    for seq in (first, second):
        cache.hold(seq.kv, cache.match(seq.kv))
        cache.extend(seq.kv, 5)
    for seq in (first, second):
        cache.begin(seq.kv, 3)
    for seq in (first, second):
        cache.computed(seq.kv, 3)
    second.tokens.extend([4, 5])
    expected = first.kv.pages[:3] + second.kv.pages[3:]
    cache.release(second.kv, 5)
    assert cache.match(sequence(3, [1, 2, 3, 4, 5, 6]).kv).pages == expected
    assert (cache.num_in_use, cache.num_cached, cache.num_free) == (5, 2, 5)


def test_of_what_failed_no_earlier_chunk_is_found_either() -> None:
    cache = KVCacheManager(8, 1)
    first, second = sequence(1, [1, 2, 3, 4, 5]), sequence(2, [1, 2, 3, 4, 5])
    cache.hold(first.kv, cache.match(first.kv))
    cache.extend(first.kv, 5)
    for end in (2, 4):
        cache.begin(first.kv, end)
        cache.computed(first.kv, end)
        assert len(cache.match(second.kv).pages) == end
    cache.discard(first.kv)
    assert cache.match(second.kv).pages == []
    assert cache.num_free == 8


def test_a_bad_row_of_an_ended_sequence_leaves_nothing_in_the_cache() -> None:
    """Else each request that finds the page fails, and keeps it in use."""
    sched = scheduler(page_size=4)
    seq = sequence(1, 3, 9)
    sched.add(seq, 0.0)
    for step in (0, 1):
        assert sched.plan(step, 0.0) is not None
    sched.apply(StepResult(0, pack([5]), (), None, 0.0, 0.0, (), 0.01), 0.0)
    sched.finish(seq, 0.0)
    assert seq.state is SeqState.FINISHED
    sched.apply(StepResult(1, pack([BAD_TOKEN]), (), None, 0.0, 0.0, (), 0.01), 0.0)
    assert sched.cache.num_free == sched.cache.num_pages


def test_who_computed_a_page_that_another_still_computes_vouches_for_its_own_only() -> None:
    cache = KVCacheManager(8, 1)
    first, second, third = (sequence(id, [1, 2, 3]) for id in (1, 2, 3))
    for seq in (first, second):
        cache.hold(seq.kv, cache.match(seq.kv))
        cache.extend(seq.kv, 3)
    for seq in (first, second):
        cache.begin(seq.kv, 3)
    cache.computed(second.kv, 3)
    cache.commit(second.kv, 3)
    cache.discard(second.kv)
    assert first.kv.node is not None
    assert cache.match(third.kv).pending is first.kv.node.parent, "nobody has written it yet"
    assert cache.match(third.kv).pages == []
    cache.computed(first.kv, 3)
    assert cache.match(third.kv).pages == first.kv.pages[:2]


def test_all_evictions_are_counted() -> None:
    cache = KVCacheManager(4, 1, host_pages=1)
    run(cache, sequence(1, [1, 2, 3]))
    run(cache, sequence(2, [4]))
    copies = cache.back_up(1)
    assert copies.nodes[0].depth == 3, "above it, nothing can be evicted until it is saved"
    seq = sequence(3, [9, 9])
    cache.hold(seq.kv, cache.match(seq.kv))
    assert cache.num_available == 3
    assert not cache.extend(seq.kv, 2)
    assert cache.num_evicted == cache.num_free == 1
    cache.backed_up(copies)
    assert cache.extend(seq.kv, 2)
    assert cache.num_evicted == 2


def test_without_caching_nothing_is_found_or_kept() -> None:
    cache = KVCacheManager(8, 2, prefix_caching=False)
    for id in (1, 2):
        assert run(cache, sequence(id, [1] * 9, cache_salt=str(id)), failed=id == 2) == 0
        assert cache.num_free == 8
    assert not cache._tree._roots
