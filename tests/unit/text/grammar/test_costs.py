"""Grammars made to slow down everybody: refused, or ended alone, before others wait for long."""

from __future__ import annotations

import time
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import Ebnf, GrammarSpec, JsonSchema, Regex
from asyncllm.text.grammar.compiler import GrammarCompiler
from asyncllm.text.grammar.matcher import Grammar, MaskFiller, Matcher
from asyncllm.text.grammar.regex_parse import parse
from asyncllm.text.grammar.regex_tree import spread
from tests.support.text.grammar_sampling import (
    EOS_IDS,
    VOCAB_SIZE,
    compiled,
    demo_compiler,
    demo_tokenizer,
    new_mask,
    tokens_in,
)

AMBIGUOUS = Ebnf('root ::= s\ns ::= s s s s | "a" | "aa" | "aaa" | ""')
#: Of CPU time; what is bounded takes less than a tenth of this.
SECONDS = 5.0


def terminals(times: int, depth: int, base: str) -> str:
    """Terminals that name the one before so many times."""
    lines = [f"T{i}: {' '.join([f'T{i - 1}'] * times)}" for i in range(1, depth)]
    return "\n".join([f"start: T{depth - 1}", f"T0: {base}", *lines])


REFUSED: dict[str, GrammarSpec] = {
    "4096 optional letters": Regex("a?" * 4096),
    "4096 wildcards": Regex(".*" * 4096),
    "alternatives that may be empty": Regex("(a|)" * 2000),
    "look-aheads that multiply": Regex(
        "^" + "".join(f"(?=.*{c}.{{{i + 20}}}b)" for i, c in enumerate("acdef")) + ".*"
    ),
    "patterns that multiply": JsonSchema(
        {"allOf": [{"pattern": f"{c}.{{{i + 20}}}b"} for i, c in enumerate("acdef")]}
    ),
    "a pattern of 8,000 letters": Ebnf(f"start: /{'a?' * 8000}/"),
    "terminals that double": Ebnf(terminals(2, 17, '"a"?')),
    "terminals that double, with counts": Ebnf(terminals(2, 20, '"a"{1,50}')),
    "a rule of 9,000 optional letters": Ebnf("root ::= " + '"a"? ' * 9000),
    "intersections": Ebnf(
        "start: T\nT: " + " & ".join(f"/.*{c}.{{9}}x.*/" for c in "abcdefghijkl")
    ),
    "rows of thousands of items": Ebnf(
        'root ::= "x" b\nb ::= '
        + " | ".join(f"r{i} b" for i in range(290))
        + ' | ""\n'
        + "\n".join(f'r{i} ::= "a" | "a" r{(i + 1) % 290} | ""' for i in range(290))
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_costs_too_much_is_refused_soon(name: str) -> None:
    begun = time.thread_time()
    with pytest.raises(BadRequest, match=r"costly|more than 500 parts|not supported"):
        compiled(REFUSED[name])
    assert time.thread_time() - begun < SECONDS


def is_whole(matcher: Matcher, text: str) -> bool:
    """As ``accepts``, with a mask in front of every token: each brings the time for one."""
    row = new_mask()
    for token in demo_tokenizer().encode(text, add_special_tokens=False):
        matcher.fill(row)
        assert matcher.error is None
        if token not in tokens_in(row):
            return False
        matcher.accept(token)
    return matcher.can_stop


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("a?" * 400, "a" * 400),
        ("(a)" * 500, "a" * 500),
        ("(a*)*b" * 200, "b" * 200),
        ("(" * 64 + "a" + ")*" * 64, "aaa"),
        ("^" + "(?:ab|c)" * 1000 + "$", "c" * 1000),
        ("(?:a{1,50}){1,50}", "a" * 99),
    ],
)
def test_long_patterns_work(pattern: str, text: str) -> None:
    assert is_whole(compiled(Regex(pattern)).matcher(), text)
    assert not is_whole(compiled(Regex(pattern)).matcher(), text + "!")


def test_what_may_be_at_many_places_is_seen() -> None:
    assert spread(parse("[a-z]{8,64}")) == 0
    assert spread(parse("abc")) == 0
    assert spread(parse(".*abc")) == 3
    assert spread(parse(".*a.{300}b")) == 302
    assert spread(parse("(a|bc)d")) == 1
    assert spread(parse("(.*ab){9}")) > 9
    # What people write stays far below the bound.
    compiled(Regex(r"^(?=.*[a-z])(?=.*[A-Z])(?=.*\d)(?=.*[!#$%])(?!.*  )[ -~]{8,64}$"))
    compiled(
        JsonSchema({"allOf": [{"pattern": "^[a-z]+@"}, {"pattern": r"\.com$"}], "maxLength": 90})
    )


def walk(matcher: Matcher, most: int) -> int:
    """Go on by the letter until there is an error; returns how many tokens that took."""
    letter = demo_tokenizer().encode("a", False)[0]
    row = new_mask()
    for count in range(most):
        matcher.fill(row)
        if matcher.error is not None:
            return count
        assert letter in tokens_in(row)
        matcher.accept(letter)
    return most


