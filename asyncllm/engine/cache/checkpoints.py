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


class Checkpoints(Protocol):
    """What the cache asks: of models with states, and of others."""

    num_slots: int
    num_taken: int
    num_used: int
    num_evicted: int

    @property
    def num_kept(self) -> int:
        """Slots of checkpoints."""

    def usable(self, match: Match) -> Match:
        """The part of a match that a sequence can begin with."""

    def forget(self, nodes: Iterable[Node]) -> None:
        """The device pages of these nodes go."""

    def reset(self) -> None:
        """All slots are free."""


class NoCheckpoints:
    """Of a model without recurrent layers: its pages are all that it needs."""

    num_slots = num_taken = num_kept = num_used = num_evicted = 0

    def usable(self, match: Match) -> Match:
        return match

    def forget(self, nodes: Iterable[Node]) -> None:
        pass

    def reset(self) -> None:
        pass


class StateSlots:
    """Owns the slots: each is free, has the state of a sequence, or a checkpoint.

    A slot that is needed is taken from the checkpoint used longest ago. Those that are dispensable
    go before all others, and those on pinned pages after all others. Nobody waits for a slot to be
    read: copies and steps use the device in the order of their plans.

    Invariant: ``num_free + num_taken + num_kept == num_slots`` between calls.

    Attributes:
        num_taken: slots of sequences.
        num_used: how often a sequence began with a checkpoint; it only grows.
        num_evicted: checkpoints whose slots were needed; it only grows.
    """

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self.num_used = 0
        self.num_evicted = 0
        # In order of their last use, oldest first.
        self._dispensable = OrderedDict[Checkpoint, None]()
        self._plain = OrderedDict[Checkpoint, None]()
        self._pinned = OrderedDict[Checkpoint, None]()
        self.reset()

    def reset(self) -> None:
        for order in (self._dispensable, self._plain, self._pinned):
            order.clear()
        self.num_taken = 0
        self._free = list(range(self.num_slots, 0, -1))  # slot 0 belongs to nobody

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Slots of checkpoints."""
        return len(self._dispensable) + len(self._plain) + len(self._pinned)

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

    def promise(self, node: Node) -> Checkpoint | None:
        """The state after ``node`` will be kept; None if it is already, or cannot be."""
        checkpoint = Checkpoint()
        return checkpoint if self.attach(checkpoint, node) else None

    def attach(self, checkpoint: Checkpoint, node: Node) -> bool:
        """Let others find a checkpoint after ``node``; False if that has one, or is unlinked."""
        if node.checkpoint is not None or not node.linked:
            return False
        node.checkpoint, checkpoint.node = checkpoint, node
        return True

    def keep(self, checkpoint: Checkpoint, slot: int) -> None:
        """A sequence's slot has the state of a checkpoint without one, or will after a copy."""
        self.num_taken -= 1
        checkpoint.slot = slot
        self._plain[checkpoint] = None

    def use(self, checkpoint: Checkpoint) -> None:
        """A sequence begins with it.

        Of those above it on the path, the ones that others used, too, are as recently used as it
        is. The rest are dispensable, as this one has replaced them.
        """
        self.num_used += 1
        checkpoint.num_used += 1
        node = checkpoint.node.parent if checkpoint.node is not None else None
        while node is not None:
            above, node = node.checkpoint, node.parent
            if above is not None and above.slot != NO_STATE:
                if above.num_used < 2:
                    self.dispense_with(above)
                else:
                    self.touch(above)
        self.touch(checkpoint)

    def touch(self, checkpoint: Checkpoint) -> None:
        """A kept checkpoint is the most recently used."""
        self._take_out(checkpoint)
        self._plain[checkpoint] = None

    def dispense_with(self, checkpoint: Checkpoint) -> None:
        """A kept checkpoint is among the first to go."""
        self._take_out(checkpoint)
        self._dispensable[checkpoint] = None

    def drop(self, checkpoint: Checkpoint) -> None:
        """Nobody finds it any more, and its slot, if it has one, is free. Idempotent."""
        if checkpoint.slot != NO_STATE:
            self._take_out(checkpoint)
            self._free.append(checkpoint.slot)
        _unlink(checkpoint)

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
        if pinned:
            checkpoint = next(iter(pinned))
            if checkpoint.node is None or not checkpoint.node.pinned:
                del pinned[checkpoint]
                return checkpoint  # its pin has ended
        for order in (self._dispensable, self._plain):
            while order:
                checkpoint, _ = order.popitem(last=False)
                node = checkpoint.node
                if node is None or node.pin is None or not node.pinned:
                    return checkpoint
                pinned[checkpoint] = None
        return pinned.popitem(last=False)[0] if pinned else None

    def _take_out(self, checkpoint: Checkpoint) -> None:
        for order in (self._plain, self._dispensable, self._pinned):
            if checkpoint in order:
                del order[checkpoint]


def _unlink(checkpoint: Checkpoint) -> None:
    if (node := checkpoint.node) is not None:
        node.checkpoint = checkpoint.node = None
    checkpoint.slot = NO_STATE
    checkpoint.ready = False
