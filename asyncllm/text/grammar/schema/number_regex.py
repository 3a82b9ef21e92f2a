"""The texts of the numbers in a range, as regular expressions.

Numbers are written so that a reader with 64-bit floats sees the same order: where there are bounds,
in at most 15 significant digits unless the bounds have more.
"""

from __future__ import annotations

import math
from decimal import Decimal

from msgspec.structs import replace

from asyncllm.text.grammar.schema.numbers import NumberShape, digits

#: Without bounds: 20 digits hold every 64-bit integer, and the exponents stay within a float's.
ANY_INTEGER = r"0|-?[1-9][0-9]{0,19}"
ANY_NUMBER = (
    r"-?(?:0|[1-9][0-9]{0,19})(?:\.[0-9]{1,17})?"
    r"|-?[1-9](?:\.[0-9]{1,16})?[eE][\-+]?(?:[0-9]{1,2}|[12][0-9]{2})"
)
_INTEGER_DIGITS, _WHOLE_DIGITS, _FRACTION_DIGITS = 15, 6, 9


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
    """The texts of a number, which differ in the zeros behind its fraction."""
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
    """The numbers of one sign between two absolute values: expressions that all match."""
    bounds = [digits(bound) for bound in (low, high) if bound is not None]
    whole = max([_INTEGER_DIGITS, *(len(digits) for digits, _ in bounds)])
    if shape.integer:
        least = int(low or 0) + (1 if low_exclusive else 0)  # behind a sign, 0 is excluded
        most = "9" * whole if high is None else str(int(high))
        return [f"{sign}(?:{'|'.join(_between(str(least), most))})"]
    short = max([_WHOLE_DIGITS, *(len(digits) for digits, _ in bounds)])
    fraction = max([_FRACTION_DIGITS, *(len(digits) + 1 for _, digits in bounds)])
    fractions = rf"(?:0|[1-9][0-9]{{0,{short - 1}}})\.[0-9]{{1,{fraction}}}"
    if shape.integer is None:
        parts = [rf"(?:(?:0|[1-9][0-9]{{0,{whole - 1}}})|{fractions})"]
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
    """The integers of a shape, with inclusive bounds that are integers."""
    low, high = shape.low, shape.high
    if low is not None:
        ceiling = Decimal(math.ceil(low))
        low = ceiling + 1 if ceiling == low and shape.low_exclusive else ceiling
    if high is not None:
        floor = Decimal(math.floor(high))
        high = floor - 1 if floor == high and shape.high_exclusive else floor
    return replace(shape, low=low, low_exclusive=False, high=high, high_exclusive=False)


def _above(whole: str, fraction: str, *, strictly: bool) -> str:
    """Absolute values from ``whole.fraction`` on, digit by digit; a fraction may be missing."""
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
    """Absolute values up to ``whole.fraction``, digit by digit; a fraction may be missing."""
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
