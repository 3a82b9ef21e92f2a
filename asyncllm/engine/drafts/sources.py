"""Drafts: guesses of how a sequence goes on, from its own tokens, a prediction or a grammar."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Final, Protocol

import msgspec
import numpy as np

from asyncllm.config import HEADS, SpeculativeConfig
from asyncllm.engine.token_constraints import PreparedParams
from asyncllm.text.reasoning import ReasoningSpan
from asyncllm.types import SamplingParams
from asyncllm.wire.messages import UNKNOWN_DRAFT

#: The most tokens behind a sequence's end in which a draft looks for its last tokens. Looking
#: through them takes 30 us.
LOOKED_AT: Final = 1 << 15
#: The most places of a token that are compared with what came before it. In a text that repeats
#: itself there are as many as tokens, and each comparison would take a millisecond.
COMPARED: Final = 1 << 12
#: The kinds of drafts.
PREDICTION: Final = "prediction"
KINDS: Final = ("grammar", PREDICTION, "lookup", *HEADS)


class Draft(Protocol):
    """Guesses the next tokens of one sequence.

    A guess may be wrong in any way: the model verifies it, and only speed depends on it.

    Attributes:
        kind: its name in metrics; guesses of one kind are about equally good.
        prior: the share of its tokens that are expected to be right, before any was tried.
    """

    kind: str
    prior: float

    def propose(self, tokens: array[int], most: int) -> Seq[int]:
        """Up to ``most`` tokens that may follow; none if it has no idea.

        Args:
            tokens: prompt and output so far. From call to call they only grow.
        """


class PromptLookup:
    """What followed the sequence's last tokens where they were before (Saxena, 2023).

    Of the places where the most of the last tokens are found, the latest counts.

    Args:
        least, most: tokens that must be found, and that are looked for.
        always: where nothing is found, the draft is the last token again and again, for benchmarks
            in which chance decides what is right.
    """

    kind = "lookup"
    prior = 0.6

    def __init__(self, least: int, most: int, *, always: bool = False):
        self._least = least
        self._most = most
        self._always = always

    def propose(self, tokens: array[int], most: int) -> Seq[int]:
        first = max(0, len(tokens) - LOOKED_AT)
        # A copy: an array that numpy looks at cannot grow.
        recent = np.array(tokens[first:], dtype=np.int32)
        end = len(recent)
        after = _after_match(recent, recent[:-1], self._least, self._most, end)
        if after is None:
            return [tokens[-1]] * most if self._always else ()
        # The text that repeats itself goes on to do so.
        index = after + np.arange(most) % (end - after)
        found: list[int] = recent[index].tolist()
        return found


class Prediction:
    """A text that the client expects to get back, with changes.

    The draft goes on where the output is in the prediction. After a token that was not predicted,
    it looks for the output's last tokens, first in what follows that place.

    Args:
        tokens: the prediction.
        num_prompt: tokens before the output.
    """

    kind = PREDICTION
    prior = 0.8
    #: Tokens that must be found to go on there.
    LEAST: Final = 2
    MOST: Final = 16
    #: The latest tokens after which its place is looked for, if it was not asked for long.
    RECENT: Final = 64

    def __init__(self, tokens: Seq[int], num_prompt: int):
        self._predicted = np.array(tokens, dtype=np.int32)
        self._num_prompt = num_prompt
        self._seen = num_prompt
        #: Where the output is in the prediction, or where it was last.
        self._place = 0
        self._lost = False

    def propose(self, tokens: array[int], most: int) -> Seq[int]:
        while self._seen < len(tokens):
            token, self._seen = tokens[self._seen], self._seen + 1
            expected = self._predicted[self._place : self._place + 1].tolist()
            if not self._lost and expected == [token]:
                self._place += 1
            elif len(tokens) - self._seen < self.RECENT:
                self._find(tokens)
            else:
                self._lost = True
        found: list[int] = self._predicted[self._place : self._place + most].tolist()
        return () if self._lost else found

    def _find(self, tokens: array[int]) -> None:
        """Look for the end of the output so far."""
        first = max(self._num_prompt, self._seen - self.MOST)
        recent = np.array(tokens[first : self._seen], dtype=np.int32)
        after = _after_match(recent, self._predicted, self.LEAST, self.MOST, self._place)
        self._lost = after is None
        self._place = self._place if after is None else after


class OfHead:
    """What a head drafts on the device, which only the device knows.

    Args:
        kind: the method.
    """

    prior = 0.7

    def __init__(self, kind: str):
        self.kind = kind

    def propose(self, tokens: array[int], most: int) -> Seq[int]:
        return [UNKNOWN_DRAFT] * most


class Forced:
    """What a grammar leaves no choice about.

    It may still come as other tokens than the tokenizer would write it with.

    Args:
        matcher: at the start of the grammar.
        num_prompt: tokens before the output.
        span: of the reasoning that may come before what the grammar applies to.
        token_bytes: the text of a token, where the span needs it.
    """

    kind = "grammar"
    prior = 0.95

    def __init__(
        self,
        matcher: ForcedTokens,
        num_prompt: int,
        span: ReasoningSpan | None = None,
        token_bytes: Callable[[int], bytes] = lambda token: b"",
    ):
        self._matcher = matcher
        self._seen = num_prompt
        self._span = span
        self._token_bytes = token_bytes

    def propose(self, tokens: array[int], most: int) -> Seq[int]:
        for token in tokens[self._seen :]:
            if not self._reasons(token) and not self._matcher.is_finished:
                self._matcher.accept(token)
        self._seen = len(tokens)
        if self._span is not None and self._span.inside:
            return ()
        return self._matcher.forced()[:most]

    def _reasons(self, token: int) -> bool:
        """Whether the next token is part of the reasoning; it may also begin the answer."""
        span = self._span
        if span is None or not span.accept(token, self._token_bytes(token)):
            return False
        if answer := span.beyond.lstrip():
            self._matcher.accept_bytes(answer)
        return True


class ForcedTokens(Protocol):
    """The state of one sequence in its grammar, see ``text.grammar.matcher``."""

    @property
    def is_finished(self) -> bool: ...
    def accept(self, token: int) -> bool: ...
    def accept_bytes(self, text: bytes) -> bool: ...
    def forced(self) -> list[int]:
        """The tokens that must follow; none if there is a choice, or after an error."""


def make_drafts(
    num_prompt: int,
    params: SamplingParams,
    lookup: SpeculativeConfig | None,
    token_bytes: Callable[[int], bytes],
) -> list[Draft]:
    """The drafts of a new sequence, the most certain first.

    Args:
        lookup: for all sequences; without it, only what a request predicts is drafted.
        token_bytes: the text of a token.
    """
    drafts: list[Draft] = []
    if isinstance(params, PreparedParams):
        if lookup is not None and params.compiled is not None:
            span = None
            if params.reasoning is not None:
                # As for the sampler: before a grammar, texts do not begin reasoning.
                span = ReasoningSpan(msgspec.structs.replace(params.reasoning, start_texts=()))
            drafts.append(Forced(params.compiled.matcher(), num_prompt, span, token_bytes))
        if params.predicted_ids:
            drafts.append(Prediction(params.predicted_ids, num_prompt))
    if lookup is not None and lookup.has_head:
        drafts.append(OfHead(lookup.method))
    elif lookup is not None:
        always = lookup.synthetic_acceptance is not None
        sizes = lookup.prompt_lookup_min, lookup.prompt_lookup_max
        drafts.append(PromptLookup(*sizes, always=always))
    return drafts


def _after_match(end: np.ndarray, text: np.ndarray, least: int, most: int, near: int) -> int | None:
    """The place in ``text`` after the longest match of the last tokens of ``end``.

    Args:
        least, most: tokens of the match; of equally long ones, the first that ends at ``near`` or
            later counts, else the last. If the last token is at very many places, only those from
            ``near`` on are compared.
    """
    most = min(most, len(end))
    if most < least:
        return None
    places = np.flatnonzero(text == end[-1])
    first = max(0, min(int(np.searchsorted(places, near)), len(places) - COMPARED))
    places = places[first : first + COMPARED]
    found, length = places, 1
    while len(places) and length < most:
        places = places[places >= length]
        places = places[text[places - length] == end[-1 - length]]
        if len(places):
            found, length = places, length + 1
    if len(found) == 0 or length < least:
        return None
    later = int(np.searchsorted(found, near))
    return int(found[min(later, len(found) - 1)]) + 1
