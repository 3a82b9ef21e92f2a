"""What a chat template makes of an answer with tool calls: the text that its model would write."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.parsing.formats import CallIds

_ASKED: Final = "Zqasked"
_SAID: Final = "Zqsaid"
_THOUGHT: Final = "Zqthought"
_TOKENS = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]|\w+|\s+|.", re.DOTALL)
_TAG_BEHIND = re.compile(r"\w(<[^<>\s]*>)")
_REVERSED = re.compile(r">[^<>\s]*<|\][A-Z_]+/?\[|\w+|\s+|.", re.DOTALL)


class ProbeCall(msgspec.Struct, frozen=True):
    """A call that is rendered and read back."""

    name: str
    arguments: dict[str, Any]


CALLS: Final = (
    ProbeCall("zeta_probe", {"color_key": "amber", "count_key": 7041}),
    ProbeCall("iota_probe", {"color_key": "indigo", "count_key": 7042}),
)
#: With one argument: some templates write nothing between two.
_SHORT_CALLS: Final = tuple(
    ProbeCall(call.name, {"color_key": call.arguments["color_key"]}) for call in CALLS
)
TOOLS: Final[list[dict[str, Any]]] = [
    {
        "type": "function",
        "function": {
            "name": call.name,
            "description": "A probe.",
            "parameters": {
                "type": "object",
                "properties": {
                    "color_key": {"type": "string", "description": "A color."},
                    "count_key": {"type": "integer", "description": "A number."},
                },
                "required": ["color_key", "count_key"],
            },
        },
    }
    for call in CALLS
]
_IDS: Final[dict[CallIds, str]] = {
    "random": "call_0a1b2c3d4e5f6a7b8c9d",
    "short": "a1B2c3D4e",
    "named": "functions.{}:{}",
}


class RenderedCalls(msgspec.Struct, frozen=True):
    """The calls of an answer as a template writes them.

    Attributes:
        before: the prompt that they follow.
        answer: what comes between it and words that are no call.
        texts: of an answer with one call, and of one with two, if the template takes two.
        calls: those of the second; the first has one of them.
        call_ids, id_: the ids with which it does.
    """

    before: str
    answer: str
    texts: tuple[str, ...]
    calls: tuple[ProbeCall, ...]
    call_ids: CallIds
    id_: str


def render_calls(template: ChatTemplate) -> Iterator[RenderedCalls]:
    """Calls as a template writes them, with two arguments and with one; nothing if it does not."""
    for calls in (CALLS, _SHORT_CALLS):
        for call_ids, id_ in _IDS.items():
            answers = [_answer(template, id_, calls[:count]) for count in (1, 2)]
            if not _shows(answers[0], calls, 1):
                continue
            said = _rendered(template, {"role": "assistant", "content": _SAID})
            header = answers[0][: _alike(answers[0], said)]
            texts = [
                _this_turn(answer.removeprefix(header), said, header, calls[0])
                for answer in answers
            ]
            shown = tuple(text for count, text in enumerate(texts, 1) if _shows(text, calls, count))
            if shown:
                answer = said.removeprefix(header).partition(_SAID)[0]
                yield RenderedCalls(header, answer, shown, calls, call_ids, id_)
            break


class RenderedReasoning(msgspec.Struct, frozen=True):
    """What a template writes around the reasoning of an answer.

    Attributes:
        before: from the question on.
        between: the reasoning and the answer.
        after: the answer.
        prompt: the text that asks for an answer.
    """

    before: str
    between: str
    after: str
    prompt: str


def render_reasoning(template: ChatTemplate) -> RenderedReasoning | None:
    """Reasoning as a template writes it; None if it writes none."""
    answer = {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT}
    for name in ("", "enable_thinking", "thinking"):
        options: dict[str, Any] = {name: True} if name else {}
        text = _rendered(template, answer, **options)
        before, _, rest = text.partition(_THOUGHT)
        between, found, after = rest.partition(_SAID)
        if found:
            return RenderedReasoning(before, between, after, _rendered(template, **options))
    return None


def _answer(template: ChatTemplate, id_: str, calls: Sequence[ProbeCall]) -> str:
    tool_calls = [
        {
            "id": id_.format(call.name, number),
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
        }
        for number, call in enumerate(calls)
    ]
    return _rendered(template, {"role": "assistant", "content": None, "tool_calls": tool_calls})


def _rendered(
    template: ChatTemplate, answer: dict[str, Any] | None = None, **variables: Any
) -> str:
    """The text from the question on, with an answer or asking for one; "" if that fails."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": _ASKED}]
    if answer is not None:
        messages.append(answer)
    variables["add_generation_prompt"] = answer is None
    for tools in (TOOLS, None):
        try:
            text = template.render(messages, tools=tools, as_text=False, **variables)
        except BadRequest:
            continue
        return text[text.rfind(_ASKED) + len(_ASKED) :]
    return ""


def same_arguments(value: Any, call: ProbeCall) -> bool:
    """Whether these are the arguments of a call, or their JSON; a number may be a string."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return isinstance(value, dict) and {key: str(inner) for key, inner in value.items()} == {
        key: str(inner) for key, inner in call.arguments.items()
    }


def _shows(text: str, calls: Sequence[ProbeCall], count: int) -> bool:
    """Whether the first calls, and no others, are in a text."""
    return all(
        (call.name in text and all(str(value) in text for value in call.arguments.values()))
        == (number < count)
        for number, call in enumerate(calls)
    )


def _this_turn(text: str, said: str, header: str, call: ProbeCall) -> str:
    """A text without what also ends a turn with words, or begins another turn behind a call."""
    end = len(text) - _alike(text[::-1], said[::-1], _REVERSED)
    if (tag := _TAG_BEHIND.match(text, end - 1)) and tag[1] in text[:end]:
        end = tag.end()  # it ends a marker of the calls
    after = max(text.find(str(value)) for value in call.arguments.values())
    headers = {words for _, words in _tags_in_context(header)}
    again = (after + at for at, words in _tags_in_context(text[after:]) if words in headers)
    return text[: min(end, next(again, end))]


def _tags_in_context(text: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The place of each tag, and the tag with the two words or tags behind it."""
    found = [(match.start(), match[0]) for match in _TOKENS.finditer(text) if match[0].strip()]
    for number, (at, token) in enumerate(found[:-2]):
        if len(token) > 2 and token[0] in "<[":
            yield at, tuple(each for _, each in found[number : number + 3])


def _alike(text: str, other: str, tokens: re.Pattern[str] = _TOKENS) -> int:
    """The length of what two texts begin with, apart from space: whole words and tags."""
    mine, others = tokens.findall(text), tokens.findall(other)
    others.reverse()
    length = position = 0
    for token in mine:
        position += len(token)
        while others and others[-1].isspace() and not token.isspace():
            others.pop()
        if others and (token == others[-1] or (token.isspace() and others[-1].isspace())):
            others.pop()
            length = position
        elif not token.isspace():
            break
    return length


def common(text: str, other: str, *, from_end: bool = False) -> int:
    """The length of what two texts begin, or end, with: whole words and tags.

    Digits may differ: some calls are numbered.
    """
    mine, others = _TOKENS.findall(text), _TOKENS.findall(other)
    if from_end:
        mine.reverse()
        others.reverse()
    length = 0
    for token, another in zip(mine, others, strict=False):
        if token != another and not (_is_digit(token) and _is_digit(another)):
            break
        length += len(token)
    return length


def _is_digit(token: str) -> bool:
    return len(token) == 1 and token.isdecimal()
