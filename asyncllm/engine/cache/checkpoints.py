"""Checkpoints: states of recurrent layers, kept for later sequences at nodes of the prefix tree.

Beside its pages, a sequence of a model with recurrent layers has one state: the sum of all tokens
so far, which cannot be cut. Others can go on from the middle of a known prefix only where a copy of
the state was kept. States are in numbered slots of one pool on the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Protocol

from asyncllm.engine.cache.node import NO_STATE, Checkpoint, Match, Node


class States(Protocol):
    """What the prefix tree asks: of models with states, and of others."""

    def usable(self, match: Match) -> Match:
        """The part of a match that a sequence can begin with."""

    def forget(self, nodes: Iterable[Node]) -> None:
        """The device pages of these nodes go."""


class NoStates:
    """Of a model without recurrent layers: its pages are all that it needs."""

    def usable(self, match: Match) -> Match:
        return match

    def forget(self, nodes: Iterable[Node]) -> None:
        pass


class StateSlots:
    """Owns the slots: each is free, has the state of a sequence, or a checkpoint.

    A slot that is needed is taken from the checkpoint used longest ago. Those that a longer one has
    replaced go before all others, and those on pinned pages after all others. Nobody waits for a
    slot to be read: copies and steps use the device in the order of their plans.

    Invariant: ``num_free + num_taken + num_kept == num_slots`` between calls.

    Attributes:
        num_taken: slots of sequences.
        num_used: how often a sequence began with a checkpoint; it only grows.
        num_evicted: checkpoints whose slots were needed; it only grows.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.num_taken = 0
        self.num_used = 0
        self.num_evicted = 0
        self._free = list(range(num_slots, 0, -1))  # slot 0 belongs to nobody
        # In order of their last use, oldest first.
        self._replaced = OrderedDict[Checkpoint, None]()
        self._plain = OrderedDict[Checkpoint, None]()
        self._pinned = OrderedDict[Checkpoint, None]()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Slots of checkpoints."""
        return len(self._replaced) + len(self._plain) + len(self._pinned)

    @property
    def num_available(self) -> int:
        """Slots that sequences could take now."""
        return len(self._free) + self.num_kept

    # -- slots of sequences ----------------------------------------------------------------------

    def take(self) -> int | None:
        """A slot for a sequence; None when sequences have all of them."""
        if self._free:
            slot = self._free.pop()
        else:
            checkpoint = self._pop()
            if checkpoint is None:
                return None
            slot = checkpoint.slot
            _unlink(checkpoint)
            self.num_evicted += 1
        self.num_taken += 1
        return slot

    def give_back(self, slot: int) -> None:
        """The sequence does not need the slot any more."""
        self.num_taken -= 1
        self._free.append(slot)

    # -- checkpoints -----------------------------------------------------------------------------

    def promise(self, node: Node, above: Checkpoint | None) -> Checkpoint | None:
        """The state after ``node`` will be kept; None if it is already, or cannot be.

        Args:
            above: the one before it on the path, if it is known.
        """
        if node.checkpoint is not None or not node.linked:
            return None
        node.checkpoint = Checkpoint(node, above)
        return node.checkpoint

    def keep(self, checkpoint: Checkpoint, slot: int) -> None:
        """A sequence gives its slot, which has the promised state, or will after a copy."""
        if checkpoint.node is None:
            self.give_back(slot)
            return
        self.num_taken -= 1
        checkpoint.slot = slot
        self._plain[checkpoint] = None

    def use(self, checkpoint: Checkpoint) -> None:
        """A sequence begins with it. Those above it that few have used are of no more use."""
        self.num_used += 1
        checkpoint.num_used += 1
        self._take_out(checkpoint)
        self._plain[checkpoint] = None
        above = checkpoint.above
        while above is not None and above.num_used < 2 and above in self._plain:
            del self._plain[above]
            self._replaced[above] = None
            above = above.above

    def drop(self, checkpoint: Checkpoint) -> None:
        """Nobody finds it any more, and its slot is free."""
        if checkpoint.node is None:
            return
        _unlink(checkpoint)
        if checkpoint.slot != NO_STATE:
            self._take_out(checkpoint)
            self._free.append(checkpoint.slot)

    def usable(self, match: Match) -> Match:
        """The part of a match that ends with a checkpoint; what it waits for is a longer one."""
        promised: Node | None = None
        node = match.deepest
        while node.parent is not None:
            checkpoint = node.checkpoint
            if checkpoint is not None:
                if not checkpoint.ready:
                    promised = promised or node
                elif node.depth <= match.node.depth:
                    break
            node = node.parent
        return Match(node, [], match.pending or promised)

    def forget(self, nodes: Iterable[Node]) -> None:
        """The device pages of these nodes go, and with them their checkpoints."""
        for node in nodes:
            if node.checkpoint is not None:
                self.drop(node.checkpoint)

    def _pop(self) -> Checkpoint | None:
        """Take out the checkpoint whose slot is taken next."""
        pinned = self._pinned
        if pinned and not next(iter(pinned)).pinned:
            return pinned.popitem(last=False)[0]  # its pin has ended
        for order in (self._replaced, self._plain):
            while order:
                checkpoint, _ = order.popitem(last=False)
                if not checkpoint.pinned:
                    return checkpoint
                pinned[checkpoint] = None
        return pinned.popitem(last=False)[0] if pinned else None

    def _take_out(self, checkpoint: Checkpoint) -> None:
        for order in (self._plain, self._replaced, self._pinned):
            if checkpoint in order:
                del order[checkpoint]


def _unlink(checkpoint: Checkpoint) -> None:
    assert checkpoint.node is not None, "it is unlinked once"
    checkpoint.node.checkpoint = checkpoint.node = checkpoint.above = None
    checkpoint.ready = False
