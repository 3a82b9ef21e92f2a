"""The prefix tree against a model of it, and what it costs."""

from __future__ import annotations

import gc
import random
import sys
import weakref
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import settings

from asyncllm.engine.cache.node import Node
from asyncllm.engine.cache.pages import PageAllocator
from asyncllm.engine.cache.radix import PrefixTree
from tests.support.engine.prefix_model import Entry, TreeMachine


class ExactHost(TreeMachine):
    """Pages are saved in the order of their last use."""

    def check_ahead(self, entry: Entry, resting: list[Entry]) -> None:
        assert entry.late or all(entry.used <= other.used for other in resting if not other.late)


TestTreeMachine = pytest.mark.slow(TreeMachine.TestCase)
TestTreeMachine.settings = settings(max_examples=150, stateful_step_count=50, derandomize=True)


def at_random(machine: TreeMachine, seed: int, steps: int) -> None:
    """Longer than hypothesis goes, and mostly what is rare there."""
    rng = random.Random(seed)
    hosts, pinned = rng.choice([2, 8, 60, 150]), rng.randint(0, 12)
    machine.begin(rng.randint(1, 3), rng.randint(8, 40), hosts, pinned)

    def pages() -> list[int]:
        return rng.choices([0, 1], [3, 1], k=rng.randint(1, 8))

    for _ in range(steps):
        salt, some, which = rng.choice([b"", b"", b"a"]), pages(), rng.randrange(99)
        match rng.randrange(16):
            case 0:
                machine.enter(salt, some, rng.randint(0, 2), rng.randint(0, 8), load=True)
            case 1:
                machine.request(salt, some)
            case 2 | 3:
                machine.come_back(which, rng.random() < 0.8, some, rng.random() < 0.3)
            case 4 if machine.users:
                machine.grow(which, some, ready=rng.random() < 0.5)
            case 5 if machine.users:
                machine.some_land(which, rng.randint(1, 8))
            case 6 | 7 if machine.users:
                machine.leave(which, trusted=rng.random() < 0.8, cold=rng.random() < 0.3)
            case 8:
                machine.spill(rng.randint(1, 12), rng.randint(0, 6))
            case 9:
                machine.back_up(rng.randint(1, 4), rng.choice([0, 0, 9]))
            case 10 if machine.saves:
                machine.backed_up(which)
            case 11 if machine.loads:
                machine.loaded(which)
            case 12 if rng.random() < 0.3:
                machine.forget_any(which)
            case 13 if machine.users:
                machine.pin(which, rng.randint(1, 20), rng.choice("ab"))
            case 14:
                machine.time_passes(rng.randint(0, 2))
            case 15:
                machine.postpone(which)
        while len(machine.users) > 5:
            machine.leave(0, trusted=rng.random() < 0.9)
        machine.same()
    machine.teardown()


@pytest.mark.parametrize("seed", range(8))
def test_the_same_at_random(seed: int) -> None:
    at_random(TreeMachine(), seed, 2500)


def test_the_host_keeps_what_was_used_last() -> None:
    for seed in range(8):
        at_random(ExactHost(), seed, 1000)


# -- cases -----------------------------------------------------------------------------------------


def chain(tree: PrefixTree, pages: PageAllocator, salt: bytes, tokens: list[int]) -> Node:
    """One user that enters a page for each token, and leaves. The page size is 1."""
    match = tree.match(array("i", [*tokens, -1]), salt)
    tree.lock(match.node)
    own = array("i", tokens[match.node.depth :])
    taken = pages.take(len(own))
    assert taken is not None
    added = tree.insert(match.node, own, taken, ready=True)
    assert len(added) == len(own)
    node = added[-1] if added else match.node
    tree.unlock(node)
    return node


def found(tree: PrefixTree, salt: bytes, tokens: list[int]) -> int:
    return len(tree.match(array("i", [*tokens, -1]), salt).pages)


def test_the_leaf_used_least_recently_goes_first_and_a_look_is_no_use() -> None:
    pages = PageAllocator(10)
    tree = PrefixTree(1, pages, PageAllocator(0))
    chain(tree, pages, b"", [1, 2, 3])
    chain(tree, pages, b"", [1, 4])
    chain(tree, pages, b"", [1, 2])  # again
    assert found(tree, b"", [1, 2, 3]) == 3
    prefixes = [[1], [1, 2], [1, 2, 3], [1, 4]]
    for gone in ([1, 2, 3], [1, 4], [1, 2], [1]):
        assert tree.evict(1)
        prefixes.remove(gone)
        assert [found(tree, b"", prefix) for prefix in prefixes] == [len(p) for p in prefixes]
        assert found(tree, b"", gone) == len(gone) - 1
    assert not tree.evict(1)
    assert pages.num_free == 10


