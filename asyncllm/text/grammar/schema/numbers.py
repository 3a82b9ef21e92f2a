"""Numbers: what keywords say about them, and the texts of those in a range.

Arithmetic is decimal and exact. Numbers are written so that a reader with 64-bit floats sees the
same order: where there are bounds, in at most 15 significant digits unless the bounds have more.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from typing import Any

from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.schema.atoms import Atom, Bound, In, Integer, Multiple

#: Without bounds: 20 digits hold every 64-bit integer, and the exponents stay within a float's.
ANY_INTEGER = r"0|-?[1-9][0-9]{0,19}"
ANY_NUMBER = (
    r"-?(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{1,17})?"
    r"|-?[1-9](?:\.[0-9]{1,16})?[eE][\-+]?(?:[0-9]{1,2}|[12][0-9]{2})"
)
_INTEGER_DIGITS, _WHOLE_DIGITS, _FRACTION_DIGITS = 15, 6, 9
#: The library looks at all remainders: with 10,000 of them for 70 ms, with a million for minutes.
MAX_MULTIPLE = 10_000


@dataclass(frozen=True)
class NumberShape:
    """A range of numbers.

    Attributes:
        low, high: the bounds, None for none, and whether they are excluded themselves.
        integer: whether there is no fraction (True), or must be one (False).
        multiple: a number of which all are multiples.
        values: the only values, as they are written; bounds and all have been applied to them.
        excluded: numbers that are not in it.
        path: where the multiple comes from.
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
        """Whether ``terms``, where there are any, are known to have a text each.

        A bound, or a number between two of them, can be written in the digits that ``_side`` gives.
        """
        return not self.excluded and self.integer is not False

    def holds(self, value: Decimal) -> bool:
        """Whether a number is inside; ``values`` do not matter."""
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
    """The ranges that atoms leave together, none of them clearly empty."""
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
    """A shape with holes as ranges between them."""
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
    """A shape with a multiple as a schema of the library's own; None if it is empty.

    The library computes remainders digit by digit, which no small regular expression does.

    Raises:
        BadRequest: the library cannot do it.
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


def terms(shape: NumberShape) -> list[list[str]]:
    """The texts of a shape without multiple: a union of intersections of regular expressions.

    Those behind a "~" must not match.
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
    if high is None or high > 0 or (high == 0 and not shape.high_exclusive):
        low_text = low if low is not None and low >= 0 else None
        found.append(_side(shape, low_text, shape.low_exclusive, high, shape.high_exclusive, ""))
    if low is None or low < 0:
        # Mirrored; without zero, which has been written without a sign.
        least, strictly = (-high, shape.high_exclusive) if high is not None else (Decimal(0), True)
        if least <= 0:
            least, strictly = Decimal(0), True
        most = None if low is None else -low
        found.append(_side(shape, least, strictly, most, shape.low_exclusive, "-"))
    if shape.excluded:
        without = "~" + "|".join(map(_all_forms, shape.excluded))
        found = [[*terms, without] for terms in found]
    return found


def _all_forms(number: Decimal) -> str:
    """A number with any zeros behind its fraction."""
    whole, fraction = digits(number)
    sign = "-" if number < 0 else ""
    return rf"{sign}{whole}\.{fraction}0*" if fraction else rf"{sign}{whole}(?:\.0+)?"


def value_regex(text: str) -> str:
    """A regular expression for one number as it is written."""
    return text.replace(".", r"\.").replace("+", r"\+")


