"""Numbers: what keywords say about them, and their texts. Arithmetic is decimal and exact.

Numbers are written so that a reader with 64-bit floats sees the same order: where there are bounds,
in at most 15 significant digits unless the bounds have more.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal, localcontext
from typing import Any, TypeAlias

import msgspec
from msgspec.structs import replace

from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema.atoms import Atom, Bound, In, Integer, Multiple

#: The library looks at all remainders: 10,000 of them take 70 ms, a million takes minutes.
MAX_MULTIPLE = 10_000
#: Without bounds: 20 digits hold every 64-bit integer, and the exponents stay within a float's.
ANY_INTEGER = r"0|-?[1-9][0-9]{0,19}"
ANY_NUMBER = (
    r"-?(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{1,17})?"
    r"|-?[1-9](?:\.[0-9]{1,16})?[eE][\-+]?(?:[0-9]{1,2}|[12][0-9]{2})"
)
_INTEGER_DIGITS, _WHOLE_DIGITS, _FRACTION_DIGITS = 15, 6, 9

#: An end of a range, and whether it is exclusive.
End: TypeAlias = tuple[Decimal, bool]
_ZERO: End = (Decimal(0), False)


class NumberShape(msgspec.Struct, frozen=True):
    """A range of numbers.

    Attributes:
        low, high: the ends, None for none.
        integer: whether there is no fraction (True), or must be one (False).
        multiple: all numbers are multiples of it.
        values: the only values, as texts; all other conditions have been applied to them.
        excluded: numbers that are not in the range.
        path: the place of the multiple in the schema.
    """

    low: End | None = None
    high: End | None = None
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
        (low, above), (high, below) = self.low, self.high
        return low >= high if above or below else low > high

    def certain(self) -> bool:
        """Whether each of ``terms`` certainly has a text.

        The digits allowed there suffice to write a bound, or a number between two bounds.
        """
        return not self.excluded and self.integer is not False

    def holds(self, value: Decimal) -> bool:
        """Whether a number is in the range, whatever the ``values``."""
        if self.low is not None and (value < self.low[0] or (value, True) == self.low):
            return False
        if self.high is not None and (value > self.high[0] or (value, True) == self.high):
            return False
        if self.integer is not None and (value == value.to_integral_value()) != self.integer:
            return False
        with localcontext(prec=800):
            return self.multiple is None or value % self.multiple == 0


def fold(atoms: list[Atom]) -> list[NumberShape]:
    """The ranges of numbers of which all atoms hold, without those that are clearly empty."""
    shape = NumberShape()
    inside: list[Any] | None = None
    outside: set[Decimal] = set()
    for atom in atoms:
        match atom:
            case Bound(value, lower, exclusive):
                shape = _with_bound(shape, (value, exclusive), lower=lower)
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
        parts.append(_with_bound(shape, (hole, True), lower=False))
        shape = _with_bound(shape, (hole, True), lower=True)
    return [*parts, shape]


def _with_bound(shape: NumberShape, end: End, *, lower: bool) -> NumberShape:
    if lower:
        return replace(shape, low=max(shape.low or end, end))
    return replace(shape, high=min(shape.high or end, end, key=lambda end: (end[0], not end[1])))


def inline_schema(shape: NumberShape) -> str | None:
    """A schema for the library's own compiler, of a shape with a multiple; None if it is empty.

    The library computes remainders digit by digit, which no small regular expression can.

    Raises:
        BadRequest: the library does not support it.
    """
    assert shape.multiple is not None
    integer = shape.integer is True or shape.multiple == shape.multiple.to_integral_value()
    schema: dict[str, Any] = {"type": "integer" if integer else "number"}
    for end, name in ((shape.low, "Minimum"), (shape.high, "Maximum")):
        if end is not None:
            schema[f"exclusive{name}" if end[1] else name.lower()] = _plain(end[0])
    schema["multipleOf"] = _plain(shape.multiple)
    schema["x-guidance"] = {"whitespace_flexible": False}
    text = json.dumps(schema)
    problem = oracle.error_of(f"start: %json {text}\n")
    if "nsatisfiable" in problem:
        return None
    if problem:
        raise refused(shape.path, "multipleOf", f"is not supported: {problem}")
    return text


def terms(shape: NumberShape) -> list[list[str]]:
    """The texts of a shape without multiple: a union of intersections of regular expressions.

    An expression behind a "~" must not match.
    """
    if shape.values is not None:
        return [["|".join(map(value_regex, shape.values))]]
    if shape.low is None and shape.high is None and not shape.excluded:
        if shape.integer is None:
            return [[ANY_NUMBER]]
        if shape.integer:
            return [[ANY_INTEGER]]
    if shape.integer:
        shape = _whole_bounds(shape)
        if shape.empty():
            return []
    found = []
    low, high = shape.low, shape.high
    if high is None or high[0] > 0 or high == _ZERO:
        least = low if low is not None and low[0] >= 0 else None
        found.append(_side(shape.integer, least, high, ""))
    if low is None or low[0] < 0:
        # Mirrored; without zero, which has been written without a sign.
        is_below = high is not None and high[0] < 0
        least = (-high[0], high[1]) if high is not None and is_below else (Decimal(0), True)
        most = None if low is None else (-low[0], low[1])
        found.append(_side(shape.integer, least, most, "-"))
    if shape.excluded:
        without = "~" + "|".join(map(_all_forms, shape.excluded))
        found = [[*terms, without] for terms in found]
    return found


def value_regex(text: str) -> str:
    """A regular expression for one number as it is written."""
    return text.replace(".", r"\.").replace("+", r"\+")


def _all_forms(number: Decimal) -> str:
    """The texts of a number, which differ in the zeros behind its fraction."""
    whole, fraction = digits(number)
    sign = "-" if number < 0 else ""
    return rf"{sign}{whole}\.{fraction}0*" if fraction else rf"{sign}{whole}(?:\.0+)?"


def _side(integer: bool | None, low: End | None, high: End | None, sign: str) -> list[str]:
    """The numbers of one sign between two absolute values, as ``terms`` that all hold."""
    bounds = [digits(bound[0]) for bound in (low, high) if bound is not None]
    whole = max([_INTEGER_DIGITS, *(len(digits) for digits, _ in bounds)])
    short = max([_WHOLE_DIGITS, *(len(digits) for digits, _ in bounds)])
    fraction = max([_FRACTION_DIGITS, *(len(digits) + 1 for _, digits in bounds)])
    integers = rf"(?:0|[1-9][0-9]{{0,{whole - 1}}})"
    fractions = rf"(?:0|[1-9][0-9]{{0,{short - 1}}})\.[0-9]{{1,{fraction}}}"
    parts = [f"{sign}{integers if integer else fractions}"]
    if integer is None:
        parts = [f"{sign}(?:{integers}|{fractions})"]
    elif not integer:
        parts.append(rf"{sign}[0-9]+\.[0-9]*[1-9][0-9]*")
    if low is not None and low != _ZERO:
        parts.append(f"~{sign}(?:{_below(*digits(low[0]), strictly=not low[1])})")
    if high is not None:
        parts.append(f"{sign}(?:{_below(*digits(high[0]), strictly=high[1])})")
    return parts


def _below(whole: str, fraction: str, *, strictly: bool) -> str:
    """All absolute values up to ``whole.fraction``, digit by digit; a fraction may be missing."""
    any_fraction = r"(?:\.[0-9]+)?"
    options = []
    for at, digit in enumerate(whole):
        least = 1 if at == 0 and len(whole) > 1 else 0
        if int(digit) > least:
            tail = f"[0-9]{{{len(whole) - at - 1}}}"
            options.append(f"{whole[:at]}[{least}-{int(digit) - 1}]{tail}{any_fraction}")
    if len(whole) > 1:
        options.append(rf"(?:0|[1-9][0-9]{{0,{len(whole) - 2}}}){any_fraction}")
    smaller = [
        rf"{fraction[:at]}[0-{int(digit) - 1}][0-9]*"
        for at, digit in enumerate(fraction)
        if digit != "0"
    ]
    smaller += [fraction[:at] for at in range(1, len(fraction))]
    if not strictly:
        smaller.append(f"{fraction}0*" if fraction else "0+")
    if fraction or not strictly:
        options.append(whole)
    if smaller and (fraction or not strictly):
        options.append(rf"{whole}\.(?:{'|'.join(smaller)})")
    return "|".join(options) or "[a&&b]"


def _whole_bounds(shape: NumberShape) -> NumberShape:
    """The integers of a shape, with inclusive bounds that are integers."""
    low, high = shape.low, shape.high
    if low is not None:
        ceiling = Decimal(math.ceil(low[0]))
        low = ceiling + ((ceiling, True) == low), False
    if high is not None:
        floor = Decimal(math.floor(high[0]))
        high = floor - ((floor, True) == high), False
    return replace(shape, low=low, high=high)


def digits(amount: Decimal) -> tuple[str, str]:
    """The digits before and behind the point, without zeros at the end."""
    whole, _, fraction = f"{abs(amount):f}".partition(".")
    return whole.lstrip("0") or "0", fraction.rstrip("0")


def exact(number: int | float) -> Decimal:
    """A number of a schema as it was written."""
    return Decimal(repr(number)) if isinstance(number, float) else Decimal(number)


def _plain(number: Decimal) -> int | float:
    return int(number) if number == number.to_integral_value() else float(number)


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
