"""Writes calls in a model's format: as text, and as the structure that a grammar enforces."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.text.parsing.formats import ChannelFormat, Formats, ParameterStyle, ToolFormat
from asyncllm.text.parsing.known_formats import GENERIC
from asyncllm.text.parsing.literal_atoms import escaped
from asyncllm.text.parsing.parser import parameter_schemas
from asyncllm.text.template_form import WriteCalls, calls_as_json, named_arguments

ToolChoice = Literal["none", "auto", "required"]
_PYTHON = "(**"  # before an object that is the arguments of a call in Python
_IGNORED = " \n\"'"  # between a marker and a name
_ATTRIBUTE = re.compile(r".*\s[\w-]+=", re.DOTALL)  # whose value stands in quotes


class CallTag(msgspec.Struct, frozen=True):
    """One tool's call: ``begin``, then JSON that the schema accepts, then ``end``.

    ``strict``: the tool wants its schema enforced even if calling is up to the model.
    """

    begin: str
    schema: dict[str, Any]
    end: str
    strict: bool


class CallStructure(msgspec.Struct, frozen=True):
    """A text with calls: ``begin``, calls with ``separator`` between them, ``end``.

    Special tokens are written out in these texts (``visible_special_tokens`` names them).

    Attributes:
        tags: each call is one of these.
        free_text: any text may come first, and there may be no call; the structure holds from
            one of ``triggers`` on. Otherwise the text is calls and nothing else.
        triggers: how the first call may begin; one for every tool, or each tool's own.
        at_most_one: there is no second call.
        reasoning_ends: if the text starts with reasoning, the structure holds from behind any of
            these.
    """

    tags: tuple[CallTag, ...]
    begin: str
    separator: str
    end: str
    free_text: bool
    triggers: tuple[str, ...]
    at_most_one: bool
    reasoning_ends: tuple[str, ...] = ()

    def separate_tags(self) -> tuple[CallTag, ...]:
        """The tags, each with the begin and end of the structure around it.

        For grammars of tags in a row, each of which begins with a trigger. Any number of them
        reads back as calls; one call is the same text.
        """
        return tuple(
            CallTag(self.begin + tag.begin, tag.schema, tag.end + self.end, tag.strict)
            for tag in self.tags
        )


def call_structure(
    formats: Formats,
    tools: Sequence[Mapping[str, Any]],
    tool_choice: ToolChoice | Mapping[str, Any],
    *,
    parallel: bool = True,
) -> CallStructure | None:
    """The structure of a text in which the model may, or must, call tools.

    Reading such a text back with a ``Parser`` of the same formats gives calls and nothing else.

    Args:
        tools: as OpenAI's API defines them.
        tool_choice: OpenAI's; an object names the one function that must be called, once.
        parallel: more than one call is allowed (parallel_tool_calls).

    Returns:
        None when nothing can be enforced: no tools, "none", or, if the model may do without a call,
        a model without a format, or one whose calls begin like other text (GLM-4's: with a name).

    Raises:
        BadRequest: the function that was named is not among the tools, or the model cannot call.
    """
    if not tools or tool_choice == "none":
        return None
    if formats.tools is None:
        if tool_choice != "auto":
            raise BadRequest("tool_choice: the model has no tool calls", param="tool_choice")
        return None
    schemas = parameter_schemas(tools)
    triggers = _triggers(formats.tools, schemas)
    if tool_choice == "auto" and not triggers:
        return None
    if not isinstance(tool_choice, str):
        name = _named(tool_choice)
        if name not in schemas:
            raise BadRequest(f"tool_choice: there is no tool {name!r}", param="tool_choice")
        schemas = {name: schemas[name]}
    functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
    strict = {function["name"] for function in functions if function.get("strict")}
    template = formats.tools.template
    tags = tuple(
        CallTag(
            template.before_name + escaped(name) + template.after_name,
            schema,
            template.after_arguments,
            strict=name in strict,
        )
        for name, schema in schemas.items()
    )
    return CallStructure(
        tags,
        template.begin,
        template.separator,
        template.end,
        free_text=tool_choice == "auto",
        triggers=triggers,
        at_most_one=not isinstance(tool_choice, str) or not parallel,
        reasoning_ends=_reasoning_ends(formats),
    )


def _triggers(form: ToolFormat | ChannelFormat, names: Iterable[str]) -> tuple[str, ...]:
    """What the first call begins with: its marker, if that alone says that a call follows.

    Otherwise that is said by what is around the name, as in ``[NAME(``; none if nothing is.
    """
    template = form.template
    begin = template.begin or template.before_name
    if isinstance(form, ChannelFormat):
        return (begin,)  # its markers begin other messages, too
    markers = [marker for marker in form.markers() if marker and begin.startswith(marker)]
    trigger = max(markers, key=len, default=begin)
    if any(map(str.isalnum, trigger)):
        return (trigger,)
    before, sign = template.begin + template.before_name, template.after_name.strip()[:1]
    return tuple(before + name + sign for name in names) if before and sign else ()


def _named(tool_choice: Mapping[str, Any]) -> str:
    match tool_choice:
        case {"type": "function", "function": {"name": str(name)}} | {
            "type": "function",
            "name": str(name),  # as the Responses API has it
        }:
            return name
    raise BadRequest("tool_choice must name a function", param="tool_choice")


def _reasoning_ends(formats: Formats) -> tuple[str, ...]:
    form = formats.reasoning
    if form is None:
        return ()
    if isinstance(form, ChannelFormat):
        return tuple(f"{end}{form.start}assistant" for end in form.ends[:1])
    return form.ends


def calls_writer(formats: Formats) -> WriteCalls:
    """What writes calls in a model's format; in Hermes' where nothing is known of the model."""
    form = formats.tools
    if not isinstance(form, ToolFormat) or form.name == GENERIC:
        return calls_as_json
    return lambda calls: _written(form, calls)


def _written(form: ToolFormat, calls: Sequence[Mapping[str, Any]]) -> str:
    template, style = form.template, _style_of(form)
    texts = list[str]()
    for call in calls:
        name, arguments = named_arguments(call)
        after_name, end = template.after_name, template.after_arguments
        if after_name.startswith(_PYTHON):
            text = _in_python(arguments)
            after_name, end = after_name.removeprefix(_PYTHON), end.removeprefix(")")
        elif style is not None:
            text = _parameters(arguments, style)
        else:
            text = json.dumps(arguments, ensure_ascii=False)
        texts.append(template.before_name + name + after_name + text + end)
    return template.begin + template.separator.join(texts) + template.end


def _style_of(form: ToolFormat) -> ParameterStyle | None:
    """How the arguments are written, if the template writes them one by one."""
    before_name = (form.template.begin + form.template.before_name).rstrip(_IGNORED)
    for call in form.calls:
        if (body := call.named) is not None and before_name.endswith(body.head or call.begin):
            return body.parameters
    return None


def _in_python(arguments: Mapping[str, Any]) -> str:
    """Arguments between parentheses."""
    if not all(key.isidentifier() for key in arguments):
        return f"(**{arguments!r})"
    return f"({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _parameters(arguments: Mapping[str, Any], style: ParameterStyle) -> str:
    line = "\n" if style.own_lines else ""
    texts = list[str]()
    for key, value in arguments.items():
        is_text = isinstance(value, str)
        quote = '"' if _ATTRIBUTE.fullmatch(style.key_begin) else ""
        text = style.key_begin + quote + key + quote + style.key_end
        if style.kind_end:
            other = "false" if style.text_kind == "true" else "object"
            text = f'{text}"{style.text_kind if is_text else other}"{style.kind_end}'
        text += (
            style.value_begin + line + (value if is_text else json.dumps(value, ensure_ascii=False))
        )
        texts.append(text + line + style.value_end.replace("{}", key))
    return "\n".join(texts)
