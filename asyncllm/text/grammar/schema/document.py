"""A schema as a document: its subschemas by place, and the targets of $ref and $dynamicRef.

https://json-schema.org/draft/2020-12/json-schema-core, sections 7 to 9; older drafts where they
mean the same. Nothing outside the document is ever fetched.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeAlias
from urllib.parse import unquote, urldefrag, urljoin

import msgspec

from asyncllm.text.grammar.limits import refused

#: Keywords whose value is a schema, a list of schemas, or an object of schemas.
_ONE = {
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if"),
    *("items", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
}
_MANY = {"allOf", "anyOf", "items", "oneOf", "prefixItems"}
_NAMED = {
    *("$defs", "definitions", "dependencies", "dependentSchemas"),
    *("patternProperties", "properties"),
}
#: Dialects whose keywords mean the same here; those of other meta-schemas are unknown.
_DIALECTS = frozenset(
    f"{scheme}://json-schema.org/{draft}/schema"
    for scheme in ("http", "https")
    for draft in ("draft-04", "draft-06", "draft-07", "draft/2019-09", "draft/2020-12")
)

#: Dynamic anchors on the way to a subschema, with the first node of each.
Scope: TypeAlias = tuple[tuple[str, "Node"], ...]


class Node(msgspec.Struct, frozen=True, eq=False):
    """One subschema; equal only to itself.

    Attributes:
        schema: the schema, an object or a boolean.
        path: its place, a JSON pointer in a URI fragment such as ``#/properties/a``.
        base: the URI against which its references are resolved.
        key: unique; the path, unless the schema is not in the document itself.
    """

    schema: Any
    path: str
    base: str
    key: str

    def child(self, schema: Any, *steps: str | int) -> Node:
        below = "".join([f"/{_pointer_token(str(step))}" for step in steps])
        return Node(schema, self.path + below, self.base, self.key + below)


class Document:
    """All subschemas of one schema.

    Raises:
        BadRequest: an identifier or $schema is not understood.
    """

    def __init__(self, schema: Any):
        self._nodes: dict[str, Node] = {}
        self._resources: dict[str, Node] = {}
        self._anchors: dict[tuple[str, str], Node] = {}
        self._dynamic: dict[str, list[tuple[str, Node]]] = {}
        self._alike: dict[tuple[str, bytes], Node] = {}
        self._same: dict[Node, Node] = {}
        self._made = 0
        self.root = self._scan(Node(schema, "#", "", "#"))

    @property
    def root_scope(self) -> Scope:
        return self.enter((), self.root)

    def node(self, parent: Node, *steps: str | int) -> Node:
        """The subschema at this place below ``parent``."""
        schema = parent.schema
        for step in steps:
            schema = schema[step]
        if not isinstance(schema, dict | bool):
            raise refused(parent.path, str(steps[0]), "holds something that is not a schema")
        node = parent.child(schema, *steps)
        return self._shared(self._nodes.setdefault(node.key, node))

    def _shared(self, node: Node) -> Node:
        """The first node with an equal schema and base, which means the same."""
        found = self._same.get(node)
        if found is None:
            text = msgspec.json.encode(node.schema)
            found = self._same[node] = self._alike.setdefault((node.base, text), node)
        return found

    def make(self, schema: Any, origin: Node) -> Node:
        """A node for a schema that is not in the document but follows from ``origin``."""
        self._made += 1
        return Node(schema, origin.path, origin.base, f"made {self._made}")

    def resolve(self, node: Node) -> Node:
        """The target of a node's $ref."""
        return self._resolve(node, "$ref")

    def resolve_dynamic(self, node: Node, scope: Scope) -> Node:
        """The target of a node's $dynamicRef in a scope."""
        target = self._resolve(node, "$dynamicRef")
        anchor = target.schema.get("$dynamicAnchor") if isinstance(target.schema, dict) else None
        if anchor is None or not node.schema["$dynamicRef"].endswith("#" + anchor):
            return target
        return dict(scope).get(anchor, target)

    def enter(self, scope: Scope, node: Node) -> Scope:
        """The scope inside ``node``: the outermost of several equal anchors counts."""
        known = {anchor for anchor, _ in scope}
        new = [entry for entry in self._dynamic.get(node.base, ()) if entry[0] not in known]
        return (*scope, *new)

    def _resolve(self, node: Node, keyword: str) -> Node:
        reference = node.schema[keyword]
        if not isinstance(reference, str):
            raise refused(node.path, keyword, "must be a string")
        if reference.startswith("#"):
            base, fragment = node.base, reference[1:]
        else:
            base, fragment = urldefrag(urljoin(node.base, reference))
        resource = self._resources.get(base)
        if resource is None:
            raise refused(node.path, keyword, f"points outside the schema: {reference!r}")
        fragment = unquote(fragment)
        if not fragment:
            return self._shared(resource)
        if not fragment.startswith("/"):
            found = self._anchors.get((base, fragment))
        else:
            found = self._at_pointer(resource, fragment)
        if found is None:
            raise refused(node.path, keyword, f"points to nothing: {reference!r}")
        return self._shared(found)

    def _at_pointer(self, resource: Node, pointer: str) -> Node | None:
        path, schema = resource.path, resource.schema
        base = resource.base
        for token in pointer[1:].split("/"):
            step: str | int = token.replace("~1", "/").replace("~0", "~")
            if isinstance(schema, list) and str(step).isdecimal() and len(token) < 8:
                step = int(step)
            try:
                schema = schema[step]
            except (KeyError, IndexError, TypeError):
                return None
            path = f"{path}/{_pointer_token(str(step))}"
            if path in self._nodes:
                base = self._nodes[path].base
        if not isinstance(schema, dict | bool):
            return None
        if path not in self._nodes:  # below a keyword that is not known to hold schemas
            self._scan(Node(schema, path, base, path))
        return self._nodes[path]

    def _scan(self, root: Node) -> Node:
        """Enter a subschema and all below it, in any order."""
        found: Node | None = None
        stack = [root]
        while stack:
            node = self._enter_node(stack.pop())
            found = found or node
            for steps, schema in _subschemas(node.schema):
                stack.append(node.child(schema, *steps))
        assert found is not None
        return found

    def _enter_node(self, node: Node) -> Node:
        schema = node.schema
        if not isinstance(schema, dict):
            self._nodes[node.path] = node
            if node.path == "#":
                self._resources[""] = node
            return node
        dialect = schema.get("$schema")
        if isinstance(dialect, str) and dialect.rstrip("#") not in _DIALECTS:
            raise refused(node.path, "$schema", f"names the unknown dialect {dialect!r}")
        identifier = schema.get("$id", "")
        if isinstance(identifier, str) and identifier and not identifier.startswith("#"):
            base = urldefrag(urljoin(node.base, identifier))[0]
            if base in self._resources:
                raise refused(node.path, "$id", f"is used twice: {base!r}")
            node = Node(schema, node.path, base, node.key)
            self._resources[base] = node
        if node.path == "#":
            self._resources[node.base] = self._resources[""] = node
        if isinstance(identifier, str) and identifier.startswith("#"):  # up to draft 7
            self._anchors[node.base, identifier[1:]] = node
        self._nodes[node.path] = node
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(anchor := schema.get(keyword), str):
                self._anchors[node.base, anchor] = node
        if isinstance(anchor := schema.get("$dynamicAnchor"), str):
            self._dynamic.setdefault(node.base, []).append((anchor, node))
        return node


def _subschemas(schema: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every direct subschema, with the steps to it."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        if keyword in _ONE and isinstance(value, dict | bool):
            yield (keyword,), value
        elif keyword in _MANY and isinstance(value, list):
            for index, child in enumerate(value):
                yield (keyword, index), child
        elif keyword in _NAMED and isinstance(value, dict):
            for name, child in value.items():
                if isinstance(child, dict | bool):
                    yield (keyword, name), child


def _pointer_token(step: str) -> str:
    return step if step.isalnum() else step.replace("~", "~0").replace("/", "~1")
