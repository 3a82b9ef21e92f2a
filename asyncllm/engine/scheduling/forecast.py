"""Forecast: how long outputs will be, and so what requests will need and how long they wait."""

from __future__ import annotations

from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.engine.scheduling.step_time import StepTimeModel

#: What outputs are expected to be before any has been seen.
FIRST_GUESS = 256.0
#: The weight of the newest output in the mean, and of the newest decode step.
NEWEST = 1 / 32


class Forecast:
    """Means of what was seen, and the step-time model, turned into expectations."""

    def __init__(self, times: StepTimeModel):
        self._times = times
        self._output = FIRST_GUESS
        #: Of a step without prompt chunks, for one token of each row; 0.0 until there was one.
        self.decode_seconds = 0.0

    def saw_output(self, num_tokens: int) -> None:
        """A sequence ended, for whatever reason, after so many tokens of output."""
        self._output += (num_tokens - self._output) * NEWEST

    def saw_decode_step(self, seconds: float) -> None:
        """A step without prompt chunks took so long."""
        weight = NEWEST if self.decode_seconds else 1.0
        self.decode_seconds += (seconds - self.decode_seconds) * weight

    def length(self, seq: Sequence) -> int:
        """Tokens that ``seq`` is expected to come to, never fewer than one more than it has.

        One that comes back after a preemption has shown to be longer than expected.
        """
        if seq.surely_full:
            return seq.max_length
        generated = len(seq.tokens) - seq.num_prompt
        expected = seq.num_prompt + max(int(self._output), 2 * generated)
        return min(max(expected, len(seq.tokens) + 1), seq.max_length)

    def wait(self, num_ahead: int, tokens_ahead: int, num_free: int, num_rows: int) -> float:
        """Seconds until a request that arrives now has its first step, about.

        Args:
            num_ahead, tokens_ahead: requests to be served before, and what they have to prefill.
            num_free: how many can begin without waiting for others to end.
            num_rows: how many run at once.
        """
        prompts = num_ahead * self._times.prefill_seconds(tokens_ahead // max(num_ahead, 1))
        turns = max(0, num_ahead + 1 - num_free) / max(num_rows, 1)
        return prompts + turns * self._output * self.decode_seconds

    def service(self, num_prompt: int, num_output: int) -> float:
        """Seconds from the first step to the last token, about, if nobody's prompt delays it."""
        return self._times.prefill_seconds(num_prompt) + num_output * self.decode_seconds
