"""HostTier: which pages of the prefix tree have a copy in host memory, and which lose it.

Pages are copied just ahead of their eviction from the device, so the two tiers hold different
pages, and together behave like one cache of both sizes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from asyncllm.engine.cache.checkpoints import Checkpoints
from asyncllm.engine.cache.lazy_heap import LazyHeap
from asyncllm.engine.cache.node import NO_PAGE, Node
from asyncllm.engine.cache.pages import PageAllocator

#: The share of the device's pages that are free or ahead, so that many can be taken at once: with
#: an 8B model on an H200, those of 49,000 tokens. And the least number of them.
AHEAD_SHARE = 1 / 16
LEAST_AHEAD = 64
#: The share of the host's pages that may be ahead. They add nothing, as the device has them, too.
MOST_AHEAD_OF_HOST = 1 / 8


class HostTier:
    """Owns the host pages. Everything is O(log n), amortised.

    The device pages next to be evicted are *ahead*: saved, or not worth it. Those are short-lived,
    or older than all that the host has. Pinned pages are ahead only once all others are.
    When a page is used again, it is ahead no more, and its copy is *spare*: the first that gives
    its host page up. Host pages without a device page follow, least recently used leaf first.

    Host pages may also have copies of recurrent states (``Checkpoints``). Of these and of leaves,
    what was used longest ago gives way.

    Attributes:
        num_ahead: pages ahead, and on their way to the host.
    """

    def __init__(self, pages: PageAllocator, num_device_pages: int, states: Checkpoints):
        self.pages = pages
        self._states = states
        self.num_ahead = 0
        self._window = min(
            max(LEAST_AHEAD, int(num_device_pages * AHEAD_SHARE)),
            math.ceil(pages.num_pages * MOST_AHEAD_OF_HOST),
        )
        self._saving: set[Node] = set()
        #: Unused device pages that are not ahead, least recently used first; some are in use again.
        #: (The first key of an OrderedDict is found at once; a dict first skips all deleted ones.)
        self._queue = queue = OrderedDict[Node, None]()

        def passed_over(node: Node) -> bool:
            return node not in queue and not node.ahead and node.evictable(leaf=False)

        #: Pages that were pinned when they came up in the queue, as pins give way.
        self._pinned = LazyHeap[Node](
            lambda until, node: (
                node.pin is not None and node.pin.until == until and passed_over(node)
            )
        )
        #: Those whose pin has ended, least recently used first.
        self._ended = LazyHeap[Node](lambda tick, node: node.tick == tick and passed_over(node))
        #: Pages ahead that were pinned when they were saved.
        self._pinned_ahead: set[Node] = set()
        self._spare: dict[Node, None] = {}
        self._leaves = LazyHeap[Node](lambda tick, node: node.tick == tick and node.host_leaf())

    def unused(self, node: Node) -> None:
        """The device page has just been used for the last time."""
        if not self._window or node.ahead:
            return
        if node.tick <= 0:  # it is short-lived: the first to be evicted
            self._set_ahead(node)
        else:
            self._queue[node] = None
            self._queue.move_to_end(node)

    def used(self, node: Node) -> None:
        """The device page is in use again: its copy is not needed soon."""
        if node.ahead:
            self._set_not_ahead(node)
        if node.host != NO_PAGE and node.ready and not node.saving:
            self._spare[node] = None

    def leaves_device(self, node: Node) -> None:
        """The device page is given back."""
        if node.ahead:
            self._set_not_ahead(node)
        elif self._window:
            self._queue.pop(node, None)
            self._spare.pop(node, None)

    def free(self, node: Node) -> None:
        """Give the host page back, if there is one."""
        if node.host != NO_PAGE:
            self.pages.give_back([node.host])
            node.host = NO_PAGE

    def offer(self, node: Node) -> None:
        """``node`` may have become a leaf that only the host has."""
        if node.host_leaf():
            self._leaves.push(node.tick, node)

    def advance(self, most: int, num_free: int, remove: Callable[[Node], None]) -> list[Node]:
        """Give up to ``most`` of the next pages to be evicted a host page, if few can be taken.

        Args:
            num_free: of the device, less those that are about to be taken.
            remove: removes a leaf from the tree, and frees its host page.

        Returns:
            The nodes to be copied, which are locked until ``saved``.
        """
        while (ended := self._pinned.peek()) is not None and not ended.pinned:
            self._pinned.pop()
            self._ended.push(ended.tick, ended)
        chosen: list[Node] = []
        while len(chosen) < most and (node := self._next(num_free)) is not None:
            if node.host != NO_PAGE:
                del self._spare[node]
            elif not self._is_too_old(node):
                host = self._take(remove)
                if host is None:
                    break
                node.host, node.saving, node.locks = host, True, 1
                chosen.append(node)
            self._queue.pop(node, None)
            self._set_ahead(node)
        self._saving.update(chosen)
        return chosen

    def saved(self, node: Node) -> None:
        """The copy is done."""
        node.saving = False
        self._saving.discard(node)
        if not node.ahead:
            self.used(node)

    def num_ready(self) -> int:
        """Pages ahead that can be evicted now: not on their way, nor above one that is."""
        waiting = set(self._saving)
        for node in self._saving:
            above = node.parent if node.linked else None
            while above is not None and above.ahead and above not in waiting:
                waiting.add(above)
                above = above.parent
        return self.num_ahead - sum(node.ahead for node in waiting)

    def _next(self, num_free: int) -> Node | None:
        """The page to be evicted after those ahead; None if enough can be taken at once."""
        lacking = self._window - num_free - self.num_ahead
        # Those passed over may be older than all ahead: up to another window of them is saved.
        if lacking + self._window > 0 and (node := self._ended.peek()) is not None:
            return node
        # Pages that are not pinned are evicted before all pinned ones, even those ahead.
        if lacking + len(self._pinned_ahead) <= 0:
            return None
        while self._queue:
            node = next(iter(self._queue))
            usable = node.evictable(leaf=False)
            if usable and not node.pinned:
                return node
            del self._queue[node]
            if usable and node.pin is not None:
                self._pinned.push(node.pin.until, node)
        return self._pinned.peek() if lacking > 0 else None

    def _set_ahead(self, node: Node) -> None:
        node.ahead = True
        self.num_ahead += 1
        if node.pinned:
            self._pinned_ahead.add(node)

    def _set_not_ahead(self, node: Node) -> None:
        node.ahead = False
        self.num_ahead -= 1
        self._pinned_ahead.discard(node)

    def take_for_state(
        self, count: int, tick: int, remove: Callable[[Node], None]
    ) -> list[int] | None:
        """Pages for a copy of a state, last used at ``tick``; None when all was used later."""
        if count > self.pages.num_pages:
            return None
        while self.pages.num_free < count:
            if self._all_used_after(tick) or not self._make_room(remove):
                return None
        return self.pages.take(count)

    def _is_too_old(self, node: Node) -> bool:
        """Whether all that the host has was used after ``node``."""
        return not self.pages.num_free and self._all_used_after(node.tick)

    def _all_used_after(self, tick: int) -> bool:
        if self._spare or self._states.num_spare:
            return False
        leaf, state = self._leaves.peek(), self._states.oldest_on_host()
        ticks = [leaf.tick] if leaf is not None else []
        ticks += [state] if state is not None else []
        return bool(ticks) and min(ticks) > tick

    def _take(self, remove: Callable[[Node], None]) -> int | None:
        if not self.pages.num_free:
            self._make_room(remove)
        return self.pages.take_one()

    def _make_room(self, remove: Callable[[Node], None]) -> bool:
        """Free a page of the host, or those of a state; False when all are being copied."""
        if self._spare:
            self.free(self._spare.popitem()[0])  # the page used last
            return True
        if self._states.num_spare:
            self._states.give_up_spare()
            return True
        leaf, state = self._leaves.peek(), self._states.oldest_on_host()
        if state is not None and (leaf is None or state <= leaf.tick):
            self._states.give_up_oldest()
        elif leaf is not None:
            self._leaves.pop()
            remove(leaf)
        else:
            return False
        return True
