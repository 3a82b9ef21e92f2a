"""Which captured size a step with prompts fills.

Steps are padded to the sizes that were captured, and padding costs what tokens cost. So what counts
is the time of a size, and a step should fill the size it has. The linear model of step times is off
by up to a tenth at single sizes, because matrix products work in tiles: 8B on an H200 takes as long
for 704 tokens as for 768, and for 896 as for 1,024.
"""

from __future__ import annotations

from bisect import bisect_left

from asyncllm.engine.scheduling.timing.prefill_room import StepCost, StepShape, num_pairs

#: Steps over which a size's means forget.
MEMORY = 32
#: A size without a step among so many is tried again: what made it slow may be over.
FORGET = 1024
#: A single step counts as at most this much slower or faster than predicted.
MOST = 1.5


class _Measured:
    """Means over the steps of one size."""

    __slots__ = ("attention", "count", "kv_tokens", "num_tokens", "seconds", "updated")

    def __init__(self) -> None:
        self.count = self.updated = 0
        self.num_tokens = self.kv_tokens = self.attention = self.seconds = 0.0

    def add(self, shape: StepShape, seconds: float) -> None:
        self.count = min(self.count + 1, MEMORY)
        self.num_tokens += (shape.num_tokens - self.num_tokens) / self.count
        self.kv_tokens += (shape.kv_tokens - self.kv_tokens) / self.count
        self.attention += (shape.attention - self.attention) / self.count
        self.seconds += (seconds - self.seconds) / self.count


class StepSizes:
    """Learns how much longer than predicted each size takes.

    Args:
        sizes: tokens that steps with prompts are padded to, rising; larger steps are not padded.
    """

    def __init__(self, sizes: tuple[int, ...] = ()) -> None:
        self._sizes = sizes
        self._measured = {size: _Measured() for size in sizes}
        self._num_steps = 0

    def observe(self, shape: StepShape, seconds: float, cost: StepCost) -> None:
        """A step with prompts took ``seconds``; ``cost`` predicts it without sizes."""
        self._num_steps += 1
        index = bisect_left(self._sizes, shape.num_tokens)
        if index == len(self._sizes):
            return
        size = self._sizes[index]
        if self._is_old(self._measured[size]):
            self._measured[size] = _Measured()
        measured = self._measured[size]
        measured.updated = self._num_steps
        predicted = cost.seconds(*shape)
        clipped = min(max(seconds, predicted / MOST), predicted * MOST)
        measured.add(shape, clipped)

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
                if seconds * self._ratio(size, cost) <= limit:
                    return tokens
        return 0

    def _ratio(self, size: int, cost: StepCost) -> float:
        """Measured over predicted seconds of a size.

        The means are compared with today's cost: a new fit does not make an old ratio wrong.
        """
        measured = self._measured[size]
        if not measured.count or self._is_old(measured):
            return 1.0
        predicted = cost.seconds(measured.num_tokens, measured.kv_tokens, measured.attention)
        if predicted == 0.0:
            return 1.0
        return measured.seconds / predicted

    def _is_old(self, measured: _Measured) -> bool:
        return self._num_steps - measured.updated > FORGET