def test_a_grammar_that_becomes_too_costly_ends() -> None:
    matcher = compiled(AMBIGUOUS).matcher()
    begun = time.thread_time()
    assert walk(matcher, 5000) < 5000
    assert time.thread_time() - begun < SECONDS
    assert "too costly" in (matcher.error or "")
    assert not matcher.is_finished
    assert not matcher.can_stop


def test_a_grammar_that_costs_little_never_ends_for_it() -> None:
    matcher = compiled(Regex("[a-z]*")).matcher()
    assert walk(matcher, 3000) == 3000


class _Dear:
    """A matcher of the library's whose masks take long."""

    def __init__(self, inner: object, seconds: float):
        self._inner = inner
        self._seconds = seconds

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        end = time.thread_time() + self._seconds
        while time.thread_time() < end:
            pass
        self._inner.unsafe_compute_mask_ptr(address, num_bytes)  # type: ignore[attr-defined]


class _InTurn:
    """Stands in for the library's threads, which take its own matchers only."""

    def unsafe_compute_mask_ptr(
        self, pairs: list[tuple[_Dear, int]], address: int, size: int, rows: int
    ) -> None:
        for matcher, row in pairs:
            matcher.unsafe_compute_mask_ptr(address + row * size, size)


def dear(grammar: Grammar, seconds: float) -> Matcher:
    matcher = grammar.matcher()
    matcher._matcher = _Dear(matcher._matcher, seconds)  # type: ignore[assignment]
    return matcher


def test_in_a_batch_only_the_costly_row_ends() -> None:
    grammar = compiled(Regex("[a-z]*"))
    matchers = [dear(grammar, 0.0), dear(grammar, 0.01), dear(grammar, 0.0)]
    filler = MaskFiller(demo_compiler().vocabulary, threads=1)
    filler._executor = _InTurn()  # type: ignore[assignment]
    mask = new_mask(len(matchers))
    for _ in range(100):
        filler.fill_rows(matchers, mask)
        if matchers[1].error is not None:
            break
    assert [matcher.error is None for matcher in matchers] == [True, False, True]
    # It costs nothing any more, and the others go on.
    begun = time.thread_time()
    for _ in range(50):
        filler._batches_to_time = 1
        filler.fill_rows(matchers, mask)
    assert time.thread_time() - begun < 0.4  # 50 of its masks take 0.5
    assert np.array_equal(mask[0], mask[2])


def test_several_costly_rows_end_sooner_than_one() -> None:
    """Together they make every step late."""

    def steps(num_dear: int) -> int:
        grammar = compiled(Regex("[a-z]*"))
        matchers = [dear(grammar, 0.01) for _ in range(num_dear)]
        filler = MaskFiller(demo_compiler().vocabulary, threads=1)
        filler._executor = _InTurn()  # type: ignore[assignment]
        mask = new_mask(num_dear)
        for count in range(100):
            filler.fill_rows(matchers, mask)
            if all(matcher.error is not None for matcher in matchers):
                return count
        raise AssertionError("they never end")

    assert steps(6) < 8 < steps(1)


def small_compiler() -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer(), VOCAB_SIZE, EOS_IDS, max_grammars=4)


COMPILER = small_compiler()
PATTERN = st.text(alphabet="ab01.*+?(){},|[]^$\\-=!<:dwpLu/\n\ud800é", max_size=60) | st.builds(
    lambda piece, count: piece * count,
    st.sampled_from(["a?", "(a)", "(a*)*b", "(", "[a", "(?=a)", "(?!", "a|", "^", "\\", "{", "()"]),
    st.integers(1, 3000),
)
GRAMMAR = st.text(max_size=80) | st.builds(
    lambda head, body, count: head + body * count,
    st.sampled_from(["root ::= ", "start: ", "root ::= root\n", "", "?start: /", 'start: "']),
    st.sampled_from(['"a" ', "(", "[a", "root ", "x: y\n", "a | ", "/a/ ", "\\", "{1,", "~", "!"]),
    st.integers(1, 400),
)
KEYWORDS = [
    "type",
    "allOf",
    "not",
    "pattern",
    "properties",
    "a",
    "items",
    "$ref",
    "enum",
    "if",
    "patternProperties",
    "minLength",
    "maxItems",
    "format",
    "multipleOf",
    "const",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | PATTERN,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
    ),
    max_leaves=12,
)


def nested(schema: object, keyword: str, depth: int) -> object:
    for _ in range(depth):
        schema = {keyword: [schema] if keyword.endswith("Of") else schema}
    return schema


SCHEMA = JSON | st.builds(
    nested,
    JSON,
    st.sampled_from(["items", "not", "allOf", "anyOf", "contains"]),
    st.integers(0, 200),
)


@settings(max_examples=120, deadline=None)
@given(st.builds(Regex, PATTERN) | st.builds(Ebnf, GRAMMAR) | st.builds(JsonSchema, SCHEMA))
def test_whatever_comes_is_a_grammar_or_refused(spec: GrammarSpec) -> None:
    with suppress(BadRequest):
        assert COMPILER.compile(spec).matcher().error is None
