"""The steps by which text in pieces is read, against their definition on the whole text."""

from __future__ import annotations

import re
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from asyncllm.text.parsing.source import Markers, Source, Steps

small = st.text("ab<", max_size=12)
marker_sets = st.sets(st.text("ab<", min_size=1, max_size=4), max_size=4)


def run(steps: Callable[[Source], Steps[None]], pieces: list[str]) -> None:
    """Feed pieces to a reader, then the end."""
    source = Source()
    reader = steps(source)
    next(reader, None)
    for piece in pieces:
        source.feed(piece)
        next(reader, None)
    source.end()
    for _ in reader:
        pass


@given(data=st.data(), markers=marker_sets)
def test_until_finds_what_comes_first(data: st.DataObject, markers: set[str]) -> None:
    parts = st.sampled_from(sorted(markers)) | small if markers else small
    text = "".join(data.draw(st.lists(parts, max_size=5)))
    size = data.draw(st.integers(1, 4))
    found: list[str] = []

    def read(source: Source) -> Steps[None]:
        looked_for = Markers(markers)
        while (yield from source.until(looked_for, found.append)):
            found.append("[" + (yield from source.at(looked_for)) + "]")

    run(read, [text[at : at + size] for at in range(0, len(text), size)])
    pattern = "|".join(map(re.escape, sorted(markers, key=len, reverse=True)))
    assert "".join(found) == (re.sub(pattern, lambda m: f"[{m[0]}]", text) if markers else text)


def test_a_marker_within_the_beginning_of_another_waits_for_it() -> None:
    found: list[str] = []

    def read(source: Source) -> Steps[None]:
        yield from source.until(Markers(("ab<", "b")), found.append)
        found.append((yield from source.at(Markers(("ab<", "b")))))

    run(read, ["ab", "<"])
    run(read, ["ab", "a"])
    run(read, ["ab"])
    assert found == ["ab<", "a", "b", "a", "b"]


@given(text=small, markers=marker_sets)
def test_at_and_breaks_off(text: str, markers: set[str]) -> None:
    found: list[str | bool] = []

    def read(source: Source) -> Steps[None]:
        looked_for = Markers(markers)
        found.append((yield from source.at(looked_for)))
        if not found[0]:
            found.append((yield from source.breaks_off(looked_for)))
        yield from source.until(Markers(()), found.append)

    run(read, list(text))
    expected: list[str | bool]
    marker = max((marker for marker in markers if text.startswith(marker)), key=len, default="")
    if marker:
        expected = [marker]
    else:
        breaks_off = any(marker.startswith(text) for marker in markers)
        expected = ["", breaks_off or not text]
        text = "" if breaks_off else text
    rest = text[len(marker) :]
    assert found[: len(expected)] == expected
    assert "".join(str(piece) for piece in found[len(expected) :]) == rest


@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=4),
    rest=small,
    limit=st.none() | st.integers(0, 8),
)
def test_run_takes_characters_of_a_kind(pieces: list[str], rest: str, limit: int | None) -> None:
    pieces = [*pieces, rest]
    found: list[str] = []

    def read(source: Source) -> Steps[None]:
        source.mark("kept ")
        source.mark()
        found.append((yield from source.run(re.compile("[ab]+"), limit)))
        found.append((yield from source.take("<b")))
        found.append(source.rewind(len(found[0])))  # has the second come again
        found.append((yield from source.take("<b")))
        found.append(source.unmark())

    run(read, pieces)
    text = "".join(pieces)
    end = next((at for at, char in enumerate(text) if char == "<"), len(text))
    taken = text[:end][:limit]
    following = text[len(taken) : len(taken) + 1]
    char = following if following in "<b" else ""
    assert found == [taken, char, taken, char, f"kept {taken}{char}"]
