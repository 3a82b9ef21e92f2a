"""From each kind of spec to a grammar in the library's Lark dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import singledispatch

from llguidance.gbnf_to_lark import any_to_lark

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.limits import MAX_CHOICES, MAX_GRAMMAR_CHARS, check_nesting
from asyncllm.text.grammar.regex_parse import parse
from asyncllm.text.grammar.regex_tree import RegexError, full_match, languages, quote, write
from asyncllm.text.grammar.schema.writer import schema_rules
from asyncllm.text.grammar.spec import (
    Choice,
    Ebnf,
    GrammarSpec,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTags,
)

#: Texts of tokens that are no plain text, and their ids; None for those that end a sequence.
SpecialTokens = Mapping[str, int | None]

#: Lets masks hold all tokens that go on, not just the tokenizer's own way to spell a forced text.
_HEADER = '%llguidance {"no_forcing": true}\n'
# These would reach the library's own compiler of schemas, or its options.
_DIRECTIVE = re.compile(r"%\s*(json|regex|llguidance|lark)\b|@[A-Za-z_]")


def lark_of(spec: GrammarSpec, special_tokens: SpecialTokens) -> str:
    """The grammar of a spec.

    Raises:
        BadRequest: the spec is malformed, admits nothing, or is not supported.
    """
    return _HEADER + _lark_of(spec, special_tokens)


@singledispatch
def _lark_of(spec: GrammarSpec, special_tokens: SpecialTokens) -> str:
    raise TypeError(f"not a grammar spec: {type(spec).__name__}")


@_lark_of.register
def _json_object(spec: JsonObject, special_tokens: SpecialTokens) -> str:
    return schema_rules(True, only="object")


@_lark_of.register
def _json_schema(spec: JsonSchema, special_tokens: SpecialTokens) -> str:
    return schema_rules(spec.schema)


@_lark_of.register
def _regex(spec: Regex, special_tokens: SpecialTokens) -> str:
    try:
        found = languages(full_match(parse(spec.pattern)))
    except RegexError as error:
        raise BadRequest(f"the regular expression {error}") from error
    terms = [("" if inside else "~") + f"/{write(node, json=False)}/" for node, inside in found]
    if not all(inside for _, inside in found):
        terms.insert(0, "/(?s:.*)/")
    expression = " & ".join(terms)
    if oracle.matches(expression, ""):
        # A terminal that matches nothing at all is no lexeme for the library.
        return f'start: "" | T\nT: {expression}\n'
    if oracle.is_empty(expression):
        raise BadRequest("the regular expression matches no text")
    return f"start: T\nT: {expression}\n"


@_lark_of.register
def _choice(spec: Choice, special_tokens: SpecialTokens) -> str:
    choices = list(dict.fromkeys(spec.choices))
    if not choices:
        raise BadRequest("the choice has nothing to choose from")
    if len(choices) > MAX_CHOICES or sum(map(len, choices)) > MAX_GRAMMAR_CHARS:
        raise BadRequest(
            f"the choice has more than {MAX_CHOICES} texts or {MAX_GRAMMAR_CHARS} characters"
        )
    options = ['""'] if "" in choices else []
    if filled := [choice for choice in choices if choice]:
        options.append("T")
    lines = [f"start: {' | '.join(options)}\n"]
    if filled:
        lines.append(f"T: /{'|'.join(map(quote, filled))}/\n")
    return "".join(lines)


@_lark_of.register
def _ebnf(spec: Ebnf, special_tokens: SpecialTokens) -> str:
    check_nesting(spec.grammar)
    if found := _DIRECTIVE.search(spec.grammar):
        raise BadRequest(f"the grammar has {found[0]!r}, which is not supported")
    # Without blank lines, whose runs cost the library's converter the square of their length.
    lines = [line for line in spec.grammar.splitlines() if line.strip()]
    try:
        return str(any_to_lark("\n".join(lines) + "\n"))
    except Exception as error:  # the library's converter raises whatever comes
        raise BadRequest(f"the grammar is malformed: {oracle.first_line(str(error))}") from error


@_lark_of.register
def _structural_tags(spec: StructuralTags, special_tokens: SpecialTokens) -> str:
    if not spec.tags:
        raise BadRequest("the structural tag has no tags")
    lines = []
    for index, tag in enumerate(spec.tags):
        try:
            lines.append(schema_rules(tag.schema, name=f"schema{index}"))
        except BadRequest as error:
            raise BadRequest(f"tag {index}: {error.message}") from error
    if not spec.free_text:
        bodies = [
            _sequence(_pieces(tag.begin, special_tokens), f"schema{index}", tag.end, special_tokens)
            for index, tag in enumerate(spec.tags)
        ]
        lines.append(f"tag: {' | '.join(bodies)}\n")
        lines.append(f"start: tag{'' if spec.stop_after_first else '+'}\n")
        return "".join(lines)
    heads, plain = _heads(spec, special_tokens)
    lines += heads
    never = "|".join(quote(trigger) for trigger in plain)
    without = f" & ~/(?s:.*)(?:{never})(?s:.*)/" if never else ""
    lines.append(f'TEXT: /(?s:.+)/{without}\ntail: "" | TEXT\n')
    some = "tag+" if spec.at_least_one else "tag*"
    start = f"{some} tail"
    if spec.stop_after_first:
        start = "tag" if spec.at_least_one else "tag | tail"
    lines.append(f"start: {start}\n")
    return "".join(lines)


def _heads(spec: StructuralTags, special_tokens: SpecialTokens) -> tuple[list[str], list[str]]:
    """The rules of the tags with the text before them, and the triggers that are plain text."""
    triggers = list(dict.fromkeys(spec.triggers))
    if not triggers or not all(triggers):
        raise BadRequest("the structural tag has no triggers, or an empty one")
    for one in triggers:
        if other := next((other for other in triggers if one != other and one in other), None):
            raise BadRequest(f"the trigger {one!r} is part of the trigger {other!r}")
    bodies: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for index, tag in enumerate(spec.tags):
        trigger = next((one for one in triggers if tag.begin.startswith(one)), None)
        if trigger is None:
            raise BadRequest(f"tag {index} begins with no trigger: {tag.begin!r}")
        rest = _pieces(tag.begin[len(trigger) :], special_tokens)
        bodies[trigger].append(_sequence(rest, f"schema{index}", tag.end, special_tokens))
    lines = []
    heads = []
    plain = []
    for index, (trigger, options) in enumerate(bodies.items()):
        if not options:
            raise BadRequest(f"no tag begins with the trigger {trigger!r}")
        if trigger in special_tokens:
            lines.append(f"head{index}: tail {_token(trigger, special_tokens)}\n")
        elif any(token in trigger for token in special_tokens):
            raise BadRequest(f"the trigger {trigger!r} is more than one special token")
        else:
            plain.append(trigger)
            # Lazy: it ends where the trigger does for the first time.
            lines.append(f"head{index}[lazy]: HEAD{index}\n")
            lines.append(f"HEAD{index}: /(?s:.*){quote(trigger)}/\n")
        heads.append(f"head{index} ({' | '.join(options)})")
    lines.append(f"tag: {' | '.join(heads)}\n")
    return lines, plain


def _sequence(begin: list[str], body: str, end: str, special_tokens: SpecialTokens) -> str:
    return " ".join([*begin, body, *_pieces(end, special_tokens)])


def _pieces(text: str, special_tokens: SpecialTokens) -> list[str]:
    """A text as symbols, special tokens as such."""
    if not text:
        return []
    names = sorted((name for name in special_tokens if name in text), key=len, reverse=True)
    if not names:
        return [f"/{quote(text)}/"]
    found = re.split(f"({'|'.join(map(re.escape, names))})", text)
    return [
        _token(piece, special_tokens) if piece in special_tokens else f"/{quote(piece)}/"
        for piece in found
        if piece
    ]


def _token(name: str, special_tokens: SpecialTokens) -> str:
    token = special_tokens[name]
    if token is None:
        raise BadRequest(f"{name!r} ends the output, so it cannot be in a structural tag")
    return f"<[{token}]>"
