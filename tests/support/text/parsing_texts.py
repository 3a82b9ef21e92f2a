"""Texts for the tests of the parser: calls as each family of models writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import strategies as st

from asyncllm.text.parsing import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    Content,
    Event,
    Formats,
    Message,
    Parser,
    Reasoning,
    ToolArguments,
    message_of,
)
from asyncllm.text.parsing.formats import ChannelFormat

Call = tuple[str, dict[str, Any]]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [
    tool(
        "get_weather",
        city={"type": "string"},
        days={"type": "integer"},
        exact={"type": ["boolean", "null"]},
        area={"anyOf": [{"type": "object"}, {"type": "array"}]},
    ),
    tool(
        "search.web",
        query={"type": "string"},
        limit={"type": "number"},
        lang={"type": ["string", "null"]},
    ),
    {"type": "function", "function": {"name": "now"}},
]

TOOL_NAMES = sorted(TOOL_FORMATS)
# Those in which values are text, which cannot hold their own markers.
TEXT_NAMES = ("glm45", "minimax_m2", "qwen3_coder", "seed_oss")
TAGGED_NAMES = [name for name in TOOL_NAMES if name != "harmony"]


def formats_of(tools: str | None = None, reasoning: str | None = None) -> Formats:
    if tools == "harmony":
        reasoning = "harmony"
    return Formats(
        None if tools is None else TOOL_FORMATS[tools],
        None if reasoning is None else REASONING_FORMATS[reasoning],
    )


def new_parser(formats: Formats, **options: Any) -> Parser:
    """A parser whose calls have the ids "0", "1", ..."""
    options.setdefault("tools", TOOLS)
    if isinstance(formats.tools, ChannelFormat):
        options.setdefault("prompt", "<|start|>user<|message|>Hi<|end|><|start|>assistant")
    return Parser(formats, new_id=lambda index, name: str(index), **options)


def events_of(pieces: Iterable[str], formats: Formats, **options: Any) -> list[Event]:
    """The events of a text in pieces, neighbours of one kind joined."""
    parser = new_parser(formats, **options)
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined(events + parser.finish())


def parse_all(text: str, formats: Formats, **options: Any) -> Message:
    """The message of a whole text; ``options`` are those of ``Parser``."""
    parser = Parser(formats, **options)
    return message_of(parser.feed(text) + parser.finish())


def read(text: str, tools: str | None, reasoning: str | None = None) -> Message:
    return message_of(events_of([text], formats_of(tools, reasoning)))


def calls_of(text: str, tools: str) -> list[tuple[str, str]]:
    """Names and arguments of a text that is calls and nothing else."""
    message = read(text, tools)
    assert message.content == ""
    return [(call.name, call.arguments) for call in message.calls]


def joined(events: Sequence[Event]) -> list[Event]:
    found: list[Event] = []
    for event in events:
        match found[-1:], event:
            case [Content(before)], Content(text):
                found[-1] = Content(before + text)
            case [Reasoning(before)], Reasoning(text):
                found[-1] = Reasoning(before + text)
            case [ToolArguments(index, before)], ToolArguments(same, text) if same == index:
                found[-1] = ToolArguments(index, before + text)
            case _:
                found.append(event)
    return found


#: Anything that JSON can say.
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


def _object(key: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, arguments: (
        f'{{"name": "{name}", "{key}": {json.dumps(arguments, ensure_ascii=False)}}}'
    )


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={k}>\n{_value(v)}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def _seed_oss(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(f"<parameter={k}>{_value(v)}</parameter>\n" for k, v in arguments.items())
    return f"<seed:tool_call>\n<function={name}>\n{values}</function>\n</seed:tool_call>"


def _glm45(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{_value(v)}</arg_value>\n"
        for k, v in arguments.items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def _minimax_m2(name: str, arguments: dict[str, Any]) -> str:
    values = "".join(
        f'<parameter name="{k}">{_value(v)}</parameter>\n' for k, v in arguments.items()
    )
    return f'<invoke name="{name}">\n{values}</invoke>'


def _olmo3(name: str, arguments: dict[str, Any]) -> str:
    if not all(key.isidentifier() for key in arguments):
        return f"{name}(**{arguments!r})"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _gemma4(name: str, arguments: dict[str, Any]) -> str:
    def literal(value: Any) -> str:
        match value:
            case str():
                return f'<|"|>{value}<|"|>'
            case list():
                return f"[{', '.join(map(literal, value))}]"
            case dict():
                keys = (key if key.isidentifier() else literal(key) for key in value)
                items = zip(keys, map(literal, value.values()), strict=True)
                return "{" + ", ".join(f"{key}: {item}" for key, item in items) + "}"
            case _:
                return json.dumps(value)

    return f"<|tool_call>call:{name}{literal(arguments)}<tool_call|>"


def _around(before: str, middle: str, after: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda name, arguments: (
        f"{before}{name}{middle}{json.dumps(arguments, ensure_ascii=False)}{after}"
    )


def _tagged(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{_object('arguments')(name, arguments)}\n</tool_call>"


#: format -> (begin, one call, separator, end)
WRITERS: dict[str, tuple[str, Callable[[str, dict[str, Any]], str], str, str]] = {
    "hermes": ("", _tagged, "\n", ""),
    "qwen3_coder": ("", _qwen3_coder, "\n", ""),
    "seed_oss": ("", _seed_oss, "\n", ""),
    "glm45": ("", _glm45, "\n", ""),
    "minimax_m2": ("<minimax:tool_call>\n", _minimax_m2, "\n", "\n</minimax:tool_call>"),
    "llama3_json": ("<|python_tag|>", _object("parameters"), "; ", ""),
    "mistral": ("[TOOL_CALLS] [", _object("arguments"), ", ", "]"),
    "mistral_args": ("", _around("[TOOL_CALLS]", "[ARGS]", ""), "", ""),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>",
        _around(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "\n```json\n", "\n```<｜tool▁call▁end｜>"
        ),
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>",
        _around("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|>",
        _around(
            "<|tool_call_begin|>functions.", ":0<|tool_call_argument_begin|>", "<|tool_call_end|>"
        ),
        "",
        "<|tool_calls_section_end|>",
    ),
    "granite": ("<|tool_call|>[", _object("arguments"), ", ", "]"),
    "phi4_mini": ("<|tool_call|>[", _object("arguments"), ", ", "]<|/tool_call|>"),
    "nemotron": ("<TOOLCALL>[", _object("arguments"), ", ", "]</TOOLCALL>"),
    "olmo3": ("<function_calls>", _olmo3, "\n", "</function_calls>"),
    "pythonic": ("[", _olmo3, ", ", "]"),
    "lfm2": ("<|tool_call_start|>[", _olmo3, ", ", "]<|tool_call_end|>"),
    "gemma4": ("", _gemma4, "", ""),
    "glm4": ("", _around("", "\n", ""), "\n", ""),
    "command": (
        "<|START_ACTION|>[\n",
        _around('{"tool_call_id": "0", "tool_name": "', '", "parameters": ', "}"),
        ",\n",
        "\n]<|END_ACTION|>",
    ),
    "json": ("```json\n[", _object("arguments"), ",\n", "]\n```"),
    "harmony": (
        "",
        _around("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "<|call|>"),
        "<|start|>assistant",
        "",
    ),
}


def written(format_name: str, calls: Sequence[Call]) -> str:
    """Calls as models of this family write them."""
    begin, write, separator, end = WRITERS[format_name]
    return begin + separator.join(write(name, arguments) for name, arguments in calls) + end


def fragments(formats: Formats) -> list[str]:
    """Markers, their beginnings, and what else makes a parser stumble."""
    markers = sorted(formats.markers())
    beginnings = [marker[: len(marker) // 2] for marker in markers if len(marker) > 1]
    names = ['"name": "now"', '"arguments": ', '"parameters": {"a": 1}', "now", "to=functions.now"]
    signs = ['"', "\\", '\\"', "\\ud83d", "\\u00e", "{", "}", "[", "]", ":", ",", "<", ">", "`"]
    texts = [
        "\n",
        "  ",
        "é🙂",
        "plain text",
        "1.5e",
        "tru",
        "```",
        '{"name": "now", "arguments": {}}',
    ]
    return [*markers, *beginnings, *names, *signs, *texts]