def _side(
    shape: NumberShape,
    low: Decimal | None,
    low_exclusive: bool,
    high: Decimal | None,
    high_exclusive: bool,
    sign: str,
) -> list[str]:
    """The numbers of one sign whose amounts are between two bounds."""
    bounds = [digits(bound) for bound in (low, high) if bound is not None]
    whole = max([_INTEGER_DIGITS, *(len(digits) for digits, _ in bounds)])
    fraction = max([_FRACTION_DIGITS, *(len(digits) + 1 for _, digits in bounds)])
    short = max([_WHOLE_DIGITS, *(len(digits) for digits, _ in bounds)])
    integers = rf"(?:0|[1-9][0-9]{{0,{whole - 1}}})"
    fractions = rf"(?:0|[1-9][0-9]{{0,{short - 1}}})\.[0-9]{{1,{fraction}}}"
    if shape.integer and low is not None and high is not None:
        least = low + 1 if low_exclusive else low  # behind a sign, 0 is excluded
        return [f"{sign}(?:{'|'.join(_between(str(int(least)), str(int(high))))})"]
    if shape.integer:
        parts = [integers]
    elif shape.integer is None:
        parts = [f"(?:{integers}|{fractions})"]
    else:
        parts = [fractions, r"[0-9]+\.[0-9]*[1-9][0-9]*"]
    if low is not None and (low > 0 or low_exclusive):
        parts.append(_above(*digits(low), strictly=low_exclusive))
    if high is not None:
        parts.append(_below(*digits(high), strictly=high_exclusive))
    return [f"{sign}(?:{part})" for part in parts]


def _between(low: str, high: str) -> list[str]:
    """Patterns of the whole numbers from ``low`` to ``high``, digit by digit."""
    if len(low) < len(high):
        between = f"[1-9][0-9]{{{len(low)},{len(high) - 2}}}"
        return [
            *_between(low, "9" * len(low)),
            *([between] if len(high) - len(low) > 1 else []),
            *_between("1" + "0" * (len(high) - 1), high),
        ]
    if low == high:
        return [low]
    rest = len(low) - 1
    first, last = int(low[0]), int(high[0])
    if first == last:
        return [low[0] + pattern for pattern in _between(low[1:], high[1:])]
    options = []
    if low[1:] != "0" * rest:
        options += [low[0] + pattern for pattern in _between(low[1:], "9" * rest)]
        first += 1
    above = []
    if high[1:] != "9" * rest:
        above = [high[0] + pattern for pattern in _between("0" * rest, high[1:])]
        last -= 1
    if first <= last:
        digit = str(first) if first == last else f"[{first}-{last}]"
        options.append(digit + (f"[0-9]{{{rest}}}" if rest > 1 else "[0-9]" * rest))
    return options + above


def _whole_bounds(shape: NumberShape) -> NumberShape:
    """The same integers with inclusive bounds that are integers."""
    low, high = shape.low, shape.high
    if low is not None:
        ceiling = Decimal(math.ceil(low))
        low = ceiling + 1 if ceiling == low and shape.low_exclusive else ceiling
    if high is not None:
        floor = Decimal(math.floor(high))
        high = floor - 1 if floor == high and shape.high_exclusive else floor
    return replace(shape, low=low, low_exclusive=False, high=high, high_exclusive=False)


def _above(whole: str, fraction: str, *, strictly: bool) -> str:
    """Amounts from ``whole.fraction`` on, digit by digit; a fraction may be missing."""
    any_fraction = r"(?:\.[0-9]+)?"
    options = [
        rf"{whole[:at]}[{int(digit) + 1}-9][0-9]{{{len(whole) - at - 1}}}{any_fraction}"
        for at, digit in enumerate(whole)
        if digit != "9"
    ]
    options.append(rf"[1-9][0-9]{{{len(whole)},}}{any_fraction}")
    larger = [
        rf"{fraction[:at]}[{int(digit) + 1}-9][0-9]*"
        for at, digit in enumerate(fraction)
        if digit != "9"
    ]
    if strictly:
        larger.append(f"{fraction}[0-9]*[1-9][0-9]*")
    elif fraction:
        larger.append(f"{fraction}[0-9]*")
    if not fraction and not strictly:
        options.append(whole + any_fraction)
    elif larger:
        options.append(rf"{whole}\.(?:{'|'.join(larger)})")
    return "|".join(options)


def _below(whole: str, fraction: str, *, strictly: bool) -> str:
    """Amounts up to ``whole.fraction``, digit by digit; a fraction may be missing."""
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
