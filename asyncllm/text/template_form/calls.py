"""Calls and their results: ids, arguments, and which result belongs to which call."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from string import ascii_letters, digits
from typing import Any, Final, TypeAlias

from asyncllm.text.template_form.messages import Message, calls_of

_LETTERS: Final = digits + ascii_letters
#: Writes the calls of a message as text.
WriteCalls: TypeAlias = Callable[[Sequence[Mapping[str, Any]]], str]
#: The key of arguments that are not a JSON object, for templates that take nothing else.
RAW_KEY: Final = "arguments"


def _hashed(id: str, length: int, letters: str = _LETTERS) -> str:
    if len(id) == length and set(id) <= set(letters):
        return id  # it has the form already
    number = int.from_bytes(blake2b(id.encode("utf-8", "surrogatepass"), digest_size=32).digest())
    text = ""
    for _ in range(length):
        number, at = divmod(number, len(letters))
        text += letters[at]
    return text


def _named(id: str, name: str, number: int) -> str:
    begin, _, end = id.rpartition(":")
    return id if begin == f"functions.{name}" and end.isdecimal() else f"functions.{name}:{number}"


#: Ids in the forms that templates demand, from any id, the function's name and the call's number.
ID_FORMS: Final[Mapping[str, Callable[[str, str, int], str]]] = {
    "short": lambda id, *_: _hashed(id, 9),  # Mistral's
    "long": lambda id, *_: id if id.startswith("call_") else f"call_{_hashed(id, 24)}",  # OpenAI's
    "number": lambda id, *_: _hashed(id, 9, digits),
    "named": _named,  # Kimi's, which prints no other name
}


def with_ids(messages: Sequence[Message], form: str | None) -> list[Message]:
    """Every call and every result has an id, in the given form.

    A call without an id gets a number. A result without one belongs to the first call that has no
    result yet. A call and its result get the same one.
    """
    made: list[Message] = []
    number = 0
    open_ids: list[str] = []
    changed: dict[str, str] = {}
    change = ID_FORMS[form] if form is not None else lambda id, *_: id
    for message in messages:
        if calls := calls_of(message):
            named = []
            for call in calls:
                id = call.get("id")
                if not isinstance(id, str) or not id:
                    id = f"call_{number}"
                changed[id] = change(id, call["function"]["name"], number)
                number += 1
                named.append({**call, "id": changed[id]})
            open_ids = [call["id"] for call in named]
            message = {**message, "tool_calls": named}
        elif message["role"] == "tool":
            id = message.get("tool_call_id")
            given = next(iter(open_ids), None)
            if isinstance(id, str) and id:
                given = changed.get(id) or change(id, str(message.get("name", "")), number)
            if given in open_ids:
                open_ids.remove(given)
            if given is not None:
                message = {**message, "tool_call_id": given}
        made.append(message)
    return made


def read_arguments(given: Any) -> dict[str, Any] | str:
    """The object that a call's arguments are; else their text: what a model wrote may be anything.

    No arguments, and null, are an empty object.
    """
    if isinstance(given, dict):
        return given
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    if text.strip() in ("", "null"):
        return {}
    try:
        value = json.loads(text)
        if "\\" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def written_arguments(given: Any, *, as_object: bool, raw_as_object: bool) -> dict[str, Any] | str:
    """A call's arguments as a template takes them: an object, or its text.

    Args:
        raw_as_object: text that is not an object becomes the only value of one.
    """
    value = read_arguments(given)
    if isinstance(value, str):
        return {RAW_KEY: value} if as_object and raw_as_object else value
    if as_object:
        return value
    if isinstance(given, str) and value:
        return given
    return json.dumps(value, ensure_ascii=False)


def named_arguments(call: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A call's name and arguments, which are an object in any case."""
    function = call["function"]
    value = read_arguments(function.get("arguments"))
    return function["name"], {RAW_KEY: value} if isinstance(value, str) else value


def calls_as_json(calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as text, in the form of which most models have read much: Hermes'."""
    made = []
    for call in calls:
        name, arguments = named_arguments(call)
        text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
        made.append(f"<tool_call>\n{text}\n</tool_call>")
    return "\n".join(made)


class Exchange:
    """A message with calls, the results that follow it, and what else comes before the next answer.

    Attributes:
        message: the assistant's.
        answers: the results in their order, each with its call; None if it has none.
        missing: the calls without a result.
        others: the other messages, which come behind the results.
    """

    def __init__(self, message: Message, following: Sequence[Message]):
        self.message = message
        self.missing = list(calls_of(message))
        self.answers: list[tuple[dict[str, Any] | None, Message]] = []
        self.others = [other for other in following if other["role"] != "tool"]
        for result in following:
            if result["role"] == "tool":
                self.answers.append((self._call_of(result), result))

    def _call_of(self, result: Message) -> dict[str, Any] | None:
        id = result.get("tool_call_id")
        call = next((call for call in self.missing if call["id"] == id), None)
        if call is None and self.missing:
            call = self.missing[0]
        if call is not None:
            self.missing.remove(call)
        return call


def exchanges(messages: Sequence[Message]) -> Iterator[Exchange | Message]:
    """The messages in their order; a message with calls comes with what belongs to it."""
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        if not calls_of(message):
            yield message
            continue
        start = at
        while at < len(messages) and messages[at]["role"] != "assistant":
            at += 1
        yield Exchange(message, messages[start:at])
