"""Tool calls under a grammar, however the tokenizer writes the markers around them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tokenizers

from asyncllm.server.chat.conversation import calls_grammar
from asyncllm.text import Tokenizer
from asyncllm.text.grammar import StructuralTags, Tag
from asyncllm.text.grammar.compiler import GrammarCompiler
from asyncllm.text.parsing import (
    TOOL_FORMATS,
    CallStructure,
    Formats,
    call_structure,
    choose_formats,
)
from tests.support.text.grammar_sampling import tokens_in
from tests.support.text.parsing_texts import parse_all
from tests.support.text.tokenizers import with_markers

END = "<|end|>"
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "now", "strict": True}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}
#: The tool_choice, and whether there may be several calls.
CHOICES: list[tuple[Any, bool]] = [
    ("auto", True),
    ("auto", False),
    ("required", True),
    ("required", False),
    (NAMED, True),
]


def tokenizer_of(kind: str, markers: list[str]) -> Tokenizer:
    """Whose markers are special tokens, added ones that are not, or nothing but text."""
    found = tuple(sorted(marker for marker in markers if marker not in (END, "```")))
    made = with_markers(
        special=found if kind == "special" else (), added=found if kind == "added" else ()
    )
    return Tokenizer(tokenizers.Tokenizer.from_str(made))


def markers_of(formats: Formats) -> list[str]:
    """Those that models have tokens for."""
    return [
        marker
        for marker in formats.markers()
        if marker.startswith(("<", "[")) and " " not in marker
    ]


class Model:
    """A tokenizer's grammars; ``ends`` are the texts of tokens that end an output."""

    def __init__(self, tokenizer: Tokenizer, ends: tuple[str, ...] = (END,)):
        self.tokenizer = tokenizer
        self.ends = tuple(tokenizer.token_id(end) for end in ends)
        assert None not in self.ends
        self._compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, self.ends)  # type: ignore[arg-type]

    def refused(self, spec: Any, text: str) -> str | None:
        """Where a text stops being allowed, and None if it is allowed and complete."""
        matcher = self._compiler.compile(spec).matcher()
        row = np.zeros(-(-self.tokenizer.vocab_size // 32), np.uint32)
        tokens = self.tokenizer.encode(text, add_special_tokens=False)
        for at, token in enumerate([*tokens, self.ends[0]]):
            matcher.fill(row)
            if token not in tokens_in(row):
                return self.tokenizer.decode(tokens[:at], skip_special_tokens=False)
            if token != self.ends[0]:
                assert matcher.accept(token), matcher.error
        return None


def spec_of(structure: CallStructure) -> StructuralTags:
    spec = calls_grammar(structure)
    assert isinstance(spec, StructuralTags)
    return spec


@pytest.mark.parametrize("kind", ["special", "added", "text"])
@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_every_format_with_every_kind_of_marker(name: str, kind: str) -> None:
    formats = choose_formats(None, tools=name, reasoning="harmony" if name == "harmony" else "none")
    model = Model(tokenizer_of(kind, markers_of(formats)))
    for choice, parallel in CHOICES:
        structure = call_structure(formats, TOOLS, choice, parallel=parallel)
        if name == "glm4" and choice == "auto":  # a name at the beginning of a line may be anything
            assert structure is None
            continue
        assert structure is not None
        spec = spec_of(structure)
        weather = structure.separate_tags()[0]
        call = weather.begin + '{"city": "Bonn"}' + weather.end
        bad = weather.begin + '{"city": 3}' + weather.end
        assert model.refused(spec, call) is None
        assert (model.refused(spec, bad) or "").rstrip().endswith('"city":')
        assert (model.refused(spec, call + call) is None) == (not structure.at_most_one)
        free = choice == "auto"
        assert (model.refused(spec, "Hello.") is None) == free
        assert (model.refused(spec, "So: " + call) is None) == free
        if free:
            for trigger in structure.triggers:
                assert model.refused(spec, f"So: {trigger}!") is not None
        message = parse_all(call, formats, tools=TOOLS)
        assert [(made.name, json.loads(made.arguments)) for made in message.calls] == [
            ("weather", {"city": "Bonn"})
        ]


def test_a_call_whose_end_ends_the_output() -> None:
    """As those of gpt-oss do."""
    formats = choose_formats(None, tools="harmony")
    model = Model(tokenizer_of("special", markers_of(formats)), ("<|call|>", "<|return|>"))
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Bonn"}'
    for choice, parallel in CHOICES:
        structure = call_structure(formats, TOOLS, choice, parallel=parallel)
        assert structure is not None
        spec = spec_of(structure)
        assert model.refused(spec, call) is None
        assert model.refused(spec, call + call) == call
        assert (model.refused(spec, before + call) is None) == (choice == "auto")
        answer = "<|channel|>final<|message|>Hello."
        assert (model.refused(spec, before + answer) is None) == (choice == "auto")
        assert model.refused(spec, before + call.replace('"Bonn"', "3")) is not None


CALL = "<|a|><|b|>"


@pytest.mark.parametrize(
    ("begin", "trigger", "inside", "outside"),
    [
        # Several special tokens: the first of them opens the tag.
        ("<|a|><|b|>", "<|a|><|b|>", ["<|a|><|b|>1<|c|>", "x<|c|>y"], ["<|a|>x", "<|a|><|c|>"]),
        ("<|a|><|b|>f:", "<|a|>", ["x<|a|><|b|>f:1<|c|>x"], ["<|a|>", "<|a|><|b|>1"]),
        # A special token followed by text: only together.
        (
            "<|a|>call f:",
            "<|a|>call ",
            [
                "<|a|>call f:1<|c|>",
                "<|a|>x",
                "<|a|>",
                "<|a|>cal<|b|>",
                "<|b|>call g",
                "<|a|><|a|>x",
            ],
            ["<|a|>call g", "<|a|>call f:x", "<|a|>call "],
        ),
        # Text followed by a special token.
        (
            "to=<|a|>",
            "to=<|a|>",
            ["to=<|a|>1<|c|>", "to=", "to=<|b|>"],
            ["<|a|>", "to<|a|>", "to=<|a|>x"],
        ),
        # Text alone, beside special tokens that mean nothing.
        ("call:", "call:", ["<|a|>x<|b|>call:1<|c|>", "call"], ["call:x", "x<|a|>call:<|b|>"]),
    ],
)
def test_triggers_of_special_tokens_and_text(
    begin: str, trigger: str, inside: list[str], outside: list[str]
) -> None:
    made = with_markers(special=("<|a|>", "<|b|>", "<|c|>"))
    model = Model(Tokenizer(tokenizers.Tokenizer.from_str(made)))
    tag = Tag(begin, {"type": "integer"}, "<|c|>")
    spec = StructuralTags((tag,), (trigger,))
    for text in inside:
        assert model.refused(spec, text) is None, text
    for text in outside:
        assert model.refused(spec, text) is not None, text
    some = StructuralTags((tag,), (trigger,), at_least_one=True)
    assert model.refused(some, "text") == "text"
    assert model.refused(some, f"text{begin}1<|c|>text{begin}2<|c|>") is None
    one = StructuralTags((tag,), (trigger,), stop_after_first=True)
    assert model.refused(one, "text") is None
    assert model.refused(one, f"text{begin}1<|c|>") is None
    assert model.refused(one, f"{begin}1<|c|>x") is not None


def test_free_text_has_no_token_that_ends_the_output() -> None:
    made = with_markers(special=("<|a|>", "<|b|>"))
    model = Model(Tokenizer(tokenizers.Tokenizer.from_str(made)), (END, "<|b|>"))
    spec = StructuralTags((Tag("<|a|>", {"type": "integer"}, ""),), ("<|a|>",))
    assert model.refused(spec, "text<|b|>text") == "text<|b|>"
