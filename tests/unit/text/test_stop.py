from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.text import StopStrings


def plain_search(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The definition, on the whole text: first complete, then longest."""
    for end in range(len(text) + 1):
        matched = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if matched is not None:
            return text[: end if include else end - len(matched)], matched
    return text, None


small_texts = st.text(st.sampled_from("ab🙂"), max_size=12)


@given(
    parts=st.lists(small_texts, max_size=8),
    stops=st.lists(st.text(st.sampled_from("ab🙂"), min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_any_cut_gives_the_same(parts: list[str], stops: list[str], include: bool) -> None:
    stop = StopStrings(tuple(stops), include)
    delivered = "".join([stop.push(part) for part in parts] + [stop.finish()])
    assert (delivered, stop.matched) == plain_search("".join(parts), tuple(stops), include)


@given(text=small_texts, stops=st.lists(small_texts.filter(bool), min_size=1, max_size=3))
def test_only_a_partial_match_is_held_back(text: str, stops: list[str]) -> None:
    stop = StopStrings(tuple(stops))
    delivered = "".join(map(stop.push, text))
    if stop.matched is None:
        held = text[len(delivered) :]
        assert held == "" or any(s.startswith(held) for s in stops)
        ends = [text[i:] for i in range(len(delivered))]
        assert not any(s.startswith(end) for s in stops for end in ends)


def test_nothing_after_a_match() -> None:
    stop = StopStrings(("\nUser:",))
    assert [stop.push(piece) for piece in ("Hi", "\nUs", "er: you", "more")] == ["Hi", "", "", ""]
    assert stop.matched == "\nUser:"
    assert stop.finish() == ""


def test_held_text_comes_out_when_the_match_fails_or_the_text_ends() -> None:
    stop = StopStrings(("###",))
    assert [stop.push(piece) for piece in ("a#", "#b", "##")] == ["a", "##b", ""]
    assert stop.finish() == "##"
    assert stop.matched is None


def test_include_shows_the_stop_string_and_holds_nothing_back() -> None:
    stop = StopStrings(("###",), include=True)
    assert [stop.push(piece) for piece in ("a#", "#b#", "##c")] == ["a#", "#b#", "##"]
    assert stop.matched == "###"
    assert stop.finish() == ""


@pytest.mark.parametrize(
    ("stops", "text", "delivered", "matched"),
    [
        (("abcd", "bc"), "xabcd", "xa", "bc"),  # complete first
        (("b", "ab"), "xab", "x", "ab"),  # complete at the same character: the longest
        (("b", "a"), "xab", "x", "a"),
    ],
)
def test_which_one_wins(stops: tuple[str, ...], text: str, delivered: str, matched: str) -> None:
    stop = StopStrings(stops)
    assert stop.push(text) == delivered
    assert stop.matched == matched


def test_without_stops_everything_passes() -> None:
    stop = StopStrings(())
    assert [stop.push("a"), stop.push(""), stop.finish(), stop.matched] == ["a", "", "", None]
