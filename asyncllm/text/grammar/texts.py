"""From each kind of spec to a grammar in the library's Lark dialect."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from llguidance.gbnf_to_lark import any_to_lark

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.limits import (
    MAX_CHOICES,
    MAX_GRAMMAR_CHARS,
    Budget,
    TooSlow,
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
    Tag,
)

#: Masks hold every token that may follow, not only the tokenizer's own spelling of forced text.
_HEADER = '%llguidance {"no_forcing": true}\n'
# They would set the library's options, or reach its own compiler of schemas.
_DIRECTIVE = re.compile(r"%\s*(json|regex|llguidance|lark)\b|@[A-Za-z_]")
#: Texts and ids of special tokens; None instead of the id for a token that ends a sequence.
SpecialTokens = Mapping[str, int | None]


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


class _Body(NamedTuple):
    """The rest of a tag behind its trigger; ``last`` if the tag's end also ends the output."""

    symbols: str
    last: bool


class _Opening(NamedTuple):
    """How a trigger is recognized in free text.

    Attributes:
        special: the special token at its begin, or behind ``before``; "" without one.
        before: its plain text in front of ``special``; the whole trigger without a special token.
        after: the plain text behind a special token at its begin. Both together open a tag; if
            ``after`` is empty, the special token alone does.
    """

    special: str
    before: str
    after: str


def tag_rules(spec: StructuralTags, special_tokens: SpecialTokens, budget: Budget) -> str:
    """The grammar of structural tags, in Lark.

    Raises:
        BadRequest: tags and triggers do not fit together, or a schema cannot be enforced.
    """
    if not spec.tags:
        raise BadRequest("the structural tag has no tags")
    lines = []
    for index, tag in enumerate(spec.tags):
        try:
            lines.append(schema_rules(tag.schema, name=f"schema{index}", budget=budget))
        except TooSlow:
            raise
        except BadRequest as error:
            raise BadRequest(f"tag {tag.begin!r}: {error.message}") from error
    write = _rules_in_free_text if spec.free_text else _rules_of_tags_alone
    return "".join([*lines, *write(spec, special_tokens)])


def _rules_of_tags_alone(spec: StructuralTags, special_tokens: SpecialTokens) -> list[str]:
    bodies = [_body(tag.begin, tag, index, special_tokens) for index, tag in enumerate(spec.tags)]
    more = _options(body for body in bodies if not body.last)
    last = _options(body for body in bodies if body.last)
    if spec.stop_after_first or not more:
        return [f"start: {_options(bodies)}\n"]
    if not last:
        return [f"start: ({more})+\n"]
    return [f"start: ({more})+ | ({more})* ({last})\n"]


def _rules_in_free_text(spec: StructuralTags, special_tokens: SpecialTokens) -> list[str]:
    openings = _openings(spec, special_tokens)
    plain = [opening.before for opening in openings if not opening.special]
    # Texts that open a tag behind a special token which is free text otherwise.
    guarded: dict[str, list[str]] = {}
    for opening in openings:
        if opening.after:
            guarded.setdefault(opening.special, []).append(opening.after)
    taken = {opening.special for opening in openings}
    free = [id for name, id in special_tokens.items() if id is not None and name not in taken]
    never = f" & ~/(?s:.*)(?:{_quoted(plain)})(?s:.*)/" if plain else ""
    lines = [f"TEXT: /(?s:.+)/{never}\n"]
    if free:
        lines.append(f"other: <[{','.join(map(str, sorted(free)))}]>\n")
    for index, texts in enumerate(guarded.values()):
        lines.append(f"TEXT{index}: /(?s:.+)/{never} & ~/(?:{_quoted(texts)})(?s:.*)/\n")
    more, last = [], []
    for index, (opening, bodies) in enumerate(openings.items()):
        begin = _head(index, opening, special_tokens, lines)
        state = "open" if opening.before else "any"
        going = _options(body for body in bodies if not body.last)
        ending = _options(body for body in bodies if body.last)
        if going:
            lines.append(f"tag{index}: {begin} ({going})\n")
            more.append((state, f"tag{index}"))
        if ending:
            lines.append(f"last{index}: {begin} ({ending})\n")
            last.append((state, f"last{index}"))

    def states(prefix: str, first: str, tags: list[str]) -> None:
        """Write the automaton that starts with ``first``; ``tags`` lead back to it."""
        opened = [first, *([f"{prefix}any other"] if free else []), *tags]
        lines.append(f"{prefix}open: {' | '.join(opened)}\n")
        anywhere = [f"{prefix}open", f"{prefix}open TEXT"]
        for index, name in enumerate(guarded):
            lines.append(f"{prefix}at{index}: {prefix}any {_token(name, special_tokens)}\n")
            anywhere += [f"{prefix}at{index}", f"{prefix}at{index} TEXT{index}"]
        lines.append(f"{prefix}any: {' | '.join(anywhere)}\n")

    def following(prefix: str, tags: list[tuple[str, str]]) -> list[str]:
        return [f"{prefix}{state} {tag}" for state, tag in tags]

    if spec.stop_after_first:
        states("", '""', [])
        ends = following("", more + last)
        start = ends if spec.at_least_one else [*ends, "any"]
    elif spec.at_least_one:
        states("", '""', [])
        start = following("", last)
        if more:
            lines.append(f"first: {' | '.join(following('', more))}\n")
            states("later_", "first", following("later_", more))
            start += ["later_any", *following("later_", last)]
    else:
        states("", '""', following("", more))
        start = ["any", *following("", last)]
    lines.append(f"start: {' | '.join(start)}\n")
    return lines


