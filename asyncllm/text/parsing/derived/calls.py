"""Makes a tool format of calls as a chat template writes them, for models that are not listed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from asyncllm.text.parsing.calls.typed import literal_of
from asyncllm.text.parsing.derived.probe import ProbeCall, RenderedCalls, common, same_arguments
from asyncllm.text.parsing.formats import (
    CallSyntax,
    CallTemplate,
    JsonBody,
    NamedBody,
    ParameterStyle,
    ToolFormat,
    is_tag,
)

#: The name of every derived format.
DERIVED = "template"
_FIRST_TAG = re.compile(r"<[^<>\s]*>")
_NUMBER = re.compile(r"\d+")
_QUOTED = ('="', "='")
_DECODER = json.JSONDecoder()
_MARKER_AND_HEAD = re.compile(r"(\S*[>\]|])\s+(\S.*)", re.DOTALL)
_TWO_TAGS = re.compile(r"(\S*?>)\s*(<.*)", re.DOTALL)


class _Arguments(NamedTuple):
    """Where the arguments of the first call are written, and how.

    ``before``, ``after``: what belongs around JSON in their place.
    """

    start: int
    end: int
    body: NamedBody
    before: str = ""
    after: str = ""


def derive_format(rendered: RenderedCalls) -> ToolFormat | None:
    """The format of these calls; None if they are in no notation that is read."""
    text, call = rendered.texts[0], rendered.calls[0]
    start = text.find(call.name)
    name_end = start + len(call.name)
    finders = (_json, _literal, _parameters)
    found = next(filter(None, (find(text, name_end, call) for find in finders)), None)
    if start < 0 or found is None:
        return None
    template = _around(rendered, start, found)
    ignored: tuple[str, ...] = ()
    if envelope := _envelope(text, call):
        syntax, ignored = _in_json(text, envelope, template, found)
    else:
        body = replace(found.body, name_end=text[name_end : found.start].strip())
        named = _named(body, template, rendered)
        if named is None:
            return None
        syntax, ignored = named
    template = replace(
        template,
        after_name=text[name_end : found.start] + found.before,
        after_arguments=found.after + template.after_arguments,
    )
    return ToolFormat(
        DERIVED,
        (syntax, *_without_words(syntax)),
        template,
        ignored,
        separators=template.separator.strip() if template.separator.strip() in (",", ";") else "",
        call_ids=rendered.call_ids,
    )


def _without_words(syntax: CallSyntax) -> Iterator[CallSyntax]:
    """The syntax without words before its marker, which a model may leave out."""
    *words, marker = syntax.begin.split() or [""]
    if words and is_tag(marker):
        yield replace(syntax, begin=marker)


def _around(rendered: RenderedCalls, start: int, found: _Arguments) -> CallTemplate:
    """What is around each call and around all of them, as one and two calls show together."""
    one, two = rendered.texts[0], rendered.texts[-1]
    head, tail = one[:start], one[found.end :]
    second = two.find(rendered.calls[1].name)
    if second < 0 or not two.startswith(one[: found.end]):
        return CallTemplate(head.lstrip(), "", tail)
    between = two[found.end : second]
    before = rendered.before + head
    before_name = before[len(before) - common(before, between, from_end=True) :].lstrip()
    before_name = _own_part(before_name, one[: found.start])
    between = between[: len(between) - len(before_name)]
    length = common(between, tail)
    begin = head[: max(0, len(head) - len(before_name))].lstrip()
    return CallTemplate(
        before_name,
        "",
        between[:length],
        begin=begin,
        separator=between[length:],
        end=tail[length:] if begin else "",  # otherwise it ends the turn
    )


def _own_part(marker: str, before: str) -> str:
    """A marker without the tag that ends what is before it, as it ends ``before``."""
    tag = _FIRST_TAG.match(marker)
    return marker[tag.end() :] if tag and before.rstrip().endswith(tag[0]) else marker


def _in_json(
    text: str, envelope: tuple[int, int, JsonBody], template: CallTemplate, found: _Arguments
) -> tuple[CallSyntax, tuple[str, ...]]:
    """The syntax of calls that are objects with the name in them; markers around all of them."""
    start, end, body = envelope
    last = found.end + len(template.after_arguments)
    ignored: tuple[str, ...] = ()
    begin = text[:start].strip()
    if start > len(template.begin) and template.begin:  # each call has a marker of its own
        begin = text[len(template.begin) : start].strip()
        ignored = (template.begin.strip(), *template.end.split())
    else:
        last += len(template.end)
    if not begin:  # as an answer may begin
        body = replace(body, other_keys=("type", "id"), needs_arguments=True)
        return CallSyntax("", json=body), ()
    return CallSyntax(begin, json=body, end=tuple(text[end:last].split())), ignored


def _named(
    body: NamedBody, template: CallTemplate, rendered: RenderedCalls
) -> tuple[CallSyntax, tuple[str, ...]] | None:
    """The syntax of calls with a name before the arguments, and markers around all of them.

    None if it is an id that announces a name: any text may be one.
    """
    begin, end = template.begin.strip(), template.end.strip()
    before_name, after = template.before_name.strip(), template.after_arguments
    if body.in_python:
        begin, end = begin.removesuffix("[").rstrip(), end.removeprefix("]").lstrip()
    ignored = (*filter(None, (begin,)), *end.split()) if before_name else ()
    if not before_name:
        before_name, after = begin, after + end
    first, found, head = _around_id(before_name, rendered)
    if found and not (head and is_tag(first)):
        return None
    if found:
        before_name, body = first, replace(body, head=head)
    elif two := _MARKER_AND_HEAD.fullmatch(before_name):
        before_name, head = two.groups()
        body = replace(body, head=head)
    name_end, found, rest = _around_id(body.name_end, rendered)
    if found:
        body = replace(body, call_id=name_end, name_end=rest)
    if before_name and rendered.before.endswith(before_name):  # a word in place of a name
        body = replace(body, answer=rendered.answer.strip())
    return _unquoted(CallSyntax(before_name, end=tuple(after.split())), body), ignored


def _around_id(marker: str, rendered: RenderedCalls) -> tuple[str, str, str]:
    """What is before and behind the id of a call, or its number, and that itself if it is there."""
    first, found, rest = marker.partition(rendered.id_)
    numbers = () if found else _NUMBER.finditer(marker)
    for number in numbers:
        before, after = marker[: number.start()], marker[number.end() :]
        if f"{before}{int(number[0]) + 1}{after}" in rendered.texts[-1]:
            first, found, rest = before, number[0], after
    return first.strip(), found, rest.strip()


def _unquoted(call: CallSyntax, body: NamedBody) -> CallSyntax:
    """The syntax of a call with or without quotes around names: models leave them out."""
    if style := body.parameters:
        key_begin, key_end = _without_quotes(style.key_begin, style.key_end)
        key_end, kind_end = _without_quotes(key_end, style.kind_end)
        style = replace(style, key_begin=key_begin, key_end=key_end, kind_end=kind_end)
    before, name_end = body.head or call.begin, body.name_end
    if body.call_id:
        before, call_id = _without_quotes(before, body.call_id)
    else:
        call_id = ""
        before, name_end = _without_quotes(before, name_end)
    body = replace(body, parameters=style, call_id=call_id, name_end=name_end)
    if body.head:
        return replace(call, named=replace(body, head=before))
    return replace(call, named=body, begin=before)


def _without_quotes(before: str, after: str) -> tuple[str, str]:
    """Markers around an attribute without its quotes."""
    if before.endswith(_QUOTED) and after.startswith(before[-1]):
        return before[:-1], after[1:].lstrip()
    return before, after


def _envelope(text: str, call: ProbeCall) -> tuple[int, int, JsonBody] | None:
    """Where a JSON value with the name and the arguments in it begins and ends, and its keys."""
    for start, value, end in _json_values(text):
        if body := _keys(value[0] if isinstance(value, list) and value else value, call):
            return start, end, body
    return None


def _json_values(text: str, after: int = 0) -> Iterator[tuple[int, Any, int]]:
    """Where JSON begins, what it is, where it ends."""
    for found in re.compile(r'[{\["]').finditer(text, after):
        try:
            value, end = _DECODER.raw_decode(text, found.start())
        except ValueError:
            continue
        yield found.start(), value, end


def _keys(value: Any, call: ProbeCall) -> JsonBody | None:
    """The keys of a call that is an object."""
    if not isinstance(value, dict):
        return None
    names = [key for key, inner in value.items() if inner == call.name]
    arguments = [key for key, inner in value.items() if same_arguments(inner, call)]
    if call.name in arguments:
        return JsonBody(keyed=True)
    if names and arguments:
        usual = JsonBody()
        return JsonBody(
            tuple(dict.fromkeys((names[0], *usual.name_keys))),
            tuple(dict.fromkeys((arguments[0], *usual.argument_keys))),
        )
    for key, inner in value.items():
        if body := _keys(inner, call):
            return JsonBody((key, *body.name_keys), body.argument_keys)
    return None


def _json(text: str, after: int, call: ProbeCall) -> _Arguments | None:
    """Arguments that are JSON, or JSON in a string."""
    found = (
        (at, end) for at, value, end in _json_values(text, after) if same_arguments(value, call)
    )
    return next((_Arguments(start, end, NamedBody()) for start, end in found), None)


def _literal(text: str, after: int, call: ProbeCall) -> _Arguments | None:
    """Arguments of a call in Python, or an object in a notation of its own."""
    opening = re.compile(r"[({]").search(text, after)
    if opening is None:
        return None
    start = opening.start()
    key, value = next(iter(call.arguments.items()))
    between = text[start:].partition(key)[2].partition(str(value))[0]
    quote = between.lstrip("=: ")
    if len(quote) == 1:  # one that every literal has
        quote = ""
    found = literal_of(text[start:], quote, of_call=True)
    if not found.whole or not same_arguments(found.json, call):
        return None
    end = start + found.length
    if opening[0] == "(":
        return _Arguments(start, end, NamedBody(in_python=True), "(**", ")")
    return _Arguments(start, end, NamedBody(quote=quote))


def _parameters(text: str, after: int, call: ProbeCall) -> _Arguments | None:
    """Arguments one by one, each between markers of its own."""
    words = [word for item in call.arguments.items() for word in map(str, item)]
    pattern = "(.*?)".join(["", *map(re.escape, words), ""])
    found = re.compile(pattern, re.DOTALL).match(text, after)
    if found is None or len(words) != 4:
        return None
    before, key_end, between, second_key_end, _ = found.groups()
    rest = text[found.end() :]
    key_begin = between[len(between) - common(before, between, from_end=True) :].lstrip()
    key_begin = _own_part(key_begin, key_end)
    value_end = between[: len(between) - len(key_begin)]
    end_of_last = value_end.replace(words[0], words[2]).rstrip()
    if not key_begin or not value_end.strip() or not rest.startswith(end_of_last):
        return None
    style = ParameterStyle(
        key_begin,
        key_end.strip(),
        "",
        value_end.strip().replace(words[0], "{}"),
        own_lines=key_end.endswith("\n") and value_end.startswith("\n"),
    )
    if key_end != second_key_end:
        style = _with_kinds(style, key_end, second_key_end)
    elif two := _TWO_TAGS.fullmatch(style.key_end):
        style = replace(style, key_end=two[1], value_begin=two[2])
    start = after + len(before) - len(key_begin)
    return _Arguments(start, found.end() + len(end_of_last), NamedBody(parameters=style))


def _with_kinds(style: ParameterStyle, of_text: str, of_number: str) -> ParameterStyle:
    """The style of parameters behind whose name comes the kind of their value."""
    start, end = common(of_text, of_number), common(of_text, of_number, from_end=True)
    return replace(
        style,
        key_end=of_text[:start],
        text_kind=of_text[start : len(of_text) - end],
        kind_end=of_text[len(of_text) - end :].strip(),
    )
