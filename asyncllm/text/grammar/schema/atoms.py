"""Atoms: conditions on values of one JSON type, which remain when all logic is resolved.

A branch is a conjunction of atoms; a schema is a union of branches for each type.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Any, Literal, TypeAlias

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.text.grammar.limits import refused
from asyncllm.text.grammar.regex_tree import Node as Regex
from asyncllm.text.grammar.schema.document import Node, Scope

Kind: TypeAlias = Literal["null", "boolean", "number", "string", "array", "object"]
KINDS: tuple[Kind, ...] = ("null", "boolean", "number", "string", "array", "object")


class Claim(msgspec.Struct, frozen=True):
    """That a value is valid against a subschema, or that it is not.

    Attributes:
        node: the subschema.
        holds: whether the value is valid.
        scope: the dynamic scope in which references of the subschema are resolved.
        watchers: the ``unevaluated...`` keywords for which this subschema evaluates parts.
    """

    node: Node
    holds: bool
    scope: Scope = ()
    watchers: frozenset[int] = frozenset()

    def unwatched(self) -> Claim:
        """The claim without its watchers."""
        return Claim(self.node, self.holds, self.scope)

    def same(self, holds: bool) -> tuple[Node, bool, Scope]:
        """A key by which claims are equal or opposite, whatever their watchers."""
        return self.node, holds, self.scope

    def refused(self, keyword: str, reason: str) -> BadRequest:
        """The error for a keyword of the subschema that cannot be enforced."""
        return refused(self.node.path, keyword, reason)


#: Claims about one value that hold together, in the order of the schema.
Claims: TypeAlias = tuple[Claim, ...]


class In(msgspec.Struct, frozen=True):
    """A null, boolean, number or string is one of these values, or is none of them."""

    values: tuple[Any, ...]
    inside: bool


class Integer(msgspec.Struct, frozen=True):
    """A number has no fraction, or has one; 1.0 has none."""

    holds: bool


class Bound(msgspec.Struct, frozen=True):
    value: Decimal
    lower: bool
    exclusive: bool


class Multiple(msgspec.Struct, frozen=True):
    of: Decimal
    path: str


class Match(msgspec.Struct, frozen=True):
    """A string as a whole is in a language, or is not."""

    regex: Regex
    inside: bool


class Count(msgspec.Struct, frozen=True):
    """Number of characters, items or properties."""

    least: int
    most: int | None
    keyword: str
    path: str


class Item(msgspec.Struct, frozen=True):
    """The item at an index, if there is one."""

    index: int
    claim: Claim


class Rest(msgspec.Struct, frozen=True):
    """All items from an index on."""

    start: int
    claim: Claim


class Contains(msgspec.Struct, frozen=True):
    """From ``least`` to ``most`` items from an index on make the claim true."""

    start: int
    claim: Claim
    least: int
    most: int | None


class Unique(msgspec.Struct, frozen=True):
    path: str


class Property(msgspec.Struct, frozen=True):
    """The value of a property, if there is one."""

    name: str
    claim: Claim


class Matching(msgspec.Struct, frozen=True):
    """The values of all properties whose name is in a language."""

    regex: Regex
    claim: Claim


class Others(msgspec.Struct, frozen=True):
    """The values of all properties that are not named and whose name is in none of the languages"""

    names: frozenset[str]
    regexes: tuple[Regex, ...]
    claim: Claim


class Presence(msgspec.Struct, frozen=True):
    name: str
    present: bool


class Names(msgspec.Struct, frozen=True):
    """All names, as strings."""

    claim: Claim


class Some(msgspec.Struct, frozen=True):
    """There is a property that ``where`` selects, whose value or name makes its claim true."""

    where: Matching | Others | Names
    keyword: str
    path: str


class Unevaluated(msgspec.Struct, frozen=True):
    """The claim holds for all items or properties that nothing with this watcher evaluates."""

    watcher: int
    claim: Claim


Atom: TypeAlias = (
    In
    | Integer
    | Bound
    | Multiple
    | Match
    | Count
    | Item
    | Rest
    | Contains
    | Unique
    | Property
    | Matching
    | Others
    | Presence
    | Names
    | Some
    | Unevaluated
)


class Watched(msgspec.Struct, frozen=True):
    """An atom, and the ``unevaluated...`` keywords for which it evaluates items or properties."""

    atom: Atom
    watchers: frozenset[int]


Branch: TypeAlias = tuple[Watched, ...]


class Option(msgspec.Struct, frozen=True):
    """One way to make a keyword true: atoms and claims about the same value."""

    atoms: tuple[Atom, ...] = ()
    claims: Claims = ()


#: The options of a keyword that is true of every value, and of one that is true of none.
TRUE: list[Option] = [Option()]
FALSE: list[Option] = []


def kind_of(value: Any) -> Kind:
    """The JSON type of a parsed value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
