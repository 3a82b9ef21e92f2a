"""Tool definitions with the fields that a template takes for granted."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

from asyncllm.text.template_form.calls import WriteCalls

#: A tool as OpenAI's chat completions define it.
Tool: TypeAlias = Mapping[str, Any]
#: What is filled in; each includes those before it.
Fill: TypeAlias = Literal[
    "nothing", "description", "parameters", "schema", "types", "one_type", "members"
]

FILLS: Final[tuple[Fill, ...]] = get_args(Fill)
#: Of a type the field that says what such a value contains.
_MEMBERS: Final[Mapping[str, str]] = {"object": "additionalProperties", "array": "items"}


def filled(tool: Tool, fill: Fill) -> Tool:
    """A tool with the optional fields that it leaves out; null counts as left out.

    Args:
        fill: a tool's "description", its "parameters", the "schema" of these with the properties of
            an object, the "types" and descriptions of properties, "one_type" for a property that
            may have several, and the "members" of objects and lists, which may be anything.
    """
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    given = {name: value for name, value in function.items() if value is not None}
    level = FILLS.index(fill)
    if level >= FILLS.index("description"):
        given.setdefault("description", "")
    if level >= FILLS.index("parameters"):
        given.setdefault("parameters", {"type": "object", "properties": {}})
    if level >= FILLS.index("schema"):
        schema = given["parameters"]
        schema = schema if isinstance(schema, Mapping) else {}
        given["parameters"] = _schema(schema, level)
    return {"type": "function", **tool, "function": given}


def _schema(schema: Mapping[str, Any], level: int) -> dict[str, Any]:
    """The schema of an object with its fields, and from "types" on with theirs."""
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    if level >= FILLS.index("types"):
        properties = {name: _property(value, level) for name, value in properties.items()}
    whole = {**schema, "properties": properties}
    whole.setdefault("type", "object")
    whole.setdefault("required", [])
    return whole


def _property(schema: Any, level: int) -> dict[str, Any]:
    """A property's schema with a type; one that is only true or false says nothing."""
    given = schema if isinstance(schema, Mapping) else {}
    whole = {name: value for name, value in given.items() if value is not None}
    whole.setdefault("description", "")
    if not isinstance(whole.get("type"), str) and (
        "type" not in whole or level >= FILLS.index("one_type")
    ):
        whole["type"] = _one_type(whole)
    if level >= FILLS.index("members") and whole["type"] in _MEMBERS:
        whole.setdefault(_MEMBERS[whole["type"]], {})
    return whole


def _one_type(schema: Mapping[str, Any]) -> str:
    """The first type that a schema allows, apart from null."""
    choices = [schema, *schema.get("anyOf", ()), *schema.get("oneOf", ())]
    for choice in choices:
        types = choice.get("type") if isinstance(choice, Mapping) else None
        for name in types if isinstance(types, list) else [types]:
            if isinstance(name, str) and name != "null":
                return name
    return "object" if "properties" in schema else "string"


def tools_as_text(tools: Sequence[Tool], write: WriteCalls) -> str:
    """The tools, and how a call is written, for a template that does not print them."""
    lines = (json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    call = {"function": {"name": "NAME", "arguments": {"KEY": "VALUE"}}}
    return "\n".join(
        ("Functions that may be called:", *lines, "", "How a call is written:", write([call]))
    )
