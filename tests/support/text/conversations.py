"""Draws conversations as clients hold them: in OpenAI's API, with all that it allows.

Each text holds a word of its own, by which it is found in a prompt.
"""

from __future__ import annotations

import json
import re
from functools import cache
from itertools import count, pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

from hypothesis import strategies as st

from asyncllm.text import ChatTemplate

#: Templates that do what those of the families do.
FAMILIES: Final = {
    path.stem: path.read_text("utf-8")
    for path in sorted((Path(__file__).parents[2] / "data/chat_templates").glob("*.jinja"))
}
SPECIAL_TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def template_of(family: str) -> ChatTemplate:
    """Made once, as many conversations are rendered to find out what it can do."""
    return ChatTemplate(FAMILIES[family], SPECIAL_TOKENS)


Message = dict[str, Any]


class Conversation(NamedTuple):
    """
    Attributes:
        turns: the messages between two answers of the model, or one of its answers.
    """

    turns: list[list[Message]]

    @property
    def messages(self) -> list[Message]:
        return [message for turn in self.turns for message in turn]

    @property
    def words(self) -> list[str]:
        """Of the texts of the messages."""
        texts = [(m.get("content"), m.get("refusal")) for m in self.messages]
        return re.findall(r"w\d+x", str(texts))

    @property
    def called(self) -> list[str]:
        """Names and arguments of the calls that results follow."""
        pairs = pairwise(self.messages)
        calls = [m["tool_calls"] for m, n in pairs if "tool_calls" in m and n["role"] == "tool"]
        return re.findall(r"[fv]\d+x", str(calls))


_AROUND: Final = st.sampled_from(
    ("{}", "{}\n", "  {} and more", 'a "{}" é', "one\n\n  two {}\nthree", "C:\\{}", "<b>{}</b>")
)
_IDS: Final = (
    *("call_{}abcdefghijklmnop", "toolu_01A{}", "c{}", "{:09d}", "functions.f:{}", "{}-4f2a-11ee"),
)
_ODD_ARGUMENTS: Final = (
    *('{{"city": "{}', "{}", '["{}"]', '"{}"', '{{"p": "C:\\U{}"}}', "{{'key': '{}'}}"),
    *('{{"a": "{}", "b": NaN}}', '{{"a": "{}"}} and more', '{{"a": "{}", "half": "\\ud83d"}}'),
)


