"""Bounds on what one grammar may cost, which stop a hostile request early."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable
from typing import Any

from asyncllm.errors import BadRequest

#: Bytes of a schema as JSON; the tools of large agents have some 100 kB.
MAX_SCHEMA_BYTES = 512 * 1024
#: Nested objects and arrays of a schema; each property adds two levels.
MAX_SCHEMA_DEPTH = 128
#: Objects, arrays and scalars of one schema together.
MAX_SCHEMA_VALUES = 60_000
MAX_INTEGER_BITS = 512
#: Characters of one regular expression, or of one grammar text.
MAX_PATTERN_CHARS = 8192
MAX_GRAMMAR_CHARS = 64 * 1024
#: Brackets in brackets, in a pattern or a grammar text: the parsers recurse.
MAX_GROUP_DEPTH = 64
#: The largest count in a quantifier such as {2,500}.
MAX_REPEAT = 10_000
#: Parts of one terminal that may be missing or repeat: "a?", "a*", "a{2,9}", "(a|)". The library's
#: cost is quadratic in them: 500 cost 3 ms a mask, 4096 cost 370 ms, 65,536 some 9 GB.
MAX_OPTIONAL_PARTS = 500
#: Strings of one choice, and their characters together.
MAX_CHOICES = 10_000
#: Nested rules. The library recurses along them: 1000 overflow a stack of 2 MB, 3000 one of 8 MB.
MAX_RULE_DEPTH = 300
#: Bytes of the text handed to the grammar library.
MAX_RULES_BYTES = 2 * 1024 * 1024


#: Combinations of positions in intersected patterns. The library may visit all of them: 40,000
#: take 50 ms, 10 million 9 s.
MAX_COMBINED_PLACES = 50_000
#: CPU time of compiling one grammar. Usual schemas take 1 to 50 ms, but a garbage collection of a
#: large program may come in between and takes a second.
MAX_COMPILE_SECONDS = 3.0


class TooSlow(BadRequest):
    """Compiling has used up its time."""

    def __init__(self) -> None:
        super().__init__("the grammar is too costly: it takes too long to compile")


def check_together(spreads: Iterable[int]) -> None:
    """Refuse an intersection with too many combinations of positions.

    Args:
        spreads: ``regex_tree.spread`` of each pattern.
    """
    if math.prod(1 + spread for spread in spreads) > MAX_COMBINED_PLACES:
        raise BadRequest("the patterns are too costly together: look-aheads and counts multiply")


def refused(path: str, keyword: str, reason: str) -> BadRequest:
    """The error for a keyword that cannot be enforced, named with its place in the schema."""
    return BadRequest(f"schema {path}: {keyword!r} {reason}")


class Budget:
    """Bounds the steps and the CPU time of one compilation. A step takes 1 to 30 us.

    Attributes:
        left: steps.
        ends: ``time.thread_time`` of the compiling thread at which the time is used up.
    """

    LIMIT = 40_000
    _STEPS_PER_LOOK = 32  # at the clock, which is a system call

    def __init__(self, seconds: float = MAX_COMPILE_SECONDS) -> None:
        self.left = self.LIMIT
        self.ends = time.thread_time() + seconds
        self._next_look = self.left

    def spend(self, steps: int = 1) -> None:
        """Raises BadRequest when no steps are left, and TooSlow when the time is over."""
        self.left -= steps
        if self.left < 0:
            raise BadRequest("the schema is too complex: its combinations of keywords multiply")
        if self.left < self._next_look:
            self._next_look = self.left - self._STEPS_PER_LOOK
            self.check_time()

    def check_time(self) -> None:
        """Raises TooSlow when the time is over."""
        if time.thread_time() > self.ends:
            raise TooSlow


def check_size(schema: Any) -> None:
    """Check the size and the types of a schema, without recursion, before any other work.

    Raises:
        BadRequest: it is too deep or too large, or holds something that JSON does not have.
    """
    num_values = num_chars = 0
    stack = [(schema, 0)]
    while stack:
        value, depth = stack.pop()
        num_values += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise BadRequest(f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise BadRequest("the schema has a key that is not a string")
            num_chars += sum(map(len, value))
            stack += [(child, depth + 1) for child in value.values()]
        elif isinstance(value, list):
            stack += [(child, depth + 1) for child in value]
        elif isinstance(value, str):
            num_chars += len(value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise BadRequest("the schema has a number beyond the range of 64-bit floats")
        elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            raise BadRequest(f"the schema has an integer of more than {MAX_INTEGER_BITS} bits")
        elif value is not None and not isinstance(value, bool | int | float):
            raise BadRequest(f"the schema has a value of type {type(value).__name__}")
        if num_values + len(stack) > MAX_SCHEMA_VALUES or num_chars > MAX_SCHEMA_BYTES:
            raise BadRequest(
                f"the schema is larger than {MAX_SCHEMA_VALUES} values or {MAX_SCHEMA_BYTES} bytes"
            )


# Without \s, which would run over line ends again and again.
_DEFINITION = re.compile(
    r"^[ \t]*[?!]?[A-Za-z_][\w\-]*(?:\.\d+)?[ \t]*(?:\[[^\]\n]*\][ \t]*)?(?:::=|:)", re.MULTILINE
)


def check_nesting(text: str) -> None:
    """Check a grammar text for a recursive parser. Brackets in strings count, too.

    Raises:
        BadRequest: it is too long or nested too deep.
    """
    if len(text) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"the grammar is longer than {MAX_GRAMMAR_CHARS} characters")
    if len(_DEFINITION.findall(text)) > MAX_RULE_DEPTH:
        raise BadRequest(f"the grammar has more than {MAX_RULE_DEPTH} rules")
    depth = 0
    for char in text:
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth = max(0, depth - 1)
        if depth > MAX_GROUP_DEPTH:
            raise BadRequest(f"the grammar nests deeper than {MAX_GROUP_DEPTH} brackets")


# The pieces of a Lark grammar that matter here.
_PIECE = re.compile(
    r"""
      (?P<comment> //[^\n]* | \#[^\n]* )
    | (?P<string> "(?:\\.|[^"\\\n])*" )
    | (?P<regex> /(?![/*])(?:\\.|[^/\\\n])+/ )
    | (?P<definition> ^[ \t]*[?!]?(?P<defined>\w+)(?:\.\d+)?[ \t]*(?:\[[^\]\n]*\])?[ \t]*: )
    | (?P<name> [A-Za-z_]\w* )
    | (?P<optional> [?*+{\[] )
    | (?P<both> & )
    """,
    re.VERBOSE | re.MULTILINE,
)
_QUANTIFIER = re.compile(r"\\.|[?*+{]|\|(?=[|)])|\((?=\|)")


def check_terminals(lark: str) -> None:
    """Refuse terminals and rules of more than MAX_OPTIONAL_PARTS, and intersections.

    The optional parts of a terminal count wherever another terminal names it. Characters that only
    look like quantifiers may count.
    """
    own: dict[str, int] = {}
    uses: dict[str, list[str]] = {}
    name = ""
    for piece in _PIECE.finditer(lark):
        match piece.lastgroup:
            case "definition" | "defined":
                name = piece["defined"]
            case "both":
                raise BadRequest("the grammar has '&' between terminals, which is not supported")
            case "optional":
                own[name] = own.get(name, 0) + 1
            case "regex":
                found = _QUANTIFIER.findall(piece[0])
                own[name] = own.get(name, 0) + sum(not part.startswith("\\") for part in found)
            case "name" if name.isupper() and piece[0].isupper():
                uses.setdefault(name, []).append(piece[0])
    total: dict[str, int] = {}

    def count(terminal: str) -> int:  # at most MAX_RULE_DEPTH deep
        if terminal not in total:
            total[terminal] = 0  # for cycles, which the library refuses
            below = sum(count(used) for used in uses.get(terminal, ()))
            total[terminal] = own.get(terminal, 0) + below
        return total[terminal]

    for defined in {*own, *uses}:
        if count(defined) > MAX_OPTIONAL_PARTS:
            raise BadRequest(
                f"the grammar is too costly: {defined!r} has more than {MAX_OPTIONAL_PARTS} parts "
                "that may be missing or repeat"
            )
