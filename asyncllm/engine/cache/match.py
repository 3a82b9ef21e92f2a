"""What of a prompt is in the cache, and where."""

from __future__ import annotations

from typing import NamedTuple

from asyncllm.engine.cache.node import Node


class Match(NamedTuple):
    """The longest known prefix of some tokens.

    Attributes:
        node: the end of the part on the device, a root when there is none.
        host: the next nodes, whose pages are in host memory only.
        pending: the last of the nodes after these whose pages a step or a copy is writing.
    """

    node: Node
    host: list[Node]
    pending: Node | None

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
