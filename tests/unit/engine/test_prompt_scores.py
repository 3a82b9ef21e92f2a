"""Logprobs of a prompt as a sequence that is unpacked when it is looked at."""

from __future__ import annotations

import numpy as np
import pytest

from asyncllm.engine.requests.request import PromptScores
from asyncllm.types import PromptLogprob
from asyncllm.wire.messages import ScoredPrompt


def part(row: int, start: int, end: int, columns: int = 3) -> ScoredPrompt:
    """The token at position p has logprob -p and rank 100 + p."""
    positions = np.arange(start, end)
    logprobs = -positions[:, None] - 0.25 * np.arange(columns)
    ids = np.where(np.arange(columns) == 0, 100 + positions[:, None], np.arange(columns) + 6)
    return ScoredPrompt(
        row, start, end, logprobs.astype("<f4").tobytes(), ids.astype("<i4").tobytes()
    )


def entry(position: int) -> PromptLogprob:
    top = ((7, -position - 0.25), (8, -position - 0.5))
    return PromptLogprob(10 + position, float(-position), top, 100 + position)


def test_chunks_make_a_sequence() -> None:
    scores = PromptScores((10, 11, 12, 13, 14), 2)
    assert [scores.add(part(3, 1, 3)), scores.add(part(0, 3, 4)), scores.add(part(0, 4, 5))] == [
        False,
        False,
        True,
    ]
    expected = [None, *map(entry, range(1, 5))]
    assert list(scores) == expected
    assert scores == expected
    assert scores != expected[:-1]
    assert scores != 5
    assert len(scores) == 5
    assert (scores[0], scores[-1], scores[1:3]) == (None, entry(4), [entry(1), entry(2)])
    with pytest.raises(IndexError):
        scores[5]
    assert repr(scores) == repr(expected)


def test_what_is_computed_again_counts_once() -> None:
    scores = PromptScores((10, 11, 12, 13), 2)
    assert not scores.add(part(0, 1, 3))
    assert not scores.add(part(0, 1, 2))
    assert scores.add(part(0, 2, 4))
    assert list(scores) == [None, entry(1), entry(2), entry(3)]


def test_one_token_has_nothing_to_score() -> None:
    scores = PromptScores((10,), 2)
    assert scores.add(ScoredPrompt(0, 1, 1, b"", b""))
    assert list(scores) == [None]


def test_a_vocabulary_may_be_smaller_than_what_is_wanted() -> None:
    scores = PromptScores((10, 11), 20)
    assert scores.add(part(0, 1, 2))
    assert scores[1] == entry(1)
