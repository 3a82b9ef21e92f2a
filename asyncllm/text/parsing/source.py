"""Text that comes in pieces, and the steps by which a parser reads it.

A parser here is a recursive-descent generator that is suspended wherever the text runs out. A step
consumes text only when no further text could change its decision, so cuts make no difference.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias, TypeVar

T = TypeVar("T")

#: A part of a parser: suspended while the text has run out, returns a ``T``.
Steps: TypeAlias = Generator[None, None, T]
Emit: TypeAlias = Callable[[str], object]

SPACE = re.compile(r"[ \t\r\n]+")
_GLANCE = 64  # characters
_READ_AGAIN = 4  # times as many characters as the text has
_SOME_SPACE = re.compile(rf"[ \t\r\n]{{0,{_GLANCE}}}")


class Markers:
    """A set of strings to look for; of several at one place, the longest is meant.

    There may be thousands: what takes long to prepare is made when ``find`` needs it.

    Attributes:
        texts: the strings, the longest first.
        first_chars: of each the first character.
    """

    __slots__ = ("_lengths", "_ordered", "_patterns", "_set", "first_chars", "texts")

    def __init__(self, markers: Iterable[str]):
        self._set = frozenset(marker for marker in markers if marker)
        self._ordered = sorted(self._set)
        self._lengths = sorted({len(marker) for marker in self._set}, reverse=True)
        self._patterns: tuple[re.Pattern[str], re.Pattern[str]] | None = None
        self.texts = tuple(sorted(self._ordered, key=len, reverse=True))
        self.first_chars = frozenset(marker[0] for marker in self._set)

    def find(self, text: str, pos: int, *, ended: bool) -> tuple[int, bool]:
        """The start of the first marker, and whether it is whole.

        Unless the text has ``ended``, the beginning of a marker at its end is found, too.
        (length, False) if there is neither.
        """
        if self._patterns is None:
            self._patterns = _patterns_of(self.texts)
        whole_pattern, beginning = self._patterns
        whole, partial = whole_pattern.search(text, pos), None
        if not ended:
            longest = self._lengths[0] if self._lengths else 0
            partial = beginning.search(text, max(pos, len(text) - longest + 1))
        if whole is not None and (partial is None or whole.start() < partial.start()):
            return whole.start(), True
        return (len(text) if partial is None else partial.start()), False

    def at(self, text: str, pos: int, *, ended: bool) -> str | None:
        """The marker at ``pos``; "" if there is none; None if more text is needed to tell."""
        if not ended and self._lengths and self.begins(text, pos):
            return None
        pieces = (text[pos : pos + length] for length in self._lengths)
        return next((piece for piece in pieces if piece in self._set), "")

    def begins(self, text: str, pos: int) -> bool:
        """Whether the rest of the text is the beginning of a marker, or empty."""
        if pos == len(text):
            return True
        if not self._lengths or len(text) - pos >= self._lengths[0]:
            return False
        rest = text[pos:]
        after = bisect_right(self._ordered, rest)
        return after < len(self._ordered) and self._ordered[after].startswith(rest)


def _patterns_of(texts: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """Patterns of the markers, and of their beginnings at the end of a text."""
    nothing = "(?!)"
    beginnings = "|".join(_beginnings(text) for text in texts if len(text) > 1)
    return (
        re.compile("|".join(map(re.escape, texts)) or nothing),
        re.compile(rf"(?:{beginnings or nothing})\Z"),
    )


def _beginnings(marker: str) -> str:
    """A pattern for the proper beginnings of a marker, the longest first."""
    first, *others = map(re.escape, marker[:-1])
    return first + "".join(f"(?:{char}" for char in others) + ")?" * len(others)


@cache  # called with constants and the fields of formats only
def markers_of(*markers: str) -> Markers:
    """The set of these markers; an empty one stands for none."""
    return Markers(markers)


NO_MARKERS = markers_of()


@dataclass(slots=True, eq=False)
class Source:
    """The text that has come and is not consumed.

    Text that may turn out not to be markup is read after ``mark``; ``unmark`` then returns it, and
    ``rewind`` has it come again. Marks may be nested.

    Attributes:
        cut_off: the text has ended, but the model did not end it.
        waiting: set while nothing is held back and any text goes to ``emit`` unless a marker begins
            in it: the first characters of these markers, and ``emit``.
    """

    cut_off: bool = False
    waiting: tuple[frozenset[str], Emit] | None = None
    _before: int = 0  # characters that came before ``_text``
    _text: str = ""
    _pos: int = 0
    _ended: bool = False
    _read_again: int = 0  # characters that came again
    # What has been consumed since each mark, or the next one.
    _marks: list[list[str]] = field(default_factory=list)

    @property
    def consumed(self) -> int:
        """How many characters have been consumed in all."""
        return self._before + self._pos

    @property
    def may_look_on(self) -> bool:
        """Whether to read to the end of the text and back: while that was not done too often."""
        return not self._ended or self._read_again < _READ_AGAIN * (self._before + len(self._text))

    def pass_by(self, length: int) -> None:
        """Count text of this length as consumed: it was emitted without being fed (``waiting``)."""
        self._before += length

    def feed(self, piece: str) -> None:
        self._before += self._pos
        self._text = self._text[self._pos :] + piece if self._pos < len(self._text) else piece
        self._pos = 0

    def put_before(self, text: str) -> None:
        """Have a text come before the first one, as if the prompt had not ended with it."""
        self._before = -len(text)
        self._text = text

    def end(self, *, cut_off: bool = False) -> None:
        self._ended = True
        self.cut_off = cut_off

    def mark(self, consumed: str = "") -> None:
        """From now on keep the text that is consumed, behind the text just consumed."""
        self._marks.append([consumed] if consumed else [])

    def unmark(self) -> str:
        """Forget the latest mark; return the text that was consumed since."""
        text = "".join(self._marks.pop())
        if self._marks:
            self._marks[-1].append(text)
        return text

    def rewind(self, length: int = 0) -> str:
        """Forget the latest mark; return ``length`` characters since, and have the rest come again.

        Not for a mark that was given text.
        """
        text = "".join(self._marks.pop())
        kept, again = text[:length], text[length:]
        self._read_again += len(again)
        if self._marks:
            self._marks[-1].append(kept)
        if len(again) <= self._pos:
            self._pos -= len(again)
        else:
            self._before -= len(again) - self._pos
            self._text = again + self._text[self._pos :]
            self._pos = 0
        return kept

    def drop(self) -> None:
        """Discard the rest of a text that has ended."""
        self._consume(len(self._text))

    def peek(self) -> Steps[str]:
        """The next character, which is not consumed; "" at the end."""
        while self._pos == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._pos]

    def glance(self) -> Steps[str]:
        """The next character behind a little space; "" if there is none. Nothing is consumed."""
        while True:
            end = _SOME_SPACE.match(self._text, self._pos).end()  # type: ignore[union-attr]
            if end < len(self._text):
                return self._text[end]
            if end - self._pos == _GLANCE or not (yield from self._more()):
                return ""

    def take(self, chars: str) -> Steps[str]:
        """Consume the next character if it is one of these; else ""."""
        char = yield from self.peek()
        return self._consume(self._pos + 1) if char and char in chars else ""

    def run(self, pattern: re.Pattern[str], limit: int | None = None) -> Steps[str]:
        """Consume characters of one kind, at most ``limit``; ``pattern`` matches a run of them."""
        pieces: list[str] = []
        room = limit
        while room != 0 and (self._pos < len(self._text) or (yield from self.peek())):
            stop = len(self._text) if room is None else self._pos + room
            match = pattern.match(self._text, self._pos, stop)
            if match is None:
                break
            pieces.append(self._consume(match.end()))
            room = None if room is None else room - len(pieces[-1])
        return "".join(pieces) if pieces else ""

    def skip_space(self) -> Steps[None]:
        """Consume whitespace."""
        yield from self.run(SPACE)

    def at(self, markers: Markers) -> Steps[str]:
        """Consume the marker that comes next; "" if none does."""
        while (marker := markers.at(self._text, self._pos, ended=self._ended)) is None:
            yield from self._more()
        if marker:
            self._consume(self._pos + len(marker))
        return marker

    def sees(self, markers: Markers, behind: int = 0) -> Steps[bool]:
        """Whether one of the markers comes next, or ``behind`` so many characters that are there.

        Nothing is consumed.
        """
        while (marker := markers.at(self._text, self._pos + behind, ended=self._ended)) is None:
            yield from self._more()
        return bool(marker)

    def breaks_off(self, markers: Markers) -> Steps[bool]:
        """Consume the rest of a text that has ended, if it begins a marker or is empty.

        Only called where no whole marker comes next.
        """
        yield from self.peek()
        if not self._ended or not markers.begins(self._text, self._pos):
            return False
        self._consume(len(self._text))
        return True

    def until(self, markers: Markers, emit: Emit, *, breaks_off: bool = False) -> Steps[bool]:
        """Consume and emit text as it comes, up to the next marker; False if there is none.

        With ``breaks_off``, a marker that the end of the text cuts off is discarded.
        """
        while True:
            ended = self._ended and not breaks_off
            end, found = markers.find(self._text, self._pos, ended=ended)
            if end > self._pos:
                emit(self._consume(end))
            if found:
                return True
            if self._ended:
                self.drop()
                return False
            if self._pos == len(self._text) and not self._marks:
                self.waiting = markers.first_chars, emit
            more = yield from self._more()
            self.waiting = None
            if not more:
                return False

    def stream(self, pattern: re.Pattern[str], emit: Emit) -> Steps[bool]:
        """Consume and emit characters of one kind as they come; False if the text ends so."""
        while True:
            if match := pattern.match(self._text, self._pos):
                emit(self._consume(match.end()))
            if self._pos < len(self._text):
                return True
            if not (yield from self._more()):
                return False

    def _more(self) -> Steps[bool]:
        """Wait for text; False if it has ended."""
        if self._ended:
            return False
        yield
        return True

    def _consume(self, end: int) -> str:
        piece = self._text[self._pos : end]
        self._pos = end
        if self._marks:
            self._marks[-1].append(piece)
        return piece
