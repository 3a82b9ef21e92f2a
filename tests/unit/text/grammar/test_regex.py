"""Regular expressions, against Python's."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.regex_parse import parse
from asyncllm.text.grammar.regex_tree import RegexError, languages
from asyncllm.text.grammar.regex_write import write
from asyncllm.text.grammar.schema.strings import json_text

#: What one character may be, in Python's dialect and in that of ECMA 262 alike.
ATOMS = ["a", "b", ".", "[ab]", "[^a]", "[b-d]", r"\.", r"\d", r"[\w]", '"', r"\\", r"\n", "é", ""]
STRINGS = ["".join(chars) for size in range(4) for chars in itertools.product("ab.", repeat=size)]
STRINGS += ['"', 'a"', "\\", "a\n", "\n\n", "é", "dé", "7", "a7b", "c", "\x01", "abab", "🙂a"]

patterns = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: (
        st.tuples(inner, inner).map("".join)
        | st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "*?"])).map(
            lambda pair: f"({pair[0]}){pair[1]}"
        )
    ),
    max_leaves=6,
)
anchored = st.tuples(st.sampled_from(["", "^"]), patterns, st.sampled_from(["", "$"])).map("".join)


def expression(pattern: str, *, in_json: bool) -> str:
    terms = []
    for node, inside in languages(parse(pattern)):
        text = json_text(node) if in_json else write(node, json=False)
        terms.append(("" if inside else "~") + f"/{text}/")
    return " & ".join(terms)


def python_search(pattern: str, text: str) -> bool:
    # Python's "$" also stands before a last line end, and its "." is any but one line end.
    pattern = re.sub(r"(?<!\\)\$", lambda _: r"\Z", pattern)
    pattern = re.sub(r"(?<!\\)\.", lambda _: r"[^\n\r]", pattern)
    return re.search(pattern, text, re.ASCII) is not None


@pytest.mark.slow
@settings(max_examples=60)
@given(anchored | st.tuples(anchored, anchored).map("|".join))
def test_the_same_texts_are_found(pattern: str) -> None:
    inside = expression(pattern, in_json=False)
    quoted = expression(pattern, in_json=True)
    for text in STRINGS:
        expected = python_search(pattern, text)
        # The library's lexer has no empty lexemes: JSON's quotes make up for that.
        if text:
            assert oracle.matches(inside, text) == expected, text
        assert oracle.matches(quoted, json.dumps(text, ensure_ascii=False)) == expected, text


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (r"^\x41\u0042\u{43}$", ["ABC"], ["abc"]),
        (r"^\uD83D\uDE42$", ["🙂"], ["🙁"]),
        (r"^\cA\t\v\f\r\0$", ["\x01\t\v\f\r\0"], [""]),
        (r"^[\b\-\]^]+$", ["\b-]^"], ["a"]),
        (r"^[^]$", ["a", "\n"], ["", "ab"]),
        (r"^a[]|b$", ["b", "ab"], ["a"]),
        (r"^\S\D\W$", ["ab-", "aé é"[:3]], ["1 1", "a1-"]),
        (r"^[^\d\s]+$", ["ab"], ["a1", "a b"]),
        (r"^\s$", ["\u00a0", "\u3000", "\ufeff"], ["a", "\u200b"]),
        (r"^\p{L}\P{L}\p{Script=Greek}$", ["a1λ", "é-Λ"], ["11λ", "a1l"]),
        (r"^\p{Cc}$", ["\x00", "\x1f", "\x7f"], ["a", '"']),
        (r"^\P{Cc}$", ["a", '"', "\\"], ["\x00", "\x7f"]),
        (r"^[\p{P}]$", ['"', "\\", "."], ["a", "\n"]),
        # Any spelling of a property, of which the characters that JSON escapes are few.
        (r"^\P{po}$", ["a", "\n"], ['"', "\\", "."]),
        (r"^\P{Grapheme_Base}$", ["\n"], ['"', "\\", "a"]),
        (r"^[^\p{ascii}]$", ["é"], ['"', "\x01", "a"]),
        (r"^(?<year>\d{4})-(?P<m>\d\d)$", ["2024-01"], ["24-1"]),
        (r"a{,2}", ["xa{,2}"], ["aa"]),
        (r"^a{2}?b$", ["aab"], ["ab"]),
        (r"^x{0}y$", ["y"], ["xy"]),
        (r"a^b", [], ["ab", "b"]),
        (r"x*^b", ["b", "bc"], ["xb"]),
        (r"(^|,)a(,|$)", ["a", "b,a", "a,c", "b,a,c"], ["ba", "ab"]),
        (r"^(?=.*b)(?!.*cc)[a-c]+$", ["ab", "cbc"], ["ac", "bcc"]),
        (r"/\/", ["//"], ["/"]),
        ("", ["", "a"], []),
        ("^$", [""], ["a"]),
    ],
)
def test_the_dialect(pattern: str, inside: list[str], outside: list[str]) -> None:
    """What Python's dialect does not have, or has otherwise."""
    quoted = expression(pattern, in_json=True)
    for text in inside:
        assert oracle.matches(quoted, json.dumps(text, ensure_ascii=False)), text
    for text in outside:
        assert not oracle.matches(quoted, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", r"lacks a '\)'"),
        (")", r"unmatched '\)'"),
        ("[a", "ends too early"),
        ("a\\", "ends too early"),
        ("*a", "nothing to repeat"),
        ("a**", "nothing to repeat"),
        ("{2}", "nothing to repeat"),
        ("a{3,2}", "out of order"),
        ("[b-a]", "out of order"),
        (r"[a-\d]", "out of order"),
        ("a{99999}", "repeats more than"),
        ("^*", "repeats an assertion"),
        (r"\1", "back-reference"),
        (r"(?<n>a)\k<n>", "back-reference"),
        (r"\bfoo", "word boundary"),
        ("(?<!a)b", "look-behind"),
        ("(?i)a", r"group '\(\?i'"),
        (r"\Z", r"unknown escape '\\Z'"),
        (r"\uD800", "no character"),
        (r"\u{110000}", "no character"),
        ("a(?=b)", "look-ahead that is not at its very begin"),
        ("(^a)+", "anchor inside a repetition"),
        ("(" * 65 + ")" * 65, "nests more than"),
        ("a" * 8193, "longer than"),
    ],
)
def test_what_is_not_supported_is_said(pattern: str, problem: str) -> None:
    with pytest.raises(RegexError, match=problem):
        languages(parse(pattern))


@given(st.text(max_size=30))
def test_no_pattern_crashes_the_parser(pattern: str) -> None:
    try:
        found = languages(parse(pattern))
    except RegexError:
        return
    for node, _ in found:
        assert write(node, json=True).isascii()
