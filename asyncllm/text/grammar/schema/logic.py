"""Resolves the logic of a schema: claims about a value become unions of branches of atoms.

This is done for one JSON type at a time, so keywords for other types vanish. Resolving "allOf",
"anyOf", "oneOf", "not", "if" and references gives a disjunctive normal form over atoms, without
negations. Claims about items and properties stay claims: sets of them are the states of the
grammar, so recursion ends where a set of claims comes again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.text.grammar.limits import Budget
from asyncllm.text.grammar.schema.atoms import (
    FALSE,
    KINDS,
    TRUE,
    Atom,
    Branch,
    Claim,
    Claims,
    Kind,
    Option,
    Presence,
    Property,
    Unevaluated,
    Watched,
)
from asyncllm.text.grammar.schema.document import Document, Node

#: Reads a keyword of a claim, and its value: one of the options returned must hold.
Reader = Callable[["Logic", Claim, str, Any], list[Option]]

_UNEVALUATED: Mapping[str, Kind] = {"unevaluatedProperties": "object", "unevaluatedItems": "array"}
#: Keywords of other drafts that restrict values.
_UNKNOWN = ("$recursiveRef", "disallow", "divisibleBy", "extends")
_KINDS_BY_TYPE: Mapping[str, Kind] = {**{kind: kind for kind in KINDS}, "integer": "number"}
_MAX_BRANCHES = 512


class _Pending(msgspec.Struct, frozen=True):
    """A claim still to be read, with the claims that it came from."""

    claim: Claim
    origins: frozenset[Any]


class _Choice(msgspec.Struct, frozen=True):
    options: list[Option]
    holder: _Pending
    watchers: frozenset[int]


class _Work(msgspec.Struct, frozen=True):
    pending: tuple[_Pending | _Choice, ...]
    atoms: Branch = ()
    known: frozenset[Any] = frozenset()


class Logic:
    """Expands claims; remembers what it has expanded.

    Args:
        document: where the claims' nodes come from.
        readers: of each JSON type, by keyword.
        clearly_empty: whether no value makes these claims true; may be False when in doubt.
    """

    def __init__(
        self,
        document: Document,
        readers: Mapping[Kind, Mapping[str, Reader]],
        budget: Budget,
        clearly_empty: Callable[[Claims], bool],
    ):
        self.document = document
        self.budget = budget
        self._readers = readers
        self._clearly_empty = clearly_empty
        self._expanded: dict[tuple[Claims, Kind], list[Branch]] = {}
        self._disjoint: dict[frozenset[Any], bool] = {}
        self._values: dict[tuple[Node, str, int], Node] = {}
        self._watchers = 0
        self.kind: Kind = "null"  # the type being expanded

    def expand(self, claims: Claims, kind: Kind) -> list[Branch]:
        """The branches for values of this type; none if no such value is possible.

        Raises:
            BadRequest: a keyword is malformed or cannot be enforced, or there are too many.
        """
        if any(_names_other_type(claim, kind) for claim in claims):
            return []
        key = (claims, kind)
        if key not in self._expanded:
            outer, self.kind = self.kind, kind
            try:
                self._expanded[key] = self._expand(claims)
            finally:
                self.kind = outer
        return self._expanded[key]

    def child(self, claim: Claim, *steps: str | int, holds: bool = True) -> Claim:
        """A claim about a subschema of ``claim.node``, in the same scope."""
        return self.follow(claim, self.document.node(claim.node, *steps), holds)

    def children(
        self, claim: Claim, keyword: str, indices: Iterable[int], *, holds: bool = True
    ) -> list[Claim]:
        return [self.child(claim, keyword, index, holds=holds) for index in indices]

    def part(self, claim: Claim, *steps: str | int) -> Claim:
        """A claim about a subschema for items or properties, true or false as ``claim``."""
        return self.child(claim, *steps, holds=claim.holds).unwatched()

    def made(self, claim: Claim, schema: Any) -> Claim:
        """A claim about a schema that follows from ``claim``."""
        return Claim(self.document.make(schema, claim.node), True, claim.scope)

    def disjoint(self, one: Claim, other: Claim) -> bool:
        """Whether no value makes both true; may be False when in doubt."""
        pair = frozenset((one.same(True), other.same(True)))
        if pair not in self._disjoint:
            self._disjoint[pair] = self._clearly_empty((one.unwatched(), other.unwatched()))
        return self._disjoint[pair]

    def constant(self, claim: Claim, keyword: str, index: int, value: Any) -> Claim:
        """The claim that an array or object equals ``value``, part by part."""
        key = (claim.node, keyword, index)
        if key not in self._values:
            self._values[key] = self.document.make(_equal_to(value), claim.node)
        return Claim(self._values[key], True, claim.scope)

    def derived(self, claim: Claim, keyword: str, make: Callable[[], Any]) -> Claim:
        """The claim that a keyword means, by a schema that is made once."""
        key = (claim.node, keyword, -1)
        if key not in self._values:
            self._values[key] = self.document.make(make(), claim.node)
        return self.follow(claim, self._values[key], claim.holds)

    def follow(self, claim: Claim, node: Node, holds: bool) -> Claim:
        watchers = claim.watchers if claim.holds and holds else frozenset[int]()
        return Claim(node, holds, self.document.enter(claim.scope, node), watchers)

    def _expand(self, claims: Claims) -> list[Branch]:
        branches: list[Branch] = []
        start = tuple(_Pending(claim, frozenset()) for claim in claims)
        stack = [_Work(start)]
        while stack:
            work = stack.pop()
            self.budget.spend()
            if not work.pending:
                branches.append(work.atoms)
                if len(branches) > _MAX_BRANCHES:
                    where = claims[0].node.path if claims else "#"
                    raise BadRequest(f"schema {where}: its combinations of keywords multiply")
                continue
            first = work.pending[0]
            if isinstance(first, _Choice):
                chosen = [self._choose(work, first, option) for option in first.options]
                stack += reversed([following for following in chosen if following is not None])
            elif (following := self._read(work, first)) is not None:
                stack.append(following)
        return branches

    def _choose(self, work: _Work, choice: _Choice, option: Option) -> _Work | None:
        if len(choice.options) > 1 and _contradicts(work.atoms, option.atoms):
            return None
        origins = choice.holder.origins | {choice.holder.claim.same(choice.holder.claim.holds)}
        pending = tuple(_Pending(claim, origins) for claim in option.claims)
        atoms = tuple(Watched(atom, choice.watchers) for atom in option.atoms)
        return _Work((*pending, *work.pending[1:]), (*work.atoms, *atoms), work.known)

    def _read(self, work: _Work, pending: _Pending) -> _Work | None:
        """Replace a claim by the choices that its keywords leave; None if it cannot hold."""
        claim = pending.claim
        if claim.same(claim.holds) in pending.origins:
            raise claim.refused("$ref", "comes back to itself without an item between")
        if claim.same(not claim.holds) in work.known:
            return None
        rest = work.pending[1:]
        schema = claim.node.schema
        if isinstance(schema, bool):
            return _Work(rest, work.atoms, work.known) if schema == claim.holds else None
        seen = (*claim.same(claim.holds), claim.watchers)
        if seen in work.known:
            return _Work(rest, work.atoms, work.known)
        known = work.known | {seen, claim.same(claim.holds)}
        if not claim.holds:
            options = self._negated(claim)
            choices = [] if options == TRUE else [_Choice(options, pending, frozenset())]
            return _Work((*choices, *rest), work.atoms, known) if options else None
        choices = self._asserted(pending)
        if any(not choice.options for choice in choices):
            return None
        # Single options come first, so that a contradiction is met before choices multiply it.
        certain = [choice for choice in choices if len(choice.options) == 1]
        open_ = [choice for choice in choices if len(choice.options) > 1]
        return _Work((*certain, *open_, *rest), work.atoms, known)

    def _asserted(self, pending: _Pending) -> list[_Choice]:
        claim = pending.claim
        schema = claim.node.schema
        last: list[_Choice] = []
        for keyword, kind in _UNEVALUATED.items():
            if keyword in schema and kind == self.kind:
                self._watchers += 1
                atom = Unevaluated(self._watchers, self.child(claim, keyword).unwatched())
                last = [_Choice([Option((atom,))], pending, claim.watchers)]
                watchers = claim.watchers | {self._watchers}
                claim = Claim(claim.node, True, claim.scope, watchers)
        choices: list[_Choice] = []
        for keyword in _values_first(schema):
            options = self._options(claim, keyword)
            if not options:
                return [_Choice(options, pending, claim.watchers)]
            if options != TRUE:
                self.budget.spend(len(options))
                choices.append(_Choice(options, pending, claim.watchers))
        return choices + last

    def _negated(self, claim: Claim) -> list[Option]:
        options: list[Option] = []
        for keyword in _values_first(claim.node.schema):
            if _UNEVALUATED.get(keyword) == self.kind and claim.node.schema[keyword] is not True:
                raise claim.refused(keyword, "is not supported under a negation")
            found = self._options(claim, keyword)
            if found == TRUE:
                return TRUE
            self.budget.spend(len(found))
            options += found
        return _merged(options)

    def _options(self, claim: Claim, keyword: str) -> list[Option]:
        reader = self._readers[self.kind].get(keyword)
        if reader is not None:
            return reader(self, claim, keyword, claim.node.schema[keyword])
        if keyword in _UNKNOWN:
            raise claim.refused(keyword, "is not supported")
        return TRUE if claim.holds else FALSE


def _names_other_type(claim: Claim, kind: Kind) -> bool:
    """Whether no value of a JSON type makes a claim true, as "type" names another one."""
    schema = claim.node.schema
    if not claim.holds or isinstance(schema, bool):
        return False
    named = schema.get("type")
    return isinstance(named, str) and _KINDS_BY_TYPE.get(named, kind) != kind


def _values_first(schema: Mapping[str, Any]) -> list[str]:
    """The keywords of a schema, first those that may exclude a type.

    So a keyword is not refused where it does not apply, such as a pattern in an integer's schema.
    """
    first = [keyword for keyword in ("type", "const", "enum") if keyword in schema]
    return [*first, *(keyword for keyword in schema if keyword not in first)]


def _contradicts(known: Branch, atoms: tuple[Atom, ...]) -> bool:
    """Whether a property would be present and absent, or make a claim true and false."""
    names = {atom.name for atom in atoms if isinstance(atom, Presence | Property)}
    if not names:
        return False
    mine = [
        atom
        for atom in (*(watched.atom for watched in known), *atoms)
        if isinstance(atom, Presence | Property) and atom.name in names
    ]
    presences = [atom for atom in mine if isinstance(atom, Presence)]
    present = {atom.name for atom in presences if atom.present}
    claims = {
        (atom.name, *atom.claim.same(atom.claim.holds))
        for atom in mine
        if isinstance(atom, Property) and atom.name in present
    }
    return any(not atom.present and atom.name in present for atom in presences) or any(
        (name, node, not holds, scope) in claims for name, node, holds, scope in claims
    )


def _merged(options: list[Option]) -> list[Option]:
    """Options in which "absent" and "present, and valid" are merged to "if present, valid"."""
    absent = {_absent(option) for option in options}
    merged = set[str | None]()
    found = []
    for option in options:
        match option.atoms:
            case (Presence(name, True), Property() as one) if name in absent and not option.claims:
                # Several claims about one property stay apart: any one of them may be false.
                merged.add(name)
                found.append(Option((one,)))
            case _:
                found.append(option)
    return [option for option in found if _absent(option) not in merged]


def _absent(option: Option) -> str | None:
    """The name of the property whose absence is all that an option needs."""
    match option.atoms:
        case (Presence(name, False),):
            return name
    return None


def _equal_to(value: Any) -> dict[str, Any]:
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        schema = {"type": "array", "minItems": len(value), "maxItems": len(value)}
        return {**schema, "prefixItems": items} if items else schema
    return {
        "type": "object",
        "properties": {name: {"const": item} for name, item in value.items()},
        "required": list(value),
        "additionalProperties": False,
    }
