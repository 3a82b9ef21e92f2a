"""A node of the prefix tree: one page of KV, and where it is."""

from __future__ import annotations

import enum
from array import array
from typing import NamedTuple

import msgspec

NO_PAGE = -1
#: The state slot that belongs to nobody.
NO_STATE = 0
#: Added to the ticks of pages that only short-lived requests have used: all others are younger.
COLD = -(1 << 62)


class Pin(msgspec.Struct, eq=False, gc=False):
    """The pages that one request has pinned; without pages it has ended.

    Attributes:
        tenant: whose share of pinned pages they count in.
        until: seconds of the scheduler's clock.
        num_pages: those that no later pin has taken over.
    """

    tenant: str
    until: float
    num_pages: int = 0


class Kind(enum.IntEnum):
    """Why a checkpoint is where it is."""

    FORK = 0  # a path left a known one
    PROMPT = 1  # the end of a prompt
    ANSWER = 2  # near the end of an answer


class Checkpoint(msgspec.Struct, eq=False, gc=False):
    """The state of recurrent layers after all tokens of a path.

    Attributes:
        node: the end of the path; None while, or as soon as, nobody is to find it.
        slot: where it is on the device; NO_STATE while it is only promised, once it was dropped,
            and when only the host has it.
        host: the host pages that have a copy; none if there is no copy.
        ready: no step and no copy is still writing the slot.
        locks: copies between the slot and the host, and sequences that it was loaded for.
        kind: why it was kept.
        num_used: how many sequences began with it.
    """

    node: Node | None = None
    slot: int = NO_STATE
    host: list[int] = []
    ready: bool = False
    locks: int = 0
    kind: Kind = Kind.FORK
    num_used: int = 0

    __repr__ = object.__repr__


class Node(msgspec.Struct, eq=False, gc=False):
    """One page's worth of tokens, after those of its ancestors. Roots hold none.

    Attributes:
        page: its device page or NO_PAGE; a node with one has ancestors with one.
        ready: the device page holds the KV; False while a step or a copy still writes it.
        depth: how many pages its path has, itself included; 0 of roots.
        tick: logical time of its last use; not positive while only short-lived requests have used
            it, and then it is not copied to the host.
        locks: users of the device page: sequences on this node or below it, a copy to the host.
        on_device: how many children have a device page.
        host: its host page or NO_PAGE; valid unless ``saving``.
        saving: a copy of the device page to the host page is under way.
        ahead: the device page may be evicted at once, see ``HostTier``.
        pin: the one that keeps its device page longest; it may have ended.
        checkpoint: the recurrent state after its path, kept or promised.
        digest: of ``changes.announce``; the cache does not use it.
        linked: ``match`` finds it. An unlinked node has no children, and its pages are free after
            its last lock.
    """

    # A struct is made in C: a long prompt needs hundreds at once. With gc=False the collector does
    # not traverse tens of thousands of nodes, which would stop everything for up to 70 ms; so code
    # that unlinks a node must cut its reference cycles.
    parent: Node | None
    key: bytes
    page: int
    ready: bool
    depth: int = 0
    tick: int = 0
    locks: int = 0
    on_device: int = 0
    host: int = NO_PAGE
    saving: bool = False
    ahead: bool = False
    pin: Pin | None = None
    checkpoint: Checkpoint | None = None
    digest: int = 0
    linked: bool = True
    children: dict[bytes, Node] = msgspec.field(default_factory=dict)

    __repr__ = object.__repr__  # a struct's would show the whole tree

    @property
    def pinned(self) -> bool:
        """Whether its device page is evicted after those that are not pinned."""
        return self.pin is not None and self.pin.num_pages > 0

    @property
    def settled(self) -> bool:
        """Neither the device page nor a promised checkpoint is still to come."""
        return self.ready and (self.checkpoint is None or self.checkpoint.ready)

    def evictable(self, *, leaf: bool = True) -> bool:
        """The device page is unused; with ``leaf``, also no child has a device page."""
        unused = self.locks == 0 and self.ready and self.linked and self.page != NO_PAGE
        return unused and not (leaf and self.on_device)

    @property
    def carries(self) -> bool:
        """Without its device page, host pages below that are worth keeping could not be found.

        Asked of nodes without children on the device.
        """
        return self.host == NO_PAGE and not self.ahead and bool(self.children)

    def host_leaf(self) -> bool:
        """Only the host has the page, and no page below it."""
        return self.host != NO_PAGE and self.page == NO_PAGE and not self.children


def pending_below(node: Node, tokens: array[int], page_size: int) -> Node | None:
    """The last node below ``node``, on the path of ``tokens`` (int32), that is not settled."""
    pending: Node | None = None
    # Bytes of one page at a time: the rest is long, and only a few pages are looked at.
    for start in range(
        node.depth * page_size, (len(tokens) - 1) // page_size * page_size, page_size
    ):
        child = node.children.get(tokens[start : start + page_size].tobytes())
        if child is None or (child.settled and (pending is not None or child.page == NO_PAGE)):
            break
        if not child.settled:
            pending = child
        node = child
    return pending


def take_apart(node: Node) -> list[Node]:
    """Unlink a node and all nodes below it from each other; returns them."""
    nodes = [node]
    for below in nodes:  # which grow
        nodes += below.children.values()
        below.children.clear()
        below.linked = False
    return nodes


class Match(NamedTuple):
    """The longest known prefix of some tokens.

    Attributes:
        node: the end of the part on the device, a root when there is none.
        host: the next nodes, whose pages are in host memory only.
        pending: the last of the nodes after these whose pages a step or a copy is writing.
        state: the recurrent state after these nodes, if only the host has it.
    """

    node: Node
    host: list[Node]
    pending: Node | None
    state: Checkpoint | None = None

    @property
    def pages(self) -> list[int]:
        """The device pages of the part on the device."""
        pages: list[int] = []
        walker = self.node
        while walker.parent is not None:
            pages.append(walker.page)
            walker = walker.parent
        pages.reverse()
        return pages

    @property
    def deepest(self) -> Node:
        """The last node that has a device page, be it written or not."""
        return self.node if self.pending is None else self.pending

    @property
    def num_known(self) -> int:
        """How many pages need not be computed: cached, or being written."""
        return self.node.depth + len(self.host) if self.pending is None else self.pending.depth
