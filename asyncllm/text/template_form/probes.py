"""Small conversations that clients send, and what is done where a template cannot place them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from asyncllm.text.template_form.messages import Message
from asyncllm.text.template_form.tools import FILLS, Tool

Change: TypeAlias = Mapping[str, Any]


class Probe(NamedTuple):
    """A conversation that clients send, and what may be done where a template cannot place it.

    Attributes:
        messages: each text and each argument is a word of its own.
        changes: of the form, the gentlest first.
    """

    messages: Sequence[Message]
    changes: Sequence[Change]
    tools: Sequence[Tool] | None = None


def _user(word: str) -> Message:
    return {"role": "user", "content": f"{word} asks."}


def system(word: str) -> Message:
    return {"role": "system", "content": f"{word} rules."}


def _says(word: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": f"{word} answers.", **fields}


def call(function: str, value: str, id: str) -> dict[str, Any]:
    arguments = f'{{"key": "{value}"}}'
    return {"id": id, "type": "function", "function": {"name": function, "arguments": arguments}}


def _result(word: str, id: str) -> Message:
    return {"role": "tool", "tool_call_id": id, "content": f"{word} results."}


def _tool(name: str, **fields: Any) -> Tool:
    return {"type": "function", "function": {"name": name, **fields}}


IDS: Final = ("call_MB7Yc0qKmbH2zUX0TVfdWkgL", "toolu_01A09q90qw90lq917835lq9")
_ONE, _TWO = call("probefind", "probealpha", IDS[0]), call("probeopen", "probebeta", IDS[1])
CALLS: Final[Message] = {"role": "assistant", "content": None, "tool_calls": [_ONE]}
MORE: Final[Message] = {"role": "assistant", "content": None, "tool_calls": [_TWO]}
_PROPERTY: Final = {"type": "string", "description": "Probekey."}
_SCHEMA: Final = {"type": "object", "properties": {"key": _PROPERTY}, "required": ["key"]}
TOOLS: Final = tuple(
    _tool(name, description=f"{name} does.", parameters=_SCHEMA)
    for name in ("probetool", "probekit")  # not those that are called, which calls must print
)
#: Tools without what OpenAI's API makes optional, by what is to be filled in.
_BARE: Final = (
    {"parameters": _SCHEMA},
    {"description": "Probefind."},
    {"description": "Probefind.", "parameters": {}},
    {"description": "Probefind.", "parameters": {"type": "object", "properties": {"key": {}}}},
    {"description": "Probefind.", "parameters": {"properties": {"key": {"enum": ["a", 1]}}}},
    {"parameters": {"type": "object", "properties": {"key": {"$ref": "#/$defs/a"}}}},
    {"parameters": {"anyOf": [_SCHEMA, {"type": "object"}]}},
    {"parameters": {"properties": {"key": {"type": ["string", "null"]}}}},
    {"parameters": {"properties": {"key": {"type": "object"}}}},
    {"parameters": {"properties": {"key": {"type": "array"}}}},
)


Q, A, NEXT = _user("Probeone"), _says("Probetwo"), _user("Probethree")
R1, R2 = _result("Probefour", IDS[0]), _result("Probefive", IDS[1])
_PLACES: Final = ({"system": "first"}, {"system": "user"})
_FOLDED: Final = (
    {"user_after_result": "in_result"},
    {"user_after_result": "bridged"},
    {"user_after_result": "in_result", "join_users": True},
)
_APART: Final = (
    {"text_with_calls": "apart"},
    {"text_with_calls": "in_result"},
    {"reasoning": "without_text"},
    {"reasoning": "without_text", "text_with_calls": "apart"},
    {"reasoning": "without_text", "text_with_calls": "in_result"},
)
_FIRST: Final = tuple({"user_first": text} for text in ("", "(The conversation goes on.)"))
_FILLS: Final = tuple({"fill": fill} for fill in FILLS)
_AS_TEXT: Final = {"calls": "text"}

#: In this order: what is found out first decides what the later ones need.
PROBES: Final = (
    Probe([Q], [{"content": "parts"}]),
    Probe([Q], [*_FILLS, {"tools_as_text": True}], TOOLS),
    *(Probe([Q], _FILLS, [_tool("probefind", **fields)]) for fields in _BARE),
    Probe([Q, NEXT], [{"join_users": True}]),
    Probe([Q, A, _says("Probesix"), NEXT], [{"join_answers": True}]),
    Probe([A, NEXT], _FIRST),
    Probe([system("Probeseven"), Q], _PLACES),
    Probe([system("Probeseven"), system("Probeeight"), Q, A, NEXT], _PLACES),
    Probe([Q, A, system("Probeseven"), NEXT], _PLACES),
    Probe([system("Probeseven"), Q, A, NEXT, system("Probeeight")], _PLACES),
    Probe([{"role": "developer", "content": "Probeseven rules."}, Q], [{"keep_developer": False}]),
)
#: Of calls and results; tried with tools.
CALL_PROBES: Final = (
    Probe([Q, CALLS, R1, MORE, R2, A, NEXT], [_AS_TEXT]),
    Probe(
        [Q, {**CALLS, "tool_calls": [_ONE, _TWO]}, R1, R2, A, NEXT],
        [{"calls": "single"}, _AS_TEXT],
    ),
    Probe([Q, {**CALLS, "content": "Probesix answers."}, R1, A, NEXT], _APART),
    Probe([Q, {**CALLS, "content": "Probesix answers."}, R1], _APART),
    Probe(
        [Q, {**CALLS, "content": "Probesix answers.", "reasoning_content": "Hm."}, R1, NEXT],
        [*_APART, *_FOLDED],
    ),
    Probe([Q, CALLS, R1, NEXT], _FOLDED),
    Probe([Q, CALLS, R1, system("Probeseven"), MORE, R2], [*_PLACES, *_FOLDED]),
    Probe([Q, CALLS, NEXT, A], [{"unanswered": "filled"}]),
    Probe([R1, Q], [{"orphans": "user"}]),
    Probe([Q, A, R1, _says("Probesix"), NEXT], [{"orphans": "user"}]),
    Probe([system("Probeseven"), CALLS, R1], _FIRST),
)
