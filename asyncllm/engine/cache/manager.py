"""KVCacheManager: the KV pages of each sequence, and the pages kept for later ones."""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol, Self

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.changes import CacheChanges
from asyncllm.engine.cache.node import NO_PAGE, Match, Node, pending_below
from asyncllm.engine.cache.pages import PageAllocator
from asyncllm.engine.cache.radix import PrefixTree


class PageHolder(Protocol):
    """The part of a sequence that the cache works on.

    Attributes:
        tokens: int32; by position.
        salt: sequences with different salts share nothing.
        pages: its block table.
        node: the end of its path in the prefix tree, locked; None while it holds no pages.
        known: the ``deepest`` of the last match of its tokens.
        first_own: the topmost node of the path that it added itself.
    """

    tokens: array[int]
    salt: bytes
    pages: list[int]
    node: Node | None
    known: Node | None
    first_own: Node | None


class Copies(NamedTuple):
    """Page copies of one step: the nodes, and (device page, host page) of each."""

    nodes: list[Node]
    pages: list[tuple[int, int]]


class KVCacheManager:
    """Grows and releases block tables; decides which page is reused, evicted, saved or loaded.

    A page is free, held (private to one sequence, locked in the tree, or part of a copy) or cached.
    Invariant: ``num_free + num_held + num_cached == num_pages`` between calls.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        host_pages: int = 0,
        max_pinned_share: float = 0.0,
    ):
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.num_evicted = 0
        self._pages = PageAllocator(num_pages)
        self._host_pages = PageAllocator(host_pages)
        self._most_pinned = int(num_pages * max_pinned_share)
        self._tree = PrefixTree(page_size, self._pages, self._host_pages, self._most_pinned)
        self.pins = self._tree.pins

    @classmethod
    def create(cls, limits: EngineLimits) -> Self:
        """An empty cache."""
        return cls(
            limits.num_pages,
            limits.page_size,
            prefix_caching=limits.prefix_caching,
            host_pages=limits.host_pages,
            max_pinned_share=limits.max_pinned_share,
        )

    @property
    def num_pages(self) -> int:
        return self._pages.num_pages

    @property
    def num_free(self) -> int:
        return self._pages.num_free

    @property
    def num_cached(self) -> int:
        """Pages that no live sequence uses, kept for reuse of their prefix."""
        return self._tree.num_cached

    @property
    def num_available(self) -> int:
        """Pages that a sequence could take now."""
        return self._pages.num_free + self._tree.num_cached

    @property
    def num_held(self) -> int:
        """Pages of live sequences and of copies under way."""
        return self.num_pages - self.num_free - self.num_cached

    @property
    def num_dropped(self) -> int:
        """Pages evicted before the host tier could save them."""
        return self._tree.num_dropped

    def num_expendable(self) -> int:
        """Pages that can be taken without the loss of what the host tier could still save."""
        return self._tree.num_expendable() if self._host_pages.num_pages else self.num_available

    @property
    def num_host_used(self) -> int:
        return self._host_pages.num_pages - self._host_pages.num_free

    def pages_for(self, num_tokens: int) -> int:
        """How many pages ``num_tokens`` positions take."""
        return -(-num_tokens // self.page_size)

    def reset(self) -> None:
        """Free all pages and forget what they hold. Nobody may hold any, nor may copies run."""
        dropped, pins, changes = self._tree.num_dropped, self.pins, self._tree.changes
        self._pages = PageAllocator(self.num_pages)
        self._host_pages = PageAllocator(self._host_pages.num_pages)
        self._tree = PrefixTree(self.page_size, self._pages, self._host_pages, self._most_pinned)
        self.pins = self._tree.pins
        # These only grow.
        self._tree.num_dropped = dropped
        self.pins.num_pins, self.pins.num_evicted = pins.num_pins, pins.num_evicted
        if changes is not None:
            changes.cleared()
            self._tree.changes = changes

    def report_to(self, changes: CacheChanges) -> None:
        """Have it told of each page that comes and goes, from now on; the cache is empty."""
        self._tree.changes = changes

    # -- one sequence ----------------------------------------------------------------------------

    def match(self, holder: PageHolder, most: int | None = None) -> Match:
        """The cached prefix of the holder's tokens, or of the first ``most``, without the last."""
        if not self.prefix_caching:
            return self._tree.match(array("i"), holder.salt)
        if most is not None:
            return self._tree.match(holder.tokens[:most], holder.salt)
        match = self._tree.match(holder.tokens, holder.salt, holder.known)
        holder.known = match.deepest
        return match

    def pending_below(self, holder: PageHolder, node: Node) -> Node | None:
        """The last page below ``node``, on the path of the holder's tokens, being written."""
        return pending_below(node, holder.tokens, self.page_size) if node.linked else None

    def hold(self, holder: PageHolder, match: Match) -> None:
        """Lock the device part of a match, with which the block table then begins."""
        previous = holder.node
        self._tree.lock(match.node)
        if previous is not None:
            self._tree.unlock(previous)
        holder.node = match.node
        holder.first_own = None
        holder.pages = match.pages

    def num_shared(self, holder: PageHolder) -> int:
        """How many pages at the beginning of its block table are the tree's."""
        assert holder.node is not None, "it holds pages"
        return holder.node.depth

    def extend(self, holder: PageHolder, num_tokens: int) -> bool:
        """Take pages for positions ``0 .. num_tokens-1``; False when there are not enough."""
        missing = self.pages_for(num_tokens) - len(holder.pages)
        if missing <= 0:
            return True
        taken = self._take(missing)
        if taken is None:
            return False
        holder.pages += taken
        return True

    def grow(self, holder: PageHolder) -> int | None:
        """Take one more page, which is returned; None when there is none."""
        page = self._pages.take_one()
        if page is None:
            taken = self._take(1)
            if taken is None:
                return None
            [page] = taken
        holder.pages.append(page)
        return page

    def begin(self, holder: PageHolder, num_tokens: int) -> None:
        """A step that computes positions up to ``num_tokens`` is planned.

        Its new full pages are entered in the tree, for others to wait for. If another sequence
        computes the same pages, release decides which are kept.
        """
        if self.prefix_caching:
            self._enter(holder, num_tokens // self.page_size, ready=False)

    def land(self, holder: PageHolder, num_tokens: int) -> None:
        """Positions up to ``num_tokens`` have been computed."""
        if holder.node is not None:
            self._tree.set_path_ready(holder.node, num_tokens // self.page_size)

    def release(self, holder: PageHolder, num_tokens: int, *, cold: bool = False) -> None:
        """Give the pages up; the full ones of ``num_tokens`` computed positions stay cached.

        No step in flight may use them. With ``cold``, those that no other has used are the first
        to be evicted.
        """
        self.commit(holder, num_tokens)
        self._let_go(holder, cold=cold)

    def discard(self, holder: PageHolder) -> None:
        """Give the pages up, and forget all that the holder has computed."""
        if holder.first_own is not None:
            self._tree.forget(holder.first_own)
        if holder.node is not None:  # no step writes it any more
            self._tree.set_path_ready(holder.node, holder.node.depth)
        self._let_go(holder)

    def commit(self, holder: PageHolder, num_tokens: int) -> None:
        """Let others find the full pages of ``num_tokens`` computed positions."""
        node = holder.node
        if node is None or not self.prefix_caching:
            return
        num_pages = num_tokens // self.page_size
        for index in range(node.depth, num_pages):
            child = node.children.get(self._key(holder, index))
            if child is None or not child.ready or child.page == NO_PAGE:
                break
            self._tree.lock_one(child)  # another sequence has computed it, too, and was faster
            node = child
        holder.node = node
        self._enter(holder, num_pages, ready=True)

    def pin(self, holder: PageHolder, num_tokens: int, tenant: str, until: float) -> int:
        """Commit ``num_tokens`` computed positions, and pin the holder's pages; see ``Pins.pin``.

        Returns:
            How many pages are pinned, from the first on; none if some were forgotten.
        """
        self.commit(holder, num_tokens)
        node, path = holder.node, list[Node]()
        while node is not None and node.linked and node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        return self.pins.pin(path, tenant, until)

    def expire_pins(self, now: float) -> None:
        """End the pins whose time is over."""
        self._tree.leaves.expire(now)

    def _enter(self, holder: PageHolder, num_pages: int, *, ready: bool) -> None:
        """Give the tree those of the first ``num_pages`` pages that are new to it."""
        assert holder.node is not None, "it holds pages"
        size, first = self.page_size, holder.node.depth
        tokens = holder.tokens[first * size : num_pages * size]
        added = self._tree.insert(holder.node, tokens, holder.pages[first:num_pages], ready=ready)
        if added:
            holder.first_own = holder.first_own or added[0]
            holder.node = added[-1]

    def _let_go(self, holder: PageHolder, *, cold: bool = False) -> None:
        end = holder.node
        if end is None:
            return
        node, own = end, holder.pages[end.depth :]
        for page in reversed(holder.pages[: end.depth]):
            if node.page != page:
                own.append(page)  # the tree has another page of the same tokens
            assert node.parent is not None, "roots have no page"
            node = node.parent
        self._pages.give_back(own)
        self._tree.unlock(end, cold=cold)
        holder.node = holder.first_own = None
        holder.pages = []

    def _key(self, holder: PageHolder, index: int) -> bytes:
        start = index * self.page_size
        return holder.tokens[start : start + self.page_size].tobytes()

    def _take(self, count: int) -> list[int] | None:
        short = count - self._pages.num_free
        if short > 0:
            if short > self._tree.num_cached:
                return None
            free = self._pages.num_free
            self._tree.evict(short)
            self.num_evicted += self._pages.num_free - free
        return self._pages.take(count)

    # -- the host tier ---------------------------------------------------------------------------

    def back_up(self, most: int, soon: int = 0) -> Copies:
        """Start to copy up to ``most`` cached pages to the host, just ahead of their eviction.

        Args:
            soon: pages that are about to be taken, beside the usual.
        """
        nodes = self._tree.back_up(most, soon)
        return Copies(nodes, [(node.page, node.host) for node in nodes])

    def backed_up(self, copies: Copies) -> None:
        """Copies of ``back_up`` are done."""
        for node in copies.nodes:
            self._tree.backed_up(node)

    def postpone(self, holder: PageHolder, match: Match) -> None:
        """A match that was held waits: its device part is released, its host part stays, too."""
        self.release(holder, 0)
        if match.host:
            self._tree.use_on_host(match.host)

    def load(self, holder: PageHolder, match: Match) -> Copies | None:
        """Start to load the host pages of a match that is held; None when there is no room.

        The holder keeps them locked until ``release``.
        """
        pages = self._take(len(match.host))
        if pages is None:
            return None
        self._tree.load(match.host, pages)
        for node in match.host:
            self._tree.lock_one(node)
        holder.node = match.host[-1]
        holder.pages += pages
        return Copies(match.host, [(node.page, node.host) for node in match.host])

    def loaded(self, copies: Copies) -> None:
        """Copies of ``load`` are done."""
        for node in copies.nodes:
            self._tree.set_ready(node)
