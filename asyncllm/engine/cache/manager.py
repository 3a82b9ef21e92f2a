"""KVCacheManager: the KV pages of each sequence, and the pages kept for later ones."""

from __future__ import annotations

from array import array
from typing import NamedTuple, Self

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.changes import CacheChanges
from asyncllm.engine.cache.checkpoints import Checkpoints, NoCheckpoints
from asyncllm.engine.cache.node import Checkpoint, Match, Node
from asyncllm.engine.cache.pages import BlockTable, PageAllocator
from asyncllm.engine.cache.radix import PrefixTree


class Copies(NamedTuple):
    """Copies of one step: the nodes, (device page, host page) of each, and states."""

    nodes: list[Node]
    pages: list[tuple[int, int]]
    states: list[Checkpoint]


class KVCacheManager:
    """Grows and releases block tables; decides which page is reused, evicted, saved or loaded.

    A page is free, held (private to one sequence, locked in the tree, or part of a copy) or cached.
    Invariant: ``num_free + num_in_use + num_cached == num_pages`` between calls.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        prefix_caching: bool = True,
        host_pages: int = 0,
        max_pinned_share: float = 0.0,
        states: Checkpoints | None = None,
    ):
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.num_evicted = 0
        self._pages = PageAllocator(num_pages)
        self._host_pages = PageAllocator(host_pages)
        self._most_pinned = int(num_pages * max_pinned_share)
        self.states = states or NoCheckpoints()
        self._tree = self._new_tree()
        self.states.reset(self._host_pages)
        self.pins = self._tree.pins

    @classmethod
    def create(cls, limits: EngineLimits, states: Checkpoints | None = None) -> Self:
        """An empty cache."""
        return cls(
            limits.num_pages,
            limits.page_size,
            prefix_caching=limits.prefix_caching,
            host_pages=limits.host_pages,
            max_pinned_share=limits.max_pinned_share,
            states=states,
        )

    def _new_tree(self) -> PrefixTree:
        parts = self._pages, self._host_pages, self._most_pinned, self.states
        return PrefixTree(self.page_size, *parts)

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
    def num_in_use(self) -> int:
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
        self._tree = self._new_tree()
        self.states.reset(self._host_pages)
        self.pins = self._tree.pins
        # These only grow.
        self._tree.num_dropped = dropped
        self.pins.num_pins, self.pins.num_evicted = pins.num_pins, pins.num_evicted
        if changes is not None:
            changes.cleared()
            self._tree.changes = changes

    def report_to(self, changes: CacheChanges) -> None:
        """Have it told of each page that comes and goes, from now on; the cache is empty."""
        self._tree.changes = self.states.changes = changes

    def has(self, tokens: array[int], salt: bytes) -> bool:
        """Whether the pages of these tokens are there, or about to be, with or without a state."""
        match = self._tree.match(tokens + array("i", [0]), salt)  # which leaves out the last token
        known = match.node.depth + len(match.host)
        return match.pending is not None or known * self.page_size == len(tokens)

    # -- one sequence ----------------------------------------------------------------------------

    def match(self, table: BlockTable, most: int | None = None) -> Match:
        """The cached prefix of the table's tokens, or of the first ``most``, without the last.

        Of models with states, up to a checkpoint.
        """
        if not self.prefix_caching:
            return self._tree.match(array("i"), table.salt)
        if most is not None:
            return self.states.usable(self._tree.match(table.tokens[:most], table.salt))
        match = self._tree.match(table.tokens, table.salt, table.known)
        table.known = match.deepest
        return self.states.usable(match)

    def join(self, table: BlockTable, most: int) -> None:
        """Hold the cached pages, ``most`` at most, of tokens that the table computes again.

        It has pages of its own for these. What follows can enter the tree only below cached ones.
        """
        path = list(table.cached_below(len(table.tokens) // self.page_size, self.page_size))
        for node in path if len(path) <= most else ():
            self._tree.lock_one(node)
            table.node = node

    def hold(self, table: BlockTable, match: Match) -> None:
        """Lock the device part of a match, with which the block table then begins."""
        previous = table.node
        self._tree.lock(match.node)
        if previous is not None:
            self._tree.unlock(previous)
        table.node = match.node
        table.first_own = None
        table.pages = match.pages

    def extend(self, table: BlockTable, num_tokens: int) -> bool:
        """Take pages for positions ``0 .. num_tokens-1``; False when there are not enough."""
        missing = self.pages_for(num_tokens) - len(table.pages)
        if missing <= 0:
            return True
        taken = self._take(missing)
        if taken is None:
            return False
        table.pages += taken
        return True

    def grow(self, table: BlockTable) -> int | None:
        """Take one more page, which is returned; None when there is none."""
        page = self._pages.take_one()
        if page is None:
            taken = self._take(1)
            if taken is None:
                return None
            [page] = taken
        table.pages.append(page)
        return page

    def begin(self, table: BlockTable, num_tokens: int) -> None:
        """A step that computes positions up to ``num_tokens`` is planned.

        Its new full pages are entered in the tree, for others to wait for. If another sequence
        computes the same pages, release decides which are kept.
        """
        if self.prefix_caching:
            self._enter(table, num_tokens // self.page_size, ready=False)

    def forget_beyond(self, table: BlockTable, num_tokens: int) -> None:
        """Positions from ``num_tokens`` on, whose pages are in the tree, will not be computed."""
        node, top = table.node, None
        while node is not None and not node.ready and node.depth * self.page_size > num_tokens:
            top, node = node, node.parent
        if top is not None and table.node is not None:
            self._tree.forget(top)
            self._tree.set_path_ready(table.node, table.node.depth)

    def computed(self, table: BlockTable, num_tokens: int) -> None:
        """Positions up to ``num_tokens`` have been computed."""
        if table.node is not None:
            self._tree.set_path_ready(table.node, num_tokens // self.page_size)

    def release(self, table: BlockTable, num_tokens: int, *, cold: bool = False) -> None:
        """Give the pages up; the full ones of ``num_tokens`` computed positions stay cached.

        No step in flight may use them. With ``cold``, those that no other has used are the first
        to be evicted.
        """
        self.commit(table, num_tokens)
        self._let_go(table, cold=cold)

    def discard(self, table: BlockTable) -> None:
        """Give the pages up, and forget all that was computed for it."""
        if table.first_own is not None:
            self._tree.forget(table.first_own)
        if table.node is not None:  # no step writes it any more
            self._tree.set_path_ready(table.node, table.node.depth)
        self._let_go(table)

    def commit(self, table: BlockTable, num_tokens: int) -> None:
        """Let others find the full pages of ``num_tokens`` computed positions."""
        if table.node is None or not self.prefix_caching:
            return
        num_pages = num_tokens // self.page_size
        for node in table.cached_below(num_pages, self.page_size):
            self._tree.lock_one(node)  # another sequence has computed it, too, and was faster
            table.node = node
        self._enter(table, num_pages, ready=True)

    def pin(self, table: BlockTable, num_tokens: int, tenant: str, until: float) -> int:
        """Commit ``num_tokens`` computed positions, and pin the table's pages; see ``Pins.pin``.

        Returns:
            How many pages are pinned, from the first on; none if some were forgotten.
        """
        self.commit(table, num_tokens)
        return self.pins.pin(table.linked_path(), tenant, until)

    def expire_pins(self, now: float) -> None:
        """End the pins whose time is over."""
        self._tree.leaves.expire(now)

    def _enter(self, table: BlockTable, num_pages: int, *, ready: bool) -> None:
        """Give the tree those of the first ``num_pages`` pages that are new to it."""
        assert table.node is not None, "it holds pages"
        size, first = self.page_size, table.node.depth
        tokens = table.tokens[first * size : num_pages * size]
        added = self._tree.insert(table.node, tokens, table.pages[first:num_pages], ready=ready)
        if added:
            table.first_own = table.first_own or added[0]
            table.node = added[-1]

    def begun(self, table: BlockTable) -> None:
        """The sequence has begun with the state that was loaded for it, or never will."""
        if table.state is not None:
            self.states.unlock(table.state)
            table.state = None

    def _let_go(self, table: BlockTable, *, cold: bool = False) -> None:
        self.begun(table)
        end = table.node
        if end is None:
            return
        node, own = end, table.pages[end.depth :]
        for page in reversed(table.pages[: end.depth]):
            if node.page != page:
                own.append(page)  # the tree has another page of the same tokens
            assert node.parent is not None, "roots have no page"
            node = node.parent
        self._pages.give_back(own)
        self._tree.unlock(end, cold=cold)
        table.node = table.first_own = None
        table.pages = []

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

    def back_up(self, most: int, soon: int = 0, states_soon: int = 0) -> Copies:
        """Start to copy up to ``most`` pages, or as much of states, just ahead of their eviction.

        Args:
            soon, states_soon: pages, and slots of states, to be taken soon, beside the usual.
        """
        nodes = self._tree.back_up(most, soon)
        states = self._tree.save_states(max(1, most // (self.states.host_size or 1)), states_soon)
        return Copies(nodes, [(node.page, node.host) for node in nodes], states)

    def backed_up(self, copies: Copies) -> None:
        """Copies of ``back_up`` are done."""
        for node in copies.nodes:
            self._tree.backed_up(node)
        for state in copies.states:
            self.states.saved(state)

    def postpone(self, table: BlockTable, match: Match) -> None:
        """A match that was held waits: its device part is released, its host part stays, too."""
        self.release(table, 0)
        if match.host:
            self._tree.use_on_host(match.host)

    def load(self, table: BlockTable, match: Match) -> Copies | None:
        """Start to load the host part of a match that is held; None when there is no room.

        The table keeps the pages locked until ``release``, and a state until ``begun``.
        """
        nodes, state = match.host, match.state
        pages = self._take(len(nodes))
        if pages is None:
            return None
        if state is not None and not self.states.load(state):
            self._pages.give_back(pages)
            return None
        self.begun(table)
        table.state = state
        if nodes:
            self._tree.load(nodes, pages)
            for node in nodes:
                self._tree.lock_one(node)
            table.node = nodes[-1]
            table.pages += pages
        copied = [(node.page, node.host) for node in nodes]
        return Copies(nodes, copied, [state] if state is not None else [])

    def loaded(self, copies: Copies) -> None:
        """Copies of ``load`` are done."""
        for node in copies.nodes:
            self._tree.set_ready(node)
        for state in copies.states:
            self.states.loaded(state)
