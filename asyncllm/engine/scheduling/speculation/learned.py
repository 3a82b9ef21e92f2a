"""For which sequences a step verifies drafted tokens, and how many of each.

A row that verifies k drafted tokens yields up to k + 1 tokens (Leviathan et al., ICML 2023). The
next row of the sequence starts where that one got to, which is known with its result. So such a
sequence has no row in the next step that is planned: if all sequences do this, the device is idle
for as long as a result and a plan take.
"""

from __future__ import annotations

from typing import Final

from asyncllm.config import EngineLimits
from asyncllm.engine.drafts.drafting import Evidence, Proposal, Tally
from asyncllm.engine.scheduling.batch import RunningBatch
from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.speculation.choice import NOTHING, Choice, Drafted
from asyncllm.engine.scheduling.timing.prefill_room import StepShape
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel

#: Tokens a second must be expected to grow by this factor: expectations have errors.
LEAST_GAIN: Final = 1.08
#: Others beside a draft may wait for their tokens longer by this factor.
MOST_DELAY: Final = 1.01
#: The weight of the newest step in what verifying was seen to take.
NEWEST: Final = 1 / 8
#: How much of what was learned is forgotten in each step in which no draft pays: drafts are tried
#: again some day.
FORGOTTEN: Final = 1 / 1024
#: A kind of draft is as good as it was for all sequences lately: so many tokens count, and what is
#: expected of it before counts as much as a few.
KIND_MEMORY, KIND_PRIOR_WEIGHT = 512.0, 2.0


class LearnedSpeculation:
    """Drafts where it is expected to pay, by the times of steps and by how good drafts were.

    With k drafted tokens, each right with probability p if those before are, a step yields
    1 + p + ... + p**k tokens of the sequence, and takes as long as the step-time model says, times
    a factor that is learned, as verifying has its own kernels. If nobody else generates, the time
    until the next plan counts, too; otherwise the sequence takes part in every other step.
    """

    def __init__(self, limits: EngineLimits, times: StepTimeModel, forecast: Forecast):
        self.tallies: dict[str, Tally] = {}
        self._kinds: dict[str, Evidence] = {}
        self._most = limits.max_draft_tokens
        self._most_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        self._times = times
        self._forecast = forecast
        #: What verifying takes beyond the model's time, as a factor, and beyond the device's time.
        self._factor = 1.0
        self._gap = 0.0
        #: The newest step with drafts: its number, shape, time, and whether it was alone.
        self._step = -1
        self._shape = StepShape(0, 0, 0.0)
        self._since = 0.0
        self._alone = False

    def choose(self, batch: RunningBatch, done: int, num_waiting: int) -> Choice:
        slots = batch.slots()
        if not len(slots) or self._keeps_out(batch, num_waiting):
            return NOTHING
        wanting: list[tuple[Sequence, int, Proposal]] = []
        for seq in batch.decoding:
            if seq.drafting is None:
                continue
            start = int(batch.computed[seq.slot])
            unknown = start + 1 - len(seq.tokens)  # tokens in flight
            most = min(self._most, int(batch.stop_at[seq.slot]) - start - 1)
            if most > 0:
                found = seq.drafting.propose(seq.tokens, most, unknown)
                if found is not None:
                    wanting.append((seq, start, found))
        if not wanting:
            return NOTHING
        self._alone = alone = len(wanting) == len(slots)
        spare = self._most_rows - len(slots)
        shape = StepShape(len(slots), int(batch.computed[slots].sum()) + len(slots), 0.0)
        plain = self._seconds(shape)
        busy = self._step > done
        held: list[Sequence] = []
        drafts: list[Drafted] = []
        for seq, start, found in wanting:
            count = self._best(found, shape, start, spare, plain, alone=alone)
            if count == 0:
                continue
            assert seq.drafting is not None
            if busy or batch.last_step[seq.slot] > done:
                seq.drafting.hold(found.kind)
                held.append(seq)
                continue
            spare -= count
            shape = _with(shape, start, count)
            drafts.append(Drafted(seq, start, found.kind, found.tokens[:count]))
        if not held and not drafts:
            self._forget()
        return Choice(tuple(held), tuple(drafts))

    def _keeps_out(self, batch: RunningBatch, num_waiting: int) -> bool:
        """Prompts are computed, or wait: drafts would take their room.

        Nor is anything drafted before it is known how long a step without drafts takes.
        """
        return bool(num_waiting or batch.prefilling) or not self._forecast.decode_seconds

    def _forget(self) -> None:
        self._factor += (1.0 - self._factor) * FORGOTTEN
        for evidence in self._kinds.values():
            evidence.forget(FORGOTTEN)

    def _best(
        self,
        found: Proposal,
        shape: StepShape,
        start: int,
        spare: int,
        plain: float,
        *,
        alone: bool,
    ) -> int:
        """How many of the proposed tokens to verify; 0 if none pays.

        Args:
            shape: of the step so far. plain: seconds of the step without drafts.
        """
        kind = self._kinds.get(found.kind)
        prior = found.prior if kind is None else kind.rate(found.prior, KIND_PRIOR_WEIGHT)
        rate = found.rate(prior)
        best, gain = 0, LEAST_GAIN
        expected = right = 1.0
        for count in range(1, min(len(found.tokens), spare) + 1):
            right *= rate
            expected += right
            seconds = self._factor * self._seconds(_with(shape, start, count))
            if alone:
                tokens, relative = expected, (seconds + self._gap) / plain
            else:
                # Others go on meanwhile: in the time of two steps, it takes part in one.
                tokens, relative = expected / 2, seconds / plain
                if relative > MOST_DELAY:
                    break
            if tokens / relative > gain:
                best, gain = count, tokens / relative
        return best

    def _seconds(self, shape: StepShape) -> float:
        if self._times.fitted:
            return max(self._times.seconds(shape), 1e-6)
        return self._forecast.decode_seconds or 1.0

    def planned(self, step: int, shape: StepShape, now: float) -> None:
        self._step, self._shape, self._since = step, shape, now

    def verified(self, draft: Drafted, num_right: int) -> None:
        num_drafted = len(draft.tokens)
        self.tallies.setdefault(draft.kind, Tally()).add(num_drafted, num_right)
        self._kinds.setdefault(draft.kind, Evidence(KIND_MEMORY)).saw(num_drafted, num_right)
        if draft.seq.drafting is not None:
            draft.seq.drafting.verified(draft.kind, num_drafted, num_right)

    def step_done(self, seconds: float, now: float) -> None:
        if seconds > 0.0:
            factor = min(max(seconds / self._seconds(self._shape), 0.5), 8.0)
            self._factor += (factor - self._factor) * NEWEST
        if self._alone:
            self._gap += (max(0.0, now - self._since - seconds) - self._gap) * NEWEST


def _with(shape: StepShape, start: int, count: int) -> StepShape:
    """The shape of a step in which a decode row gets so many drafted tokens."""
    tokens, kv_tokens, attention = shape
    pairs = (count + 1) * (start + (count + 1) / 2)
    return StepShape(tokens + count, kv_tokens - start - 1, attention + pairs)
