"""Pins: cached pages that are kept for a time, and the order in which pages are evicted."""

from __future__ import annotations

from collections.abc import Sequence

from asyncllm.engine.cache.lazy_heap import LazyHeap
from asyncllm.engine.cache.node import Node, Pin


class Pins:
    """The pinned pages of each tenant.

    A pin only decides the order of eviction: pinned pages go after all others, and count as
    available. So it never makes a request wait, and never causes a preemption. A page counts once,
    for the tenant whose pin on it lasts longest.

    Args:
        most: the most pages that one tenant may pin; all together twice as many.
    """

    def __init__(self, most: int):
        self.num_pages = 0
        self.num_pins = 0
        self.num_evicted = 0
        self._most = most
        self._by_tenant: dict[str, int] = {}
        self._pins = LazyHeap[Pin](lambda until, pin: pin.num_pages > 0)

    def pin(self, path: Sequence[Node], tenant: str, until: float) -> int:
        """Pin a path, from the top as far as the tenant's share and that of all go.

        A pin that lasts longer stays; a shorter one is replaced.

        Args:
            path: from the top down, linked.
            until: in the future, in seconds.

        Returns:
            How many pages of the path are pinned at least until then.
        """
        new = Pin(tenant, until)
        own, total = self._by_tenant.get(tenant, 0), self.num_pages
        num_pinned = 0
        for node in path:
            old = node.pin
            if old is None or not old.num_pages:  # it is not pinned
                if own >= self._most or total >= 2 * self._most:
                    break
                own += 1
                total += 1
            elif old.until < until:
                if old.tenant != tenant:
                    if own >= self._most:
                        break
                    own += 1
                    self._count(old.tenant, -1)
                old.num_pages -= 1
            else:
                num_pinned += 1
                continue
            node.pin = new
            new.num_pages += 1
            num_pinned += 1
        if new.num_pages:
            self._by_tenant[tenant], self.num_pages = own, total
            self._pins.push(until, new)
        self.num_pins += num_pinned > 0
        return num_pinned

    def drop(self, node: Node) -> bool:
        """The page leaves the tree; whether it was pinned."""
        pin, node.pin = node.pin, None
        if pin is None or not pin.num_pages:
            return False
        pin.num_pages -= 1
        self.num_pages -= 1
        self._count(pin.tenant, -1)
        return True

    def expire(self, now: float) -> None:
        """End the pins whose time is over."""
        while (pin := self._pins.peek()) is not None and pin.until <= now:
            self._pins.pop()
            self.num_pages -= pin.num_pages
            self._count(pin.tenant, -pin.num_pages)
            pin.num_pages = 0

    def held_by(self, tenant: str) -> int:
        """Pages that count for a tenant."""
        return self._by_tenant.get(tenant, 0)

    def _count(self, tenant: str, change: int) -> None:
        count = self._by_tenant[tenant] = self._by_tenant[tenant] + change
        if not count:
            del self._by_tenant[tenant]


class EvictionOrder:
    """Leaves whose device pages may be evicted.

    First those that are not pinned, the least recently used first; of these, pages that were not
    saved yet and have host pages below come last, as those would be lost with them. Then pinned
    ones, from the pin that ends first on; its path is given up from the end.
    """

    def __init__(self, pins: Pins):
        self._pins = pins
        self._plain = LazyHeap[Node](lambda tick, node: node.tick == tick and node.evictable())
        #: Leaves that came up in ``_plain`` while they carried host pages. They are offered again
        #: when they no longer do.
        self._carrying = LazyHeap[Node](
            lambda tick, node: node.tick == tick and node.evictable() and node.carries
        )
        self._pinned = LazyHeap[Node](
            lambda until, node: (
                node.pin is not None and node.pin.until == until and node.evictable()
            )
        )

    def push(self, node: Node) -> None:
        """Offer an evictable leaf; again, if it was used or pinned since."""
        if node.pin is not None and node.pinned:
            self._pinned.push(node.pin.until, node)
        else:
            self._plain.push(node.tick, node)

    def pop(self) -> Node | None:
        """Take the next one out, and end its pin; None when there is none."""
        while (node := self._plain.pop()) is not None and node.carries:
            self._carrying.push(node.tick, node)
        node = node or self._carrying.pop() or self._pinned.pop()
        if node is not None:
            self._pins.num_evicted += self._pins.drop(node)
        return node

    def expire(self, now: float) -> None:
        """End the pins whose time is over: their pages are as all others."""
        self._pins.expire(now)
        while (node := self._pinned.peek()) and not node.pinned:
            self._pinned.pop()
            self.push(node)
