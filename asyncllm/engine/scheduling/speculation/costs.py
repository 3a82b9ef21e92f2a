"""What steps with drafts take, and what drafts may lose."""

from __future__ import annotations

from statistics import median_low
from typing import Final, NamedTuple

from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.timing.prefill_room import StepShape
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel

#: The weight of the newest step in what was measured.
NEWEST: Final = 1 / 8
#: Steps with about as many drafted tokens that count.
REMEMBERED: Final = 5
#: How much of a factor is forgotten in each step in which drafts do not pay.
FORGOTTEN: Final = 1 / 256
#: Of all time that passes, drafts may lose this share.
LOST: Final = 0.005
#: A step that takes longer than expected by this factor had another reason, too.
HICCUP: Final = 1.5
#: Steps without drafts whose time drafts may lose at once: if they have not gained it before, and
#: if they have.
AT_FIRST, AT_MOST = 1.0, 20.0


class _Step(NamedTuple):
    """A step with drafts in flight: how many tokens, beside how many rows, what these alone take,
    and whether it was planned when the result before was known."""

    num_drafted: int
    num_rows: int
    plain: float
    waited: bool


class _Factor:
    """How much longer steps with about so many drafted tokens take.

    The middle of the last ones: some are launched kernel by kernel, or take long by chance.
    """

    def __init__(self, num_drafted: float, expected: float):
        self.num_drafted = float(num_drafted)
        self._seen = [expected]

    @property
    def ratio(self) -> float:
        return median_low(self._seen)

    def saw(self, num_drafted: int, ratio: float) -> None:
        self.num_drafted += (num_drafted - self.num_drafted) * NEWEST
        self._seen = [*self._seen[1 - REMEMBERED :], ratio]

    def forget(self) -> None:
        self._seen = [ratio + (1.0 - ratio) * FORGOTTEN for ratio in self._seen]


class Costs:
    """Compares steps with drafts and steps without.

    A step takes as long as the step-time model says, times a factor that is measured, as rows of
    several tokens have their own kernels, and read more experts. What drafts lose is bounded,
    whatever is expected of them: it is taken from a credit, which only grows by ``LOST`` of the
    time that passes and by what drafts gain. Nothing is drafted while it is used up.

    Attributes:
        gap: seconds that a step comes later if it is planned when the result before is known.
    """

    def __init__(self, times: StepTimeModel, forecast: Forecast):
        self.gap = 0.0
        self._times = times
        self._forecast = forecast
        self._credit = 0.0
        #: Steps without drafts: their device time, and the time from result to result, over what
        #: the model says.
        self._plain = self._whole = 1.0
        #: By the size of the number of drafted tokens.
        self._factors: dict[int, _Factor] = {}
        self._steps: dict[int, _Step] = {}
        self._last: float | None = None
        self._was_plain = False

    @property
    def allow_drafts(self) -> bool:
        """Whether drafts may lose something, and it is known how long a step takes."""
        return self._credit >= 0.0 and self._forecast.decode_seconds > 0.0

    def plain(self, shape: StepShape) -> float:
        """Seconds of a step without drafts."""
        return self._plain * self._model(shape)

    def verifying(self, shape: StepShape, num_drafted: int) -> float:
        """Seconds of a step, so many of whose tokens are drafted."""
        return self._factor(num_drafted) * self.plain(shape)

    def planned(
        self, number: int, num_drafted: int, num_rows: int, plain: float, *, waited: bool
    ) -> None:
        """A step verifies drafts; without them, its rows take ``plain`` seconds.

        Args:
            waited: it was planned when the result before was known.
        """
        self._steps[number] = _Step(num_drafted, num_rows, plain, waited)

    def step_done(
        self, number: int, shape: StepShape, num_right: int, seconds: float, now: float
    ) -> None:
        """A step of decode rows took ``seconds`` of the device; so many drafted tokens were right.

        Args:
            now: when the result was there.
        """
        took = None if self._last is None else now - self._last
        self._last = now
        step = self._steps.pop(number, None)
        after_plain, self._was_plain = self._was_plain, step is None
        if seconds <= 0.0 or took is None:
            return
        if step is not None:
            self._take(step, num_right, seconds, took)
            return
        model = self._model(shape)
        self._plain += (_clipped(seconds / model) - self._plain) * NEWEST
        if after_plain:
            self._whole += (_clipped(took / model) - self._whole) * NEWEST
        self._pass(took, took)

    def _take(self, step: _Step, num_right: int, seconds: float, took: float) -> None:
        """A step with drafts gains tokens, and loses what it takes longer."""
        beside = self._whole / self._plain
        plain = beside * step.plain
        expected = beside * self._factor(step.num_drafted) * step.plain
        if step.waited:
            gap = max(0.0, took - beside * seconds)
            self.gap += (min(gap, plain) - self.gap) * (NEWEST if self.gap else 1.0)
            expected += self.gap
        self._saw_factor(step.num_drafted, _clipped(seconds / step.plain))
        self._credit += plain * (1.0 + num_right / step.num_rows) - min(took, HICCUP * expected)
        self._credit = min(self._credit, AT_MOST * plain)
        self._pass(took, plain)

    def _pass(self, took: float, plain: float) -> None:
        """Some time has passed."""
        if self._credit < AT_FIRST * plain:
            self._credit += LOST * took

    def forget(self) -> None:
        """What was measured may have had another reason: it is tried again some day."""
        for factor in self._factors.values():
            factor.forget()

    def other_step_done(self, number: int) -> None:
        """A step with prompts is done: the time to the next result is not compared."""
        self._steps.pop(number, None)
        self._last = None
        self._was_plain = False

    def _model(self, shape: StepShape) -> float:
        if self._times.fitted:
            return max(self._times.seconds(shape), 1e-6)
        return self._forecast.decode_seconds or 1.0

    def _saw_factor(self, num_drafted: int, ratio: float) -> None:
        key = num_drafted.bit_length()
        if key not in self._factors:
            self._factors[key] = _Factor(num_drafted, self._factor(num_drafted))
        self._factors[key].saw(num_drafted, ratio)

    def _factor(self, num_drafted: int) -> float:
        """Measured, or between what was measured for fewer and for more drafted tokens."""
        key = num_drafted.bit_length()
        if key in self._factors:
            return self._factors[key].ratio
        fewer = max((k for k in self._factors if k < key), default=0)
        low = self._factors.get(fewer, _Factor(0, 1.0))
        more = min((k for k in self._factors if k > key), default=0)
        if not more:
            return low.ratio
        high = self._factors[more]
        share = (num_drafted - low.num_drafted) / (high.num_drafted - low.num_drafted)
        return low.ratio + (high.ratio - low.ratio) * share


def _clipped(ratio: float) -> float:
    """A ratio of times, of which one may have had a hiccup."""
    return min(max(ratio, 1 / 4), 8.0)
