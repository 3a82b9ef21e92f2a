"""The lazy heap against a list of everything that was ever pushed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from asyncllm.engine.cache.lazy_heap import LazyHeap

RANKS = st.integers(0, 5).map(float) | st.sampled_from([float("-inf"), float("inf"), -0.5])


class HeapMachine(RuleBasedStateMachine):
    """An item never returns to a rank that it had: then the order is fixed, among equals too."""

    def __init__(self) -> None:
        super().__init__()
        self.ranks: dict[int, float] = {}
        self.pushed: list[tuple[float, int, int]] = []
        self.num_items = 0
        self.most = 0
        self.heap = LazyHeap[int](lambda rank, item: self.ranks.get(item) == rank)

    def push(self, rank: float, item: int) -> None:
        self.ranks[item] = rank
        self.pushed.append((rank, len(self.pushed), item))
        self.heap.push(rank, item)
        self.most = max(self.most, len(self.ranks))

    def first(self) -> int | None:
        """By brute force."""
        current = [entry for entry in self.pushed if self.ranks.get(entry[2]) == entry[0]]
        return min(current)[2] if current else None

    @rule(rank=RANKS)
    def add(self, rank: float) -> None:
        self.num_items += 1
        self.push(rank, self.num_items)

    @rule(count=st.integers(50, 150), spread=st.integers(1, 7))
    def add_many(self, count: int, spread: int) -> None:
        for i in range(count):
            self.add(float(i % spread))

    @precondition(lambda self: self.ranks)
    @rule(data=st.data(), rank=RANKS)
    def move(self, data: st.DataObject, rank: float) -> None:
        item = data.draw(st.sampled_from(sorted(self.ranks)))
        if (rank, item) not in {(was, moved) for was, _, moved in self.pushed}:
            self.push(rank, item)

    @precondition(lambda self: self.ranks)
    @rule(every=st.integers(1, 9), start=st.integers(0, 9))
    def remove(self, every: int, start: int) -> None:
        for item in sorted(self.ranks)[start::every]:
            del self.ranks[item]

    @rule(count=st.integers(1, 80))
    def pop(self, count: int) -> None:
        for _ in range(count):
            expected = self.first()
            assert self.heap.peek() == expected
            assert self.heap.pop() == expected
            if expected is None:
                return
            del self.ranks[expected]

    @invariant()
    def holds_little_more_than_what_counts(self) -> None:
        entries = self.heap._entries
        assert len(entries) <= 2 * self.most + 64
        assert set(self.ranks) <= {item for _, _, item in entries}

    def teardown(self) -> None:
        self.pop(len(self.ranks) + 1)
        assert self.heap.peek() is None
        assert self.heap._entries == []


TestHeapMachine = HeapMachine.TestCase
TestHeapMachine.settings = settings(max_examples=40, stateful_step_count=25, derandomize=True)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=200))
@settings(max_examples=100, derandomize=True)
def test_items_may_return_to_a_rank_that_they_had(moves: list[tuple[int, int]]) -> None:
    """Then an old entry counts again beside the new one; the smallest rank still comes first."""
    ranks: dict[int, float] = {}
    heap = LazyHeap[int](lambda rank, item: ranks.get(item) == rank)
    for item, rank in moves:
        ranks[item] = float(rank)
        heap.push(float(rank), item)
        first = heap.peek()
        assert first is not None
        assert ranks[first] == min(ranks.values())
    while ranks:
        first = heap.pop()
        assert first is not None
        assert ranks.pop(first) <= min(ranks.values(), default=9.0)
    assert heap.pop() is None


def test_equals_come_out_in_the_order_of_their_push_also_after_tidying() -> None:
    gone: set[int] = set()
    heap = LazyHeap[int](lambda _, item: item not in gone)
    for item in range(1000):
        heap.push(1.0, item)
        if item % 3:
            gone.add(item)
    out = [heap.pop() for _ in range(334)]
    assert out == list(range(0, 1000, 3))
    assert heap.pop() is None


def test_items_are_never_compared() -> None:
    heap = LazyHeap[object](lambda rank, item: True)
    items = [object() for _ in range(200)]
    for item in items:
        heap.push(0.0, item)
    assert [heap.pop() for _ in items] == items


def test_pushes_look_at_a_bounded_number_of_entries_each() -> None:
    looks = 0
    newest: dict[int, float] = {}

    def current(rank: float, item: int) -> bool:
        nonlocal looks
        looks += 1
        return newest.get(item) == rank

    heap = LazyHeap[int](current)
    pushes = 20_000
    for i in range(pushes):  # a hundred items that change their rank all the time
        newest[i % 100] = float(i)
        heap.push(float(i), i % 100)
        assert len(heap._entries) <= 2 * 100 + 64
    assert looks <= 2 * pushes
    looks = 0
    for i in range(100):
        item = heap.pop()
        assert item == i
        del newest[item]
    assert looks <= 2 * 100 + 64
