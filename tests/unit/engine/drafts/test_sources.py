"""What is drafted: from the tokens before, from a prediction, and from a grammar."""

from __future__ import annotations

from array import array
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.config import SpeculativeConfig
from asyncllm.engine.drafts.drafting import FIRST_PAUSE, MOST_WRONG, Drafting
from asyncllm.engine.drafts.sources import COMPARED, Forced, Prediction, PromptLookup, make_drafts
from asyncllm.engine.token_constraints import PreparedParams
from asyncllm.text.reasoning import ReasoningSpan
from asyncllm.types import Reasoning, SamplingParams

TOKENS = st.lists(st.integers(0, 3), max_size=40)


def drafted(draft: PromptLookup | Prediction, tokens: list[int], most: int) -> list[int]:
    return list(draft.propose(array("i", tokens), most))


def test_what_followed_the_longest_match_is_drafted() -> None:
    lookup = PromptLookup(2, 4)
    assert drafted(lookup, [1, 2, 3, 4, 9, 2, 3, 7, 1, 2, 3], 3) == [4, 9, 2]
    assert drafted(lookup, [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], 2) == [5, 1]  # the latest counts
    assert drafted(lookup, [5, 3, 4, 6, 3], 2) == []  # one token is too few
    assert drafted(lookup, [5], 2) == drafted(lookup, [], 2) == []


