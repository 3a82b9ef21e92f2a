"""What one grammar may cost: bounds that a hostile request meets before the machine does."""

from __future__ import annotations

import math
import re
from typing import Any

from asyncllm.errors import BadRequest

#: Of a schema, written as JSON; tools of large agents have some 100 kB.
MAX_SCHEMA_BYTES = 512 * 1024
#: Nesting of a schema's objects and arrays together: a property is two levels deeper.
MAX_SCHEMA_DEPTH = 128
#: Objects, arrays and scalars of one schema together.
MAX_SCHEMA_VALUES = 60_000
MAX_INTEGER_BITS = 512
#: Characters of one regular expression, or of one grammar text.
MAX_PATTERN_CHARS = 8192
MAX_GRAMMAR_CHARS = 64 * 1024
#: Brackets in brackets, in a pattern or a grammar text: the parsers behind recurse.
MAX_GROUP_DEPTH = 64
#: The largest count in a quantifier such as {2,500}.
MAX_REPEAT = 10_000
#: Strings of one choice, and their characters together.
MAX_CHOICES = 10_000
#: Rules in rules. The library recurses along them: 1000 overflow a stack of 2 MB, 3000 one of 8 MB.
MAX_RULE_DEPTH = 300
#: Of the text handed to the grammar library.
MAX_RULES_BYTES = 2 * 1024 * 1024


def refused(path: str, keyword: str, reason: str) -> BadRequest:
    """The error for a keyword that cannot be enforced, named with its place in the schema."""
    return BadRequest(f"schema {path}: {keyword!r} {reason}")


class Budget:
    """Counts the steps of one compilation, so that none runs away. A step takes 1 to 30 us."""

    LIMIT = 40_000

    def __init__(self) -> None:
        self.left = self.LIMIT

    def spend(self, steps: int = 1) -> None:
        """Raises BadRequest when nothing is left."""
        self.left -= steps
        if self.left < 0:
            raise BadRequest("the schema is too complex: its combinations of keywords multiply")


def check_size(schema: Any) -> None:
    """Refuse what is too deep or too large, without recursion and before anything else is done.

    Raises:
        BadRequest: it is, or holds something JSON does not have.
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
    """Refuse a grammar text that is too long, or nested too deep for a recursive parser.

    Raises:
        BadRequest: it is. Brackets in strings count: a bound that is too strict harms nobody.
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
