"""The tools of a request for a response, as functions that a model may call, and back.

OpenAI has tools of many types. Those that the client runs itself become functions, and their calls
become items of their type again; the others would be run by the server, and are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from asyncllm.errors import BadRequest
from asyncllm.server.chat.adapter import convert_part
from asyncllm.server.chat.messages import function_of, function_tool, plain_choice
from asyncllm.server.responses import item_schemas as items
from asyncllm.server.responses.requests import CustomTool, FunctionTool, NamespaceTool
from asyncllm.text.template_form import read_arguments

#: The name of what a custom tool takes, as a parameter of a function.
INPUT: Final = "input"
_CUSTOM: Final = {
    "type": "object",
    "properties": {INPUT: {"type": "string", "description": "The text for the tool."}},
    "required": [INPUT],
}
_SHELL: Final = {
    "type": "object",
    "properties": {
        "command": {
            "type": "array",
            "items": {"type": "string"},
            "description": "The program and its arguments.",
        },
        "working_directory": {"type": "string", "description": "Where to run it."},
        "timeout_ms": {"type": "integer", "description": "Milliseconds that it may take."},
    },
    "required": ["command"],
}
_SEARCH: Final = {
    "type": "object",
    "properties": {"query": {"type": "string", "description": "What the tool should do."}},
    "required": ["query"],
}


class Offer(NamedTuple):
    """A tool that the model may call.

    Attributes:
        kind: the type of the tool, which decides the type of its calls.
        name, namespace: by which the client knows it.
        tool: as chat completions take it; its function's name is what the model writes.
    """

    kind: Literal["function", "custom", "local_shell", "tool_search"]
    name: str
    namespace: str | None
    tool: dict[str, Any]


class Offers:
    """The tools of one request by the names that the model writes."""

    def __init__(self, given: Iterable[tuple[str, Mapping[str, Any]]], left_out: list[str]):
        """
        Args:
            given: the tools, each with its place in the request.
            left_out: gets the names of those that cannot be offered.

        Raises:
            BadRequest: a tool is malformed.
        """
        self._by_name: dict[str, Offer] = {}
        self._left_out: list[str] = []
        for where, tool in given:
            self._add(tool, where, None)
        left_out += self._left_out

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def tools(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Those of some names, as chat completions take them."""
        return [self._by_name[name].tool for name in names]

    def find(self, kind: str, name: str, namespace: str | None) -> str | None:
        """The name by which the model knows a tool; None if it is not offered."""
        offered = joined_name(name, namespace)
        offer = self._by_name.get(offered)
        return offered if offer is not None and offer.kind == kind else None

    def leaves_out(self, tool: Any) -> bool:
        """Whether a tool is of a type that was given, and cannot be offered."""
        kind = tool.get("type") if isinstance(tool, dict) else None
        return any(name.rpartition(".")[2] == kind for name in self._left_out)

    def item(self, name: str, arguments: str, call_id: str, **head: Any) -> items.CallItem:
        """The item of a call."""
        offer = self._by_name.get(name)
        space: dict[str, Any] = {}
        if offer is not None and offer.namespace is not None:
            space["namespace"] = offer.namespace
        match offer:
            case Offer("custom", name=own):
                text = custom_input(arguments)
                return items.CustomToolCallItem(
                    call_id=call_id, name=own, input=text, **space, **head
                )
            case Offer("local_shell"):
                action = {"type": "exec", "env": {}, **_object(arguments)}
                return items.LocalShellCallItem(call_id=call_id, action=action, **head)
            case Offer("tool_search"):
                return items.ToolSearchCallItem(
                    call_id=call_id, execution="client", arguments=_object(arguments), **head
                )
        own = name if offer is None else offer.name
        return items.FunctionCallItem(
            call_id=call_id, name=own, arguments=arguments, **space, **head
        )

    def _add(self, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
        if (function_given := function_of(tool)) is not None:
            tool = {**function_given["function"], "type": "function"}
        kind = tool.get("type", "function")
        given = {"type": kind, **tool}
        match kind:
            case "function":
                function = convert_part(given, FunctionTool, where)
                fields = ("description", "parameters", "strict")
                rest = {name: getattr(function, name) for name in fields}
                self._offer("function", function.name, namespace, **rest)
            case "custom":
                custom = convert_part(given, CustomTool, where)
                self._offer(
                    "custom",
                    custom.name,
                    namespace,
                    description=_with_format(custom),
                    parameters=_CUSTOM,
                )
            case "namespace" if namespace is None:
                group = convert_part(given, NamespaceTool, where)
                for i, inner in enumerate(group.tools):
                    self._add(inner, f"{where}.tools[{i}]", group.name)
            case "local_shell":
                says = "Runs a command on the user's machine, and returns what it prints."
                self._offer("local_shell", kind, None, description=says, parameters=_SHELL)
            case "tool_search" if tool.get("execution") == "client":
                says = tool.get("description") or "Finds more tools, which can be called then."
                schema = tool.get("parameters") or _SEARCH
                self._offer("tool_search", kind, None, description=says, parameters=schema)
            case _:
                self._left_out.append(f"{where}.{kind}")

    def _offer(self, kind: Any, name: str, namespace: str | None, **fields: Any) -> None:
        offered = joined_name(name, namespace)
        tool = function_tool(name=offered, **fields)
        self._by_name[offered] = Offer(kind, name, namespace, tool)


def joined_name(name: str, namespace: str | None) -> str:
    """The name by which a model knows a tool: without a namespace its own."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


def custom_input(arguments: str) -> str:
    """The text that a model has for a custom tool; all that it wrote if it is no such object."""
    given = read_arguments(arguments)
    if not isinstance(given, dict):
        return given
    if not given:
        return ""
    only = next(iter(given.values())) if len(given) == 1 else None
    text = given.get(INPUT, only)
    return text if isinstance(text, str) else arguments


def _object(arguments: str) -> dict[str, Any]:
    given = read_arguments(arguments)
    return given if isinstance(given, dict) else {}


def _with_format(tool: CustomTool) -> str | None:
    """The description of a custom tool; a grammar for its text is told to the model."""
    match tool.format:
        case {"type": "grammar", "definition": str(definition), **rest}:
            syntax = rest.get("syntax", "")
            told = f"The text is in the language of this {syntax} grammar:\n{definition}"
            return f"{tool.description}\n\n{told}" if tool.description else told
    return tool.description


def read_choice(given: Any, offers: Offers, left_out: list[str]) -> tuple[Any, list[str]]:
    """The choice as chat completions take it, and the names of the tools on offer.

    Args:
        left_out: gets names for tools that are allowed beside others, and are left out.

    Raises:
        BadRequest: it names a tool that is not offered, or requires one where there is none.
    """
    names = offers.names
    if isinstance(mode := plain_choice(given), str):
        given = mode
    match given:
        case None | "none" | "auto":
            return given, names
        case "required" if names:
            return given, names
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            allowed = []
            for i, tool in enumerate(tools):
                if (name := _chosen(tool, offers)) is not None:
                    allowed.append(name)
                elif offers.leaves_out(tool):
                    left_out.append(f"tool_choice.tools[{i}].{tool['type']}")
                else:
                    problem = "tool_choice allows a tool that is not given"
                    raise BadRequest(problem, param="tool_choice")
            if allowed:
                return mode, allowed
        case {"type": str()} if (name := _chosen(given, offers)) is not None:
            return {"type": "function", "function": {"name": name}}, names
    raise BadRequest("tool_choice is none that these tools leave", param="tool_choice")


def _chosen(tool: Any, offers: Offers) -> str | None:
    match tool:
        case {"type": "function" | "custom" as kind, "name": str(name)}:
            return offers.find(kind, name, tool.get("namespace"))
        case {"type": "function", "function": {"name": str(name)}}:
            return offers.find("function", name, None)
        case {"type": "local_shell" | "tool_search" as kind}:
            return offers.find(kind, kind, None)
    return None


def shell_arguments(action: Mapping[str, Any]) -> str:
    """The arguments of the function that a shell call was."""
    given = {key: value for key, value in action.items() if key != "type" and value}
    return json.dumps(given, ensure_ascii=False)
