"""The tools that a request offers, and its choice of them, as chat completions have them.

Clients mix the APIs: a function in the form of one is a function in all of them. Tools of other
types would be run by another server; they are left out, and the rest of the request is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Mapping


class ToolFields(Protocol):
    """The fields of a request about its tools."""

    tools: list[dict[str, Any]] | None
    tool_choice: Any


def function_tool(**fields: Any) -> dict[str, Any]:
    """A tool as chat completions take it, without the fields that are None."""
    given = {name: value for name, value in fields.items() if value is not None}
    return {"type": "function", "function": given}


def function_of(tool: Mapping[str, Any]) -> dict[str, Any] | None:
    """A function as chat completions take it; None if the tool is none, or malformed.

    It may have the form of chat completions, of Responses, or of Messages.
    """
    kind = tool.get("type")
    match tool:
        case {"function": dict()} if kind in (None, "function"):
            return {**tool, "type": "function"}
        case {"name": str(name)} if kind == "function" or (
            kind in (None, "custom") and "input_schema" in tool
        ):
            parameters = tool.get("parameters", tool.get("input_schema"))
            rest = {key: tool.get(key) for key in ("description", "strict")}
            return function_tool(name=name, parameters=parameters, **rest)
    return None


def functions(tools: list[dict[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """The tools that are functions, and those that are malformed, for the checks to follow.

    Args:
        left_out: gets names for the others.
    """
    found = []
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if (function := function_of(tool)) is not None:
            found.append(function)
        elif kind == "function" or not isinstance(kind, str):
            found.append(tool)
        else:
            left_out.append(f"tools[{i}].{kind}")
    return found


def plain_choice(given: Any) -> Any:
    """The choice of a tool as chat completions take it; it may have the form of any API."""
    match given:
        case {"type": "any" | "required"}:
            return "required"
        case {"type": "auto" | "none" as mode}:
            return mode
        case {"type": "tool" | "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return given


def allow_tools(body: ToolFields, left_out: list[str]) -> None:
    """Replace ``allowed_tools`` by its mode, and drop the tools that it does not allow.

    It may also allow tools that are left out, beside others.

    Raises:
        BadRequest: it allows no tool that is given, or a tool must be called where there is none.
    """
    choice = body.tool_choice = plain_choice(body.tool_choice)
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}} if (
            mode in ("auto", "required") and allowed
        ):
            names = []
            for i, tool in enumerate(allowed):
                if _is_foreign(tool):
                    left_out.append(f"tool_choice.allowed_tools.tools[{i}].{tool['type']}")
                else:
                    names.append(_tool_name(tool))
        case {"type": "allowed_tools"}:
            problem = "allowed_tools needs a mode, auto or required, and at least one of the tools"
            raise BadRequest(f"tool_choice: {problem}", param="tool_choice")
        case _:
            if choice not in (None, "none", "auto") and not body.tools:
                raise BadRequest("tool_choice needs tools", param="tool_choice")
            return
    tools = body.tools or []
    if not names or None in names or not {_tool_name(tool) for tool in tools}.issuperset(names):
        problem = "tool_choice allows a tool that is not given"
        raise BadRequest(problem, param="tool_choice")
    body.tools = [tool for tool in tools if _tool_name(tool) in names]
    body.tool_choice = mode


def _is_foreign(tool: Any) -> bool:
    """Whether a tool is of a type that is left out."""
    match tool:
        case {"type": str(kind)}:
            return kind != "function"
    return False


def _tool_name(tool: Any) -> str | None:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    return None
