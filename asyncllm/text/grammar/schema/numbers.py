"""Numbers: what keywords say about them. Arithmetic is decimal and exact."""

from __future__ import annotations

import json
import math
from decimal import Decimal, localcontext
from typing import Any

import msgspec
from msgspec.structs import replace

from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema.atoms import Atom, Bound, In, Integer, Multiple

#: The library looks at all remainders: 10,000 of them take 70 ms, a million takes minutes.
MAX_MULTIPLE = 10_000


class NumberShape(msgspec.Struct, frozen=True):
    """A range of numbers.

    Attributes:
        low, high: the bounds, None for none, and whether they are exclusive.
        integer: whether there is no fraction (True), or must be one (False).
        multiple: all numbers are multiples of it.
        values: the only values, as texts; all other conditions have been applied to them.
        excluded: numbers that are not in the range.
        path: the place of the multiple in the schema.
    """

    low: Decimal | None = None
    low_exclusive: bool = False
    high: Decimal | None = None
    high_exclusive: bool = False
    integer: bool | None = None
    multiple: Decimal | None = None
    values: tuple[str, ...] | None = None
    excluded: tuple[Decimal, ...] = ()
    path: str = "#"

    def empty(self) -> bool:
        if self.values is not None:
            return not self.values
        if self.low is None or self.high is None:
            return False
        if self.low_exclusive or self.high_exclusive:
            return self.low >= self.high
        return self.low > self.high

    def certain(self) -> bool:
        """Whether each of ``number_regex.terms`` certainly has a text.

        The digits allowed there suffice to write a bound, or a number between two bounds.
        """
        return not self.excluded and self.integer is not False

    def holds(self, value: Decimal) -> bool:
        """Whether a number is in the range, whatever the ``values``."""
        if self.low is not None and (
            value < self.low or (self.low_exclusive and value == self.low)
        ):
            return False
        if self.high is not None and (
            value > self.high or (self.high_exclusive and value == self.high)
        ):
            return False
        if self.integer is not None and (value == value.to_integral_value()) != self.integer:
            return False
        return self.multiple is None or _is_multiple(value, self.multiple)


def fold(atoms: list[Atom]) -> list[NumberShape]:
    """The ranges of numbers of which all atoms hold, without those that are clearly empty."""
    shape = NumberShape()
    inside: list[Any] | None = None
    outside: set[Decimal] = set()
    for atom in atoms:
        match atom:
            case Bound(value, lower, exclusive):
                shape = _with_bound(shape, value, lower=lower, exclusive=exclusive)
            case Integer(holds):
                if shape.integer not in (None, holds):
                    return []
                shape = replace(shape, integer=holds)
            case Multiple(of, path):
                multiple = of if shape.multiple is None else _common(shape.multiple, of)
                if not fits(multiple):
                    raise refused(path, "multipleOf", "has too many digits")
                shape = replace(shape, multiple=multiple, path=path)
            case In(values, True):
                decimals = {exact(value) for value in values}
                given = list(values) if inside is None else inside
                inside = [value for value in given if exact(value) in decimals]
            case In(values, False):
                outside |= {exact(value) for value in values}
    if inside is not None:
        kept = [value for value in inside if exact(value) not in outside]
        texts = tuple(dict.fromkeys(repr(v) for v in kept if shape.holds(exact(v))))
        shape = replace(shape, values=texts)
        return [] if shape.empty() else [shape]
    if shape.empty():
        return []
    if shape.integer is False and shape.multiple is not None:
        if shape.multiple == shape.multiple.to_integral_value():
            return []
        raise refused(shape.path, "multipleOf", "is not supported beside a negated 'integer'")
    holes = [hole for hole in sorted(outside) if shape.holds(hole)]
    if shape.multiple is None:
        return [replace(shape, excluded=tuple(holes))]
    return [part for part in _split(shape, holes) if not part.empty()]


def _split(shape: NumberShape, holes: list[Decimal]) -> list[NumberShape]:
    """The ranges between the holes of a shape."""
    parts = []
    for hole in holes:
        parts.append(_with_bound(shape, hole, lower=False, exclusive=True))
        shape = _with_bound(shape, hole, lower=True, exclusive=True)
    return [*parts, shape]


def _with_bound(shape: NumberShape, value: Decimal, *, lower: bool, exclusive: bool) -> NumberShape:
    if lower:
        if shape.low is None or value > shape.low:
            return replace(shape, low=value, low_exclusive=exclusive)
        if value == shape.low:
            return replace(shape, low_exclusive=exclusive or shape.low_exclusive)
    else:
        if shape.high is None or value < shape.high:
            return replace(shape, high=value, high_exclusive=exclusive)
        if value == shape.high:
            return replace(shape, high_exclusive=exclusive or shape.high_exclusive)
    return shape


def inline_schema(shape: NumberShape) -> str | None:
    """A schema for the library's own compiler, of a shape with a multiple; None if it is empty.

    The library computes remainders digit by digit, which no small regular expression can.

    Raises:
        BadRequest: the library does not support it.
    """
    assert shape.multiple is not None
    integer = shape.integer is True or shape.multiple == shape.multiple.to_integral_value()
    schema: dict[str, Any] = {"type": "integer" if integer else "number"}
    if shape.low is not None:
        schema["exclusiveMinimum" if shape.low_exclusive else "minimum"] = _plain(shape.low)
    if shape.high is not None:
        schema["exclusiveMaximum" if shape.high_exclusive else "maximum"] = _plain(shape.high)
    schema["multipleOf"] = _plain(shape.multiple)
    schema["x-guidance"] = {"whitespace_flexible": False}
    text = json.dumps(schema)
    problem = oracle.error_of(f"start: %json {text}\n")
    if "nsatisfiable" in problem:
        return None
    if problem:
        raise refused(shape.path, "multipleOf", f"is not supported: {problem}")
    return text


def digits(amount: Decimal) -> tuple[str, str]:
    """The digits before and behind the point, without zeros at the end."""
    whole, _, fraction = f"{abs(amount):f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def exact(number: int | float) -> Decimal:
    """A number of a schema as it was written."""
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)


def _plain(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


def _is_multiple(value: Decimal, of: Decimal) -> bool:
    with localcontext(prec=800):
        return value % of == 0


def _common(one: Decimal, other: Decimal) -> Decimal:
    """The least common multiple."""
    shift = max(-int(one.as_tuple().exponent), -int(other.as_tuple().exponent), 0)
    first, second = int(one.scaleb(shift)), int(other.scaleb(shift))
    return Decimal(math.lcm(first, second)).scaleb(-shift)


def fits(multiple: Decimal) -> bool:
    """Whether the library can compute remainders of it."""
    whole, fraction = digits(multiple)
    remainders = (whole + fraction).strip("0")
    return len(fraction) <= 9 and len(whole) <= 9 and int(remainders or "0") <= MAX_MULTIPLE
