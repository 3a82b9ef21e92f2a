"""From a request's fields for structured output to a grammar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import ResponseFormat, StructuredOutputs
from asyncllm.text.grammar import (
    Choice,
    Ebnf,
    GrammarSpec,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTags,
    Tag,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from asyncllm.server.chat.requests import Schema, StructureFields
    from asyncllm.text.parsing import CallStructure


#: How long the schemas of one request may take to be looked at; those of 24 tools take 10 ms.
_LOOK_SECONDS: Final = 1.0


def grammar_of(body: StructureFields) -> GrammarSpec | None:
    """The grammar of a request's output; None when the output is free.

    Raises:
        BadRequest: the fields give several grammars, or an incomplete one.
    """
    found = list(_asked_for(body))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise BadRequest(f"{names} exclude each other", param=found[1][0])
    return found[0][1] if found else None


def blame(error: BadRequest, body: StructureFields) -> None:
    """Have an error about the grammar name the field of the request that gave it."""
    if error.param == "grammar":
        error.param = next((name for name, _ in _asked_for(body)), "tools")


def _asked_for(body: StructureFields) -> Iterator[tuple[str, GrammarSpec]]:
    if (form := body.response_format) is not None:
        spec = _response_format(form, "response_format")
        if spec is not None:
            yield "response_format", spec
    if body.structured_outputs is not None:
        if body.structured_outputs == StructuredOutputs():
            raise BadRequest("structured_outputs is empty", param="structured_outputs")
        yield from _structured_outputs(body.structured_outputs)
    for name in ("guided_json", "json_schema"):
        if (schema := getattr(body, name)) is not None:
            yield name, _schema(schema, name)
    for name in ("guided_regex", "regex"):
        if (pattern := getattr(body, name)) is not None:
            yield name, Regex(pattern)
    if body.guided_choice is not None:
        yield "guided_choice", _choice(body.guided_choice, "guided_choice")
    for name in ("guided_grammar", "ebnf"):
        if (grammar := getattr(body, name)) is not None:
            yield name, Ebnf(grammar)


def _structured_outputs(body: StructuredOutputs) -> Iterator[tuple[str, GrammarSpec]]:
    if body.json is not None:
        yield "structured_outputs.json", _schema(body.json, "structured_outputs.json")
    if body.json_object:
        yield "structured_outputs.json_object", JsonObject()
    if body.regex is not None:
        yield "structured_outputs.regex", Regex(body.regex)
    if body.choice is not None:
        yield "structured_outputs.choice", _choice(body.choice, "structured_outputs.choice")
    if body.grammar is not None:
        yield "structured_outputs.grammar", Ebnf(body.grammar)
    if (tags := body.structural_tag) is not None:
        name = "structured_outputs.structural_tag"
        if isinstance(tags, str):
            tags = _parsed(tags, ResponseFormat, name)
        spec = _response_format(tags, name)
        if spec is not None:
            yield name, spec


def _response_format(form: ResponseFormat, name: str) -> GrammarSpec | None:
    schema = form.schema if form.json_schema is None else form.json_schema.schema
    match form.type:
        case "text":
            return None
        case "json_object" | "json_schema" if schema is not None:
            return _schema(schema, name)
        case "json_object":
            return JsonObject()
        case "json_schema":
            raise BadRequest(f"{name}.json_schema.schema is required", param=name)
        case "structural_tag":
            return _tags(form, name)


def _tags(form: ResponseFormat, name: str) -> GrammarSpec:
    if not form.structures or not form.triggers:
        raise BadRequest(f"{name} needs structures and triggers", param=name)
    tags = tuple(Tag(tag.begin, tag.schema, tag.end) for tag in form.structures)
    return StructuralTags(tags, tuple(form.triggers))


def _schema(schema: Schema | str, name: str) -> GrammarSpec:
    parsed = _parsed(schema, dict[str, Any] | bool, name) if isinstance(schema, str) else schema
    return JsonSchema(parsed)


def _parsed(text: str, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{name}: {error}", param=name) from None


def _choice(choices: list[str], name: str) -> GrammarSpec:
    if not choices:
        raise BadRequest(f"{name} is empty", param=name)
    return Choice(tuple(choices))


def enforceable_tools(tools: Sequence[dict[str, Any]], left_out: list[str]) -> list[dict[str, Any]]:
    """The tools for a grammar that forces calls.

    Where no grammar can hold a model to a tool's schema, its arguments may be any object, unless
    the tool is ``strict``: then the request will be refused.

    Args:
        left_out: gets names for the schemas that are not enforced.
    """
    from asyncllm.text.grammar.limits import Budget
    from asyncllm.text.grammar.schema.writer import schema_rules

    budget, kept = Budget(_LOOK_SECONDS), []
    for tool in tools:
        function = tool["function"]
        if function.get("parameters") and not function.get("strict"):
            try:
                schema_rules(function["parameters"], budget=budget)
            except BadRequest:
                left_out.append(f"tools.{function['name']}.parameters")
                tool = {**tool, "function": {**function, "parameters": {"type": "object"}}}
        kept.append(tool)
    return kept


def calls_grammar(structure: CallStructure) -> GrammarSpec | None:
    """The grammar of a text with tool calls; None when nothing needs to be enforced."""
    tags = structure.separate_tags()
    if structure.free_text and not structure.at_most_one and not any(tag.strict for tag in tags):
        return None
    return StructuralTags(
        tags=tuple(
            Tag(tag.begin, tag.schema if tag.strict or not structure.free_text else {}, tag.end)
            for tag in tags
        ),
        triggers=structure.triggers,
        at_least_one=not structure.free_text,
        stop_after_first=structure.at_most_one,
        free_text=structure.free_text,
    )
