"""What steps with drafts take, and what drafts may lose."""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

from asyncllm.engine.scheduling.forecast import Forecast
from asyncllm.engine.scheduling.timing.prefill_room import StepShape
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel

#: Steps without drafts, and steps with about as many drafted tokens, that are remembered.
REMEMBERED: Final = 5
#: After so many steps with drafts comes one without: what it takes cannot be known otherwise.
MOST_UNMEASURED: Final = 32
#: How much of a factor is forgotten in each step in which drafts do not pay.
FORGOTTEN: Final = 1 / 256
#: Of all time that passes, drafts may lose this share.
LOST: Final = 0.004
#: A step that takes longer than expected by this factor had another reason, too.
HICCUP: Final = 1.5
#: Steps without drafts whose time drafts may lose at once: if they have not gained it before, and
#: if they have.
AT_FIRST, AT_MOST = 0.5, 20.0
#: The weight of the newest gap.
NEWEST: Final = 1 / 8


class _Step(NamedTuple):
    """A step with drafts in flight: how many tokens, beside how many rows, what these alone take,
    what is lost if all drafts are wrong, and whether the step was planned when the result before
    was known."""

    num_drafted: int
    num_rows: int
    plain: float
    risk: float
    waited: bool


class _Plain(NamedTuple):
    """A step without drafts: its time on the device, and from the result before to its own."""

    shape: StepShape
    seconds: float
    took: float


class _Factor:
    """How much longer steps with about so many drafted tokens take.

    The middle of the last ones: some are launched kernel by kernel, or take long by chance.
    """

    def __init__(self, num_drafted: int, expected: float):
        self.num_drafted = num_drafted
        self._seen = deque([expected], REMEMBERED)

    @property
    def ratio(self) -> float:
        return sorted(self._seen)[(len(self._seen) - 1) // 2]

    def saw(self, ratio: float) -> None:
        self._seen.append(ratio)

    def forget(self) -> None:
        for index, ratio in enumerate(self._seen):
            self._seen[index] = ratio + (1.0 - ratio) * FORGOTTEN


class Costs:
    """Compares steps with drafts and steps without.

    A step takes as long as the step-time model says, times a factor that is measured, as rows of
    several tokens have their own kernels, and read more experts. What drafts lose is bounded,
    whatever is expected of them: it is taken from a credit, which only grows by ``LOST`` of the
    time that passes and by what drafts gain. A draft must not risk more than there is.

    Attributes:
        gap: seconds that a step comes later if it is planned when the result before is known.
    """

    def __init__(self, times: StepTimeModel, forecast: Forecast):
        self.gap = 0.0
        self._times = times
        self._forecast = forecast
        self._credit: float | None = None
        #: The last steps without drafts, each after another one.
        self._plains: deque[_Plain] = deque(maxlen=REMEMBERED)
        #: By the size of the number of drafted tokens.
        self._factors: dict[int, _Factor] = {}
        #: With drafts and in flight.
        self._steps: dict[int, _Step] = {}
        self._unmeasured = 0
        #: When the last result was there, and whether its step had no drafts.
        self._last: float | None = None
        self._was_plain = False

    @property
    def credit(self) -> float:
        """Seconds that drafts may lose; none before it is known how long steps take."""
        if self._credit is None:
            return 0.0
        return self._credit - math.fsum(step.risk for step in self._steps.values())

    def measure_plain(self) -> bool:
        """Whether the next step should have no drafts, so that it can be measured."""
        if self._unmeasured < MOST_UNMEASURED:
            return False
        self._unmeasured = 0
        return True

    def plain(self, shape: StepShape) -> float:
        """Seconds of a step without drafts, on the device."""
        measured = math.fsum(plain.seconds for plain in self._plains)
        expected = math.fsum(self._model(plain.shape) for plain in self._plains)
        return self._model(shape) * (measured / expected if expected else 1.0)

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
        self._unmeasured += 1
        risk = (self._factor(num_drafted) - 1.0) * plain + (self.gap if waited else 0.0)
        self._steps[number] = _Step(num_drafted, num_rows, plain, max(risk, 0.0), waited)

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
            self._take(step, shape, num_right, seconds, took)
            return
        if after_plain or self._credit is not None:
            took = took if after_plain else self._beside * seconds
            self._plains.append(_Plain(shape, seconds, min(took, 2.0 * seconds)))
        if self._credit is not None:
            self._pass(took, took)
        elif len(self._plains) == REMEMBERED:
            self._credit = AT_FIRST * took

    def _take(
        self, step: _Step, shape: StepShape, num_right: int, seconds: float, took: float
    ) -> None:
        """A step with drafts gains tokens, and loses what it takes longer."""
        beside = self._beside
        plain = beside * min(step.plain, seconds)
        expected = beside * self.verifying(shape, step.num_drafted)
        if step.waited:
            gap = min(max(0.0, took - beside * seconds), plain)
            self.gap += (gap - self.gap) * (NEWEST if self.gap else 1.0)
            expected += self.gap
        self._saw_factor(step.num_drafted, seconds / self.plain(shape))
        gained = plain * (1.0 + num_right / step.num_rows) - min(took, HICCUP * expected)
        self._credit = min((self._credit or 0.0) + gained, AT_MOST * plain)
        self._pass(took, plain)

    def _pass(self, took: float, plain: float) -> None:
        """Some time has passed."""
        if self._credit is not None and self._credit < AT_FIRST * plain:
            self._credit += LOST * took

    def other_step_done(self, number: int) -> None:
        """A step with prompts is done: the time to the next result is not compared."""
        self._steps.pop(number, None)
        self._last = None
        self._was_plain = False

    def forget(self) -> None:
        """What was measured may have had another reason: it is tried again some day."""
        for factor in self._factors.values():
            factor.forget()

    @property
    def _beside(self) -> float:
        """The time from result to result over that of the device, without drafts."""
        seconds = math.fsum(plain.seconds for plain in self._plains)
        return math.fsum(plain.took for plain in self._plains) / seconds if seconds else 1.0

    def _model(self, shape: StepShape) -> float:
        if self._times.fitted:
            return max(self._times.seconds(shape), 1e-6)
        return self._forecast.decode_seconds or 1.0

    def _saw_factor(self, num_drafted: int, ratio: float) -> None:
        key = num_drafted.bit_length()
        if key not in self._factors:
            self._factors[key] = _Factor(num_drafted, self._factor(num_drafted))
        self._factors[key].saw(ratio)

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
