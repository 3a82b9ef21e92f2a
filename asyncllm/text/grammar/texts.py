"""From each kind of spec to a grammar in the library's Lark dialect."""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import any_to_lark

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.limits import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    Budget,
    check_nesting,
    check_terminals,
    check_together,
)
from asyncllm.text.grammar.regex_parse import parse
from asyncllm.text.grammar.regex_tree import RegexError, full_match, languages, spread
from asyncllm.text.grammar.regex_write import quote, write
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
from asyncllm.text.grammar.tags import SpecialTokens, tag_rules

#: Masks hold every token that may follow, not only the tokenizer's own spelling of forced text.
_HEADER = '%llguidance {"no_forcing": true}\n'
# They would set the library's options, or reach its own compiler of schemas.
_DIRECTIVE = re.compile(r"%\s*(json|regex|llguidance|lark)\b|@[A-Za-z_]")


def lark_of(spec: GrammarSpec, special_tokens: SpecialTokens, budget: Budget | None = None) -> str:
    """The grammar of a spec.

    Raises:
        BadRequest: the spec is malformed, admits nothing, is too costly, or is not supported.
    """
    budget = budget or Budget()
    match spec:
        case JsonObject():
            text = schema_rules(True, only="object", budget=budget)
        case JsonSchema(schema):
            text = schema_rules(schema, budget=budget)
        case Regex(pattern):
            text = _regex(pattern)
        case Choice(choices):
            text = _choice(choices)
        case Ebnf(grammar):
            text = _ebnf(grammar)
        case StructuralTags():
            text = tag_rules(spec, special_tokens, budget)
    return _HEADER + text


def _regex(pattern: str) -> str:
    try:
        found = languages(full_match(parse(pattern)))
    except RegexError as error:
        raise BadRequest(f"the regular expression {error}") from error
    if len(found) > 1:
        check_together(spread(node) for node, _ in found)
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


def _choice(given: tuple[str, ...]) -> str:
    choices = list(dict.fromkeys(given))
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


def _ebnf(grammar: str) -> str:
    check_nesting(grammar)
    if found := _DIRECTIVE.search(grammar):
        raise BadRequest(f"the grammar has {found[0]!r}, which is not supported")
    # Without blank lines, whose runs cost the library's converter the square of their length.
    lines = [line for line in grammar.splitlines() if line.strip()]
    try:
        text = str(any_to_lark("\n".join(lines) + "\n"))
    except Exception as error:  # the library's converter raises whatever comes
        raise BadRequest(f"the grammar is malformed: {oracle.first_line(str(error))}") from error
    check_terminals(text)
    return text
