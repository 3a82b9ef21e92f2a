"""The output of one sequence: tokens to text, stop strings, and delivery to its sink."""

from __future__ import annotations

from asyncllm.engine.drafts.drafting import Drafting
from asyncllm.engine.drafts.sources import PREDICTION
from asyncllm.text.decoding import Detokenizer
from asyncllm.text.reasoning import ReasoningSpan
from asyncllm.text.stop import LateStopStrings, StopStrings
from asyncllm.types import FinishReason, SamplingParams, Sink, TokenDelta, TokenLogprob


class OutputStream:
    """Turns new tokens into deltas, on the loop.

    Attributes:
        arrived, started, first: ``clock()`` seconds of arrival, first step and first token; 0
            before that.
        cached_tokens: tokens of the prompt found in the prefix cache.
    """

    __slots__ = (
        "_detokenizer",
        "_drafting",
        "_eos_ids",
        "_num_tokens",
        "_params",
        "_plain",
        "_reasoning",
        "_stop",
        "arrived",
        "cached_tokens",
        "first",
        "sink",
        "started",
    )

    def __init__(
        self,
        params: SamplingParams,
        sink: Sink,
        detokenizer: Detokenizer,
        eos_ids: tuple[int, ...],
        now: float,
        drafting: Drafting | None = None,
    ):
        self.sink = sink
        self.arrived = now
        self.started = 0.0
        self.first = 0.0
        self.cached_tokens = 0
        self._drafting = drafting
        self._num_tokens = 0
        self._params = params
        self._detokenizer = detokenizer
        include = params.include_stop_str_in_output
        if params.stop and params.min_tokens:
            self._stop: StopStrings = LateStopStrings(params.stop, include, params.min_tokens)
        else:
            self._stop = StopStrings(params.stop, include)
        self._eos_ids = eos_ids
        self._plain = not params.stop
        # Stop strings end the answer; reasoning may well contain one.
        reasoning = params.reasoning if params.stop else None
        self._reasoning = None if reasoning is None else ReasoningSpan(reasoning)

    def push(
        self, token: int, finish: FinishReason | None, logprob: TokenLogprob | None
    ) -> FinishReason | None:
        """Deliver one token; returns how the sequence ended, which a stop string may decide."""
        logprobs = None if logprob is None else [logprob]
        self._num_tokens += 1
        if finish is None and self._plain:
            self.sink.emit(TokenDelta(self._detokenizer.push(token), [token], logprobs))
            return None
        stop_reason: int | str | None = None
        if finish is FinishReason.STOP:
            # The text ends before the token that stopped it, as it does before a stop string.
            if token not in self._eos_ids or token in self._params.stop_token_ids:
                stop_reason = token
            wanted = self._params.include_stop_str_in_output and stop_reason is not None
            text = self._detokenizer.push(token) if wanted else ""
        else:
            text = self._detokenizer.push(token)
        if self._reasoning is None:
            text = self._stop.push(text)
        else:
            text = self._push_beyond(self._reasoning, token, text)
        if finish is not None and self._stop.matched is None:
            text += self._stop.push(self._detokenizer.finish())
            if self._stop.matched is None:
                text += self._stop.finish()
        if self._stop.matched is not None:
            finish, stop_reason = FinishReason.STOP, self._stop.matched
        self.sink.emit(
            TokenDelta(
                text=text,
                token_ids=[token],
                logprobs=logprobs,
                finish_reason=finish,
                stop_reason=stop_reason,
                cached_tokens=0 if finish is None else self.cached_tokens,
                predicted=(0, 0) if finish is None else self._predicted(),
            )
        )
        return finish

    def _predicted(self) -> tuple[int, int]:
        """Tokens of the request's prediction that were right, and that were wrong."""
        return (
            (0, 0) if self._drafting is None else self._drafting.used(PREDICTION, self._num_tokens)
        )

    def _push_beyond(self, reasoning: ReasoningSpan, token: int, text: str) -> str:
        """Look for stop strings in what is not reasoning."""
        if not reasoning.accept(token, text.encode() if reasoning.reads_text else b""):
            return self._stop.push(text)
        if not reasoning.beyond:
            return text
        beyond = reasoning.beyond.decode()  # it follows a marker, so it is whole characters
        return text.removesuffix(beyond) + self._stop.push(beyond)

    def end(self, finish: FinishReason) -> None:
        """Deliver the end of a sequence that generates nothing."""
        self.sink.emit(TokenDelta(finish_reason=finish, cached_tokens=self.cached_tokens))
