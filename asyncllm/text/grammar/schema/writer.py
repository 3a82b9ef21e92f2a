"""From a JSON Schema to a grammar of the JSON texts that are valid against it.

Each set of claims about a value becomes one rule, whose options are the branches that
``logic.Logic`` finds; the claims of their items and properties become further rules. This is the
way to make an alternating tree automaton nondeterministic. The grammar is finite because the
document has finitely many subschemas. Rules without a finite text are pruned.

Every text that the grammar admits is valid. It leaves out valid texts of other forms: properties
follow the schema's order, numbers have a bounded number of digits, characters are escaped only
where they must be, and whitespace is at most a space or a new line with its indentation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from decimal import Decimal
from itertools import chain, product
from typing import Any

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import oracle
from asyncllm.text.grammar.limits import Budget
from asyncllm.text.grammar.regex_tree import Node as Regex
from asyncllm.text.grammar.schema import arrays, members, numbers, objects, strings
from asyncllm.text.grammar.schema.alternatives import check_alternatives
from asyncllm.text.grammar.schema.atoms import KINDS, Atom, Branch, Claim, Claims, In, Kind
from asyncllm.text.grammar.schema.document import Document
from asyncllm.text.grammar.schema.logic import Logic
from asyncllm.text.grammar.schema.part_keywords import READERS
from asyncllm.text.grammar.schema.rules import Rule, Rules, Sequence, Terminal
from asyncllm.text.grammar.schema.strings import StringShape

_BREAK = r"(?: |\n {0,24}|\n\t{0,8})?"
_OPEN_BRACE, _CLOSE_BRACE = rf"\{{{_BREAK}", rf"{_BREAK}\}}"
_OPEN_BRACKET, _CLOSE_BRACKET = rf"\[{_BREAK}", rf"{_BREAK}\]"
#: Depth and branches up to which "oneOf" looks for a property that tells its options apart.
_LOOK_DEPTH = 3
_LOOK_BRANCHES = 16


def schema_rules(
    schema: Any, *, name: str = "start", only: Kind | None = None, budget: Budget | None = None
) -> str:
    """The grammar of a schema, in Lark.

    Args:
        schema: an object or a boolean, as parsed from JSON.
        name: of its root rule; all others begin with it, but for "start".
        only: admit values of this JSON type only.
        budget: of the grammar that this is a part of.

    Raises:
        BadRequest: the schema is malformed, admits nothing, is too complex, or says something that
            cannot be enforced; the message names the keyword and its place.
    """
    if not isinstance(schema, dict | bool):
        raise BadRequest("a schema must be an object or a boolean")
    try:
        prefix = "" if name == "start" else f"{name}_"
        return _SchemaWriter(schema, prefix, budget or Budget()).write(name, only)
    except RecursionError:
        raise BadRequest("the schema is too complex: its keywords are nested too deep") from None


class _SchemaWriter:
    def __init__(self, schema: Any, prefix: str, budget: Budget):
        self._document = Document(schema)
        self._budget = budget
        self.rules = Rules(self._is_empty, prefix)
        self.logic = Logic(self._document, READERS, budget, self._clearly_empty)
        self._values: dict[frozenset[Claim], Rule] = {}
        self._todo: list[tuple[Claims, Rule]] = []
        self._matches: dict[tuple[Regex, str], bool] = {}
        self.comma = self._fixed(rf",{_BREAK}")
        self.colon = self._fixed(": ?")
        self._depth = 0

    def write(self, name: str, only: Kind | None) -> str:
        root = Claim(self._document.root, True, self._document.root_scope)
        rule = self.rules.new_rule(name)
        kinds = KINDS if only is None else (only,)
        for kind in kinds:
            self._add(rule, (root,), kind)
        while self._todo:
            claims, todo_rule = self._todo.pop()
            for kind in KINDS:
                self._add(todo_rule, claims, kind)
        text = self.rules.write(rule)
        if text is None:
            what = "value" if only is None else only
            raise BadRequest(f"schema #: no {what} is valid against it")
        return text

    def value(self, claims: Claims) -> Rule:
        """The rule for values of which all these claims are true."""
        claims = tuple(claim for claim in claims if claim.node.schema is not claim.holds)
        key = frozenset(claims)
        if key not in self._values:
            self._budget.spend(4)
            self._values[key] = self.rules.new_rule()
            self._todo.append((claims, self._values[key]))
        return self._values[key]

    def matches(self, regex: Regex, text: str) -> bool:
        """Whether a string is in a language."""
        key = (regex, text)
        if key not in self._matches:
            self._budget.spend(20)
            expression = f"/{strings.json_text(regex)}/"
            if any("\ud800" <= char < "\ue000" for char in text):
                return False
            self._matches[key] = oracle.matches(expression, json.dumps(text, ensure_ascii=False))
        return self._matches[key]

    def names(self, claims: Claims, base: StringShape) -> list[Terminal]:
        """Terminals for the strings of which all these claims are true, within ``base``."""
        branches = self.logic.expand(claims, "string") if claims else [()]
        found = []
        for branch in branches:
            shape = strings.fold(_atoms(branch), base)
            if shape is not None and (terminal := self._string(shape)) is not None:
                found.append(terminal)
        return found

    def few_values(self, claims: Claims, most: int) -> list[Terminal] | None:
        """All values as texts; None if the schema does not list them, or lists more than ``most``.

        Only null, booleans, numbers and strings. Equal values come once, whatever their texts.
        """
        texts: dict[Any, str] = {}
        for kind in KINDS:
            for branch in self.logic.expand(claims, kind):
                found = _listed(kind, _atoms(branch))
                if found is None:
                    return None
                texts |= found
        if len(texts) > most:
            return None
        terminals = [self.rules.terminal([text]) for text in texts.values()]
        return [terminal for terminal in terminals if terminal is not None]

    def _fixed(self, regex: str) -> Terminal:
        terminal = self.rules.terminal([regex])
        assert terminal is not None
        return terminal

    def _add(self, rule: Rule, claims: Claims, kind: Kind) -> None:
        """Add the options for values of one JSON type."""
        branches = dict.fromkeys(self.logic.expand(claims, kind))
        if kind == "object":
            check_alternatives(branches, lambda a, b: self._clearly_nothing("object", a + b))
        for branch in branches:
            for symbols in self._options(kind, branch):
                self.rules.add(rule, *symbols)

    def _options(self, kind: Kind, branch: Branch) -> list[Sequence]:
        found = self._fold(kind, branch)
        if not found:
            return []
        match kind:
            case "null" | "boolean":
                return [(self._fixed("|".join(found)),)]
            case "number":
                return self._numbers(found)
            case "string":
                terminal = self._string(found)
                return [(terminal,)] if terminal is not None else []
            case "array":
                options = arrays.write(self, found)
                ends = self._fixed(_OPEN_BRACKET), self._fixed(_CLOSE_BRACKET)
            case "object":
                options = members.write(self, found)
                ends = self._fixed(_OPEN_BRACE), self._fixed(_CLOSE_BRACE)
        return [(ends[0], *symbols, ends[1]) for symbols in options]

    def _fold(self, kind: Kind, branch: Branch) -> Any:
        """The values of a branch, as their JSON type has them; false if there are clearly none."""
        match kind:
            case "null" | "boolean":
                return _scalars(kind, _atoms(branch))
            case "number":
                return numbers.fold(_atoms(branch))
            case "string":
                return strings.fold(_atoms(branch))
            case "array":
                return arrays.fold(self.logic, branch)
            case "object":
                return objects.fold(branch)

    def _is_empty(self, expression: str) -> bool:
        self._budget.check_time()
        return oracle.is_empty(expression)

    def _string(self, shape: StringShape) -> Terminal | None:
        terms, certain = shape.terms(), shape.certain()
        if len(terms) > 1 and not certain:
            self._budget.spend(50)  # the library is asked whether they have a common text
        return self.rules.terminal(terms, certain=certain)

    def _numbers(self, shapes: list[numbers.NumberShape]) -> list[Sequence]:
        options: list[Sequence] = []
        for shape in shapes:
            if shape.multiple is not None and shape.values is None:
                self._budget.spend(100)
                if (inline := numbers.inline_schema(shape)) is not None:
                    options.append((self.rules.inline(f"%json {inline}"),))
                continue
            for terms in numbers.terms(shape):
                terminal = self.rules.terminal(terms, certain=shape.certain())
                if terminal is not None:
                    options.append((terminal,))
        return options

    def _clearly_empty(self, claims: Claims) -> bool:
        """Whether claims contradict each other by their values, types or required properties."""
        if self._depth >= _LOOK_DEPTH:
            return False
        self._depth += 1
        try:
            return all(self._clearly_no(kind, claims) for kind in KINDS)
        finally:
            self._depth -= 1

    def _clearly_no(self, kind: Kind, claims: Claims) -> bool:
        """Whether claims contradict each other for values of one JSON type.

        Each claim is expanded alone, hence once for many pairs.
        """
        try:
            found = [self.logic.expand((claim,), kind) for claim in claims]
        except BadRequest:
            return False  # refused where it is written
        if math.prod(map(len, found)) > _LOOK_BRANCHES:
            return False
        self.logic.budget.spend()
        return all(
            self._clearly_nothing(kind, tuple(chain.from_iterable(branches)))
            for branches in product(*found)
        )

    def _clearly_nothing(self, kind: Kind, branch: Branch) -> bool:
        found = self._fold(kind, branch)
        parts: Iterable[Claims] = ()
        if found and kind == "array":
            parts = map(found.claims_at, range(min(found.least, found.first_alike)))
        elif found and kind == "object":
            parts = (members.claims_about(self, found, name) for name in found.required)
        return not found or any(map(self._clearly_empty, parts))


def _atoms(branch: Branch) -> list[Atom]:
    return [watched.atom for watched in branch]


def _scalars(kind: Kind, atoms: list[Atom]) -> list[str]:
    """The values of null or boolean, as texts."""
    values: list[Any] = [None] if kind == "null" else [False, True]
    for atom in atoms:
        if isinstance(atom, In):
            values = [value for value in values if (value in atom.values) == atom.inside]
    return ["null" if value is None else str(value).lower() for value in values]


def _listed(kind: Kind, atoms: list[Atom]) -> dict[Any, str] | None:
    """All values of one JSON type with their texts as regular expressions; None if too many."""
    match kind:
        case "null" | "boolean":
            return {text: text for text in _scalars(kind, atoms)}
        case "number":
            found: dict[Any, str] = {}
            for shape in numbers.fold(atoms):
                if shape.values is None:
                    return None
                for text in shape.values:
                    found[Decimal(text)] = numbers.value_regex(text)
            return found
        case "string":
            strings_ = strings.fold(atoms)
            if strings_ is None:
                return {}
            if strings_.values is None or strings_.inside or strings_.outside:
                return None
            return {f'"{value}': strings.json_texts([value]) for value in strings_.values}
    return None
