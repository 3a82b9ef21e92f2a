"""The form of messages and tools that one chat template takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from msgspec.structs import replace

from asyncllm.text.template_form.calls import (
    Exchange,
    WriteCalls,
    calls_as_json,
    exchanges,
    with_ids,
    written_arguments,
)
from asyncllm.text.template_form.messages import Message, calls_of, text_of
from asyncllm.text.template_form.tools import FILLS, Fill, Tool, filled, tools_as_text
from asyncllm.text.template_form.turns import (
    SYSTEM,
    added,
    break_markers,
    joined,
    placed_system,
    with_bridges,
    with_folded_users,
)

#: The result of a call that has none.
NO_RESULT: Final = "(no result)"
_REASONING: Final = frozenset(("thinking", "reasoning_content", "reasoning"))


class Form(msgspec.Struct, frozen=True):
    """The defaults leave messages as they are, and suit most templates.

    Attributes:
        content: "either" leaves a list of text parts a list; "text" joins the texts with newlines;
            "parts" makes a list of every text.
        keep_developer: the role "developer" stays; otherwise it becomes "system".
        arguments: of calls, as an object or as JSON text.
        raw_arguments: arguments that are no JSON object stay text, or become the only value of one.
        no_content: added to an answer with calls that has no content: nothing, "" or None.
        system: "anywhere"; "first": only at the start, later ones become part of the next user
            turn; "user": nowhere, the first ones become part of the first user turn.
        ids: a name of ``ID_FORMS``, or None for any id.
        calls: "parallel": several in a message; "single": one, followed by its result; "text":
            none, they are written as text, behind the text of the message.
        results: of calls, in messages of a "tool", or as texts of a "user".
        text_with_calls: text beside calls is "kept", becomes a message "apart" before them, or is
            put "in_result".
        reasoning: "kept", or left out of answers with calls that have "text".
        user_after_result: a user's turn after a result is "kept", goes "in_result", or is "bridged"
            by an empty answer; with "reminders", only those of a program go in the result.
        orphans: results without a call are "kept", or become a user's text.
        unanswered: calls without a result are "kept", or get an empty one: "filled".
        join_users, join_answers: two turns of a role in a row become one.
        drop_empty: answers without text and calls are left out.
        user_first: the text of a user's turn that is put at the start where there is none.
        fill: what is filled in where tools leave it out.
        empty_tools: no tools are an empty list, and not None.
        tools_as_text: tools are a part of the first message.
        break_markers: answers do not contain the beginnings of special tokens.
    """

    content: Literal["either", "text", "parts"] = "text"
    keep_developer: bool = False
    arguments: Literal["object", "text"] = "object"
    raw_arguments: Literal["text", "object"] = "text"
    no_content: Mapping[str, str | None] = {}
    system: Literal["anywhere", "first", "user"] = "anywhere"
    ids: str | None = None
    calls: Literal["parallel", "single", "text"] = "parallel"
    results: Literal["tool", "user"] = "tool"
    text_with_calls: Literal["kept", "apart", "in_result"] = "kept"
    reasoning: Literal["kept", "without_text"] = "kept"
    user_after_result: Literal["kept", "in_result", "bridged", "reminders"] = "kept"
    orphans: Literal["kept", "user"] = "kept"
    unanswered: Literal["kept", "filled"] = "kept"
    join_users: bool = False
    join_answers: bool = False
    drop_empty: bool = False
    user_first: str | None = None
    fill: Fill = "nothing"
    empty_tools: bool = False
    tools_as_text: bool = False
    break_markers: bool = False

    def apply(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] | None,
        write: WriteCalls = calls_as_json,
    ) -> tuple[list[Message], list[Tool] | None]:
        """Checked messages, and tools, in this form; the given ones stay as they are.

        Args:
            write: writes calls as text, also the example for tools as text.
        """
        made = list(messages)
        if not self.keep_developer:
            made = [_as_system(message) for message in made]
        offered = None if tools is None else [filled(tool, self.fill) for tool in tools]
        if offered is not None and self.tools_as_text:
            described = {"role": "system", "content": tools_as_text(offered, write)}
            made, offered = [described, *made] if offered else made, None
        if offered is None and self.empty_tools:
            offered = []
        made = with_ids(made, self.ids)
        if self.system != "anywhere":
            made = placed_system(made, at_start=self.system == "first")
        if self.drop_empty:
            made = [*(m for m in made[:-1] if not _is_empty(m)), made[-1]]
        if self.join_answers:
            made = joined(made, "assistant")
        parts = list(exchanges(made))
        made = [m for part in parts for m in self._exchange(part, write, part is parts[-1])]
        if self.user_after_result in ("in_result", "reminders"):
            made = with_folded_users(made, only_reminders=self.user_after_result == "reminders")
        if self.join_users:
            made = joined(made, "user")
        if self.user_after_result == "bridged":
            made = with_bridges(made)
        if self.user_first is not None:
            made = _with_user_first(made, self.user_first)
        if self.break_markers:
            made = [break_markers(m) if m["role"] == "assistant" else m for m in made]
        return [self._finished(message) for message in made], offered

    def _exchange(
        self, part: Exchange | Message, write: WriteCalls, is_last: bool
    ) -> Iterator[Message]:
        """The messages of an answer's calls and their results, or the one message."""
        if not isinstance(part, Exchange):
            yield self._result(None, part) if part["role"] == "tool" else part
            return
        if self.unanswered == "filled" and (part.answers or part.others or not is_last):
            part.answers += [(call, _empty_result(call)) for call in part.missing]
        message = self._with_text(part)
        if self.text_with_calls == "apart" and self.calls != "text" and text_of(message).strip():
            yield {"role": "assistant", "content": message["content"]}
            message = _without(message, {"content"})
        if self.calls == "single":
            yield from self._one_by_one(message, part)
        else:
            yield _with_calls_as_text(message, write) if self.calls == "text" else message
            for call, result in part.answers:
                yield self._result(call, result)
        yield from part.others

    def _with_text(self, part: Exchange) -> Message:
        """The message with calls, where text may stand beside them."""
        message, text = part.message, text_of(part.message)
        if not text.strip() or self.calls == "text":
            return message
        if self.text_with_calls == "in_result" and part.answers:
            call, result = part.answers[0]
            part.answers[0] = call, added(result, text, before=True)
            return _without(message, {"content"})
        if self.text_with_calls == "kept" and self.reasoning == "without_text":
            return _without(message, _REASONING)
        return message

    def _result(self, call: Mapping[str, Any] | None, result: Message) -> Message:
        """A result in a message that the template prints."""
        if self.results == "tool" and not (call is None and self.orphans == "user"):
            return result
        name = result.get("name") if call is None else call["function"]["name"]
        head = f"Result of {name}:" if name else "Result of a call:"
        user = {"role": "user", "content": result["content"]}
        return added(user, head, before=True, between="\n")

    def _one_by_one(self, message: Message, part: Exchange) -> Iterator[Message]:
        """Each call in a message of its own, followed by its result; the first one has the text."""
        for call in calls_of(message):
            yield {**message, "tool_calls": [call]}
            for of, result in part.answers:
                if of is call:
                    yield self._result(call, result)
            message = _without(message, {"content", *_REASONING})
        yield from (self._result(None, result) for call, result in part.answers if call is None)

    def _finished(self, message: Message) -> Message:
        """The message with its content and arguments as the template takes them."""
        calls = calls_of(message)
        if "content" in message:
            content = message["content"]
            if calls and content == "" and self.no_content.get("content", "") is None:
                content = None
            message = {**message, "content": self._content(content)}
        elif calls:
            message = {**message, **self.no_content}
            if self.content == "parts" and message.get("content") == "":
                message["content"] = []
        elif message["role"] == "assistant":
            message = {**message, "content": self._content("")}
        if calls:
            message = {**message, "tool_calls": [self._call(call) for call in calls]}
        return message

    def _content(self, content: str | list[dict[str, str]] | None) -> Any:
        if isinstance(content, str) and self.content == "parts":
            return [{"type": "text", "text": content}]
        if isinstance(content, list):
            if self.content == "text":
                return "\n".join(part["text"] for part in content)
            return [dict(part) for part in content]
        return content

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        arguments = written_arguments(
            function.get("arguments"),
            as_object=self.arguments == "object",
            raw_as_object=self.raw_arguments == "object",
        )
        return {**call, "function": {**function, "arguments": arguments}}


