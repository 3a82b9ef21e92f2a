"""Forecast: expected lengths of outputs, and expected times of waiting and service."""

from __future__ import annotations

from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.step_time import StepTimeModel

#: Expected tokens of an output before any has ended.
FIRST_GUESS = 256.0
#: The weight of the newest output in the mean, and of the newest decode step.
NEWEST = 1 / 32


class Forecast:
    """Expectations from means of past outputs and steps, and from the step-time model."""

    def __init__(self, times: StepTimeModel):
        self._times = times
        self._output = FIRST_GUESS
        #: Of a step without prompt chunks, for one token of each row; 0.0 until there was one.
        self.decode_seconds = 0.0

    def saw_output(self, num_tokens: int) -> None:
        """A sequence ended, for any reason, after ``num_tokens`` of output."""
        self._output += (num_tokens - self._output) * NEWEST

    def saw_decode_step(self, seconds: float) -> None:
        """A step without prompt chunks took ``seconds``."""
        weight = NEWEST if self.decode_seconds else 1.0
        self.decode_seconds += (seconds - self.decode_seconds) * weight

    def length(self, seq: Sequence) -> int:
        """The expected final length of ``seq``, at least one token more than it has.

        An output that is long already is expected to double.
        """
        if seq.surely_full:
            return seq.max_length
        generated = len(seq.tokens) - seq.num_prompt
        expected = seq.num_prompt + max(int(self._output), 2 * generated)
        return min(max(expected, len(seq.tokens) + 1), seq.max_length)

    def wait(self, num_ahead: int, tokens_ahead: int, num_free: int, num_rows: int) -> float:
        """Estimated seconds until a request that arrives now has its first step.

        Args:
            num_ahead, tokens_ahead: requests served before it, and their tokens to prefill.
            num_free: how many can begin without waiting for others to end.
            num_rows: how many run at once.
        """
        prompts = num_ahead * self._times.prefill_seconds(tokens_ahead // max(num_ahead, 1))
        turns = max(0, num_ahead + 1 - num_free) / max(num_rows, 1)
        return prompts + turns * self._output * self.decode_seconds

    def service(self, num_prompt: int, num_output: int) -> float:
        """Estimated seconds from first step to last token, if no other prompt delays it."""
        return self._times.prefill_seconds(num_prompt) + num_output * self.decode_seconds
