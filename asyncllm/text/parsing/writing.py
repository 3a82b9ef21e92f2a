"""Writes calls as a model does, for chat templates that print none."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from asyncllm.text.parsing.formats import Formats, ParameterStyle, ToolFormat
from asyncllm.text.parsing.tool_formats import GENERIC
from asyncllm.text.template_form import WriteCalls, calls_as_json, named_arguments

_PYTHON = "(**"  # before an object that is the arguments of a call in Python
_IGNORED = " \n\"'"  # between a marker and a name
_ATTRIBUTE = re.compile(r".*\s[\w-]+=", re.DOTALL)  # whose value stands in quotes


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
