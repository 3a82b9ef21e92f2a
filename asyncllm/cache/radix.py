"""The prefix tree: KV pages by their tokens, for requests with the same prefix.

A radix tree over page-aligned tokens (Zheng et al., SGLang, 2024). Each edge is one page, so no
edge is ever split, and a node has the state of one page: on the device, in host memory, in both, or
being copied. Plain ints and bytes; no torch.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict

from asyncllm.cache.lazy_heap import LazyHeap
from asyncllm.cache.node import (
    COLD,
    NO_PAGE,
    Match,
    Node,
    cut_branch,
    pending_below,
    take_apart,
)
from asyncllm.cache.pages import PageAllocator
from asyncllm.cache.pins import EvictionOrder, Pins


class PrefixTree:
    """Owns the pages it is given until it evicts them back into the allocators.

    Eviction takes the least recently used leaf, pinned ones last, in O(log n). ``num_cached``
    counts device pages without a lock.
    """

    def __init__(
        self, page_size: int, pages: PageAllocator, host_pages: PageAllocator, most_pinned: int = 0
    ):
        self.page_size = page_size
        self.num_cached = 0
        self._pages = pages
        self._host_pages = host_pages
        self._roots: dict[bytes, Node] = {}
        self._clock = 0
        #: Cached pages that the host may not have, least recently used first. (The first key of an
        #: OrderedDict is found at once; a dict first skips all deleted ones.)
        self._unsaved: OrderedDict[Node, None] = OrderedDict()
        self.pins = Pins(most_pinned)
        self.leaves = EvictionOrder(self.pins)
        self._host_leaves = LazyHeap[Node](
            lambda tick, node: node.tick == tick and node.host_evictable()
        )

    def __del__(self) -> None:
        for root in self._roots.values():
            take_apart(root)

    # -- looking up ------------------------------------------------------------------------------

    def match(self, tokens: array[int], salt: bytes) -> Match:
        """The longest cached prefix of ``tokens`` (int32) under ``salt``, without the last token.

        The last token has to be computed to sample the next one.
        """
        # A new root is kept from its first lock on.
        node = end = self._roots.get(salt) or Node(None, salt, NO_PAGE, ready=True)
        pages: list[int] = []
        host: list[Node] = []
        pending: Node | None = None
        step = self.page_size * tokens.itemsize
        data = tokens.tobytes()
        for start in range(0, (len(tokens) - 1) // self.page_size * step, step):
            child = node.children.get(data[start : start + step])
            if child is None:
                break
            if not child.ready:
                pending = child
            elif pending is not None:
                break
            elif child.page == NO_PAGE:
                host.append(child)
            else:
                pages.append(child.page)
                end = child
            node = child
        return Match(end, pages, host, pending)

    def pending_below(self, node: Node, tokens: array[int]) -> Node | None:
        """The last node below ``node``, on the path of ``tokens``, being written."""
        return pending_below(node, tokens, self.page_size)

    # -- growing ---------------------------------------------------------------------------------

    def insert(
        self, parent: Node, tokens: array[int], pages: list[int], *, ready: bool
    ) -> list[Node]:
        """Add a chain of locked nodes below ``parent``, whose pages become the tree's.

        It ends before the first page whose tokens are there already; below an unlinked node it is
        empty. A node that is only in host memory gets the given device page.

        Args:
            parent: locked, like its ancestors.
            tokens: int32 [len(pages) * page_size].

        Returns:
            The nodes added, from the top down.
        """
        added: list[Node] = []
        if not parent.linked:
            return added
        step = self.page_size * tokens.itemsize
        data = tokens.tobytes()
        for start, page in zip(range(0, len(data), step), pages, strict=True):
            key = data[start : start + step]
            node = parent.children.get(key)
            if node is None:
                node = Node(parent, key, page, ready, parent.depth + 1, locks=1)
                parent.children[key] = node
            elif node.page == NO_PAGE:
                node.page, node.ready, node.tick, node.locks = page, ready, self._clock, 1
                self._offer_host(node)
            else:
                break
            parent.on_device += 1
            added.append(node)
            parent = node
        return added

    def lock(self, node: Node) -> None:
        """Keep the device pages of ``node`` and its ancestors."""
        walker: Node | None = node
        while walker is not None:
            self.lock_one(walker)
            walker = walker.parent

    def unlock(self, node: Node, *, cold: bool = False) -> None:
        """Undo one ``lock``; the pages become the most recently used.

        With ``cold``, those that no other has used become the least recently used.
        """
        self._clock += 1
        walker: Node | None = node
        while walker is not None:
            parent = walker.parent
            walker.tick = self._clock + (COLD if cold and walker.tick <= 0 else 0)
            self._unlock_one(walker)
            if walker.host != NO_PAGE:
                self._offer_host(walker)
            walker = parent

    def set_ready(self, node: Node) -> None:
        """The device page holds its KV now."""
        node.ready = True
        if node.locks == 0:
            if node.linked:
                self.num_cached += 1
                self._offer(node)
            else:
                self._free(node)
        if node.host != NO_PAGE:
            self._offer_host(node)

    def set_path_ready(self, node: Node, depth: int) -> None:
        """The first ``depth`` pages of the path to ``node`` hold their KV now.

        Pages of a path are written from the top down.
        """
        walker: Node | None = node
        while walker is not None and not walker.ready:
            if walker.depth <= depth:
                self.set_ready(walker)
            walker = walker.parent

    def forget(self, node: Node) -> None:
        """Unlink ``node`` and all below it; present users may go on using them."""
        if not node.linked:
            return
        self._unlink(node)
        for below in take_apart(node):
            self.pins.drop(below)
            if below.locks == 0 and below.ready:
                self.num_cached -= below.page != NO_PAGE
                self._free(below)

    # -- evicting --------------------------------------------------------------------------------

    def evict(self, count: int) -> bool:
        """Return the ``count`` least recently used device pages to the allocator.

        Pages with a copy in host memory can come back. Others are forgotten, with all host pages
        below them. False when fewer could be evicted.
        """
        while count > 0 and (node := self.leaves.pop()):
            if not self._host_pages.num_pages:
                count -= self._evict_branch(node, count)
                continue
            count -= 1
            self.num_cached -= 1
            if node.host == NO_PAGE:
                self._remove(node)
            else:
                self._leave_device(node)
        return count <= 0

    def _evict_branch(self, leaf: Node, most: int) -> int:
        """Evict a leaf, and each parent that is the next leaf in turn; returns how many pages.

        The same as one by one, which takes six times as long: a long prompt evicts thousands. Not
        for a tree with host pages.
        """
        pages, above = cut_branch(leaf, most, self.leaves.least)
        self.num_cached -= len(pages)
        pages.reverse()
        self._pages.give_back(pages)
        if above.parent is not None:
            self._offer(above)
        elif not above.children and above.locks == 0:
            self._roots.pop(above.key, None)
        return len(pages)

    def back_up(self, count: int) -> list[Node]:
        """Give up to ``count`` cached pages a host page, the least recently used first.

        The caller makes the copies, and reports them with ``backed_up``. The device pages stay;
        when they are evicted, nothing is lost.
        """
        started: list[Node] = []
        while len(started) < count and self._unsaved:
            node = next(iter(self._unsaved))
            if node.evictable(leaf=False):
                host = self._take_host(node.tick)
                if host is None:
                    break
                node.host, node.saving = host, True
                self.lock_one(node)
                started.append(node)
            del self._unsaved[node]
        return started

    def backed_up(self, node: Node) -> None:
        """A copy of ``back_up`` is done."""
        node.saving = False
        self._unlock_one(node)
        self._offer_host(node)

    def load(self, nodes: list[Node], pages: list[int]) -> None:
        """Give a downward chain of nodes, only in host memory, device pages.

        The caller makes the copies, and reports each with ``set_ready``.
        """
        for node, page in zip(nodes, pages, strict=True):
            assert node.page == NO_PAGE, "only on the host"
            assert node.parent is not None, "roots have no page"
            node.page, node.ready = page, False
            node.parent.on_device += 1

    # -- inside ----------------------------------------------------------------------------------

    def lock_one(self, node: Node) -> None:
        """Keep the device page of ``node``, but not those of its ancestors."""
        if node.parent is None:
            self._roots.setdefault(node.key, node)
        if node.locks == 0 and node.ready and node.linked and node.page != NO_PAGE:
            self.num_cached -= 1
        node.locks += 1

    def _unlock_one(self, node: Node) -> None:
        node.locks -= 1
        if node.locks:
            return
        if not node.linked:
            if node.ready:  # else a copy or a step is still writing the page
                self._free(node)
        elif node.page != NO_PAGE:
            self.num_cached += node.ready
            if not node.on_device:
                self._offer(node)
            if node.host == NO_PAGE and node.tick > 0 and self._host_pages.num_pages:
                self._unsaved[node] = None
                self._unsaved.move_to_end(node)
        elif node.parent is None and not node.children:
            self._roots.pop(node.key, None)

    def _leave_device(self, node: Node) -> None:
        """The device page goes, the host page stays."""
        self._pages.give_back([node.page])
        node.page = NO_PAGE
        self._left_device(node)
        self._offer_host(node)

    def _left_device(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "roots have no page"
        parent.on_device -= 1
        self._offer(parent)

    def _remove(self, node: Node) -> None:
        """Remove a node without device pages below it, and all nodes below it."""
        self._unlink(node)
        for below in take_apart(node):
            self._free(below)

    def _unlink(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None, "roots are not unlinked"
        del parent.children[node.key]
        if node.page != NO_PAGE:
            self._left_device(node)
        if parent.parent is not None:
            self._offer_host(parent)
        elif not parent.children and parent.locks == 0:
            self._roots.pop(parent.key, None)

    def _free(self, node: Node) -> None:
        """An unlinked node's pages go back."""
        self._unsaved.pop(node, None)
        if node.page != NO_PAGE:
            self._pages.give_back([node.page])
            node.page = NO_PAGE
        if node.host != NO_PAGE:
            self._host_pages.give_back([node.host])
            node.host = NO_PAGE

    def _take_host(self, tick: int) -> int | None:
        """A host page; if none is free, one that was used before ``tick``."""
        while not self._host_pages.num_free:
            node = self._host_leaves.pop()
            if node is None:
                return None
            if node.tick > tick:
                self._offer_host(node)
                return None
            if node.page == NO_PAGE:
                self._remove(node)
            else:
                self._host_pages.give_back([node.host])
                node.host = NO_PAGE
        taken = self._host_pages.take(1)
        return taken[0] if taken else None

    def _offer(self, node: Node) -> None:
        if node.evictable():
            self.leaves.push(node)

    def _offer_host(self, node: Node) -> None:
        if node.host_evictable():
            self._host_leaves.push(node.tick, node)
