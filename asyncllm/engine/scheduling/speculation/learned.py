"""For which sequences a step verifies drafted tokens, and how many of each.

A row that verifies k drafted tokens yields up to k + 1 tokens (Leviathan et al., ICML 2023). Its
sequence has a row in the next step, too, which is planned before that is known. A guess for that
row assumes that all drafts in flight are right, unless the device makes it.
"""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from asyncllm.config import EngineLimits
from asyncllm.engine.drafts.drafting import Evidence, Proposal, Tally
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.speculation.choice import NOTHING, Choice, Drafted
from asyncllm.engine.scheduling.speculation.costs import Costs
from asyncllm.engine.scheduling.timing.prefill_room import StepShape
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel

#: Tokens a second must be expected to grow by this factor: expectations have errors.
LEAST_GAIN: Final = 1.03
#: Sequences for which nothing can be drafted may wait for their tokens longer by this factor.
MOST_DELAY: Final = 1.01
#: How much of what was learned of a kind of draft, and of a sequence's drafts, is forgotten in each
#: step for which none of them are chosen: they are tried again some day.
FORGOTTEN, OWN_FORGOTTEN = 1 / 1024, 1 / 64
#: After so many steps in which no guess pays, some are tried all the same.
MOST_UNTRIED: Final = 32
#: A kind of draft is as good as it was for all sequences lately: so many tokens count, and what is
#: expected of it before counts as much as a few.
KIND_MEMORY, KIND_PRIOR_WEIGHT = 512.0, 2.0
#: Sequences that are asked for a draft in a step, at least. The number grows while drafts pay.
LEAST_ASKED: Final = 16

Floats = npt.NDArray[np.float64]


class Wanting(NamedTuple):
    """A sequence, the promised start of its next row, tokens that are expected from its rows in
    flight, and its guess."""

    seq: Sequence
    start: int
    unknown: int
    found: Proposal


class _Beside(NamedTuple):
    """A step in which some rows may get drafts.

    Attributes:
        shape: without drafts.
        start: the mean position of these rows.
        num_rows: how many there are.
        longest: the most seconds that it may take.
    """

    shape: StepShape
    start: float
    num_rows: int
    longest: float

    def with_drafts(self, count: int) -> StepShape:
        """With so many drafted tokens, in as many rows as there are."""
        tokens, kv_tokens, attention = self.shape
        num_rows = min(count, self.num_rows)
        pairs = (count + num_rows) * (self.start + (count / num_rows + 1) / 2)
        left = kv_tokens - round(num_rows * (self.start + 1))
        return StepShape(tokens + count, left, attention + pairs)


