"""Reads one value in the notation of JSON or of Python, and writes it as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Final

from asyncllm.text.parsing.literal_atoms import QUOTES, LiteralString, constant_of
from asyncllm.text.parsing.source import NO_MARKERS, SPACE, Emit, Markers, Source, Steps, markers_of

_CLOSERS: Final = {"{": "}", "[": "]", "(": ")"}
_CLOSING: Final = ")]}"
_SPACE: Final = " \t\r\n"
#: What a value in brackets is followed by.
_ENDS: Final = ",)]}"
_IN_LINE = re.compile(r"[ \t\r]+")
_WORD = re.compile(r"[\w.+-]+")
_KEY = re.compile(r"[^\s:=,()\[\]{}'\"<]+")
_STARS = re.compile(r"\*+")
_PLAIN = re.compile(r"[^,()\[\]{}<>`|]+")  # no bracket and no marker begins in it


class _Frame:
    """A bracket that is open.

    Attributes:
        kind: "object"; "list"; "call", the arguments of a call in Python; "rest", an object behind
            two stars, whose members are the call's; "tuple"; "round", a parenthesis that may
            hold one value or be a tuple, which its first comma shows; or "curly", in Python an
            object or a set, which becomes a list: what follows the first item shows it.
        count: how many items have been written.
        at: the place of a "round" or "curly" among the pieces held back.
        named: an argument with its name has come, so each of those behind it has a name, too.
        empty: a comma came before any item.
    """

    __slots__ = ("at", "closer", "count", "empty", "kind", "named")

    def __init__(self, kind: str, closer: str, count: int = 0, at: int = 0):
        self.kind = kind
        self.closer = closer
        self.count = count
        self.at = at
        self.named = self.empty = False


class Literal:
    """One value, of any depth, in time linear in its text.

    JSON is written as it is. All else is mended so that what is written is JSON, wherever the text
    ends: Python's constants, strings, tuples and arguments of calls are translated; commas, names
    and brackets that are missing are filled in; numbers that JSON does not have are null; any other
    text is a string. Strings are written as they come.

    Attributes:
        exact: so far there was nothing but constants, strings and brackets.

    Args:
        stops: markers that end the value, unless they are within a string.
        quote: another mark around strings, which know no escapes then.
        of_call: a parenthesis opens the arguments of a call in Python.
        names: of its parameters, for arguments that have none.
        calls: how other calls in Python begin. One ends this call if it begins a line, or stands
            where no argument can.
    """

    def __init__(
        self,
        source: Source,
        emit: Emit,
        *,
        stops: Markers = NO_MARKERS,
        quote: str = "",
        of_call: bool = False,
        names: Sequence[str] = (),
        calls: Markers = NO_MARKERS,
    ):
        self._source = source
        self._emit = emit
        self._calls = calls
        self._stops = stops
        self._strings = LiteralString(source, stops, markers_of(quote), calls)
        self._names = names
        self._of_call = of_call
        self._in_python = False  # the arguments of a call: spaces are written anew
        self._open: list[_Frame] = []
        self._whole = True
        self.exact = True
        # What belongs before the next value: space, a comma, its name. Dropped if none comes.
        self._before = ""
        self._separated = False  # by a comma
        self._pieces: list[str] = []  # held back while parentheses are "round"
        self._undecided = 0  # how many are

    def read(self) -> Steps[bool]:
        """Read the value, from its first character; return whether it is whole."""
        if self._of_call and (yield from self._source.take("(")):
            self._in_python = True
            self._write("{")
            self._open.append(_Frame("call", ")"))
        else:
            yield from self._value()
        while self._open and self._whole:
            self._whole = yield from self._item(self._open[-1])
        while self._open:
            self._close()
        return self._whole

    def _item(self, frame: _Frame) -> Steps[bool]:
        """Read an item, a comma or a closing bracket; False if the value ends before."""
        source = self._source
        char = yield from source.peek()
        if char and char in _SPACE:
            space = yield from self._space()
            self._before += "" if self._in_python else space
            char = yield from source.peek()
        if not char or (yield from self._stopped(char)):
            return False
        if char in _CLOSING:
            return (yield from self._closes(char))
        if char == ",":
            yield from source.take(char)
            self._comma(frame)
        elif frame.kind == "call":
            yield from self._argument(frame, char)
        elif frame.kind in ("object", "rest", "curly"):
            yield from self._member(frame, char)
        else:
            self._separate(frame)
            yield from self._value()
        return self._whole

    def _closes(self, char: str) -> Steps[bool]:
        """Consume a closing bracket, and close those within; False if none of ours was open."""
        depths = enumerate(reversed(self._open), start=1)
        depth = next((depth for depth, frame in depths if frame.closer == char), 0)
        if not depth:
            return False
        yield from self._source.take(char)
        self._write(self._before.replace(",", ""))
        self._before, self._separated = "", False
        for _ in range(depth):
            self._close()
        return True

    def _close(self) -> None:
        frame = self._open.pop()
        if frame.kind == "curly":
            self._becomes(frame, "object")
        if frame.kind == "rest":
            self._open[-1].count = frame.count
        elif frame.kind != "round":
            self._write("]" if frame.kind in ("list", "tuple") else "}")
        else:
            if frame.count != 1:
                self._pieces[frame.at] = "["
                self._write("]")
            self._decide()

    def _comma(self, frame: _Frame) -> None:
        if frame.kind == "round":
            self._pieces[frame.at] = "["
            frame.kind = "tuple"
            self._decide()
        frame.empty |= not frame.count
        if frame.count and not self._separated:
            self._separated = True
            self._before += ","

    def _becomes(self, frame: _Frame, kind: str) -> None:
        """It is clear what a "curly" frame is."""
        frame.kind = kind
        self._pieces[frame.at] = "{" if kind == "object" else "["
        self._decide()

    def _decide(self) -> None:
        """It is clear what one more bracket was."""
        self._undecided -= 1
        if not self._undecided:
            self._emit("".join(self._pieces))
            self._pieces.clear()

    def _separate(self, frame: _Frame) -> None:
        """An item begins: there must be a comma before it, unless it is the first."""
        if self._in_python:
            self._before = ", " if frame.count else ""
        elif frame.count and not self._separated:
            self._before = "," + (self._before or " ")
        self._separated = False

    def _argument(self, frame: _Frame, char: str) -> Steps[None]:
        """Read an argument of a call, with its name or without."""
        source = self._source
        if char == "*" and len((yield from source.run(_STARS))) == 2:
            yield from source.skip_space()
            if (yield from source.take("{")):
                self._open.append(_Frame("rest", "}", frame.count))
                return
        if (frame.named or frame.empty) and (yield from source.sees(self._calls)):
            self._whole = False
            return
        self._separate(frame)
        word = yield from source.run(_WORD)
        space = yield from self._space()
        if word and (yield from source.take("=")):
            yield from self._space()
            frame.named = True
            yield from self._named(json.dumps(word, ensure_ascii=False) + ": ")
            return
        if not (yield from source.peek()) and not constant_of(word, breaks_off=False):
            return  # part of a name
        known = frame.count < len(self._names)
        name = self._names[frame.count] if known else str(frame.count)
        self._before += json.dumps(name, ensure_ascii=False) + ": "
        if word:
            yield from self._bare(word, space)
        else:
            yield from self._value()

    def _member(self, frame: _Frame, char: str) -> Steps[None]:
        """Read a name, a colon and a value of an object."""
        source = self._source
        pieces, word = list[str](), ""
        if (yield from self._strings.opens(char)):
            self._whole = yield from self._strings.read(
                pieces.append, in_python=self._in_python, followed_by=""
            )
        elif word := (yield from source.run(_KEY)):
            self.exact = False
            pieces.append(json.dumps(word, ensure_ascii=False))
        else:
            self.exact = False
            yield from source.take(char)  # no name begins with it
            return
        before = yield from source.run(SPACE)
        if frame.kind == "curly":
            char = yield from source.peek()
            self._becomes(frame, "list" if char and char in _ENDS else "object")
            if frame.kind == "list":
                self._begin()
                self._write(constant_of(word, breaks_off=False) or "".join(pieces))
                return
        if (yield from source.take(":=")) == "=":
            yield from source.take(">")
        after = yield from source.run(SPACE)
        self._separate(frame)
        between = ": " if self._in_python else f"{before}:{after}"
        yield from self._named("".join(pieces) + between)

    def _named(self, name: str) -> Steps[None]:
        """Read the value of a member; null if there is none, nothing if the text ends."""
        char = yield from self._source.peek()
        self._before += name
        if char and char in _ENDS:
            self.exact = False
            self._begin()
            self._write("null")
        elif char and not (yield from self._stopped(char)):
            yield from self._value()

    def _value(self) -> Steps[None]:
        source = self._source
        char = yield from source.peek()
        if char and (yield from self._strings.opens(char)):
            followed_by = _ENDS if self._open else ""
            self._begin()
            self._whole = yield from self._strings.read(
                self._write, in_python=self._in_python, followed_by=followed_by
            )
        elif closer := _CLOSERS.get(char):
            yield from source.take(char)
            self._begin()
            if char == "(" or (char == "{" and self._in_python):
                kind = "round" if char == "(" else "curly"
                self._open.append(_Frame(kind, closer, at=len(self._pieces)))
                self._undecided += 1
                self._pieces.append("")
            else:
                self._open.append(_Frame("object" if char == "{" else "list", closer))
                self._write(char)
        elif not char or not (yield from self._strings.breaks_off(char)):
            word = yield from source.run(_WORD)
            yield from self._bare(word, (yield from self._space()))

    def _bare(self, word: str, space: str) -> Steps[None]:
        """Read a value that begins with a word: a constant, a number, or else a string."""
        source = self._source
        char = yield from source.peek()
        constant = constant_of(word, breaks_off=not char)
        self._begin()
        ends = not char or char in _ENDS or (yield from self._stopped(char))
        self.exact &= bool(constant) and ends
        if word and (ends or (constant and char in QUOTES)):
            self._write(constant or json.dumps(word, ensure_ascii=False))
            self._before = "" if self._in_python else space
            return
        pieces, closers = [word, space], list[str]()
        while char and not (yield from self._stopped(char)):
            if char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif char in _CLOSING:
                if not closers or closers.pop() != char:
                    break
            elif char == "," and not closers:
                break
            pieces.append((yield from source.take(char)))
            pieces.append((yield from source.run(_PLAIN)))
            char = yield from source.peek()
        self._write(json.dumps("".join(pieces).strip(), ensure_ascii=False))

    def _space(self) -> Steps[str]:
        """Consume whitespace, up to a call that begins a line."""
        source = self._source
        if not self._calls.texts:
            return (yield from source.run(SPACE))
        pieces: list[str] = []
        while True:
            pieces.append((yield from source.run(_IN_LINE)))
            char = yield from source.peek()
            if char != "\n" or (yield from self._stopped(char)):
                return "".join(pieces)
            pieces.append((yield from source.take("\n")))

    def _stopped(self, char: str) -> Steps[bool]:
        """Whether a marker, or a call, comes next that ends the value; ``char`` comes next."""
        if char in self._stops.first_chars and (yield from self._source.sees(self._stops)):
            return True
        calls = self._calls
        return bool(char == "\n" and calls.texts and (yield from self._source.sees(calls, 1)))

    def _begin(self) -> None:
        """A value begins: write what belongs before it."""
        self._write(self._before)
        self._before = ""
        if self._open:
            self._open[-1].count += 1

    def _write(self, text: str) -> None:
        if self._undecided:
            self._pieces.append(text)
        elif text:
            self._emit(text)
