"""HostTier: which pages of the prefix tree have a copy in host memory, and which lose it.

Pages are copied just ahead of their eviction from the device, so the two tiers hold different
pages, and together behave like one cache of both sizes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

from asyncllm.cache.lazy_heap import LazyHeap
from asyncllm.cache.node import NO_PAGE, Node
from asyncllm.cache.pages import PageAllocator

#: The share of the device's pages that are free or ahead, so that many can be taken at once: with
#: an 8B model on an H200, those of 49,000 tokens. And the least number of them.
AHEAD_SHARE = 1 / 16
LEAST_AHEAD = 64
#: The share of the host's pages that may be ahead. They add nothing, as the device has them, too.
MOST_AHEAD_OF_HOST = 1 / 8


class HostTier:
    """Owns the host pages. Everything is O(log n), amortised.

    The device pages next to be evicted are *ahead*: saved, or too old to be. When a page is used
    again, it is ahead no more, and its copy is *spare*: the first that gives its host page up.
    Host pages without a device page follow, least recently used leaf first.

    Attributes:
        num_ahead: pages ahead, and on their way to the host.
    """

    def __init__(self, pages: PageAllocator, num_device_pages: int):
        self.pages = pages
        self.num_ahead = 0
        self._window = min(
            max(LEAST_AHEAD, int(num_device_pages * AHEAD_SHARE)),
            math.ceil(pages.num_pages * MOST_AHEAD_OF_HOST),
        )
        #: Unused device pages that are not ahead, least recently used first; some are in use again.
        #: (The first key of an OrderedDict is found at once; a dict first skips all deleted ones.)
        self._queue: OrderedDict[Node, None] = OrderedDict()
        self._spare: dict[Node, None] = {}
        self._leaves = LazyHeap[Node](lambda tick, node: node.tick == tick and node.host_leaf())

    def unused(self, node: Node) -> None:
        """The device page has just been used for the last time."""
        if self._window and node.tick > 0 and not node.ahead:
            self._queue[node] = None
            self._queue.move_to_end(node)

    def used(self, node: Node) -> None:
        """The device page is in use again: its copy is not needed soon."""
        if node.ahead:
            node.ahead = False
            self.num_ahead -= 1
        if node.host != NO_PAGE and node.ready and not node.saving:
            self._spare[node] = None

    def leaves_device(self, node: Node) -> None:
        """The device page is given back."""
        if node.ahead:
            node.ahead = False
            self.num_ahead -= 1
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
            num_free: of the device.
            remove: removes a leaf from the tree, and frees its host page.

        Returns:
            The nodes to be copied.
        """
        chosen: list[Node] = []
        num_passed = 0
        while self._queue and self.num_ahead + num_free < self._window:
            if len(chosen) + num_passed == most:
                break
            node = next(iter(self._queue))
            if node.evictable(leaf=False):
                if node.pinned:  # it is evicted last
                    self._queue.move_to_end(node)
                    num_passed += 1
                    continue
                if node.host != NO_PAGE:
                    del self._spare[node]
                elif not self._is_too_old(node):
                    host = self._take(remove)
                    if host is None:
                        break
                    node.host = host
                    chosen.append(node)
                node.ahead = True
                self.num_ahead += 1
            del self._queue[node]
        return chosen

    def _is_too_old(self, node: Node) -> bool:
        """Whether all that the host has was used after ``node``."""
        if self.pages.num_free or self._spare:
            return False
        leaf = self._leaves.peek()
        return leaf is not None and leaf.tick > node.tick

    def _take(self, remove: Callable[[Node], None]) -> int | None:
        if not self.pages.num_free:
            if self._spare:
                self.free(self._spare.popitem()[0])  # the page used last
            elif leaf := self._leaves.pop():
                remove(leaf)
        return self.pages.take_one()