class LearnedSpeculation:
    """Drafts where it is expected to pay, by the times of steps and by how good drafts were.

    With k drafted tokens, each right with probability p if those before are, a row yields
    1 + p + ... + p**k tokens. A step verifies the most probable tokens, as many as give the most
    tokens a second. ``Costs`` bounds what it loses if they turn out to be wrong.

    If all sequences have a guess, they may also skip a step, and so wait until all tokens that it
    depends on are known. The device is idle meanwhile.
    """

    def __init__(self, limits: EngineLimits, times: StepTimeModel, forecast: Forecast):
        self.tallies: dict[str, Tally] = {}
        self._kinds: dict[str, Evidence] = {}
        self._most = limits.max_draft_tokens
        self._most_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._most_asked = limits.max_draft_rows or self._most_rows
        self._costs = Costs(times, forecast)
        #: How many are asked for drafts, and whose turn it is.
        self._asked = LEAST_ASKED
        self._turn = 0
        #: What the rows of the last plan take without drafts, and how many there are.
        self._plain = 0.0
        self._num_rows = 0
        #: The drafts of steps in flight.
        self._in_flight: deque[tuple[int, tuple[Drafted, ...]]] = deque()
        #: Steps for which none of the guesses were chosen.
        self._untried = 0
        #: Whether sequences skip a step to wait.
        self._waiting = False
        self._num_right = 0

    def choose(self, batch: RunningBatch, done: int, num_waiting: int) -> Choice:
        slots = batch.slots()
        if not len(slots) or self._keeps_out(batch, num_waiting):
            return NOTHING
        wanting = self._ask(batch, done)
        if not wanting:
            self._ask_fewer()
            return NOTHING
        if self._costs.measure_plain():
            return NOTHING
        shape = StepShape(len(slots), int(batch.computed[slots].sum()) + len(slots), 0.0)
        self._plain, self._num_rows = self._costs.plain(shape), len(slots)
        in_flight = bool((batch.last_step[slots] > done).any())
        others = any(seq.drafting is None for seq in batch.decoding)
        longest = MOST_DELAY * self._plain if others else float("inf")
        counts, wait = self._best(wanting, shape, longest, in_flight=in_flight)
        if wait:
            self._waiting = True
            for seq, _, _, found in wanting:
                assert seq.drafting is not None
                seq.drafting.hold(found.kind)
            return Choice(held=tuple(each.seq for each in wanting))
        drafts, ahead = [], 0
        for (seq, start, unknown, found), count in zip(wanting, counts, strict=True):
            if found.on_device:
                ahead, count = max(ahead, count), min(count, batch.num_drafted(seq))
            if count:
                tokens = found.tokens[:count]
                length = len(seq.tokens) + unknown
                drafts.append(Drafted(seq, start, found.kind, tokens, length, found.assumed))
        self._learn_from_choice(wanting, counts)
        return Choice(drafts=tuple(drafts), ahead=ahead)

    def _keeps_out(self, batch: RunningBatch, num_waiting: int) -> bool:
        """Prompts are computed, or wait: drafts would take their room. Or they have lost enough."""
        return bool(num_waiting or batch.prefilling) or self._costs.credit <= 0.0

    def _ask(self, batch: RunningBatch, done: int) -> list[Wanting]:
        """Guesses of some of the sequences; each has its turn."""
        decoding = batch.decoding
        first, misled = self._turn % len(decoding), self._misled(done)
        wanting: list[Wanting] = []
        asked = 0
        for seq in (*decoding[first:], *decoding[:first]):
            if asked == self._asked:
                break
            self._turn += 1
            if seq.drafting is None:
                continue
            start = int(batch.computed[seq.slot])
            unknown = start + 1 - len(seq.tokens) - misled.get(seq.id, 0)
            most = min(self._most, batch.most_drafts(seq))
            if most <= 0 or not seq.drafting.is_awake(seq.tokens):
                continue
            asked += 1
            found = seq.drafting.propose(seq.tokens, most, unknown)
            if found is not None:
                wanting.append(Wanting(seq, start, unknown, found))
        return wanting

    def _ask_fewer(self) -> None:
        self._asked = max(self._asked // 2, LEAST_ASKED)

    def _misled(self, done: int) -> dict[int, int]:
        """Drafted tokens in flight that are known to be wrong, as they are not in their place, by
        sequence."""
        while self._in_flight and self._in_flight[0][0] <= done:
            self._in_flight.popleft()
        drafts: dict[int, Drafted] = {}
        for _, planned in self._in_flight:
            for draft in planned:
                drafts.setdefault(draft.seq.id, draft)
        return {
            id: len(draft.tokens)
            for id, draft in drafts.items()
            if not draft.on_device and not draft.in_place
        }

    def _learn_from_choice(self, wanting: list[Wanting], counts: list[int]) -> None:
        for each, count in zip(wanting, counts, strict=True):
            if not count:
                each.found.evidence.forget(OWN_FORGOTTEN)
        if any(counts):
            self._asked = min(2 * self._asked, self._most_asked)
            return
        self._ask_fewer()
        self._costs.forget()
        for evidence in self._kinds.values():
            evidence.forget(FORGOTTEN)

    def _best(
        self, wanting: list[Wanting], shape: StepShape, longest: float, *, in_flight: bool
    ) -> tuple[list[int], bool]:
        """How many tokens of each guess to verify, and whether to wait instead.

        Args:
            shape: of the step without drafts.
            longest: the most seconds that the step may take.
            in_flight: whether waiting makes more tokens known.
        """
        least = LEAST_GAIN * shape.num_tokens / self._plain
        start = sum(each.start for each in wanting) / len(wanting)
        step = _Beside(shape, start, len(wanting), longest)
        sure, certain = self._probabilities(wanting)
        counts, rate = self._most_probable(step, sure * certain)
        if in_flight and len(wanting) == shape.num_tokens:
            _, later = self._most_probable(step, sure, self._costs.gap)
            if later > max(rate, least):
                return counts, True
        return (counts if rate >= least else self._trial(step)), False

    def _trial(self, step: _Beside) -> list[int]:
        """One token of each guess now and then, if none pay: what is not tried is not known."""
        self._untried += 1
        longest = min(step.longest, self._plain + self._costs.credit / 2)
        seconds = self._costs.verifying(step.with_drafts(step.num_rows), step.num_rows)
        fits = step.num_rows + step.shape.num_tokens <= self._most_rows and seconds <= longest
        if self._untried < MOST_UNTRIED or not fits:
            return [0] * step.num_rows
        self._untried = 0
        return [1] * step.num_rows

    def _probabilities(self, wanting: list[Wanting]) -> tuple[Floats, Floats]:
        """That each guessed token is right if those in flight are, [n, longest]; and that these
        are, [n, 1]."""
        priors: dict[str, float] = {}
        rates, lengths, unknown = [], [], []
        for _, _, in_flight, found in wanting:
            if found.kind not in priors:
                kind = self._kinds.get(found.kind)
                prior = found.prior
                priors[found.kind] = kind.rate(prior, KIND_PRIOR_WEIGHT) if kind else prior
            rates.append(found.rate(priors[found.kind]))
            lengths.append(len(found.tokens))
            unknown.append(0 if found.on_device else in_flight)
        rate: Floats = np.array(rates)[:, None]
        places = np.arange(1, max(lengths) + 1)
        sure: Floats = rate**places * (places <= np.array(lengths)[:, None])
        certain: Floats = rate ** np.array(unknown)[:, None]
        return sure, certain

    def _most_probable(
        self, step: _Beside, probable: Floats, gap: float = 0.0
    ) -> tuple[list[int], float]:
        """How many tokens of each, so that the most tokens come a second; and how many do."""
        flat, num_rows = probable.ravel(), step.shape.num_tokens
        order = np.argsort(-flat, kind="stable")
        room = min(int(np.count_nonzero(flat)), self._most_rows - num_rows)
        expected = flat[order].cumsum()
        best, found = 0, 0.0
        for count in _numbers(room):
            seconds = self._costs.verifying(step.with_drafts(count), count)
            rate = (num_rows + float(expected[count - 1])) / (seconds + gap)
            fits = seconds + gap <= self._plain + self._costs.credit and seconds <= step.longest
            if fits and rate > found:
                best, found = count, rate
        owners = order[:best] // probable.shape[1]
        return np.bincount(owners, minlength=len(probable)).tolist(), found

    def planned(self, step: int, drafts: tuple[Drafted, ...]) -> None:
        waited, self._waiting = self._waiting, False
        self._in_flight.append((step, drafts))
        num_drafted = sum(len(draft.tokens) for draft in drafts)
        self._costs.planned(step, num_drafted, self._num_rows, self._plain, waited=waited)

    def verified(self, draft: Drafted, num_right: int) -> None:
        # After another draft of which something was wrong, this one tells nothing new.
        tells = draft.on_device or len(draft.assumed) == 1 or draft.in_place
        num_drafted = len(draft.tokens)
        self._num_right += num_right
        self.tallies.setdefault(draft.kind, Tally()).add(num_drafted, num_right)
        if tells:
            self._kinds.setdefault(draft.kind, Evidence(KIND_MEMORY)).saw(num_drafted, num_right)
        if draft.seq.drafting is not None:
            before = draft.seq.num_output
            draft.seq.drafting.verified(draft.kind, num_drafted, num_right, before, counts=tells)

    def step_done(self, step: int, shape: StepShape | None, seconds: float, now: float) -> None:
        right, self._num_right = self._num_right, 0
        if shape is None:
            self._costs.other_step_done(step)
            return
        self._costs.step_done(step, shape, right, seconds, now)


def _numbers(most: int) -> list[int]:
    """1, 2, 4 and so on, and ``most``; none if that is not positive."""
    if most <= 0:
        return []
    return [*(1 << i for i in range((most - 1).bit_length())), most]
