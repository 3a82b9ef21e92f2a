"""Finds the form that a template takes, by rendering small conversations when a model is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any, Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from asyncllm.text.template_form.calls import ID_FORMS
from asyncllm.text.template_form.form import Form
from asyncllm.text.template_form.messages import Message, calls_of, checked, text_of
from asyncllm.text.template_form.tools import FILLS, Tool
from asyncllm.text.template_form.turns import SYSTEM

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
        [Q, {**CALLS, "tool_calls": [_ONE, _TWO]}, R1, R2, A, NEXT], [{"calls": "single"}, _AS_TEXT]
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


#: Renders messages and tools; None if the template fails on them.
Render: TypeAlias = Callable[[list[Message], list[Tool] | None], str | None]

_WORD: Final = re.compile("probe[a-z]+")


class Found(NamedTuple):
    """
    Attributes:
        cannot: what the template cannot do and what is done instead, as clauses of a sentence.
    """

    form: Form
    cannot: tuple[str, ...]


def find_form(render: Render, *, keep_developer: bool) -> Found:
    """The gentlest form with which a template takes what clients send.

    Args:
        keep_developer: whether the template speaks of the role "developer".
    """
    form = Form(keep_developer=keep_developer)
    search = _Search(render)
    form = replace(form, content=search.content(form))
    form = replace(form, empty_tools=not search.takes(form, Probe([Q], ())))
    if not search.takes_a_turn(form):
        return Found(form, ("a single turn of a user (it fails)",))
    form = search.improve(form, PROBES)
    form = search.improve(search.with_calls(form), CALL_PROBES)
    form = search.improve(form, PROBES)  # a later change may have undone an earlier one
    form = search.with_thoughts(form)
    clauses = _clauses(form)
    if not search.only_grows(form):
        clauses.append("longer conversations without changes (the cache helps up to the change)")
    return Found(form, tuple(clauses))


class _Search:
    def __init__(self, render: Render):
        self._render = render
        self._tools: Sequence[Tool] | None = None
        self._taken: list[tuple[Probe, Sequence[Tool] | None]] = []

    def content(self, form: Form) -> str:
        """Whether texts are printed from a list, from a string, or from both."""
        parts = [{"type": "text", "text": "Probeone asks."}]
        listed = self._text(replace(form, content="either"), [{"role": "user", "content": parts}])
        if listed is None or "Probeone" not in listed or "'type'" in listed:
            return "text"  # some print the list as Python does
        return "either" if self.takes(form, Probe([Q], ())) else "parts"

    def takes_a_turn(self, form: Form) -> bool:
        """Whether the template renders one turn of a user; some do so with tools alone."""
        if self.takes(form, Probe([Q], ())):
            return True
        self._tools = TOOLS
        return self.takes(form, Probe([Q], ()))

    def improve(self, form: Form, probes: Sequence[Probe]) -> Form:
        """The form with the changes that the probes need; none may undo what another needed."""
        for probe in probes:
            if not self.takes(form, probe):
                changed = (replace(form, **change) for change in probe.changes)
                fitting = (new for new in changed if self.takes(new, probe) and self._keeps(new))
                if (new := next(fitting, None)) is None:
                    continue
                form = new
            self._taken.append((probe, self._tools))
        return form

    def _keeps(self, form: Form) -> bool:
        """Whether the template still takes all that it took."""
        return all(self.takes(form, probe, tools) for probe, tools in self._taken)

    def with_calls(self, form: Form) -> Form:
        """The form of calls and their results.

        Most templates take any; DeepSeek's older ones want arguments as text and None as content.
        Some print no calls, or nothing of both.
        """
        forms = [
            replace(form, ids=ids, arguments=arguments, no_content=no_content)
            for ids in (None, *ID_FORMS)
            for arguments, no_content in product(
                ("object", "text"), ({}, {"content": ""}, {"content": None})
            )
        ]
        text = replace(form, calls="text", no_content={"content": ""})
        for self._tools in (TOOLS, None):
            for results in ("tool", "user"):
                for new in (replace(each, results=results) for each in forms):
                    if self._takes_calls(new):
                        return self._with_raw(new)
            if self.takes(form, Probe([Q], ())):
                break  # it takes the tools
        as_tool = replace(text, results="tool")
        return as_tool if self._takes_calls(as_tool) else replace(text, results="user")

    def _takes_calls(self, form: Form) -> bool:
        return self.takes(form, Probe([Q, CALLS, R1, MORE, R2], ()))

    def with_thoughts(self, form: Form) -> Form:
        """The form in which a program's reminder does not make the template drop reasoning.

        Many templates print the reasoning of the answers that follow the last question.
        """
        asked = [Q, {**CALLS, "reasoning_content": "Probethought"}, R1]
        reminded = [*asked, {"role": "user", "content": "<system-reminder>Probesix"}]
        folded = replace(form, user_after_result="reminders")
        shown = "Probethought" in (self._text(form, asked, self._tools) or "")
        kept = "Probethought" in (self._text(form, reminded, self._tools) or "")
        if form.user_after_result != "kept" or not shown or kept or not self._keeps(folded):
            return form
        return folded

    def only_grows(self, form: Form) -> bool:
        """Whether a prompt begins as that of the shorter conversation, up to what was said last.

        Some templates print the system message or the tools beside the last question, or print
        answers otherwise once a question follows.
        """
        for begun in ([system("Probeseven"), Q], [Q, CALLS, R1]):
            texts = [self._text(form, m, self._tools) for m in (begun, [*begun, A, NEXT])]
            if None not in texts:
                first, second = map(str, texts)
                if not second.startswith(first[: first.rfind(text_of(begun[-1]))]):
                    return False
        return True

    def _with_raw(self, form: Form) -> Form:
        """Also for arguments that are not JSON."""
        broken = call("probefind", "", IDS[0])
        broken["function"]["arguments"] = "{probealpha"
        probe = Probe([Q, {**CALLS, "tool_calls": [broken]}, R1], ())
        for new in (form, replace(form, raw_arguments="object")):
            text = self._text(new, probe.messages, self._tools)
            if text is not None and "probealpha" in text:
                return new
        return form

    def takes(self, form: Form, probe: Probe, tools: Sequence[Tool] | None = None) -> bool:
        """Whether the template renders a conversation with all of its words, and the tools."""
        text = self._text(form, probe.messages, probe.tools or tools or self._tools)
        if text is None or not all(t["function"]["name"] in text for t in probe.tools or ()):
            return False
        return _has_calls(probe.messages, text) and _has_texts(probe.messages, text)

    def _text(
        self, form: Form, messages: Sequence[Message], tools: Sequence[Tool] | None = None
    ) -> str | None:
        return self._render(*form.apply(checked(messages), tools))


def _has_calls(messages: Sequence[Message], text: str) -> bool:
    functions = [call["function"] for message in messages for call in calls_of(message)]
    words = [word for f in functions for word in (f["name"], *_WORD.findall(f["arguments"]))]
    calls = text[text.find(words[0]) :] if words else ""
    return all(word in text for word in words) and "{'key'" not in calls  # not as Python prints it


def _has_texts(messages: Sequence[Message], text: str) -> bool:
    """Whether all texts are there.

    A system message after the first turn stands behind what came before it: otherwise a prompt
    would change where it is cached.
    """
    last, has_begun = -1, False
    for message in messages:
        if content := message.get("content"):
            is_system = message["role"] in SYSTEM
            found = text.find(content, last + 1 if is_system and has_begun else 0)
            if found < 0:
                return False
            has_begun |= not is_system
            last = found
    return True


#: Values of a form's fields that somebody should hear of.
_CLAUSES: Final[Mapping[tuple[str, Any], str]] = {
    ("content", "parts"): "text outside of parts (it becomes one)",
    ("raw_arguments", "object"): "arguments that are no JSON object (they become its only value)",
    ("system", "first"): "system messages after the first (they join it, or the next user turn)",
    ("system", "user"): "system messages (they join the next user turn)",
    ("calls", "single"): "several calls in a message (they follow one another)",
    ("calls", "text"): "calls (they are written as text)",
    ("results", "user"): "results (a user tells them)",
    ("text_with_calls", "apart"): "text beside calls (it becomes a message before them)",
    ("text_with_calls", "in_result"): "text beside calls (it begins the result)",
    ("reasoning", "without_text"): "reasoning beside text and calls (it is left out)",
    ("user_after_result", "in_result"): "a user's text after a result (it ends the result)",
    ("user_after_result", "bridged"): "a user's text after a result (an empty answer precedes it)",
    ("user_after_result", "reminders"): "reminders beside reasoning (they end the result)",
    ("orphans", "user"): "results without a call (they become a user's text)",
    ("unanswered", "filled"): "calls without a result (they get an empty one)",
    ("join_users", True): "two user turns in a row (they are joined)",
    ("join_answers", True): "two answers in a row (they are joined)",
    ("tools_as_text", True): "tools (they are described in the first message)",
}


def _clauses(form: Form) -> list[str]:
    said = [clause for (name, value), clause in _CLAUSES.items() if getattr(form, name) == value]
    if form.fill != "nothing":
        said.append("tools without their optional fields (they are filled in)")
    if form.ids is not None:
        said.append("any id of a call (calls and their results get others)")
    if form.user_first is not None:
        said.append("a conversation that no user begins (an empty turn begins it)")
    return said
