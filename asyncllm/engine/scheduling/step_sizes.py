"""Which captured size a step with prompts fills.

Steps are padded to the sizes that were captured, and padding costs what tokens cost. So what counts
is the time of a size, and a step should fill the size it has. The linear model of step times is off
by up to a tenth at single sizes, because matrix products work in tiles: 8B on an H200 takes as long
for 704 tokens as for 768, and for 896 as for 1,024.
"""

from __future__ import annotations

from bisect import bisect_left

from asyncllm.engine.scheduling.prefill_room import (
    PrefillRoom,
    StepCost,
    StepShape,
    num_pairs,
)

#: Observations over which a size's ratio is averaged.
MEMORY = 32
#: A size without a step among so many is tried again: what made it slow may be over.
FORGET = 1024
#: A single step counts as at most this much slower or faster than predicted.
MOST = 1.5
#: The attention of prompts may take this share of the room more than expected.
SLACK = 0.05


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

    def room(
        self, decodes: StepShape, limit: float, most: int, cost: StepCost, start: int
    ) -> PrefillRoom | None:
        """The room that fills the largest size which takes at most ``limit`` seconds.

        None if no size does that has room for prompts, and for at most ``most`` of their tokens.

        Args:
            start: the latest position from which a prompt may go on.
        """
        without = cost.seconds(*decodes)
        for size in reversed(self._sizes):
            tokens = size - decodes.num_tokens
            if not 0 < tokens <= most:
                continue
            ratio = self._ratios[size]
            allowed = limit if self._is_old(ratio) else limit / ratio.value
            if cost.seconds(size, decodes.kv_tokens, num_pairs(start, tokens)) <= allowed:
                seconds = (1.0 + SLACK) * (allowed - without)
                return PrefillRoom(tokens, seconds, cost, decodes.num_tokens)
        return None

    def _is_old(self, ratio: _Ratio) -> bool:
        return self._num_steps - ratio.updated > FORGET