def test_what_repeats_itself_goes_on() -> None:
    assert drafted(PromptLookup(2, 4), [9, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert drafted(PromptLookup(2, 8), [7] * 5, 4) == [7] * 4


@given(tokens=TOKENS, least=st.integers(1, 4), extra=st.integers(0, 4), most=st.integers(1, 9))
def test_lookup_is_a_search(tokens: list[int], least: int, extra: int, most: int) -> None:
    found = drafted(PromptLookup(least, least + extra), tokens, most)
    for length in range(min(least + extra, len(tokens) - 1), least - 1, -1):
        tail = tokens[-length:]
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tail:
                text = list(tokens)
                while len(text) < end + most:
                    text.append(text[len(text) - len(tokens) + end])
                assert found == text[end : end + most]
                return
    assert found == []


def test_a_prediction_is_followed_left_and_found_again() -> None:
    draft = Prediction([10, 11, 12, 13, 14, 15, 11, 12, 16], 2)
    tokens = [0, 1]
    assert drafted(draft, tokens, 3) == [10, 11, 12]
    tokens += [10, 11]
    assert drafted(draft, tokens, 2) == [12, 13]
    tokens += [99]
    assert drafted(draft, tokens, 2) == []
    tokens += [98, 13]
    assert drafted(draft, tokens, 2) == []  # one token is too few
    tokens += [14]
    assert drafted(draft, tokens, 9) == [15, 11, 12, 16]
    tokens += [15, 11, 12, 16]
    assert drafted(draft, tokens, 9) == []


def test_a_prediction_goes_on_behind_the_place_where_it_was_left() -> None:
    draft = Prediction([1, 2, 3, 7, 1, 2, 4, 8], 0)
    assert drafted(draft, [1, 2, 3], 2) == [7, 1]
    assert drafted(draft, [1, 2, 3, 9, 1, 2], 2) == [4, 8]


@given(answer=TOKENS, predicted=TOKENS, cuts=st.lists(st.integers(1, 5), min_size=40))
def test_a_prediction_does_not_depend_on_when_it_is_asked(
    answer: list[int], predicted: list[int], cuts: list[int]
) -> None:
    draft, done = Prediction(predicted, 0), 0
    for cut in cuts:
        done = min(done + cut, len(answer))
        whole = Prediction(predicted, 0)
        assert drafted(draft, answer[:done], 4) == drafted(whole, answer[:done], 4)


def test_a_prediction_not_asked_for_long_looks_for_the_latest_tokens_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each search goes through the whole prediction, on the event loop."""
    searches: list[int] = []
    find = Prediction._find

    def counting(self: Prediction, tokens: array[int]) -> None:
        searches.append(len(tokens))
        find(self, tokens)

    monkeypatch.setattr(Prediction, "_find", counting)
    draft = Prediction([10, 11, 12, 13, 14, 15], 0)
    assert drafted(draft, [10, *[99] * 1000, 11, 12], 3) == [13, 14, 15]
    assert len(searches) <= Prediction.RECENT


@pytest.mark.parametrize("draft", [Prediction([7] * 10_000, 0), PromptLookup(1, 64)])
def test_a_text_of_one_token_is_not_compared_everywhere(
    draft: Prediction | PromptLookup, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[int] = []
    searched = np.searchsorted

    def noting(places: np.ndarray, near: int) -> np.intp:
        compared.append(len(places))
        return searched(places, near)

    monkeypatch.setattr(np, "searchsorted", noting)
    assert drafted(draft, [7] * 9_000 + [8, 7, 7], 3)[1:] == [7, 7]
    assert compared[-1] <= COMPARED


class Steps:
    """A grammar of fixed tokens, with a choice where there is None."""

    def __init__(self, tokens: list[int | None]):
        self.tokens = tokens

    @property
    def is_finished(self) -> bool:
        return not self.tokens

    def accept(self, token: int) -> bool:
        self.tokens = self.tokens[1:]
        return True

    def accept_bytes(self, text: bytes) -> bool:
        self.tokens = self.tokens[len(text) :]
        return True

    def forced(self) -> list[int]:
        end = self.tokens.index(None) if None in self.tokens else len(self.tokens)
        return [token for token in self.tokens[:end] if token is not None]


def test_what_a_grammar_forces_is_drafted() -> None:
    draft = Forced(Steps([1, 2, None, 3, 4, 5]), 2)
    assert draft.propose(array("i", [8, 9]), 5) == [1, 2]
    assert draft.propose(array("i", [8, 9, 1, 2]), 5) == []
    assert draft.propose(array("i", [8, 9, 1, 2, 7]), 2) == [3, 4]
    assert draft.propose(array("i", [8, 9, 1, 2, 7, 3, 4, 5, 0]), 2) == []


@pytest.mark.parametrize("is_open", [False, True])
def test_a_grammar_begins_after_the_reasoning(is_open: bool) -> None:
    reasoning = Reasoning(start_ids=(50,), end_ids=(51,), is_open=is_open)
    draft = Forced(Steps([1, 2, 3]), 0, ReasoningSpan(reasoning))
    tokens = [] if is_open else [50]
    assert draft.propose(array("i", tokens), 5) == ()
    tokens += [1, 9]
    assert draft.propose(array("i", tokens), 5) == ()
    tokens += [51]
    assert draft.propose(array("i", tokens), 5) == [1, 2, 3]
    assert draft.propose(array("i", [*tokens, 1]), 5) == [2, 3]


def test_a_token_may_end_the_reasoning_and_begin_the_answer() -> None:
    texts = {8: b"so </th", 9: b"ink>\n{"}
    span = ReasoningSpan(Reasoning(end_texts=("</think>",), is_open=True))
    draft = Forced(Steps([1, 2, 3]), 0, span, texts.__getitem__)
    assert draft.propose(array("i", [8]), 5) == ()
    assert draft.propose(array("i", [8, 9]), 5) == [2, 3]


def test_an_answer_without_reasoning_begins_with_the_grammar() -> None:
    draft = Forced(Steps([1, 2, 3]), 0, ReasoningSpan(Reasoning(start_ids=(50,), end_ids=(51,))))
    assert draft.propose(array("i"), 5) == [1, 2, 3]
    assert draft.propose(array("i", [1]), 5) == [2, 3]


def test_each_request_has_its_drafts() -> None:
    def kinds(params: SamplingParams, lookup: SpeculativeConfig | None) -> list[str]:
        return [draft.kind for draft in make_drafts(1, params, lookup, bytes)]

    predicting = PreparedParams(predicted_ids=(1, 2))
    assert kinds(SamplingParams(), None) == kinds(PreparedParams(), None) == []
    assert kinds(predicting, None) == ["prediction"]
    assert kinds(SamplingParams(), SpeculativeConfig()) == ["lookup"]
    assert kinds(predicting, SpeculativeConfig()) == ["prediction", "lookup"]


class Fixed:
    kind, prior = "fixed", 0.5

    def propose(self, tokens: array[int], most: int) -> list[int]:
        return [7] * most


def test_drafts_are_asked_less_often_while_nothing_of_them_is_right() -> None:
    drafting, tokens, asked = Drafting([Fixed()]), array("i", [1]), []
    for _ in range(200):
        if (found := drafting.propose(tokens, 3, 0)) is not None:
            asked.append(len(tokens))
            drafting.verified("fixed", len(found.tokens), 0, 0)
        tokens.append(2)
    gaps = [after - before for before, after in pairwise(asked)][MOST_WRONG - 1 :]
    assert gaps == [FIRST_PAUSE * 2**i for i in range(len(gaps))]
    assert len(gaps) >= 4


def test_the_rate_is_that_of_the_latest_tokens() -> None:
    drafting, tokens = Drafting([Fixed()]), array("i", [1])
    first = drafting.propose(tokens, 4, 0)
    assert first is not None
    assert first.rate(0.25) == 0.25
    for _ in range(40):
        drafting.verified("fixed", 4, 4, 0)
    good = drafting.propose(tokens, 4, 0)
    assert good is not None
    assert good.rate(0.5) > 0.95
    for _ in range(40):
        drafting.verified("fixed", 4, 1, 0)
    bad = drafting.propose(tokens, 4, 0)
    assert bad is not None
    assert 0.45 < bad.rate(0.5) < 0.6
    assert drafting.tallies["fixed"].num_drafted == 320
    assert drafting.tallies["fixed"].num_right == 200


def test_tokens_in_flight_are_left_out() -> None:
    drafting = Drafting([Prediction([1, 2, 3, 4], 0)])
    found = drafting.propose(array("i"), 2, unknown=1)
    assert found is not None
    assert list(found.tokens) == [2, 3]
    assert drafting.propose(array("i"), 2, unknown=4) is None