def fallbacks(form: Form) -> tuple[Form, ...]:
    """Forms for conversations that a template does not take in ``form``, the gentlest first.

    The last ones have nothing but texts that alternate between user and assistant.
    """
    careful = replace(
        form,
        no_content=form.no_content or {"content": ""},
        raw_arguments="object",
        system="user" if form.system == "user" else "first",
        ids=form.ids or "short",
        reasoning="without_text",
        text_with_calls="in_result" if form.text_with_calls == "kept" else form.text_with_calls,
        user_after_result="in_result",
        orphans="user",
        unanswered="filled",
        join_users=True,
        join_answers=True,
        drop_empty=True,
        user_first=form.user_first or "",
        fill=FILLS[-1],
        empty_tools=True,
    )
    content = "text" if form.content == "either" else form.content
    text = replace(careful, calls="text", results="user", content=content)
    plain = replace(text, system="user", tools_as_text=True)
    return (
        replace(form, fill=FILLS[-1]),
        careful,
        replace(careful, calls="single", text_with_calls="in_result"),
        text,
        plain,
        replace(plain, user_first="(The conversation goes on.)", break_markers=True),
    )


def _as_system(message: Message) -> Message:
    return {**message, "role": "system"} if message["role"] == "developer" else message


def _is_empty(message: Message) -> bool:
    return message["role"] == "assistant" and not calls_of(message) and not text_of(message).strip()


def _without(message: Message, names: set[str] | frozenset[str]) -> Message:
    return {name: value for name, value in message.items() if name not in names}


def _empty_result(call: Mapping[str, Any]) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "content": NO_RESULT}


def _with_calls_as_text(message: Message, write: WriteCalls) -> Message:
    return added(_without(message, {"tool_calls"}), write(calls_of(message)))


def _with_user_first(messages: Sequence[Message], text: str) -> list[Message]:
    start = next((i for i, m in enumerate(messages) if m["role"] not in SYSTEM), len(messages))
    if start < len(messages) and messages[start]["role"] == "user":
        return list(messages)
    return [*messages[:start], {"role": "user", "content": text}, *messages[start:]]
