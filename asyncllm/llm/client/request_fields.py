"""Writes parameters as the fields of a request in OpenAI's protocol, with vLLM's extensions."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import Choice, Ebnf, JsonObject, JsonSchema, Regex, StructuralTags
from asyncllm.types import SamplingParams, SchedulingParams

#: Parameters that a server derives from its chat template.
_OF_TEMPLATES: Final = ("reasoning", "shown_special_tokens")


def sampling_fields(params: SamplingParams, *, chat: bool) -> dict[str, Any]:
    """The parameters that are set; other servers refuse fields that they do not know.

    Args:
        chat: whether they are for chat completions.

    Raises:
        BadRequest: one cannot be sent; ``param`` names it.
    """
    fields = {
        name: value
        for name, value in msgspec.structs.asdict(params).items()
        if value not in (None, ()) or name == "max_tokens"
    }
    for name in _OF_TEMPLATES:
        if name in fields:
            raise BadRequest(
                f"{name} cannot be sent: a server has its own, for the chat template", param=name
            )
    if chat and params.max_tokens == 0:
        raise BadRequest("max_tokens 0 cannot be sent in chats", param="max_tokens")
    if "grammar" in fields:
        fields["structured_outputs"] = _structure(fields.pop("grammar"))
    if params.logprobs is not None:
        if chat:
            fields |= {"logprobs": True, "top_logprobs": params.logprobs}
        if params.logprobs > 0:  # alternatives need unambiguous names
            fields["return_tokens_as_token_ids"] = True
    return fields


def scheduling_fields(scheduling: SchedulingParams) -> dict[str, Any]:
    """The parameters that are not at their defaults.

    Raises:
        BadRequest: a tenant is given.
    """
    if scheduling.tenant:
        raise BadRequest("a server tells tenants by their API keys", param="tenant")
    return changed_fields(scheduling)


def changed_fields(params: msgspec.Struct) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    defaults = msgspec.structs.asdict(type(params)())
    fields = msgspec.structs.asdict(params)
    return {name: value for name, value in fields.items() if value != defaults[name]}


def _structure(grammar: object) -> dict[str, Any]:
    """A grammar as ``structured_outputs``."""
    match grammar:
        case JsonObject():
            return {"json_object": True}
        case JsonSchema(schema):
            return {"json": schema}
        case Regex(pattern):
            return {"regex": pattern}
        case Choice(choices):
            return {"choice": choices}
        case Ebnf(text):
            return {"grammar": text}
        case StructuralTags(tags, triggers, at_least_one=False, stop_after_first=False):
            if grammar.free_text:
                form = {"type": "structural_tag", "structures": tags, "triggers": triggers}
                return {"structural_tag": form}
    raise BadRequest(
        f"a grammar like this {type(grammar).__name__} cannot be sent", param="grammar"
    )
