"""Ranges of numbers, against decimal arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asyncllm.text.grammar import JsonSchema
from tests.support.text.grammar_sampling import accepts, compiled

pytestmark = pytest.mark.slow

bounds = st.integers(-120, 120) | st.integers(-12_000, 12_000).map(lambda number: number / 100)
keywords = st.sampled_from(["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"])
WHOLE = [str(number) for number in (*range(-130, 131), 999, -999, 1000, -1000, 123456)]
FRACTIONS = [
    f"{whole}.{fraction}"
    for whole in ("0", "-0", "1", "-1", "9", "10", "-99", "100", "119", "-120")
    for fraction in ("0", "00", "01", "05", "09", "1", "10", "5", "50", "99", "125", "001")
]


def holds(schema: dict[str, Any], text: str) -> bool:
    number = Decimal(text)
    checks: dict[str, Callable[[Any], bool]] = {
        "minimum": lambda bound: number >= bound,
        "maximum": lambda bound: number <= bound,
        "exclusiveMinimum": lambda bound: number > bound,
        "exclusiveMaximum": lambda bound: number < bound,
        "multipleOf": lambda bound: number % bound == 0,
        "not": lambda other: number not in [Decimal(repr(value)) for value in other["enum"]],
        "type": lambda name: name == "number" or number == int(number),
    }
    return all(
        checks[keyword](Decimal(repr(value)) if not isinstance(value, str | dict) else value)
        for keyword, value in schema.items()
    )


def check(schema: dict[str, Any], texts: list[str]) -> None:
    if not any(holds(schema, text) for text in texts):
        return  # nothing to admit, so the schema may be refused
    grammar = compiled(JsonSchema(schema))
    for text in texts:
        # Zero has no sign.
        expected = holds(schema, text) and not (text.startswith("-") and Decimal(text) == 0)
        assert accepts(grammar, text) == expected, text


@settings(max_examples=40)
@given(st.dictionaries(keywords, bounds, min_size=1, max_size=3))
@example({"minimum": 0, "maximum": 0})
@example({"exclusiveMinimum": -1, "exclusiveMaximum": 1})
@example({"minimum": -99.99, "maximum": -0.01})
@example({"exclusiveMinimum": 9, "maximum": 100})
def test_ranges_of_numbers(limits: dict[str, Any]) -> None:
    check({"type": "number", **limits}, WHOLE + FRACTIONS)


@settings(max_examples=40)
@given(st.dictionaries(keywords, bounds, min_size=1, max_size=3))
@example({"minimum": 9.5, "maximum": 10.5})
@example({"exclusiveMinimum": -10, "exclusiveMaximum": -8})
def test_ranges_of_integers(limits: dict[str, Any]) -> None:
    check({"type": "integer", **limits}, WHOLE)


@settings(max_examples=20)
@given(
    st.dictionaries(keywords, bounds, max_size=2),
    st.lists(st.integers(-20, 20) | st.sampled_from([0.5, -1.25, 9.01]), min_size=1, max_size=6),
)
def test_ranges_with_holes(limits: dict[str, Any], holes: list[Any]) -> None:
    for kind in ("integer", "number"):
        schema = {"type": kind, **limits, "not": {"enum": holes}}
        check(schema, WHOLE + ([] if kind == "integer" else FRACTIONS))


@pytest.mark.parametrize("multiple", [1, 2, 3, 7, 10, 12, 100, 0.5, 2.5])
@pytest.mark.parametrize("limits", [{}, {"minimum": -17, "maximum": 55}])
def test_multiples(multiple: Any, limits: dict[str, Any]) -> None:
    check({"type": "integer", "multipleOf": multiple, **limits}, WHOLE)


@pytest.mark.parametrize("multiple", [0.01, 0.05, 0.5, 0.25])
def test_decimal_multiples(multiple: float) -> None:
    schema = {"type": "number", "multipleOf": multiple}
    grammar = compiled(JsonSchema(schema))
    for text in WHOLE + FRACTIONS:
        if accepts(grammar, text):
            assert holds(schema, text), text
    # Zeros at the end may be left out; digits that matter may not.
    for text in WHOLE:
        assert accepts(grammar, text)


def test_large_bounds_are_exact() -> None:
    grammar = compiled(JsonSchema({"type": "integer", "minimum": 2**63 - 1, "maximum": 2**64}))
    for number in (2**63 - 1, 2**64):
        assert accepts(grammar, str(number))
    for number in (2**63 - 2, 2**64 + 1):
        assert not accepts(grammar, str(number))
    grammar = compiled(JsonSchema({"type": "integer", "format": "int32"}))
    assert accepts(grammar, str(-(2**31)))
    assert not accepts(grammar, str(2**31))


def test_numbers_stay_within_64_bit_floats() -> None:
    grammar = compiled(JsonSchema({"type": "number"}))
    for text in ("0", "-1.5e-7", "3E+20", "123456789.25", "9e299"):
        assert accepts(grammar, text)
    for text in ("1e400", "1" * 400, "01", "1.", ".5", "+1", "NaN", "1e", "0x1"):
        assert not accepts(grammar, text)
