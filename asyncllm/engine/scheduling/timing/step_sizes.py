"""Which captured size a step with prompts fills.

Steps are padded to the sizes that were captured, and padding costs what tokens cost. So what counts
is the time of a size, and a step should fill the size it has. The linear model of step times is off
by up to a tenth at single sizes, because matrix products work in tiles: 8B on an H200 takes as long
for 704 tokens as for 768, and for 896 as for 1,024.
"""

from __future__ import annotations

from bisect import bisect_left

from asyncllm.engine.scheduling.timing.prefill_room import StepCost, StepShape, num_pairs

#: Observations over which a size's ratio is averaged.
MEMORY = 32
#: A size without a step among so many is tried again: what made it slow may be over.
FORGET = 1024
#: A single step counts as at most this much slower or faster than predicted.
MOST = 1.5


class _Ratio:
    """Measured over predicted seconds of one size."""

    __slots__ = ("count", "updated", "value")

    def __init__(self) -> None:
        self.value, self.count, self.updated = 1.0, 0, 0


class StepSizes:
    """Learns how much longer than predicted each size takes.

    Args:
        sizes: tokens that steps with prompts are padded to, rising; larger steps are not padded.
    """

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self._sizes = sizes
        self._ratios = {size: _Ratio() for size in sizes}
        self._num_steps = 0

    def observe(self, shape: StepShape, seconds: float, cost: StepCost) -> None:
        """A step with prompts took ``seconds``, which ``cost`` predicts without sizes."""
        self._num_steps += 1
        index = bisect_left(self._sizes, shape.num_tokens)
        if index == len(self._sizes):
            return
        size = self._sizes[index]
        ratio = self._ratios[size]
        if self._is_old(ratio):
            ratio.value, ratio.count = 1.0, 0
        ratio.updated = self._num_steps
        ratio.count = min(ratio.count + 1, MEMORY)
        found = seconds / cost.seconds(*shape)
        ratio.value += (min(max(found, 1 / MOST), MOST) - ratio.value) / ratio.count

    def room(self, shape: StepShape, start: int, limit: float, most: int, cost: StepCost) -> int:
        """How many tokens fill the largest size that takes at most ``limit`` seconds.

        0 if no size does that is larger than the step, and needs at most ``most`` tokens.

        Args:
            shape: of the step so far.
            start: the position of the prompt from which on the tokens are.
        """
        for size in reversed(self._sizes):
            tokens = size - shape.num_tokens
            if 0 < tokens <= most:
                attention = shape.attention + num_pairs(start, tokens)
                seconds = cost.seconds(size, shape.kv_tokens, attention)
                ratio = self._ratios[size]
                if seconds * (1.0 if self._is_old(ratio) else ratio.value) <= limit:
                    return tokens
        return 0

    def _is_old(self, ratio: _Ratio) -> bool:
        return self._num_steps - ratio.updated > FORGET
