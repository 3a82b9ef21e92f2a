"""The prefix tree: KV pages by their tokens, for requests with the same prefix.

A radix tree over page-aligned tokens (Zheng et al., SGLang, 2024). Each edge is one page, so no
edge is ever split, and a node has the state of one page: on the device, in host memory, in both, or
being copied. Plain ints and bytes; no torch.
"""

from __future__ import annotations

from array import array

from asyncllm.engine.cache.changes import CacheChanges
from asyncllm.engine.cache.checkpoints import Checkpoints, NoCheckpoints
from asyncllm.engine.cache.host_tier import HostTier
from asyncllm.engine.cache.node import COLD, NO_PAGE, Checkpoint, Match, Node, take_apart
from asyncllm.engine.cache.pages import PageAllocator
from asyncllm.engine.cache.pins import EvictionOrder, Pins


class PrefixTree:
    """Owns the pages it is given until it evicts them back into the allocators.

    Eviction takes the least recently used leaf, in O(log n); those that others depend on, and
    pinned ones, come last. ``num_cached`` counts device pages without a lock, ``num_dropped`` those
    evicted before the host tier could save them.
    """

    def __init__(
        self,
        page_size: int,
        pages: PageAllocator,
        host_pages: PageAllocator,
        most_pinned: int = 0,
        states: Checkpoints | None = None,
    ):
        self.page_size = page_size
        self.num_cached = 0
        self.num_dropped = 0
        self._states = states or NoCheckpoints()
        self._pages = pages
        self._host = HostTier(host_pages, pages.num_pages, self._states)
        self._roots: dict[bytes, Node] = {}
        self._clock = 0
        self.changes: CacheChanges | None = None
        self.pins = Pins(most_pinned)
        self.leaves = EvictionOrder(self.pins)

    def __del__(self) -> None:
        for root in self._roots.values():
            self._states.forget(take_apart(root))

    # -- looking up ------------------------------------------------------------------------------

    def match(self, tokens: array[int], salt: bytes, known: Node | None = None) -> Match:
        """The longest cached prefix of ``tokens`` (int32) under ``salt``, without the last token.

        The last token has to be computed to sample the next one.

        Args:
            known: the ``deepest`` of an earlier match of these tokens, or of fewer; if it still has
                a page, nothing is looked up on the way to it.
        """
        if known is not None and known.linked and known.page != NO_PAGE:
            node = end = known
            while not end.ready:  # as all are above the first one, up to the root
                assert end.parent is not None, "roots are ready"
                end = end.parent
        else:  # a new root is kept from its first lock on
            node = end = self._roots.get(salt) or Node(None, salt, NO_PAGE, ready=True)
        host: list[Node] = []
        pending = None if node is end else node
        step = self.page_size * tokens.itemsize
        data = tokens.tobytes()
        for start in range(node.depth * step, (len(tokens) - 1) // self.page_size * step, step):
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
                end = child
            node = child
        return Match(end, host, pending)

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
                self._host.used(node)
            else:
                break
            parent.on_device += 1
            added.append(node)
            parent = node
        if ready and self.changes is not None:
            self.changes.stored(reversed(added))
        return added

    def lock(self, node: Node) -> None:
        """Keep the device pages of ``node`` and its ancestors."""
        walker: Node | None = node
        while walker is not None:
            if walker.locks and not walker.ahead:
                walker.locks += 1  # most of a path that many share
            else:
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
            walker = parent

    def set_ready(self, node: Node) -> None:
        """The device page holds its KV now."""
        node.ready = True
        if self.changes is not None:
            self.changes.stored((node,))
        if node.host != NO_PAGE:
            self._host.used(node)
        if node.locks == 0:
            if node.linked:
                self.num_cached += 1
                self._offer(node)
                self._host.unused(node)
            else:
                self._free(node)

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
        for below in self._unlink(node):
            self.pins.drop(below)
            if below.locks == 0 and below.ready:
                self.num_cached -= below.page != NO_PAGE
                self._free(below)

    # -- evicting --------------------------------------------------------------------------------

    def evict(self, count: int) -> bool:
        """Return the ``count`` least recently used device pages to the allocator.

        Pages with a copy in host memory can come back, others are forgotten. Host pages below them
        would be forgotten as well, so such pages are evicted only when no others are left but
        pinned ones. False when fewer could be evicted.
        """
        pages: list[int] = []
        while len(pages) < count and (leaf := self.leaves.pop()):
            # Up a path that was used as a whole, each page is the next: no need to ask the heap.
            node, tick = leaf, leaf.tick
            while len(pages) < count and node.tick == tick and not node.pinned and node.evictable():
                if node.carries and node is not leaf:
                    break
                parent = node.parent
                assert parent is not None, "roots have no page"
                pages.append(node.page)
                self._evict_one(node, parent)
                node = parent
            self._offer(node)
        self.num_cached -= len(pages)
        self._pages.give_back(pages[::-1])
        return len(pages) == count

    def num_expendable(self) -> int:
        """Device pages that can be taken without a loss: free, saved, or not worth saving."""
        return self._pages.num_free + self._host.num_ready()

    def back_up(self, most: int, soon: int = 0) -> list[Node]:
        """Give up to ``most`` pages that are next to be evicted a host page.

        The caller makes the copies, and reports them with ``backed_up``. The device pages stay;
        when they are evicted, nothing is lost.

        Args:
            soon: pages that are about to be taken.
        """
        started = self._host.advance(most, self._pages.num_free - soon, self._remove)
        self.num_cached -= len(started)
        return started

    def backed_up(self, node: Node) -> None:
        """A copy of ``back_up`` is done."""
        self._host.saved(node)
        self._unlock_one(node)

    def save_states(self, most: int, soon: int) -> list[Checkpoint]:
        """Start to copy states to the host, as ``back_up`` does pages; see ``Checkpoints.save``."""

        def take(count: int, tick: int) -> list[int] | None:
            return self._host.take_for_state(count, tick, self._remove)

        return self._states.save(most, soon, take)

    def use_on_host(self, nodes: list[Node]) -> None:
        """Pages that are about to be loaded become the most recently used of the host.

        Args:
            nodes: a downward chain, only in host memory, below pages that were just used.
        """
        for node in nodes:
            node.tick = self._clock
        self._host.offer(nodes[-1])

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
        if node.ahead:
            self._host.used(node)
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
            self._host.unused(node)
        elif node.parent is None and not node.children:
            self._roots.pop(node.key, None)

    def _evict_one(self, node: Node, parent: Node) -> None:
        """The device page goes; if the host has no copy, so do the pages below it."""
        parent.on_device -= 1
        node.page = NO_PAGE
        saved = node.host != NO_PAGE
        self.num_dropped += not (saved or node.ahead) and self._host.pages.num_pages > 0
        self._host.leaves_device(node)
        if saved:
            self._host.offer(node)
        else:
            self._remove(node)

    def _remove(self, node: Node) -> None:
        """Remove a node without device pages below it, and all nodes below it."""
        for below in self._unlink(node):
            self._free(below)

    def _unlink(self, node: Node) -> list[Node]:
        """Nobody finds ``node`` and all nodes below it any more; returns them."""
        parent = node.parent
        assert parent is not None, "roots are not unlinked"
        del parent.children[node.key]
        if node.page != NO_PAGE:
            parent.on_device -= 1
        if not parent.on_device and (node.page != NO_PAGE or not parent.children):
            self._offer(parent)
        if parent.parent is not None:
            self._host.offer(parent)
        elif not parent.children and parent.locks == 0:
            self._roots.pop(parent.key, None)
        nodes = take_apart(node)
        self._states.forget(nodes)
        if self.changes is not None:
            self.changes.removed(nodes)
        return nodes

    def _free(self, node: Node) -> None:
        """An unlinked node's pages go back."""
        if node.page != NO_PAGE:
            self._pages.give_back([node.page])
            node.page = NO_PAGE
            self._host.leaves_device(node)
        self._host.free(node)

    def _offer(self, node: Node) -> None:
        if node.evictable():
            self.leaves.push(node)
