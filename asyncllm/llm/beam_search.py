"""Beam search: the continuations of a prompt with the highest total probability.

The same search, and so the same results, as transformers' ``generate(num_beams=...)``. Each step
asks the engine for one token of every beam, with the likeliest alternatives. A beam's full pages
are in the prefix cache, so only its last page is computed again; beams with the same beginning
share pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from asyncllm.engine.engine import Engine
from asyncllm.engine.requests.check import check_request
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.engine.requests.reservations import Reservation
from asyncllm.errors import DeadlineExceeded
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import FinishReason, SamplingParams, SchedulingParams, TokenLogprob, Usage
from asyncllm.types.beam_search import Beam, BeamSearchParams


class _Hypothesis(NamedTuple):
    """A beam; ``entries`` are the logprobs of its tokens, if wanted."""

    tokens: tuple[int, ...] = ()
    logprob: float = 0.0
    entries: tuple[TokenLogprob, ...] = ()


class _OneToken(SamplingParams, frozen=True, kw_only=True):
    """The parameters of a step, with more alternatives than callers may have."""

    def __post_init__(self) -> None:
        pass


class BeamSearch:
    """One search; it is checked when it is made."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None = None,
        reservation: Reservation | None = None,
    ):
        """
        Args:
            reservation: gives the search its place in the queue, when it is run.

        Raises:
            BadRequest: it can never be served.
            QueueFull: too much is waiting already, and there is no reservation.
        """
        whole = SamplingParams(max_tokens=params.max_tokens, stop_token_ids=params.stop_token_ids)
        self._most = check_request(prompt_ids, whole, engine.limits).max_length - len(prompt_ids)
        scheduling = scheduling or SchedulingParams()
        # The next step comes back to the pages of each step.
        ttl = scheduling.cache_ttl_s or None
        self._scheduling = msgspec.structs.replace(scheduling, cache_ttl_s=ttl)
        if reservation is None:
            engine.reservations.check(len(prompt_ids), 1, self._scheduling.tenant)
        self._reservation = reservation
        own_ends = () if params.ignore_eos else engine.limits.eos_token_ids
        self._ends = frozenset((*own_ends, *params.stop_token_ids))
        self._engine = engine
        self._tokenizer = tokenizer
        self._prompt = tuple(prompt_ids)
        self._params = params
        # Enough that beams are left to continue, even if all others end.
        self._num_candidates = max(2, 1 + len(self._ends)) * params.beam_width
        count = min(self._num_candidates, engine.limits.vocab_size)
        self._step = _OneToken(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=count)
        self._cached_tokens = -1

    async def run(self) -> list[Beam]:
        """The best beams found, best first. Cancelling it leaves nothing behind.

        Raises:
            DeadlineExceeded: it was not finished in time.
            StepError, EngineDead: it failed while running.
        """
        engine, arrival = self._engine, self._engine.now
        outcome = "error"
        try:
            beams = [self._beam(*finished) for finished in await self._search(arrival)]
            outcome = beams[0].finish_reason.value
        except asyncio.CancelledError:
            outcome = "abort"
            raise
        except DeadlineExceeded:
            outcome = "deadline"
            raise
        finally:
            engine.stats.finished[outcome] += 1
            engine.stats.request_latency.observe(engine.now - arrival)
        engine.stats.prompt_tokens += len(self._prompt)
        engine.stats.cached_tokens += self._cached_tokens
        return beams

    async def _search(self, arrival: float) -> list[tuple[float, _Hypothesis]]:
        """Finished beams and their scores, best first."""
        params, width = self._params, self._params.beam_width
        running, finished = [_Hypothesis()], list[tuple[float, _Hypothesis]]()
        for length in range(1, self._most + 1):
            candidates = await self._candidates(running, arrival)
            last = length == self._most
            running = []
            for place, candidate in enumerate(candidates):
                if not last and candidate.tokens[-1] not in self._ends:
                    running.append(candidate)
                elif place < width:  # one that ends behind these is not among the best
                    finished.append((candidate.logprob / length**params.length_penalty, candidate))
            del running[width:]
            finished.sort(key=lambda scored: -scored[0])
            del finished[width:]
            if not running or self._is_over(running[0], length, finished):
                break
        return finished

    def _is_over(
        self, best: _Hypothesis, length: int, finished: list[tuple[float, _Hypothesis]]
    ) -> bool:
        """Whether running beams, the best of which is given, need not be continued."""
        params = self._params
        if len(finished) < params.beam_width:
            return False
        if params.early_stopping is True:
            return True
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._most
        score: float = best.logprob / length**params.length_penalty
        return score <= finished[-1][0]

    async def _candidates(self, running: list[_Hypothesis], arrival: float) -> list[_Hypothesis]:
        """The likeliest beams that are one token longer, best first."""
        collectors = [Collector() for _ in running]
        ids = []
        try:
            for beam, collector in zip(running, collectors, strict=True):
                tokens = self._prompt + beam.tokens
                # The first part takes the place of the whole search.
                reservation, self._reservation = self._reservation, None
                engine_id = self._engine.add(
                    tokens,
                    self._step,
                    collector,
                    self._scheduling,
                    arrival=arrival,
                    reservation=reservation,
                )
                ids.append(engine_id)
            deltas = await Collector.all(collectors)
        finally:
            for engine_id in ids:
                self._engine.abort(engine_id)
        if self._cached_tokens < 0:
            self._cached_tokens = deltas[0].cached_tokens
        entries = [delta.logprobs[0] for delta in deltas if delta.logprobs]
        longer = [
            (beam.logprob + logprob, beam, token, logprob, entry)
            for beam, entry in zip(running, entries, strict=True)
            for token, logprob in entry.top
        ]
        longer.sort(key=lambda candidate: -candidate[0])
        return [self._longer(*candidate) for candidate in longer[: self._num_candidates]]

    def _longer(
        self, total: float, beam: _Hypothesis, token: int, logprob: float, place: TokenLogprob
    ) -> _Hypothesis:
        """A beam with one more token; ``place`` has the likely tokens there."""
        entries, wanted = beam.entries, self._params.logprobs
        if wanted is not None:
            entries = (*entries, TokenLogprob(token, logprob, place.top[:wanted]))
        return _Hypothesis((*beam.tokens, token), total, entries)

    def _beam(self, score: float, found: _Hypothesis) -> Beam:
        *text_ids, last = found.tokens
        ended = last in self._ends
        if not ended:
            text_ids.append(last)
        detokenizer = self._tokenizer.detokenizer(
            self._params.skip_special_tokens, self._prompt, self._params.shown_special_tokens
        )
        text = "".join(map(detokenizer.push, text_ids)) + detokenizer.finish()
        return Beam(
            text=text,
            token_ids=list(found.tokens),
            finish_reason=FinishReason.STOP if ended else FinishReason.LENGTH,
            stop_reason=last if last in self._params.stop_token_ids else None,
            logprobs=None if self._params.logprobs is None else list(found.entries),
            usage=Usage(len(self._prompt), len(found.tokens), max(self._cached_tokens, 0)),
            logprob=found.logprob,
            score=score,
        )
