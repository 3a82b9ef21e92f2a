"""KV pages as plain ints: the free list, and the block table of each sequence."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from asyncllm.engine.cache.node import NO_PAGE, Checkpoint, Node


class PageAllocator:
    """Hands out page numbers ``0 .. num_pages-1``, each to one owner at a time.

    The most recently freed page is handed out first: it is the likeliest to be in a cache.
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """``count`` pages, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        del self._free[-count:]
        taken.reverse()
        return taken

    def take_one(self) -> int | None:
        """One page, or None when none is free."""
        return self._free.pop() if self._free else None

    def give_back(self, pages: list[int]) -> None:
        """Return pages taken before; their owner must not use them any more."""
        self._free.extend(reversed(pages))


@dataclass(slots=True, eq=False)
class BlockTable:
    """What one sequence has of the KV cache. ``KVCacheManager`` alone changes its pages.

    Attributes:
        tokens: int32, by position; the sequence's own, which only grow.
        salt: sequences with different salts share nothing.
        ttl: ``SchedulingParams.cache_ttl_s``: seconds for which its pages stay after its end.
        pages: the page of each ``page_size`` positions.
        node: the end of its path in the prefix tree, locked; None while it holds no pages.
        known: the ``deepest`` of the last match of its tokens.
        first_own: the topmost node of the path that it added itself.
        state: the checkpoint that was loaded for it from the host, locked until it begins.
        shared: others are likely to have the same tokens up to here; 0: nobody knows.
        corrupt: some of its KV is not to be trusted.
    """

    tokens: array[int]
    salt: bytes = b""
    ttl: float | None = None
    pages: list[int] = field(default_factory=list)
    node: Node | None = None
    known: Node | None = None
    first_own: Node | None = None
    state: Checkpoint | None = None
    shared: int = 0
    corrupt: bool = False

    def node_at(self, num_pages: int, page_size: int) -> Node | None:
        """The node after the first pages of its tokens, if the tree has it."""
        node = self.node
        while node is not None and node.depth > num_pages:
            node = node.parent
        while node is not None and node.depth < num_pages:
            node = self._child(node, page_size)
        return node

    def cached_below(self, num_pages: int, page_size: int) -> Iterator[Node]:
        """The nodes of its next pages, up to ``num_pages``, as far as others have computed them."""
        node = self.node
        while node is not None and node.depth < num_pages:
            node = self._child(node, page_size)
            if node is None or not node.ready or node.page == NO_PAGE:
                break
            yield node

    def linked_path(self) -> list[Node]:
        """Its nodes from the top down; none if some were forgotten."""
        node, path = self.node, list[Node]()
        while node is not None and node.linked and node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return path

    def _child(self, node: Node, page_size: int) -> Node | None:
        """The node of its next page."""
        start = node.depth * page_size
        return node.children.get(self.tokens[start : start + page_size].tobytes())

    @property
    def num_shared(self) -> int:
        """How many pages at the beginning are the prefix tree's."""
        assert self.node is not None, "it holds pages"
        return self.node.depth