def _openings(spec: StructuralTags, special_tokens: SpecialTokens) -> dict[_Opening, list[_Body]]:
    """How each trigger is recognized, with the bodies of its tags."""
    triggers = list(dict.fromkeys(spec.triggers))
    if not triggers or not all(triggers):
        raise BadRequest("the structural tag has no triggers, or an empty one")
    for one in triggers:
        if other := next((other for other in triggers if one != other and one in other), None):
            raise BadRequest(f"the trigger {one!r} is part of the trigger {other!r}")
    found: dict[_Opening, list[_Body]] = {}
    used = set()
    for index, tag in enumerate(spec.tags):
        trigger = next((one for one in triggers if tag.begin.startswith(one)), None)
        if trigger is None:
            raise BadRequest(f"tag {tag.begin!r} begins with no trigger")
        used.add(trigger)
        opening = _opening(_split(trigger, special_tokens), special_tokens)
        rest = tag.begin[len(opening.before) + len(opening.special) :]
        found.setdefault(opening, []).append(_body(rest, tag, index, special_tokens))
    if unused := next((trigger for trigger in triggers if trigger not in used), None):
        raise BadRequest(f"no tag begins with the trigger {unused!r}")
    # A special token that also opens a tag alone needs no text behind it.
    alone = {o.special: o for o in found if o.special and not o.before and not o.after}
    merged: dict[_Opening, list[_Body]] = {}
    for opening, bodies in found.items():
        merged.setdefault(alone.get(opening.special, opening), []).extend(bodies)
    return merged


def _opening(pieces: list[str], special_tokens: SpecialTokens) -> _Opening:
    first, *others = pieces
    if first in special_tokens:
        after = others[0] if others and others[0] not in special_tokens else ""
        return _Opening(first, "", after)
    return _Opening(others[0] if others else "", first, "")


def _head(index: int, opening: _Opening, special_tokens: SpecialTokens, lines: list[str]) -> str:
    """The symbols from the state in which a tag begins up to its body."""
    token = _token(opening.special, special_tokens) if opening.special else ""
    if not opening.before:
        return token
    lines.append(f"HEAD{index}: /(?s:.*){quote(opening.before)}/\n")
    if token:
        return f"HEAD{index} {token}"
    # Lazy: it ends where the trigger does for the first time.
    lines.append(f"head{index}[lazy]: HEAD{index}\n")
    return f"head{index}"


def _body(begin: str, tag: Tag, index: int, special_tokens: SpecialTokens) -> _Body:
    end = _split(tag.end, special_tokens)
    # The engine reads the token that ends the output: the grammar is complete before it.
    last = bool(end) and special_tokens.get(end[-1], -1) is None
    symbols = [
        *(_symbol(piece, special_tokens) for piece in _split(begin, special_tokens)),
        f"schema{index}",
        *(_symbol(piece, special_tokens) for piece in (end[:-1] if last else end)),
    ]
    return _Body(" ".join(symbols), last)


def _options(bodies: Iterable[_Body]) -> str:
    return " | ".join(dict.fromkeys(body.symbols for body in bodies))


def _split(text: str, special_tokens: SpecialTokens) -> list[str]:
    """A text cut into special tokens and the plain text between them."""
    if not text:
        return []
    names = sorted((name for name in special_tokens if name and name in text), key=len)
    if not names:
        return [text]
    found = re.split(f"({'|'.join(map(re.escape, reversed(names)))})", text)
    return [piece for piece in found if piece]


def _symbol(piece: str, special_tokens: SpecialTokens) -> str:
    return _token(piece, special_tokens) if piece in special_tokens else f"/{quote(piece)}/"


def _token(name: str, special_tokens: SpecialTokens) -> str:
    token = special_tokens[name]
    if token is None:
        raise BadRequest(f"{name!r} ends the output, so it cannot be in a structural tag")
    return f"<[{token}]>"


def _quoted(texts: list[str]) -> str:
    return "|".join(map(quote, texts))
