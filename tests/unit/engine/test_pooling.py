"""What is wanted of a prompt: hidden states as one vector, logprobs that are unpacked when read."""

from __future__ import annotations

import numpy as np
import pytest

from asyncllm import EmbeddingParams, SamplingParams
from asyncllm.engine.pooling import PooledHidden, PooledParams
from asyncllm.engine.requests.request import PromptScores, reader_of
from asyncllm.errors import BadRequest, StepError
from asyncllm.types import Pooling, PromptLogprob, TokenDelta
from asyncllm.wire.messages import (
    NO_TOKEN,
    PooledPrompt,
    ScoredPrompt,
    StepResult,
    decode_result,
    encode,
    pack,
)
from tests.support.engine.scheduling import scheduler, sequence


def part(start: int, end: int, total: list[float]) -> PooledPrompt:
    return PooledPrompt(0, start, end, np.array(total, dtype="<f4").tobytes())


def packed(*values: float) -> bytes:
    return np.array(values, dtype="<f4").tobytes()


def test_chunks_add_up_to_their_mean() -> None:
    hidden = PooledHidden(5)
    assert not hidden.add(part(0, 3, [3.0, 6.0]))
    assert hidden.add(part(3, 5, [7.0, -1.0]))
    assert hidden.delta() == TokenDelta(hidden=packed(2.0, 1.0))


def test_the_last_one_alone_is_what_it_is() -> None:
    hidden = PooledHidden(5)
    assert hidden.add(part(4, 5, [0.1, 2.0]))
    assert hidden.delta().hidden == packed(0.1, 2.0)


def test_who_reads_what() -> None:
    assert reader_of(sequence(1, 5)) is None
    scored = SamplingParams(max_tokens=0, prompt_logprobs=0)
    assert isinstance(reader_of(sequence(1, 5, 0, scored)), PromptScores)
    for pooling, first in (("last", 4), ("mean", 0)):
        seq = sequence(1, 5, 0, PooledParams(pooling=pooling))  # type: ignore[arg-type]
        assert isinstance(reader_of(seq), PooledHidden)
        assert (seq.reads.pool_from, seq.reads.pending) == (first, pooling == "mean")
        assert seq.output.surely_full


def test_a_delta_keeps_it() -> None:
    delta = TokenDelta(hidden=b"abcd")
    delta.merge(TokenDelta(text="a"))
    assert (delta.hidden, delta.text) == (b"abcd", "a")
    whole = TokenDelta()
    whole.merge(delta)
    assert whole.hidden == b"abcd"


def test_results_travel() -> None:
    result = StepResult(1, b"", (), None, 0.0, 0.0, pooled=(part(0, 2, [1.0, 2.0]),))
    assert decode_result(encode(result)) == result


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_that_comes_back_goes_on_where_it_was(pooling: Pooling) -> None:
    """Preempted after its first chunk: what has landed is not asked for again."""
    sched = scheduler(prefill_chunk=4, page_size=4)
    seq = sequence(1, list(range(10, 20)), 0, PooledParams(pooling=pooling))
    sched.add(seq, 0.0)
    planned = sched.plan(0, 0.0)
    assert planned is not None
    [admit] = planned.message.admits
    assert admit.pool_from == (0 if pooling == "mean" else 9)
    mine = PooledPrompt(0, 0, 4, b"")
    pooled = (mine,) if pooling == "mean" else ()
    result = StepResult(0, pack([NO_TOKEN]), (), None, 0.0, 0.0, seconds=0.001, pooled=pooled)
    applied = sched.apply(result, 0.1)
    assert applied.read == [(seq, read) for read in pooled]
    planned = sched.plan(1, 0.1)
    assert planned is not None
    sched.departures.preempt(seq, sched.in_flight[-1], 0.1)
    result = StepResult(
        1, pack([NO_TOKEN]), (), None, 0.0, 0.0, seconds=0.001,
        pooled=(PooledPrompt(0, 4, 8, b""),) if pooled else (),
    )  # fmt: skip
    sched.apply(result, 0.2)
    planned = sched.plan(2, 0.2)
    assert planned is not None
    [admit] = planned.message.admits
    assert admit.pool_from == (8 if pooling == "mean" else 9)
    assert (seq.num_cached, seq.reads.done) == (0, 8 if pooling == "mean" else 0)


def test_nothing_is_told_of_a_prompt_that_has_ended() -> None:
    """Its first chunk failed; the second was on its way by then."""
    sched = scheduler(prefill_chunk=4, page_size=4)
    sched.add(sequence(1, 10, 0, PooledParams(pooling="mean")), 0.0)
    for number in range(2):
        assert sched.plan(number, 0.0) is not None
    assert len(sched.apply(StepResult(0, b"", (), "planted", 0.0, 0.0), 0.1).failed) == 1
    pooled = (PooledPrompt(0, 4, 8, b""),)
    result = StepResult(1, pack([NO_TOKEN]), (), None, 0.0, 0.0, pooled=pooled)
    assert sched.apply(result, 0.2).read == []


# -- vectors ---------------------------------------------------------------------------------------


def test_vectors() -> None:
    hidden = packed(3.0, 4.0, 12.0)
    np.testing.assert_allclose(EmbeddingParams().vector(hidden), np.array([3, 4, 12]) / 13)
    cut = EmbeddingParams(dimensions=2).vector(hidden)
    assert cut.dtype == np.float32
    np.testing.assert_allclose(cut, [0.6, 0.8])
    raw = EmbeddingParams(normalize=False).vector(hidden)
    assert raw.tolist() == [3, 4, 12]
    assert EmbeddingParams().vector(packed(0.0, 0.0)).tolist() == [0.0, 0.0]
    large = EmbeddingParams().vector(packed(3e30, 4e30))
    np.testing.assert_allclose(large, [0.6, 0.8])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_no_vector(value: float) -> None:
    with pytest.raises(StepError, match="not finite"):
        EmbeddingParams().vector(packed(1.0, value))


def test_parameters_are_checked() -> None:
    for fields in ({"dimensions": 0}, {"dimensions": "2"}, {"pooling": "max"}, {"normalize": 2}):
        with pytest.raises(BadRequest) as caught:
            EmbeddingParams(**fields)
        assert caught.value.param == next(iter(fields))
    EmbeddingParams(dimensions=8).check(8)
    with pytest.raises(BadRequest, match="at most 7") as caught:
        EmbeddingParams(dimensions=8).check(7)
    assert caught.value.param == "dimensions"


def scored(row: int, start: int, end: int, columns: int = 3) -> ScoredPrompt:
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
    assert [
        scores.add(scored(3, 1, 3)),
        scores.add(scored(0, 3, 4)),
        scores.add(scored(0, 4, 5)),
    ] == [False, False, True]
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
    assert not scores.add(scored(0, 1, 3))
    assert not scores.add(scored(0, 1, 2))
    assert scores.add(scored(0, 2, 4))
    assert list(scores) == [None, entry(1), entry(2), entry(3)]


def test_one_token_has_nothing_to_score() -> None:
    scores = PromptScores((10,), 2)
    assert scores.add(ScoredPrompt(0, 1, 1, b"", b""))
    assert list(scores) == [None]


def test_a_vocabulary_may_be_smaller_than_what_is_wanted() -> None:
    scores = PromptScores((10, 11), 20)
    assert scores.add(scored(0, 1, 2))
    assert scores[1] == entry(1)
