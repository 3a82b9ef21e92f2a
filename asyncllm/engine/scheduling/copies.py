"""PageCopies: pages and states being copied between device and host, and who waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field

from asyncllm.engine.cache.manager import Copies, KVCacheManager
from asyncllm.engine.cache.node import Match
from asyncllm.engine.scheduling.sequence import SeqState, Sequence
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from asyncllm.wire.messages import STATE_TO_DEVICE, STATE_TO_HOST, TO_DEVICE, TO_HOST, pack

#: Pages that one step sends to the host at most, beside as many as its tokens fill: some
#: milliseconds of the bus.
MOST_SAVED = 64
#: Seconds of the bus that pages on their way to the host take at most. They cannot be evicted.
MOST_SAVING_SECONDS = 0.1
#: The share of the device's pages that are loaded at once for one sequence, and the least number.
#: What they replace is saved before. Host pages that were loaded have room for what the next part
#: replaces; all at once, a long prompt would need room in both tiers for what it replaces.
LOAD_SHARE = 1 / 8
LEAST_LOADED = 64


@dataclass(slots=True)
class _Batch:
    """The copies of one plan."""

    saves: list[Copies] = field(default_factory=list)
    loads: list[tuple[Sequence, Copies]] = field(default_factory=list)

    def message(self) -> bytes:
        """In the format of ``StepPlan.copies``."""
        flat: list[int] = []
        for copies in self.saves:
            _append(flat, copies, TO_HOST, STATE_TO_HOST)
        for _, copies in self.loads:
            _append(flat, copies, TO_DEVICE, STATE_TO_DEVICE)
        return pack(flat)

    @property
    def num_pages(self) -> int:
        return sum(map(_num_pages, [*self.saves, *(copies for _, copies in self.loads)]))


def _append(flat: list[int], copies: Copies, of_page: int, of_state: int) -> None:
    for page, host in copies.pages:
        flat += (of_page, page, host)
    for state in copies.states:
        for host in state.host:
            flat += (of_state, state.slot, host)


def _num_pages(copies: Copies) -> int:
    """How many pages of the host are copied."""
    return len(copies.pages) + sum(len(state.host) for state in copies.states)


class PageCopies:
    """Copies planned, sent and acknowledged.

    A sequence whose prefix is being loaded is LOADING until the acknowledgment. Then it is the next
    to enter, or to load the next part, unless it must give its pages up before.

    Attributes:
        num_done: plans whose copies were acknowledged.
    """

    def __init__(self, cache: KVCacheManager, times: StepTimeModel):
        self.num_done = 0
        self._num_loading = 0
        self._num_saving = 0
        self._cache = cache
        self._times = times
        self._most_loaded = max(LEAST_LOADED, int(cache.num_pages * LOAD_SHARE))
        self._unsent = _Batch()
        self._sent: dict[int, _Batch] = {}
        self._loaded: dict[int, Sequence] = {}

    @property
    def num_loading(self) -> int:
        """Sequences that are LOADING, or loaded and about to enter."""
        return self._num_loading + len(self._loaded)

    @property
    def outstanding(self) -> bool:
        """Whether a copy is not acknowledged yet."""
        return bool(self._sent or self._unsent.saves or self._unsent.loads)

    def back_up(self, num_tokens: int, soon: int = 0, states_soon: int = 0) -> None:
        """Copy what is soon evicted to the host, while a step of ``num_tokens`` runs.

        Args:
            soon, states_soon: pages, and slots of states, that requests are about to take.
        """
        if self._times.copy_seconds(self._num_saving) > MOST_SAVING_SECONDS:
            return
        most = MOST_SAVED + num_tokens // self._cache.page_size + soon
        if page_seconds := self._times.copy_seconds(1):
            most = min(most, max(MOST_SAVED, int(MOST_SAVING_SECONDS / page_seconds)))
        copies = self._cache.back_up(most, soon, states_soon)
        if count := _num_pages(copies):
            self._unsent.saves.append(copies)
            self._num_saving += count

    def save_before(self, count: int) -> bool:
        """Whether a newcomer should take ``count`` pages only when copies under way are done.

        Otherwise pages would be lost that the host tier has had no time to save, and a prompt that
        is longer than what it saves ahead would never find one of its like again.
        """
        if count <= self._cache.num_free:
            return False
        lacking = count - self._cache.num_expendable()
        if lacking <= 0 or not self._pays(lacking, lacking, 0):
            return False
        self.back_up(0, soon=count)
        return self._num_saving > 0

    def pays(self, match: Match) -> bool:
        """Whether loading the host part of a match is faster than computing it."""
        end, begins = (
            match.node.depth + len(match.host),
            self._cache.states.on_device(match).node.depth,
        )
        state = match.state.host if match.state is not None else ()
        return self._pays(len(match.host) + len(state), end - begins, begins)

    def _pays(self, num_copied: int, num_computed: int, above: int) -> bool:
        """Whether copying pages is faster than computing some, after ``above`` others."""
        size = self._cache.page_size
        compute = self._times.prefill_seconds(num_computed * size, above * size)
        return not self._times.fitted or self._times.copy_seconds(num_copied) <= compute

    def next_part(self, match: Match) -> Match:
        """The match with as many of its host pages as are loaded at once; a state comes last."""
        part = match.host[: self._most_loaded]
        state = match.state if len(part) == len(match.host) else None
        return match._replace(host=part, state=state)

    def load(self, seq: Sequence, match: Match) -> bool:
        """Start to load for ``seq``, which holds the match; False when there is no room."""
        copies = self._cache.load(seq.kv, match)
        if copies is None:
            return False
        self._loaded.pop(seq.id, None)
        seq.state = SeqState.LOADING
        self._num_loading += 1
        self._unsent.loads.append((seq, copies))
        return True

    def pages_for(self, seq: Sequence) -> int:
        """How many pages are about to be loaded for ``seq``."""
        return sum(len(copies.pages) for other, copies in self._unsent.loads if other is seq)

    def send(self, step: int) -> bytes:
        """The copies that were not sent yet, for the plan of ``step``."""
        if not (self._unsent.saves or self._unsent.loads):
            return b""
        batch, self._unsent = self._unsent, _Batch()
        self._sent[step] = batch
        return batch.message()

    def done(self, step: int, seconds: float) -> None:
        """The copies of ``step`` are done."""
        batch = self._sent.pop(step)
        self.num_done += 1
        self._times.observe_copy(batch.num_pages, seconds)
        for copies in batch.saves:
            self._num_saving -= _num_pages(copies)  # before a state that was dropped gives them up
            self._cache.backed_up(copies)
        for seq, copies in batch.loads:
            self._cache.loaded(copies)
            if seq.state is SeqState.LOADING:
                seq.state = SeqState.WAITING
                self._num_loading -= 1
                self._loaded[seq.id] = seq

    def is_for(self, seq: Sequence) -> bool:
        """Whether pages are being or were loaded for a sequence that has not entered yet."""
        return seq.state is SeqState.LOADING or seq.id in self._loaded

    def abandon(self, seq: Sequence) -> None:
        """A loading or loaded sequence enters or ends; its copies go on."""
        if self._loaded.pop(seq.id, None) is None:
            self._num_loading -= 1

    @property
    def oldest_loaded(self) -> Sequence | None:
        return next(iter(self._loaded.values()), None)

    @property
    def newest_loaded(self) -> Sequence | None:
        return next(reversed(self._loaded.values()), None)
