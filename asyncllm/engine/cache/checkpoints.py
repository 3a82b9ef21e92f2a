"""Checkpoints: states of recurrent layers, kept for later sequences at nodes of the prefix tree.

Beside its pages, a sequence of a model with recurrent layers has one state: the sum of all tokens
so far, which cannot be cut. Others can go on from the middle of a known prefix only where a copy of
the state was kept. ``state_slots.StateSlots`` has them; this is what the cache asks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol, TypeAlias

from asyncllm.engine.cache.changes import CacheChanges
from asyncllm.engine.cache.node import NO_STATE, Checkpoint, Match, Node
from asyncllm.engine.cache.pages import PageAllocator

#: Makes room on the host for so many pages, for something that was last used then; None if there
#: is no such room.
TakeHostPages: TypeAlias = Callable[[int, int], "list[int] | None"]


class Checkpoints(Protocol):
    """What the cache asks: of models with states, and of others."""

    num_slots: int
    num_taken: int
    num_used: int
    num_evicted: int
    #: Host pages that a copy of a state takes; 0 without a host tier.
    host_size: int
    #: What is told of states that are kept and lost.
    changes: CacheChanges | None

    @property
    def num_kept(self) -> int:
        """Slots of checkpoints."""

    @property
    def num_on_host(self) -> int:
        """Checkpoints that have a copy on the host."""

    @property
    def num_spare(self) -> int:
        """Of these, those that will not be needed soon."""

    def usable(self, match: Match) -> Match:
        """The part of a match that a sequence can begin with, once its host part is loaded."""

    def on_device(self, match: Match) -> Match:
        """The part of a match that a sequence can begin with at once."""

    def forget(self, nodes: Iterable[Node]) -> None:
        """These nodes leave the tree."""

    def reset(self, host_pages: PageAllocator) -> None:
        """All slots are free. Host pages are taken from here from now on."""

    def save(self, most: int, soon: int, take: TakeHostPages) -> list[Checkpoint]:
        """Start to copy up to ``most`` states to the host, just ahead of their eviction.

        Args:
            soon: slots that are about to be taken, beside the usual.
        """

    def saved(self, checkpoint: Checkpoint) -> None:
        """A copy to the host is done."""

    def load(self, checkpoint: Checkpoint) -> bool:
        """Give a state of the host a slot to be copied to; False when there is none.

        It is locked for the copy, and for the sequence that wants it until ``unlock``.
        """

    def loaded(self, checkpoint: Checkpoint) -> None:
        """A copy to the device is done."""

    def unlock(self, checkpoint: Checkpoint) -> None:
        """A sequence that it was loaded for has begun with it, or never will."""

    def oldest_on_host(self) -> int | None:
        """The tick of the copy on the host that was used longest ago."""

    def give_up_spare(self) -> None:
        """Free a copy on the host that will not be needed soon."""

    def give_up_oldest(self) -> None:
        """Free the copy on the host that was used longest ago."""


class NoCheckpoints:
    """Of a model without recurrent layers: its pages are all that it needs."""

    num_slots = num_taken = num_kept = num_used = num_evicted = 0
    num_on_host = num_spare = host_size = 0
    changes: CacheChanges | None = None

    def usable(self, match: Match) -> Match:
        return match

    def on_device(self, match: Match) -> Match:
        return match._replace(host=[])

    def forget(self, nodes: Iterable[Node]) -> None:
        pass

    def reset(self, host_pages: PageAllocator) -> None:
        pass

    def save(self, most: int, soon: int, take: TakeHostPages) -> list[Checkpoint]:
        return []

    def saved(self, checkpoint: Checkpoint) -> None:
        pass

    def load(self, checkpoint: Checkpoint) -> bool:
        return False

    def loaded(self, checkpoint: Checkpoint) -> None:
        pass

    def unlock(self, checkpoint: Checkpoint) -> None:
        pass

    def oldest_on_host(self) -> int | None:
        return None

    def give_up_spare(self) -> None:
        pass

    def give_up_oldest(self) -> None:
        pass


def usable(match: Match) -> Match:
    """The part of a match that ends with a checkpoint; what it waits for is a longer one."""
    promised: Node | None = None
    depth = match.node.depth
    known = depth + len(match.host)
    node = match.pending or (match.host[-1] if match.host else match.node)
    while node.parent is not None:
        checkpoint = node.checkpoint
        if checkpoint is not None:
            if not checkpoint.ready:
                promised = promised or node
            elif node.depth <= known:
                break
        node = node.parent
    found, pending = node.checkpoint, match.pending or promised
    state = found if found is not None and found.slot == NO_STATE else None
    if node.depth <= depth:
        return Match(node, [], pending, state)
    return Match(match.node, match.host[: node.depth - depth], pending, state)


def on_device(match: Match) -> Match:
    """The part of a match that ends with a checkpoint on the device."""
    node = match.node
    while (above := node.parent) is not None:
        checkpoint = node.checkpoint
        if checkpoint is not None and checkpoint.ready and checkpoint.slot != NO_STATE:
            break
        node = above
    return Match(node, [], match.pending)