class _Draws:
    """Makes the messages of one conversation."""

    def __init__(self, draw: st.DrawFn, *, reasons: bool):
        self.draw = draw
        self.reasons = reasons
        self.numbers = count(1)

    def text(self) -> str:
        return self.draw(_AROUND).format(f"w{next(self.numbers)}x")

    def content(self) -> Any:
        if self.draw(st.integers(0, 3)):
            return self.text()
        return [{"type": "text", "text": self.text()} for _ in range(self.draw(st.integers(1, 2)))]

    def system(self) -> Message:
        return {"role": self.draw(st.sampled_from(("system", "developer"))), "content": self.text()}

    def user(self) -> Message:
        return {"role": "user", "content": self.content()}

    def answer(self) -> Message:
        fields: Message = {}
        match self.draw(st.integers(0, 9)):
            case 0:
                fields["content"] = [{"type": "refusal", "refusal": self.text()}]
            case 1:
                fields |= {"content": None, "refusal": self.text()}
            case 2:
                fields["content"] = self.text()
                if self.reasons:
                    fields["reasoning_content"] = "Hm."
            case 3:
                fields["content"] = "<think>Hm.</think>" + self.text()
            case 4:
                fields["content"] = self.draw(st.sampled_from(("", None)))
            case _:
                fields["content"] = self.content()
        return {"role": "assistant", **fields}

    def calls(self) -> list[Message]:
        """An answer with calls, and their results."""
        message: Message = {"role": "assistant"}
        match self.draw(st.integers(0, 4)):
            case 0:
                message["content"] = self.text()
            case 1:
                message["content"] = None
            case 2:
                message["content"] = ""
        if self.reasons and self.draw(st.booleans()):
            message["reasoning"] = "Hm."
        numbers = [next(self.numbers) for _ in range(self.draw(st.sampled_from((1, 1, 2, 3))))]
        ids = [self.draw(st.sampled_from(_IDS)).format(number) for number in numbers]
        have_ids = self.draw(st.integers(0, 4)) > 0
        calls = [self.call(f"f{number}x", id) for number, id in zip(numbers, ids, strict=True)]
        results = [{"role": "tool", "tool_call_id": id, "content": self.result()} for id in ids]
        if not have_ids:
            for each in calls:
                del each["id"]
            for result in results:
                del result["tool_call_id"]
        elif self.draw(st.booleans()):
            results.reverse()
        message["tool_calls"] = calls
        match self.draw(st.integers(0, 9)):
            case 0:
                results = []
            case 1:
                results = results[:1]
        return [message, *results]

    def call(self, name: str, id: str) -> Message:
        word = f"v{next(self.numbers)}x"
        arguments: Any = json.dumps({"city": word})
        match self.draw(st.integers(0, 7)):
            case 0:
                arguments = self.draw(st.sampled_from(_ODD_ARGUMENTS)).format(word)
            case 1:
                arguments = self.draw(st.sampled_from(("", "null", "{}", None)))
            case 2:
                arguments = {"city": word, "deep": [{"a": None}, 1.5, True]}
        function = {"name": name, "arguments": arguments}
        return {"id": id, "type": "function", "function": function}

    def result(self) -> Any:
        nothing = self.draw(st.sampled_from((1, 1, 1, "", None)))
        return self.content() if nothing == 1 else nothing


@st.composite
def conversations(draw: st.DrawFn, *, reasons: bool = True) -> Conversation:
    """Any conversation that a client may send, in any order of turns.

    Args:
        reasons: answers may come with reasoning.
    """
    draws = _Draws(draw, reasons=reasons)
    turns: list[list[Message]] = []
    head = [draws.system() for _ in range(draw(st.sampled_from((0, 1, 1, 2))))]
    for _ in range(draw(st.integers(1, 6))):
        match draw(st.integers(0, 9)):
            case 0 | 1 | 2:
                turns.append([draws.user()])
            case 3 | 4:
                turns.append([draws.answer()])
            case 5:
                turns.append([draws.system()])
            case 6:
                orphan = {"role": "tool", "tool_call_id": "gone", "content": draws.text()}
                turns.append([orphan])
            case _:
                answer, *results = draws.calls()
                extra = draw(st.sampled_from((None, draws.user, draws.system)))
                turns += [[answer], [*results, *([extra()] if extra is not None else [])]]
    turns = [turn for turn in ([*head], *turns) if turn]
    return Conversation(turns)


_PROPERTIES: Final = st.dictionaries(
    st.sampled_from(("city", "days", "unit")),
    st.sampled_from(
        (
            {"type": "string", "description": "A city."},
            {"type": "string"},
            {"type": ["string", "null"]},
            {"enum": ["a", 1]},
            {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": None},
            {"$ref": "#/$defs/a"},
            {"type": "array", "items": {"type": "object", "properties": {"a": {}}}},
            {},
            True,
        )
    ),
)


@st.composite
def _functions(draw: st.DrawFn) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": draw(st.sampled_from(("weather", "list-files", "a.b")))}
    if (description := draw(st.sampled_from(("Does it.", "", None, 0)))) != 0:
        fields["description"] = description
    match draw(st.integers(0, 5)):
        case 0:
            fields["parameters"] = draw(st.sampled_from(({}, None, {"type": "object"})))
        case 1:
            pass
        case _:
            fields["parameters"] = {"type": "object", "properties": draw(_PROPERTIES)}
    return fields


#: Tools with and without what OpenAI's API makes optional.
TOOLS: Final = st.none() | st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": _functions()}),
    min_size=1,
    max_size=2,
)
