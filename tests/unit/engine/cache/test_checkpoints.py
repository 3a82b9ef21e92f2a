"""State slots have one owner each, and checkpoints go in the order of their use."""

from __future__ import annotations

import sys
from array import array

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.engine.cache.node import NO_STATE, Checkpoint, Node
from asyncllm.engine.cache.pages import PageAllocator
from asyncllm.engine.cache.radix import PrefixTree
from asyncllm.engine.cache.state_slots import StateSlots
from tests.support.engine.scheduling import path


class SlotsMachine(RuleBasedStateMachine):
    """Any order of calls, against lists that are searched."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[int] = []
        self.promised: list[Checkpoint] = []
        #: Least recently used first.
        self.kept: list[Checkpoint] = []
        self.replaced: list[Checkpoint] = []
        self.where: dict[Checkpoint, int] = {}

    @initialize(count=st.integers(1, 12))
    def begin(self, count: int) -> None:
        self.slots = StateSlots(count)

    @rule()
    def take(self) -> None:
        free = self.slots.num_free
        slot = self.slots.take()
        if slot is None:
            assert not self.kept
            assert not self.replaced
            assert not free
            return
        assert slot not in self.taken
        if not free:
            gone = (self.replaced or self.kept).pop(0)
            assert slot == self.where.pop(gone)
            assert (gone.node, gone.slot) == (None, NO_STATE)
        self.taken.append(slot)

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 99))
    def give_back(self, which: int) -> None:
        self.slots.give_back(self.taken.pop(which % len(self.taken)))

    @rule(below=st.integers(0, 99))
    def promise(self, below: int) -> None:
        known = [each.node for each in (*self.kept, *self.replaced) if each.node is not None]
        node = Node(known[below % len(known)] if known else None, b"", 0, ready=True)
        checkpoint = self.slots.promise(node)
        assert checkpoint is not None
        assert node.checkpoint is checkpoint
        assert self.slots.promise(node) is None
        self.promised.append(checkpoint)

    @precondition(lambda self: self.taken)
    @rule(which=st.integers(0, 99), slot=st.integers(0, 99), ready=st.booleans())
    def keep(self, which: int, slot: int, ready: bool) -> None:
        """One that was promised, or that nobody is to find yet."""
        checkpoint = Checkpoint()
        if self.promised and which < 80:
            checkpoint = self.promised.pop(which % len(self.promised))
            if checkpoint.node is None:
                return
        self.where[checkpoint] = given = self.taken.pop(slot % len(self.taken))
        self.slots.keep(checkpoint, given)
        assert checkpoint.slot == given
        checkpoint.ready = ready
        self.kept.append(checkpoint)

    @precondition(lambda self: self.kept or self.replaced)
    @rule(which=st.integers(0, 99))
    def use(self, which: int) -> None:
        known = [*self.kept, *self.replaced]
        checkpoint = known[which % len(known)]
        self.slots.use(checkpoint)
        node = checkpoint.node.parent if checkpoint.node is not None else None
        while node is not None:
            if (above := node.checkpoint) in (*self.kept, *self.replaced):
                assert above is not None
                self.move(above, self.kept if above.num_used > 1 else self.replaced)
            node = node.parent
        self.move(checkpoint, self.kept)

    def move(self, checkpoint: Checkpoint, where: list[Checkpoint]) -> None:
        for order in (self.kept, self.replaced):
            if checkpoint in order:
                order.remove(checkpoint)
        where.append(checkpoint)

    @precondition(lambda self: self.kept or self.replaced or self.promised)
    @rule(which=st.integers(0, 99))
    def forget(self, which: int) -> None:
        """Its page goes, or whoever knows it does."""
        known = [*self.kept, *self.replaced, *self.promised]
        checkpoint = known[which % len(known)]
        node = checkpoint.node
        if node is not None:
            self.slots.forget([node])
            assert node.checkpoint is None
        self.slots.drop(checkpoint)
        self.where.pop(checkpoint, None)
        for order in (self.kept, self.replaced):
            if checkpoint in order:
                order.remove(checkpoint)

    @invariant()
    def one_owner(self) -> None:
        slots = self.slots
        checkpoints = [*self.kept, *self.replaced]
        kept = [checkpoint.slot for checkpoint in checkpoints]
        assert kept == [self.where[checkpoint] for checkpoint in checkpoints]
        everywhere = sorted([*slots._free, *self.taken, *kept])
        assert everywhere == list(range(1, slots.num_slots + 1)), "none is lost, none has two"
        assert (slots.num_taken, slots.num_kept) == (len(self.taken), len(kept))
        assert slots.num_free == slots.num_slots - len(self.taken) - len(kept)
        for checkpoint in checkpoints:
            assert checkpoint.node is None or checkpoint.node.checkpoint is checkpoint
        assert all(checkpoint.slot == NO_STATE for checkpoint in self.promised)


TestSlotsMachine = SlotsMachine.TestCase
TestSlotsMachine.settings = settings(max_examples=80, stateful_step_count=40, derandomize=True)


# -- in the tree -----------------------------------------------------------------------------------


class Kept:
    """A tree with states; the page size is 1, and nobody is inside."""

    def __init__(
        self, num_pages: int = 100, num_states: int = 20, host_size: int = 0, host_pages: int = 0
    ):
        self.slots = StateSlots(num_states, host_size=host_size)
        self.pages, hosts = PageAllocator(num_pages), PageAllocator(host_pages)
        self.tree = PrefixTree(1, self.pages, hosts, 50, self.slots)
        self.slots.reset(hosts)

    def add(self, tokens: list[int], *at: int, ready: bool = True) -> None:
        """A sequence comes and goes, and leaves checkpoints after so many tokens."""
        match = self.tree.match(array("i", [*tokens, -1]), b"")
        self.tree.lock(match.node)
        own = array("i", tokens[match.node.depth :])
        pages = self.pages.take(len(own))
        assert pages is not None
        added = self.tree.insert(match.node, own, pages, ready=True)
        node = end = added[-1] if added else match.node
        while node.parent is not None:
            if node.depth in at:
                self.keep(node, ready=ready)
            node = node.parent
        self.tree.unlock(end)

    def keep(self, node: Node, *, ready: bool = True) -> Checkpoint:
        checkpoint, slot = self.slots.promise(node), self.slots.take()
        assert checkpoint is not None
        assert slot is not None
        self.slots.keep(checkpoint, slot)
        checkpoint.ready = ready
        return checkpoint

    def found(self, tokens: list[int]) -> tuple[int, int]:
        """How much of it is usable, and up to where something is to come."""
        match = self.slots.usable(self.tree.match(array("i", [*tokens, -1]), b""))
        assert len(match.pages) == match.node.depth
        return match.node.depth, match.pending.depth if match.pending is not None else 0


def test_a_hit_ends_at_the_deepest_checkpoint_on_the_path_and_is_none_without_one() -> None:
    kept = Kept()
    kept.add([1, 2, 3, 4, 5, 6], 2, 5)
    kept.add([7, 8, 9])
    assert kept.found([1, 2, 3, 4, 5, 6, 7]) == (5, 0)
    assert kept.found([1, 2, 3, 4, 5]) == (5, 0)
    assert kept.found([1, 2, 3, 4]) == (2, 0)
    assert kept.found([1, 2, 9]) == (2, 0)
    assert kept.found([1]) == (0, 0), "its only checkpoints are in a part that it does not share"
    assert kept.found([7, 8, 9]) == (0, 0)


def test_a_promise_is_waited_for_if_it_is_deeper_than_what_is_there() -> None:
    kept = Kept()
    kept.add([1, 2, 3, 4, 5, 6], 3)
    kept.add([1, 2, 3, 4, 5, 6], 2, 5, ready=False)
    assert kept.found([1, 2, 3, 4, 5, 6]) == (3, 5)
    assert kept.found([1, 2, 3, 4]) == (3, 0)
    assert kept.found([1, 2]) == (0, 2)


def test_pages_stay_when_their_checkpoint_goes_and_take_it_along_when_they_go() -> None:
    kept = Kept(num_pages=6, num_states=2)
    kept.add([1, 2, 3, 4, 5, 6], 2, 5)
    slot = kept.slots.take()
    assert slot is not None
    assert kept.tree.num_cached == 6
    assert kept.found([1, 2, 3, 4, 5, 6]) == (2, 0), "5 was looked at last, and kept first"
    kept.slots.give_back(slot)
    assert kept.tree.evict(4)
    assert (kept.found([1, 2, 3]), kept.slots.num_kept) == ((2, 0), 1)
    assert kept.tree.evict(1)
    assert (kept.found([1, 2, 3]), kept.slots.num_free) == ((0, 0), 2)


def test_checkpoints_on_pinned_pages_go_last_and_as_others_when_the_pin_has_ended() -> None:
    kept = Kept(num_states=3)
    kept.add([1, 2, 3], 3)
    kept.add([4, 5, 6], 3)
    kept.add([7, 8, 9], 3)
    end = kept.tree.match(array("i", [1, 2, 3, -1]), b"").node
    assert kept.tree.pins.pin(list(path(end))[-2::-1], "a", 10.0) == 3

    def gone() -> set[int]:
        """The first tokens of the prefixes whose checkpoints are gone."""
        kept.slots.take()
        return {first for first in (1, 4, 7) if not kept.found([first, first + 1, first + 2])[0]}

    assert gone() == {4}
    kept.add([4, 5, 6], 3)
    assert gone() == {4, 7}, "the pinned one is older"
    kept.tree.leaves.expire(11.0)
    assert gone() == {4, 7, 1}


def test_an_ended_pin_is_as_old_as_it_is() -> None:
    kept = Kept(num_states=3)
    for first in (1, 4, 7):
        kept.add([first, first + 1], 2)
    end = kept.tree.match(array("i", [1, 2, -1]), b"").node
    kept.tree.pins.pin(list(path(end))[-2::-1], "a", 10.0)
    kept.slots.take()  # it passes over the pinned one
    kept.tree.leaves.expire(11.0)
    kept.slots.take()
    assert (kept.found([1, 2])[0], kept.found([4, 5])[0], kept.found([7, 8])[0]) == (0, 0, 2)


def test_what_a_longer_one_replaced_goes_first_and_what_several_use_goes_with_it() -> None:
    kept = Kept(num_states=5)
    kept.add([1, 2, 3, 4], 1, 2, 3, 4)
    kept.add([9], 1)
    nodes = list(path(kept.tree.match(array("i", [1, 2, 3, 4, -1]), b"").node))
    fourth, _, second, first = [node.checkpoint for node in nodes[:-1]]
    for used in (first, first, second, fourth):
        assert used is not None
        kept.slots.use(used)
    order = []
    for _ in range(5):
        kept.slots.take()
        left = {node.depth for node in nodes if node.checkpoint is not None}
        order.append((*sorted(left), "other") if kept.found([9])[0] else tuple(sorted(left)))
    assert order == [(1, 2, 4, "other"), (1, 4, "other"), (1, 4), (4,), ()]


@pytest.mark.parametrize("host_size", [0, 3])
def test_an_eviction_takes_as_long_among_ten_thousand_checkpoints_as_among_a_hundred(
    host_size: int,
) -> None:
    """10,000 take 4 ms (Python's function calls are counted, as times depend on the machine)."""

    def most_calls(count: int) -> int:
        kept = Kept(num_pages=count, num_states=count, host_size=host_size, host_pages=6 * count)
        kept.add(list(range(count)), *range(1, count + 1))
        calls, most = 0, 0

        def note(frame: object, event: str, arg: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        for i in range(count):
            if host_size and i % 4 == 0:
                for checkpoint in kept.tree.save_states(4, 0):
                    kept.slots.saved(checkpoint)
            calls = 0
            sys.setprofile(note)
            kept.slots.take()
            sys.setprofile(None)
            most = max(most, calls)
        assert kept.slots.num_kept == 0
        assert kept.slots.num_evicted + kept.slots.num_on_host == count
        assert kept.tree.num_cached == count
        assert (kept.slots.num_on_host > count // 2) == (host_size > 0)
        return most

    assert most_calls(10_000) == most_calls(100) <= 12


def test_a_tree_that_is_given_up_leaves_no_checkpoint() -> None:
    kept = Kept()
    kept.add([1, 2, 3], 1, 3)
    del kept.tree
    assert kept.slots.num_free == kept.slots.num_slots
