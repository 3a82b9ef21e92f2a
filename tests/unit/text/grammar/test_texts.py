"""Regular expressions, choices, grammars and structural tags, as requests have them."""

from __future__ import annotations

import json
import re

import pytest

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import Choice, Ebnf, GrammarSpec, Regex, StructuralTags, Tag
from tests.support.text.grammar_sampling import accepts, compiled, demo_tokenizer, sample
from tests.support.text.grammar_schemas import closed

ARGUMENTS = closed({"city": {"type": "string", "maxLength": 8}})
TOOL = Tag('<tool_call>\n{"name": "f", "arguments": ', ARGUMENTS, "}\n</tool_call>")
ARITHMETIC = """
root  ::= expr
expr  ::= term (("+" | "-") term)*
term  ::= [0-9] | "(" expr ")"
"""
LARK = """
start: greeting " " name
greeting: "Hello" | "Hi"
name: /[A-Z][a-z]{1,5}/
"""


@pytest.mark.parametrize(
    ("spec", "inside", "outside"),
    [
        (Regex(r"\d{3}-\d{4}"), ["555-1234"], ["555-123", "x555-1234", "555-12345"]),
        (Regex("^(yes|no)$"), ["yes", "no"], ["yesno", ""]),
        (Regex("a*"), ["", "aaa"], ["b", "ab"]),
        (Regex("(?:a|ab)(?:c|bcd)"), ["ac", "abc", "abcd", "abbcd"], ["ab", "abcdx"]),
        (Regex("[^\\n]+"), ["a / b", "ünï"], ["a\nb"]),
        (Regex("^(?!.*no).{2,9}$"), ["yes", "on"], ["no", "x no y"]),
        (Choice(("red", "green", "green tea")), ["red", "green", "green tea"], ["gree", "", "tea"]),
        (Choice(("", "a")), ["", "a"], ["aa"]),
        (Choice(('"', "\\d", "a/b", "x|y", "\n", "大")), ['"', "\\d", "a/b", "x|y", "大"], ["1"]),
        (Ebnf(ARITHMETIC), ["1", "1+2", "(1+2)-3", "((4))"], ["1+", "(1", "12"]),
        (Ebnf(LARK), ["Hello World", "Hi Al"], ["Hello", "Hey Al", "Hi al"]),
        (StructuralTags((TOOL,), free_text=False, stop_after_first=True),
         ['<tool_call>\n{"name": "f", "arguments": {"city": "Bonn"}}\n</tool_call>'],
         ["", "text", '<tool_call>\n{"name": "g", "arguments": {"city": "Bonn"}}\n</tool_call>']),
        (StructuralTags((TOOL,), ("<tool_call>",)),
         ["", "just text", "a < b",
          'so: <tool_call>\n{"name": "f", "arguments": {"city": ""}}\n</tool_call> done'],
         ["<tool_call>", "text <tool_call>\n{}"]),
        (StructuralTags((TOOL,), ("<tool_call>",), at_least_one=True),
         ['<tool_call>\n{"name": "f", "arguments": {"city": ""}}\n</tool_call>'], ["", "text"]),
        (StructuralTags((Tag("<a>", True, "</a>"), Tag("<b>", {"type": "null"}, "</b>")),
                        ("<a", "<b"), stop_after_first=True),
         ["", "x", "x<a>[1]</a>", "<b>null</b>"], ["<a>1</a>x", "<b>1</b>", "<ab"]),
    ],
)  # fmt: skip
def test_what_is_admitted(spec: GrammarSpec, inside: list[str], outside: list[str]) -> None:
    grammar = compiled(spec)
    for text in inside:
        assert accepts(grammar, text), text
    for text in outside:
        assert not accepts(grammar, text), text


@pytest.mark.parametrize(
    ("spec", "pattern"),
    [
        (Regex(r"[ab]{2,5}(?:\d|-)+!"), r"[ab]{2,5}(?:\d|-)+!"),
        (Choice(("one", "two", "three")), "one|two|three"),
        (Ebnf(LARK), "(Hello|Hi) [A-Z][a-z]{1,5}"),
    ],
)
def test_outputs_match(spec: GrammarSpec, pattern: str) -> None:
    for seed in range(10):
        output = sample(compiled(spec), seed)
        assert output.finished
        assert re.fullmatch(pattern, output.text)


def test_outputs_are_tags() -> None:
    grammar = compiled(StructuralTags((TOOL,), free_text=False))
    for seed in range(5):
        output = sample(grammar, seed)
        assert output.finished
        for piece in output.text.split("<tool_call>\n")[1:]:
            call = json.loads(piece.removesuffix("\n</tool_call>"))
            assert call["name"] == "f"
            assert list(call["arguments"]) == ["city"]


def test_special_tokens_of_tags_are_tokens() -> None:
    name = "<|im_start|>"
    grammar = compiled(StructuralTags((Tag(f"{name}f:", {"type": "null"}, name),), (name,)))
    (special,) = demo_tokenizer().encode(name, False)
    matcher = grammar.matcher()
    for token in [special, *demo_tokenizer().encode("f:null", False), special]:
        assert matcher.accept(token), matcher.error
    assert matcher.can_stop
    # In letters it is just text.
    matcher = grammar.matcher()
    for char in name:
        assert matcher.accept(demo_tokenizer().encode(char, False)[0])
    assert matcher.can_stop


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (Regex("(a"), r"lacks a '\)'"),
        (Regex(r"(a)\1"), "back-reference"),
        (Regex("a(?=b)"), "look-ahead"),
        (Regex("^(?!a)a$"), "matches no text"),
        (Regex("a^b"), "matches no text"),
        (Choice(()), "nothing to choose"),
        (Choice(("x" * 70_000,)), "characters"),
        (Ebnf("root ::= ("), "malformed|not valid"),
        (Ebnf('start: "a" missing'), "not valid"),
        (Ebnf('start: %json {"type": "object"}'), "%json"),
        (Ebnf('%llguidance {}\nstart: "a"'), "%llguidance"),
        (Ebnf("start: @other"), "@o"),
        (Ebnf("no rules"), "malformed|not valid"),
        (Ebnf("start: " + "(" * 100 + '"a"' + ")" * 100), "nests deeper"),
        (Ebnf("\n".join(f"a{i}: a{i + 1}" for i in range(5000))), "more than 300 rules"),
        (Ebnf("#" * 70_000), "longer than"),
        (Ebnf("\n" * 60_000), "malformed|not valid"),
        (StructuralTags(()), "no tags"),
        (StructuralTags((TOOL,)), "no triggers"),
        (StructuralTags((TOOL,), ("",)), "an empty one"),
        (StructuralTags((TOOL,), ("<function",)), "begins with no trigger"),
        (StructuralTags((TOOL,), ("<tool", "<tool_call>")), "part of the trigger"),
        (StructuralTags((TOOL,), ("<tool_call>", "<x>")), "no tag begins"),
        (StructuralTags((Tag("<a>", {"$ref": "x"}, ""),), ("<a>",)), r"<a>.: schema #: .\$ref"),
        (StructuralTags((Tag("<a>", True, "<|im_end|>."),), ("<a>",)), "ends the output"),
        (Choice(("\ud800",)), "surrogate"),
    ],
)
def test_what_is_refused(spec: GrammarSpec, problem: str) -> None:
    with pytest.raises(BadRequest, match=problem):
        compiled(spec)
