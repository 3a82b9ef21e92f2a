"""StateSlots: where the states of recurrent layers are, and which of them give up their place.

They are in numbered slots on the device, and with a host tier also in host pages, several for each.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from asyncllm.engine.cache.changes import CacheChanges
from asyncllm.engine.cache.checkpoints import TakeHostPages, on_device, usable
from asyncllm.engine.cache.node import NO_STATE, Checkpoint, Node
from asyncllm.engine.cache.pages import PageAllocator

#: The share of the slots that sequences leave over which are free or ahead, and their least number.
AHEAD_SHARE = 1 / 8
LEAST_AHEAD = 4


class StateSlots:
    """Owns the slots: each is free, has the state of a sequence, or a checkpoint.

    A slot that is needed is taken from the checkpoint used longest ago. Those that are dispensable
    go first, and those on pinned pages last. Nobody waits for a slot to be read by a step: steps,
    and copies from slot to slot, use the device in the order of their plans.

    With a host tier, the checkpoints whose slots are taken next are *ahead*: copied to the host, or
    not worth it. The host keeps none that is dispensable. When one is used again, it is ahead no
    more, and its copy is *spare*: the first that gives its host pages up. While a copy between slot
    and host is under way, and until the sequence that it was loaded for begins, a checkpoint is
    locked and keeps its slot. There are never more locked ones than sequences leave over.

    Invariant: ``num_free + num_taken + num_kept == num_slots`` between calls.

    Args:
        num_seqs: sequences that may have a slot at once.
        host_size: host pages that a copy of a state takes; 0 without a host tier.

    Attributes:
        num_taken: slots of sequences.
        num_used: how often a sequence began with a checkpoint; it only grows.
        num_evicted: checkpoints that were lost as their place was needed; it only grows.
    """

    usable = staticmethod(usable)
    on_device = staticmethod(on_device)

    def __init__(self, num_slots: int, num_seqs: int = 1, host_size: int = 0):
        self.num_slots = num_slots
        self.changes: CacheChanges | None = None
        self.host_size = host_size
        self.num_used = 0
        self.num_evicted = 0
        self._most_saving = num_slots - num_seqs
        self._window = max(LEAST_AHEAD, int(AHEAD_SHARE * self._most_saving))
        # In order of their last use, oldest first.
        self._dispensable = OrderedDict[Checkpoint, None]()
        self._ahead = OrderedDict[Checkpoint, None]()
        self._plain = OrderedDict[Checkpoint, None]()
        self._pinned = OrderedDict[Checkpoint, None]()
        self._orders = (self._dispensable, self._ahead, self._plain, self._pinned)
        #: Those that are locked, and the order that they join afterwards.
        self._locked: dict[Checkpoint, OrderedDict[Checkpoint, None]] = {}
        #: Those with a copy on the host that is done, and the tick of their last known use, oldest
        #: first; and of these, those that are spare.
        self._on_host = OrderedDict[Checkpoint, int]()
        self._spare: dict[Checkpoint, None] = {}
        self.reset(PageAllocator(0))

    def reset(self, host_pages: PageAllocator) -> None:
        for order in (*self._orders, self._locked, self._on_host, self._spare):
            order.clear()
        self.num_taken = self._num_saving = 0
        self._host_pages = host_pages
        self._free = list(range(self.num_slots, 0, -1))  # slot 0 belongs to nobody

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_kept(self) -> int:
        """Slots of checkpoints."""
        return sum(map(len, self._orders)) + len(self._locked)

    @property
    def num_on_host(self) -> int:
        """Checkpoints that have a copy on the host."""
        return len(self._on_host)

    @property
    def num_spare(self) -> int:
        """Of these, those that will not be needed soon."""
        return len(self._spare)

    # -- slots of sequences ----------------------------------------------------------------------

    def take(self) -> int | None:
        """A slot for a sequence; None when sequences, and copies under way, have all of them."""
        if self._free:
            slot = self._free.pop()
        else:
            checkpoint = self._pop()
            if checkpoint is None:
                return None
            slot, checkpoint.slot = checkpoint.slot, NO_STATE
            if checkpoint.host:
                self._spare.pop(checkpoint, None)
            else:
                self._lose(checkpoint)
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

    def set_ready(self, checkpoint: Checkpoint) -> None:
        """Its slot has the state: others may begin with it."""
        checkpoint.ready = True
        if self.changes is not None and checkpoint.node is not None:
            self.changes.state_kept(checkpoint.node)

    def use(self, checkpoint: Checkpoint) -> None:
        """A sequence begins with it.

        Of those above it on the path, the ones that others used, too, are as recently used as it
        is. The rest are dispensable, as this one has replaced them.
        """
        self.num_used += 1
        checkpoint.num_used += 1
        node = checkpoint.node and checkpoint.node.parent
        while node is not None:
            above, node = node.checkpoint, node.parent
            if above is not None and (above.slot != NO_STATE or above in self._on_host):
                if above.num_used < 2:
                    self.dispense_with(above)
                else:
                    self.touch(above)
        self.touch(checkpoint)

    def touch(self, checkpoint: Checkpoint) -> None:
        """A kept checkpoint is the most recently used."""
        if checkpoint.slot != NO_STATE:
            self._move(checkpoint, self._plain)
            if checkpoint in self._on_host:
                self._spare[checkpoint] = None

    def dispense_with(self, checkpoint: Checkpoint) -> None:
        """A kept checkpoint is among the first to go."""
        if checkpoint in self._on_host:
            self._free_copy(checkpoint)
            if checkpoint.slot == NO_STATE:
                self._unlink(checkpoint)
        if checkpoint.slot != NO_STATE:
            self._move(checkpoint, self._dispensable)

    def drop(self, checkpoint: Checkpoint) -> None:
        """Nobody finds it any more, and its slot, if it has one, is free. Idempotent.

        While a copy is under way, its slot and its host pages are free only afterwards.
        """
        self._unlink(checkpoint)
        if checkpoint.locks:
            return
        if checkpoint.slot != NO_STATE:
            for order in self._orders:
                order.pop(checkpoint, None)
            self._free.append(checkpoint.slot)
            checkpoint.slot = NO_STATE
        if checkpoint.host:
            self._free_copy(checkpoint)

    def forget(self, nodes: Iterable[Node]) -> None:
        """These nodes leave the tree, and with them their checkpoints."""
        for node in nodes:
            if node.checkpoint is not None:
                self.drop(node.checkpoint)

    # -- copies on the host ----------------------------------------------------------------------

    def save(self, most: int, soon: int, take: TakeHostPages) -> list[Checkpoint]:
        """Start to copy up to ``most`` states to the host, just ahead of their eviction."""
        chosen: list[Checkpoint] = []
        if not self.host_size:
            return chosen
        target = self._window + soon - self.num_free - len(self._dispensable)
        while len(self._ahead) + self._num_saving < target and len(chosen) < most:
            if self._num_saving >= self._most_saving or not (checkpoint := self._oldest()):
                break
            node = checkpoint.node
            if checkpoint not in self._on_host and node is not None and checkpoint.ready:
                pages = take(self.host_size, node.tick)
                if checkpoint.node is None:  # its page has made room
                    self._host_pages.give_back(pages or [])
                    continue
                if pages is not None:
                    checkpoint.host = pages
                    self._num_saving += 1
                    self._lock(checkpoint, self._ahead)
                    chosen.append(checkpoint)
                    continue
            self._spare.pop(checkpoint, None)
            self._move(checkpoint, self._ahead)
        return chosen

    def saved(self, checkpoint: Checkpoint) -> None:
        """A copy to the host is done."""
        self._num_saving -= 1
        order = self._locked[checkpoint]
        if checkpoint.node is not None and order is not self._dispensable:
            self._on_host[checkpoint] = checkpoint.node.tick
            if order is not self._ahead:
                self._spare[checkpoint] = None
        else:
            self._free_copy(checkpoint)
        self.unlock(checkpoint)

    def load(self, checkpoint: Checkpoint) -> bool:
        """Give a state of the host a slot, to be copied to."""
        slot = self.take()
        if slot is None:
            return False
        self.num_taken -= 1
        checkpoint.slot, checkpoint.ready = slot, False
        del self._on_host[checkpoint]
        self._lock(checkpoint, self._plain)
        checkpoint.locks += 1
        return True

    def loaded(self, checkpoint: Checkpoint) -> None:
        """A copy to the device is done."""
        if checkpoint.node is not None:
            checkpoint.ready = True
            self._on_host[checkpoint] = checkpoint.node.tick
            self._spare[checkpoint] = None
        self.unlock(checkpoint)

    def unlock(self, checkpoint: Checkpoint) -> None:
        """A copy is done, or a sequence that it was loaded for has begun, or never will."""
        checkpoint.locks -= 1
        if not checkpoint.locks:
            self._locked.pop(checkpoint)[checkpoint] = None
            if checkpoint.node is None:
                self.drop(checkpoint)

    def oldest_on_host(self) -> int | None:
        """The tick of the copy on the host that was used longest ago."""
        while self._on_host:
            checkpoint, tick = next(iter(self._on_host.items()))
            assert checkpoint.node is not None, "nobody else's is on the host"
            if checkpoint.node.tick == tick:
                return tick
            self._on_host[checkpoint] = checkpoint.node.tick  # it was used since
            self._on_host.move_to_end(checkpoint)
        return None

    def give_up_spare(self) -> None:
        """Free a copy on the host that will not be needed soon."""
        self._free_copy(next(reversed(self._spare)))

    def give_up_oldest(self) -> None:
        """Free the copy on the host that was used longest ago."""
        checkpoint = next(iter(self._on_host))
        self._free_copy(checkpoint)
        if checkpoint.slot == NO_STATE:
            self._lose(checkpoint)

    # -- inside ----------------------------------------------------------------------------------

    def _free_copy(self, checkpoint: Checkpoint) -> None:
        self._on_host.pop(checkpoint, None)
        self._spare.pop(checkpoint, None)
        self._host_pages.give_back(checkpoint.host)
        checkpoint.host = []

    def _lose(self, checkpoint: Checkpoint) -> None:
        """It is nowhere any more, as its place was needed."""
        self._unlink(checkpoint)
        self.num_evicted += 1

    def _unlink(self, checkpoint: Checkpoint) -> None:
        checkpoint.ready = False
        if (node := checkpoint.node) is not None:
            node.checkpoint = checkpoint.node = None
            if self.changes is not None:
                self.changes.state_lost(node)

    def _lock(self, checkpoint: Checkpoint, order: OrderedDict[Checkpoint, None]) -> None:
        for each in self._orders:
            each.pop(checkpoint, None)
        checkpoint.locks += 1
        self._locked[checkpoint] = order

    def _move(self, checkpoint: Checkpoint, order: OrderedDict[Checkpoint, None]) -> None:
        """Put one with a slot at the end of an order, at once or when it is no longer locked."""
        if checkpoint.locks:
            self._locked[checkpoint] = order
            return
        for each in self._orders:
            each.pop(checkpoint, None)
        order[checkpoint] = None

    def _oldest(self) -> Checkpoint | None:
        """The one to be evicted after those ahead."""
        while self._plain:
            checkpoint = next(iter(self._plain))
            if checkpoint.node is None or not checkpoint.node.pinned:
                return checkpoint
            self._move(checkpoint, self._pinned)
        return next(iter(self._pinned), None)

    def _pop(self) -> Checkpoint | None:
        """Take out the checkpoint whose slot is taken next."""
        pinned = self._pinned
        if pinned:
            checkpoint = next(iter(pinned))
            if checkpoint.node is None or not checkpoint.node.pinned:
                del pinned[checkpoint]
                return checkpoint  # its pin has ended
        for order in self._orders[:-1]:
            while order:
                checkpoint, _ = order.popitem(last=False)
                node = checkpoint.node
                if node is None or node.pin is None or not node.pinned:
                    return checkpoint
                pinned[checkpoint] = None
        return pinned.popitem(last=False)[0] if pinned else None