@pytest.mark.parametrize("seed", range(5))
def test_pages_evicted_at_once_are_those_evicted_one_by_one(seed: int) -> None:
    freed = []
    for at_once in (1, 7, 1000):
        rng = random.Random(seed)
        pages = PageAllocator(300)
        tree = PrefixTree(1, pages, PageAllocator(0))
        for _ in range(40):
            chain(tree, pages, rng.choice([b"", b"a"]), rng.choices([0, 1], k=rng.randint(1, 9)))
        kept = tree.match(array("i", [0, 0, 0, 0]), b"").node
        tree.lock(kept)
        free, cached = pages.num_free, tree.num_cached
        while tree.evict(at_once):
            pass
        assert tree.num_cached == 0
        assert pages.num_free == free + cached == 300 - kept.depth
        tree.unlock(kept)
        assert tree.evict(kept.depth)
        freed.append(pages.take(300))
        assert not tree._roots
    assert freed[0] == freed[1] == freed[2]


def test_eviction_costs_a_few_looks_at_the_heap_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, with every page touched many times before: what is stale is passed over once."""
    looks = 0
    evictable = Node.evictable

    def counted(node: Node, *, leaf: bool = True) -> bool:
        nonlocal looks
        looks += 1
        return evictable(node, leaf=leaf)

    num_pages = 4000
    pages = PageAllocator(num_pages)
    tree = PrefixTree(1, pages, PageAllocator(0))
    monkeypatch.setattr(Node, "evictable", counted)
    for _ in range(4):
        for branch in range(num_pages // 4):
            chain(tree, pages, b"", [branch, 1, 2, 3])
    touched = 4 * num_pages  # unlocked so often
    assert looks <= touched, "what is locked, or has pages below it, is not looked at"
    assert len(tree.leaves._plain._entries) <= 2 * num_pages + 64
    looks = 0
    for _ in range(num_pages // 100):
        assert tree.evict(100)
    assert pages.num_free == num_pages
    assert looks <= 3 * num_pages


class Children(dict[bytes, Node]):
    """What a node alone refers to."""


@pytest.fixture
def alive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How many nodes there are, of which the garbage collector deletes none."""
    watched: list[weakref.ref[Children]] = []

    def make(*args: Any, **options: Any) -> Node:
        node = Node(*args, **options)
        node.children = children = Children()
        watched.append(weakref.ref(children))
        return node

    monkeypatch.setattr("asyncllm.engine.cache.radix.Node", make)
    gc.disable()
    yield lambda: sum(children() is not None for children in watched)
    gc.enable()


def test_nothing_is_left_of_thousands_of_salts(alive: Callable[[], int]) -> None:
    pages, hosts = PageAllocator(40), PageAllocator(20)
    tree = PrefixTree(1, pages, hosts)
    for i in range(3000):
        salt = str(i).encode()
        assert found(tree, salt + b"?", [1, 2]) == 0, "a look leaves nothing"
        if pages.num_free < 4:
            for node in tree.back_up(4):
                tree.backed_up(node)
            assert tree.evict(4)
        node = chain(tree, pages, salt, [1, 2, 3, 4])
        if i % 3 == 0:
            tree.forget(node)
    # Beyond the nodes of the pages: their roots, nodes in between, and stale entries of the heaps.
    assert len(tree._roots) <= 40 + 20
    del node
    assert alive() <= 3 * (40 + 20) + 2 * 64 + 2 * (40 + 20)
    assert tree.evict(tree.num_cached)
    assert pages.num_free == 40
    for root in list(tree._roots.values()):
        for child in list(root.children.values()):
            tree.forget(child)
    assert (hosts.num_free, tree._roots, len(tree._host._queue)) == (20, {}, 0)


def test_nodes_go_without_the_garbage_collector(alive: Callable[[], int]) -> None:
    pages = PageAllocator(40)
    tree = PrefixTree(1, pages, PageAllocator(0))
    for first in range(3):
        chain(tree, pages, b"", [first, 1, 2, 3])
    tree.leaves._plain.clear()  # which may have stale entries
    assert alive() == 1 + 3 * 4
    [root] = tree._roots.values()
    tree.forget(next(iter(root.children.values())))
    del root
    assert alive() == 1 + 2 * 4
    del tree
    assert alive() == 0


def test_the_garbage_collector_walks_through_no_nodes() -> None:
    pages = PageAllocator(40)
    node: Node | None = chain(PrefixTree(1, pages, PageAllocator(0)), pages, b"", [1, 2, 3])
    while node is not None:
        assert not gc.is_tracked(node)
        # Which they are of themselves since Python 3.14.
        assert sys.version_info >= (3, 14) or not gc.is_tracked(node.children)
        node = node.parent
