"""One sequence's way out: any cut of a text into tokens ends at the same place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.engine.requests.stream import OutputStream
from asyncllm.text import StopStrings
from asyncllm.text.decoding import ByteDetokenizer
from asyncllm.text.stop import LateStopStrings
from asyncllm.types import FinishReason, Reasoning, SamplingParams, TokenDelta
from tests.support.engine.fake_executor import ListSink


def delivered(pieces: list[bytes], params: SamplingParams) -> TokenDelta:
    """What a sequence of tokens with these bytes comes to, if it has no more."""
    sink = ListSink()
    detokenizer = ByteDetokenizer(dict(enumerate(pieces)), strip_first_space=False)
    stream = OutputStream(params, sink, detokenizer, (), 0.0)
    for token in range(len(pieces)):
        last = FinishReason.LENGTH if token == len(pieces) - 1 else None
        if stream.push(token, last, None) is not None:
            break
    whole = TokenDelta()
    for delta in sink.deltas:
        whole.merge(delta)
    return whole


def cuts(data: bytes) -> Iterator[list[bytes]]:
    """All ways to cut bytes into pieces, characters being cut as well."""
    for marks in product((False, True), repeat=len(data) - 1):
        pieces, start = [], 0
        for at, mark in enumerate(marks, 1):
            if mark:
                pieces.append(data[start:at])
                start = at
        yield [*pieces, data[start:]]


@pytest.mark.parametrize(
    ("reasoning", "expected"),
    [
        (Reasoning((0,), (3,)), "<think>a stop b</think>c "),  # begun by the first token
        (Reasoning((9,), (3,), is_open=True), "<think>a stop b</think>c "),  # and by the prompt
        (Reasoning((9,), (3,)), "<think>a "),  # not begun at all
        (None, "<think>a "),
    ],
)
def test_reasoning_is_not_stopped(reasoning: Reasoning | None, expected: str) -> None:
    pieces = [b"<think>", b"a st", b"op b", b"</think>", b"c s", b"top d"]
    params = SamplingParams(stop=("stop",), reasoning=reasoning)
    whole = delivered(pieces, params)
    assert (whole.text, whole.stop_reason) == (expected, "stop")


def test_reasoning_whose_end_is_several_tokens_is_not_stopped() -> None:
    reasoning = Reasoning(end_texts=("</e>", "[e]"), is_open=True)
    params = SamplingParams(stop=("st",), reasoning=reasoning)
    for pieces in cuts("ést</e>cst d".encode()):
        whole = delivered(pieces, params)
        assert (whole.text, whole.stop_reason) == ("ést</e>c", "st"), pieces


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize(
    ("text", "stops", "expected", "reason"),
    [
        ("xENDy", ("END",), "x", "END"),
        ("aab🙂c", ("ab🙂",), "a", "ab🙂"),
        ("ENENDE", ("END",), "EN", "END"),
        ("é🙂éé", ("éé", "🙂éx"), "é🙂", "éé"),
        ("a🙂b END", ("ENDS", "🙂c"), "a🙂b END", None),
        ("EN", ("END",), "EN", None),
    ],
)
def test_every_cut_gives_the_same(
    text: str, stops: tuple[str, ...], expected: str, reason: str | None, include: bool
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=include)
    if reason is not None and include:
        expected += reason
    for pieces in cuts(text.encode()):
        whole = delivered(pieces, params)
        assert (whole.text, whole.stop_reason) == (expected, reason), pieces
        assert whole.finish_reason is (FinishReason.STOP if reason else FinishReason.LENGTH)


small = st.text(st.sampled_from("ab🙂"), min_size=1, max_size=6)


@given(
    text=small,
    stops=st.lists(small.filter(lambda stop: len(stop) < 4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_every_cut_of_any_text_gives_the_same(text: str, stops: list[str], include: bool) -> None:
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include)
    found = {
        (whole.text, whole.stop_reason, whole.finish_reason)
        for pieces in cuts(text.encode()[:10].decode(errors="ignore").encode() or b"a")
        for whole in [delivered(pieces, params)]
    }
    assert len(found) == 1


def late_search(
    pieces: list[str], stops: tuple[str, ...], include: bool, early: int
) -> tuple[str, str | None]:
    """The definition: the first stop string that is complete after the first pieces."""
    text = "".join(pieces)
    for end in range(len("".join(pieces[:early])) + 1, len(text) + 1):
        matched = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if matched is not None:
            return text[: end if include else end - len(matched)], matched
    return text, None


@given(
    pieces=st.lists(st.text(st.sampled_from("ab🙂"), max_size=4), max_size=6),
    stops=st.lists(
        st.text(st.sampled_from("ab🙂"), min_size=1, max_size=4), min_size=1, max_size=3
    ),
    include=st.booleans(),
    early=st.integers(0, 4),
)
def test_min_tokens_hold_stop_strings_back(
    pieces: list[str], stops: list[str], include: bool, early: int
) -> None:
    stop = LateStopStrings(tuple(stops), include, early)
    text = "".join([*map(stop.push, pieces), stop.finish()])
    assert (text, stop.matched) == late_search(pieces, tuple(stops), include, early)


def test_min_tokens_and_stop_strings_of_a_sequence() -> None:
    pieces = [b"a", b"EN", b"D", b"E", b"N", b"D", b"x"]
    late = delivered(pieces, SamplingParams(stop=("END",), min_tokens=3))
    assert (late.text, late.stop_reason, len(late.token_ids)) == ("aEND", "END", 6)
    soon = delivered(pieces, SamplingParams(stop=("END",), min_tokens=2))
    assert (soon.text, len(soon.token_ids)) == ("a", 3)
    never = delivered(pieces, SamplingParams(stop=("END",), min_tokens=6))
    assert (never.text, never.finish_reason) == ("aENDENDx", FinishReason.LENGTH)


def test_without_min_tokens_nothing_is_late() -> None:
    stream = OutputStream(
        SamplingParams(stop=("x",)),
        ListSink(),
        ByteDetokenizer({}, strip_first_space=False),
        (),
        0.0,
    )
    assert type(stream._stop) is StopStrings
