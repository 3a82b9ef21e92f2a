"""Grammar rules as data: prunes rules without a finite text, and writes the library's Lark.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.text.grammar.limits import MAX_RULE_DEPTH, MAX_RULES_BYTES


class Rule(msgspec.Struct, frozen=True):
    """A reference to a rule."""

    name: str


class Terminal(msgspec.Struct, frozen=True):
    """A reference to a terminal, which is matched as one lexeme."""

    name: str


class Inline(msgspec.Struct, frozen=True):
    """A piece of Lark."""

    text: str


class Times(msgspec.Struct, frozen=True):
    """A sequence, ``least`` to ``most`` times."""

    symbols: Sequence
    least: int
    most: int | None


Symbol: TypeAlias = Rule | Terminal | Inline | Times
Sequence: TypeAlias = tuple[Symbol, ...]


class Rules:
    """The rules of one grammar.

    Args:
        is_empty: whether a terminal's expression, an intersection, matches nothing.
        prefix: of the names of all rules, so that several grammars can share one text.
    """

    def __init__(self, is_empty: Callable[[str], bool], prefix: str = ""):
        self._is_empty = is_empty
        self._prefix = prefix
        self._rules: dict[str, list[Sequence]] = {}
        self._terminals: dict[str, str] = {}
        self._size = 0

    def new_rule(self, name: str = "") -> Rule:
        """A rule without options yet."""
        name = name or f"{self._prefix}r{len(self._rules)}"
        self._rules[name] = []
        return Rule(name)

    def add(self, rule: Rule, *symbols: Symbol) -> None:
        """One more option for a rule."""
        self._rules[rule.name].append(symbols)
        self._grow(8 + 6 * len(symbols))

    def rule(self, options: Iterable[Sequence]) -> Rule:
        rule = self.new_rule()
        for symbols in options:
            self.add(rule, *symbols)
        return rule

    def terminal(self, terms: Iterable[str], *, certain: bool = False) -> Terminal | None:
        """The texts that match all of these regular expressions, and none of those after a "~".

        Args:
            certain: there are such texts; otherwise the library is asked, which takes 0.5 ms.

        Returns:
            None if there are none.
        """
        parts = [
            f"~/{term[1:]}/" if term.startswith("~") else f"/{term}/"
            for term in sorted(dict.fromkeys(terms), key=lambda term: term.startswith("~"))
        ]
        text = " & ".join(parts)
        name = self._terminals.get(text)
        if name is None:
            self._grow(len(text) + 8)
            empty = len(parts) > 1 and not certain and self._is_empty(text)
            name = self._terminals[text] = (
                "" if empty else f"{self._prefix.upper()}T{len(self._terminals)}"
            )
        return Terminal(name) if name else None

    def inline(self, text: str) -> Inline:
        self._grow(len(text))
        return Inline(text)

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MAX_RULES_BYTES:
            raise BadRequest(f"the grammar grows beyond {MAX_RULES_BYTES} bytes")

    def write(self, root: Rule) -> str | None:
        """The rules that ``root`` needs, as text; None if it has no finite sentence."""
        fruitful = self._fruitful()
        if root.name not in fruitful:
            return None
        self._check_depth(root.name, fruitful)
        lines: list[str] = []
        used_terminals: set[str] = set()
        found = {root.name: None}
        for rule in found_in_order(found):
            options = [
                self._write_all(symbols, fruitful, found, used_terminals)
                for symbols in self._rules[rule]
                if self._is_fruitful(symbols, fruitful)
            ]
            lines.append(f"{rule}: {' | '.join(dict.fromkeys(options))}")
        texts = {terminal: text for text, terminal in self._terminals.items()}
        lines += [f"{terminal}: {texts[terminal]}" for terminal in sorted(used_terminals)]
        return "\n".join(lines) + "\n"

    def _fruitful(self) -> set[str]:
        """Rules from which some finite text follows: the least fixed point."""
        waiting: dict[str, list[str]] = {}
        fruitful: set[str] = set()
        todo = list(self._rules)
        for name, options in self._rules.items():
            for symbols in options:
                for used in _rules_in(symbols):
                    waiting.setdefault(used, []).append(name)
        while todo:
            name = todo.pop()
            if name in fruitful:
                continue
            if any(self._is_fruitful(symbols, fruitful) for symbols in self._rules[name]):
                fruitful.add(name)
                todo += waiting.get(name, ())
        return fruitful

    def _check_depth(self, root: str, fruitful: set[str]) -> None:
        """Refuse deep rules: the library recurses into a rule where it first meets it."""
        met = {root}
        stack = [iter(self._used(root, fruitful))]
        while stack:
            name = next(stack[-1], None)
            if name is None:
                stack.pop()
            elif name not in met:
                met.add(name)
                stack.append(iter(self._used(name, fruitful)))
                if len(stack) > MAX_RULE_DEPTH:
                    raise BadRequest(f"the grammar nests deeper than {MAX_RULE_DEPTH} rules")

    def _used(self, name: str, fruitful: set[str]) -> list[str]:
        return [
            used
            for symbols in self._rules[name]
            if self._is_fruitful(symbols, fruitful)
            for used in _rules_in(symbols)
            if used in fruitful
        ]

    def _is_fruitful(self, symbols: Sequence, fruitful: set[str]) -> bool:
        for symbol in symbols:
            if isinstance(symbol, Rule) and symbol.name not in fruitful:
                return False
            if isinstance(symbol, Times) and symbol.least > 0:  # noqa: SIM102
                if not self._is_fruitful(symbol.symbols, fruitful):
                    return False
        return True

    def _write_all(
        self, symbols: Sequence, fruitful: set[str], found: dict[str, None], used: set[str]
    ) -> str:
        texts = []
        for symbol in symbols:
            match symbol:
                case Rule(name):
                    match self._rules[name]:
                        case [(Terminal(alone),)]:  # saves a rule
                            used.add(alone)
                            texts.append(alone)
                        case _:
                            found.setdefault(name)
                            texts.append(name)
                case Terminal(name):
                    used.add(name)
                    texts.append(name)
                case Inline(text):
                    texts.append(text)
                case Times(inner, least, most):
                    if most == 0 or not self._is_fruitful(inner, fruitful):
                        continue
                    body = self._write_all(inner, fruitful, found, used)
                    texts.append(f"({body}){_counts(least, most)}")
        return " ".join(texts) or '""'


def found_in_order(found: dict[str, None]) -> Iterable[str]:
    """The keys of a dict that grows meanwhile."""
    at = 0
    while at < len(found):
        names = list(found)[at:]
        at += len(names)
        yield from names


def _counts(least: int, most: int | None) -> str:
    if most is None:
        return {0: "*", 1: "+"}.get(least, f"{{{least},}}")
    return "?" if (least, most) == (0, 1) else f"{{{least},{most}}}"


def _rules_in(symbols: Sequence) -> list[str]:
    names = []
    for symbol in symbols:
        if isinstance(symbol, Rule):
            names.append(symbol.name)
        elif isinstance(symbol, Times):
            names += _rules_in(symbol.symbols)
    return names
