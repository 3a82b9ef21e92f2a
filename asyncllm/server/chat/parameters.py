"""From the fields of a request to SamplingParams, its grammar included, and SchedulingParams."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.server.chat.requests import (
    GeneratingFields,
    PredictedOutput,
    ResponseFormat,
    Schema,
    StructuredOutputs,
    StructureFields,
)
from asyncllm.text import grammar
from asyncllm.types import SamplingParams, SchedulingParams


def _shared(params: type[msgspec.Struct]) -> tuple[str, ...]:
    """The fields that requests have by the same name."""
    return tuple(f for f in params.__struct_fields__ if f in GeneratingFields.__struct_fields__)


_OF_SAMPLING: Final = _shared(SamplingParams)
_OF_SCHEDULING: Final = _shared(SchedulingParams)


def sampling_params(
    body: GeneratingFields,
    defaults: SamplingParams,
    *,
    max_tokens: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The request's parameters, over the model's defaults.

    Args:
        max_tokens: None for that of the body.

    Raises:
        BadRequest: a value is out of range, or the fields give several grammars.
    """
    given = _given(body, _OF_SAMPLING)
    if (spec := _grammar(body)) is not None:
        given["grammar"] = spec
    if isinstance(body.prediction, PredictedOutput):
        given["prediction"] = body.prediction.text
    given["max_tokens"] = body.max_tokens if max_tokens is None else max_tokens
    given |= {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    return msgspec.structs.replace(defaults, **given)


def scheduling_params(
    body: GeneratingFields, tenant: str, *, isolated: bool = False
) -> SchedulingParams:
    """The request's parameters; the tenant is never the client's choice.

    Args:
        isolated: whether cached prefixes are not shared with other tenants.

    Raises:
        BadRequest: a value is out of range.
    """
    return SchedulingParams(tenant=tenant, isolated=isolated, **_given(body, _OF_SCHEDULING))


def _given(body: GeneratingFields, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(body, name)) is not None}


def name_grammar_field(error: BadRequest, body: StructureFields) -> None:
    """Have an error about the grammar name the field of the request that gave it."""
    if error.param == "grammar":
        error.param = next((name for name, _ in _grammars(body)), "tools")


def _grammar(body: StructureFields) -> grammar.GrammarSpec | None:
    """The grammar of a request's output; None when the output is free.

    Raises:
        BadRequest: the fields give several grammars, or an incomplete one.
    """
    found = list(_grammars(body))
    if len(found) > 1:
        names = " and ".join(name for name, _ in found)
        raise BadRequest(f"{names} exclude each other", param=found[1][0])
    return found[0][1] if found else None


def _grammars(body: StructureFields) -> Iterator[tuple[str, grammar.GrammarSpec]]:
    """Each grammar that the request gives, with the name of its field."""
    yield from _made(body, {"response_format": _response_format})
    if body.structured_outputs is not None:
        if body.structured_outputs == StructuredOutputs():
            raise BadRequest("structured_outputs is empty", param="structured_outputs")
        yield from _made(body.structured_outputs, _STRUCTURED_OUTPUTS, "structured_outputs.")
    yield from _made(body, _OLDER_NAMES)


def _made(
    fields: msgspec.Struct, makers: Mapping[str, Maker], where: str = ""
) -> Iterator[tuple[str, grammar.GrammarSpec]]:
    for field, make in makers.items():
        value, name = getattr(fields, field), where + field
        if value is not None and (spec := make(value, name)) is not None:
            yield name, spec


def _response_format(given: ResponseFormat | str, name: str) -> grammar.GrammarSpec | None:
    form = _parsed(given, ResponseFormat, name) if isinstance(given, str) else given
    schema = form.schema if form.json_schema is None else form.json_schema.schema
    match form.type:
        case "text":
            return None
        case "json_object" | "json_schema" if schema is not None:
            return _schema(schema, name)
        case "json_object":
            return grammar.JsonObject()
        case "json_schema":
            raise BadRequest(f"{name}.json_schema.schema is required", param=name)
    if not form.structures or not form.triggers:
        raise BadRequest(f"{name} needs structures and triggers", param=name)
    tags = tuple(grammar.Tag(tag.begin, tag.schema, tag.end) for tag in form.structures)
    return grammar.StructuralTags(tags, tuple(form.triggers))


def _schema(schema: Schema | str, name: str) -> grammar.GrammarSpec:
    parsed = _parsed(schema, dict[str, Any] | bool, name) if isinstance(schema, str) else schema
    return grammar.JsonSchema(parsed)


def _parsed(text: str, kind: Any, name: str) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadRequest(f"{name}: {error}", param=name) from None


def _choice(choices: list[str], name: str) -> grammar.GrammarSpec:
    if not choices:
        raise BadRequest(f"{name} is empty", param=name)
    return grammar.Choice(tuple(choices))


#: From a field's value, and its name for errors; None if the value asks for nothing.
Maker = Callable[[Any, str], grammar.GrammarSpec | None]

_STRUCTURED_OUTPUTS: Final[dict[str, Maker]] = {
    "json": _schema,
    "json_object": lambda wanted, _: grammar.JsonObject() if wanted else None,
    "regex": lambda pattern, _: grammar.Regex(pattern),
    "choice": _choice,
    "grammar": lambda text, _: grammar.Ebnf(text),
    "structural_tag": _response_format,
}
_OLDER_NAMES: Final[dict[str, Maker]] = {
    "guided_json": _schema,
    "json_schema": _schema,
    "guided_regex": lambda pattern, _: grammar.Regex(pattern),
    "regex": lambda pattern, _: grammar.Regex(pattern),
    "guided_choice": _choice,
    "guided_grammar": lambda text, _: grammar.Ebnf(text),
    "ebnf": lambda text, _: grammar.Ebnf(text),
}
