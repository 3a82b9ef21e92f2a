"""What the prefix cache gains and loses, for those outside who route requests by prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Final, NamedTuple

from asyncllm.engine.cache.node import Node

#: ``Node.digest`` of a page that is not announced, and of one that never is.
NOT_YET: Final = 0
NEVER: Final = -1


class Changes(NamedTuple):
    """Since the last time: first all pages went (``cleared``), or some; then others came."""

    cleared: bool
    removed: list[Node]
    stored: list[Node]


class CacheChanges:
    """Collects the pages that the prefix tree gains and loses, on the device or on the host.

    Args:
        notify: called with the first change since ``take``.
    """

    def __init__(self, notify: Callable[[], object]):
        self._notify = notify
        self._notified = False
        self._cleared = False
        self._stored: list[Node] = []
        self._removed: list[Node] = []

    def stored(self, nodes: Iterable[Node]) -> None:
        """Pages hold their KV now; of one path, from the bottom up."""
        self._stored += nodes
        self._changed()

    def removed(self, nodes: Iterable[Node]) -> None:
        """Nobody finds these pages any more."""
        self._removed += nodes
        self._changed()

    def cleared(self) -> None:
        """The tree is empty."""
        self._stored.clear()
        self._removed.clear()
        self._cleared = True
        self._changed()

    def state_kept(self, node: Node) -> None:
        """The recurrent state after ``node`` is kept."""

    def state_lost(self, node: Node) -> None:
        """It is not kept any more."""

    def take(self) -> Changes:
        """The changes since the last call."""
        stored = [node for node in self._stored if self._counts(node)]
        changes = Changes(self._cleared, self._removed, stored)
        self._stored, self._removed, self._cleared = [], [], False
        self._notified = False
        return changes

    def _counts(self, node: Node) -> bool:
        """Whether requests would find it."""
        return node.linked

    def _changed(self) -> None:
        if not self._notified:
            self._notified = True
            self._notify()


class StateChanges(CacheChanges):
    """Of a model with recurrent layers: pages count as stored if a state after them is kept.

    No request finds the others.
    """

    def __init__(self, notify: Callable[[], object]):
        super().__init__(notify)
        #: Pages that count, and how many of those after them do.
        self._after: dict[Node, int] = {}

    def stored(self, nodes: Iterable[Node]) -> None:
        pass

    def removed(self, nodes: Iterable[Node]) -> None:
        pass

    def cleared(self) -> None:
        self._after.clear()
        super().cleared()

    def state_kept(self, node: Node) -> None:
        new, walker = list[Node](), node
        while walker.parent is not None and walker not in self._after:
            self._after[walker] = min(len(new), 1)
            new.append(walker)
            walker = walker.parent
        if new:
            if walker in self._after:
                self._after[walker] += 1
            super().stored(new)

    def state_lost(self, node: Node) -> None:
        gone: list[Node] = []
        while self._after.get(node) == 0 and not _has_state(node):
            del self._after[node]
            gone.append(node)
            assert node.parent is not None, "roots do not count"
            node = node.parent
            if node in self._after:
                self._after[node] -= 1
        if gone:
            super().removed(gone)

    def _counts(self, node: Node) -> bool:
        return node in self._after


def _has_state(node: Node) -> bool:
    return node.checkpoint is not None and (node.checkpoint.ready or bool(node.checkpoint.host))


class StoredPages(NamedTuple):
    """Pages of one path, one below the other.

    Attributes:
        parent: the digest of the page above them; None at the beginning of a prompt.
        digests: of each page: 64 bits of a hash of its tokens and of all tokens before.
        tokens: int32 bytes, of all of them.
    """

    parent: int | None
    digests: list[int]
    tokens: bytes


def announce(stored: Iterable[Node]) -> list[StoredPages]:
    """Give digests to pages that have none, and to those above them; changes in their order.

    One thread, and any, calls this and reads digests. It uses only what never changes of a node.
    Prefixes with a salt are left out: only those who know it share them.
    """
    return [path for node in stored if (path := _announced(node))]


def withdraw(removed: Iterable[Node]) -> list[int]:
    """The digests of pages that were announced; like ``announce``, in the same thread."""
    digests: list[int] = []
    for node in removed:
        if node.digest > NOT_YET:
            digests.append(node.digest)
            node.digest = NOT_YET  # it may be announced again
    return digests


def _announced(node: Node) -> StoredPages | None:
    path: list[Node] = []
    while node.digest == NOT_YET and node.parent is not None:
        path.append(node)
        node = node.parent
    if not path:
        return None
    if node.digest == NEVER or (node.parent is None and node.key):
        for each in path:
            each.digest = NEVER
        return None
    path.reverse()
    parent = digest = node.digest
    for each in path:
        hashed = blake2b(each.key, digest_size=8, key=digest.to_bytes(8, "little"))
        digest = each.digest = int.from_bytes(hashed.digest(), "little") or 1
    tokens = b"".join([each.key for each in path])
    return StoredPages(parent or None, [each.digest for each in path], tokens)
