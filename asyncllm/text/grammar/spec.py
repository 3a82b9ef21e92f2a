"""The kinds of structured output as plain data, with a key for caches."""

from __future__ import annotations

import hashlib
from typing import Any, TypeAlias

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.text.grammar.limits import check_size


class JsonObject(msgspec.Struct, frozen=True, tag="json_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, tag="json_schema"):
    """JSON that is valid against a schema: an object or a boolean, as parsed from JSON."""

    schema: dict[str, Any] | bool


class Regex(msgspec.Struct, frozen=True, tag="regex"):
    """A text that matches a regular expression as a whole, in the syntax of ECMA 262."""

    pattern: str


class Choice(msgspec.Struct, frozen=True, tag="choice"):
    """One of these texts."""

    choices: tuple[str, ...]


class Ebnf(msgspec.Struct, frozen=True, tag="ebnf"):
    """A context-free grammar, in llama.cpp's GBNF or in Lark's syntax."""

    grammar: str


class Tag(msgspec.Struct, frozen=True):
    """A stretch of output: its begin, JSON valid against a schema, its end."""

    begin: str
    schema: dict[str, Any] | bool
    end: str


class StructuralTags(msgspec.Struct, frozen=True, tag="structural_tag"):
    """Free text in which each trigger begins one of the tags.

    Attributes:
        tags: the begin of each starts with one of the triggers.
        triggers: texts that occur at the begin of tags only.
        at_least_one: the output has a tag.
        stop_after_first: the output ends with the first tag.
        free_text: there may be text outside of tags; without it ``triggers`` do not matter, and
            there is at least one tag.
    """

    tags: tuple[Tag, ...]
    triggers: tuple[str, ...] = ()
    at_least_one: bool = False
    stop_after_first: bool = False
    free_text: bool = True


GrammarSpec: TypeAlias = JsonObject | JsonSchema | Regex | Choice | Ebnf | StructuralTags


def cache_key(spec: GrammarSpec) -> bytes:
    """A hash of the spec; the order of a schema's properties counts.

    Raises:
        BadRequest: a schema is too large or not JSON, or a text is not Unicode.
    """
    if isinstance(spec, JsonSchema):
        check_size(spec.schema)
    elif isinstance(spec, StructuralTags):
        for tag in spec.tags:
            check_size(tag.schema)
    try:
        encoded = msgspec.json.encode(spec)
    except UnicodeEncodeError as error:
        raise BadRequest("the format has an unpaired surrogate") from error
    return hashlib.blake2b(encoded, digest_size=16).digest()
