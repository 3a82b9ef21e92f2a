"""How long outputs are expected to become."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.scheduling.forecast import (
    FIRST_GUESS,
    NUM_BINS,
    OutputLengths,
    _first_of,
    bin_of,
)

CONTEXT = 32_000


def pass_bins(lengths: OutputLengths, num_tokens: int) -> None:
    for index in range(bin_of(num_tokens)):
        lengths.passed(index)


def end(lengths: OutputLengths, num_tokens: int) -> None:
    pass_bins(lengths, num_tokens)
    lengths.ended(bin_of(num_tokens))


def test_bins_follow_each_other() -> None:
    for index in range(NUM_BINS):
        first, after = _first_of(index), _first_of(index + 1)
        assert bin_of(first) == bin_of(after - 1) == index
        assert after - first <= max(16, first / 4)


def test_before_any_output_has_ended_they_are_expected_to_be_long() -> None:
    lengths = OutputLengths()
    assert lengths.expected(0, 500) == 500
    assert FIRST_GUESS < lengths.expected(0, 2 * FIRST_GUESS) < 2 * FIRST_GUESS


def test_where_none_is_assumed_to_end_before_its_limit() -> None:
    lengths = OutputLengths(first_guess=math.inf, prior_weight=8.0)
    assert lengths.expected(0, 500) == 500
    pass_bins(lengths, 20_000)  # and reached its limit there
    assert lengths.expected(70, CONTEXT) == CONTEXT
    end(lengths, 30)
    assert lengths.expected(0, CONTEXT) > 0.8 * CONTEXT
    for _ in range(60):
        end(lengths, 30)
    assert lengths.expected(0, CONTEXT) < 0.2 * CONTEXT
    assert round(lengths.expected(70, CONTEXT)) == CONTEXT


def test_a_few_outputs_teach_how_long_they_are() -> None:
    lengths = OutputLengths()
    for _ in range(4):
        end(lengths, 60)
    assert 60 <= lengths.expected(0, 2000) < 200
    for _ in range(200):
        end(lengths, 60)
    assert 50 < lengths.expected(0, 2000) < 70


def test_an_output_that_is_long_already_is_like_other_long_ones() -> None:
    lengths = OutputLengths()
    for number in range(1000):
        end(lengths, 50 if number % 5 else 2000)
    assert 300 < lengths.expected(0, CONTEXT) < 700
    assert 1700 < lengths.expected(100, CONTEXT) < 2300
    assert 1700 < lengths.expected(1700, CONTEXT) < 2300


def test_outputs_under_way_are_noticed_before_they_end() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        end(lengths, 60)
    for _ in range(100):
        pass_bins(lengths, 500)
    assert lengths.expected(0, CONTEXT) > 400


@given(
    st.lists(st.tuples(st.integers(0, CONTEXT), st.booleans()), max_size=50),
    st.integers(0, CONTEXT),
    st.integers(1, CONTEXT),
)
def test_an_expectation_is_between_what_there_is_and_what_there_may_be(
    seen: list[tuple[int, bool]], num_tokens: int, most: int
) -> None:
    lengths = OutputLengths()
    for length, ended in seen:
        (end if ended else pass_bins)(lengths, length)
    found = lengths.expected(num_tokens, most)
    assert min(num_tokens, most) <= found <= most * (1 + 1e-9)
    assert found == most or found >= lengths.expected(num_tokens, max(1, most // 2)) * (1 - 1e-9)
