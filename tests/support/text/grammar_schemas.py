"""Schemas of every common kind, by name."""

from __future__ import annotations

from typing import Any

_TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer", "minimum": 0, "maximum": 9},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def closed(properties: dict[str, Any], **more: Any) -> dict[str, Any]:
    """An object with all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
        **more,
    }


_SHORT = {"type": "string", "maxLength": 6}
_CAT = closed({"kind": {"const": "cat"}, "lives": {"type": "integer", "minimum": 1, "maximum": 9}})
_DOG = closed({"kind": {"const": "dog"}, "name": _SHORT})

SCHEMAS: dict[str, Any] = {
    "true": closed({"any": {"type": ["null", "boolean", "integer"]}}),
    "nested": closed({"a": closed({"b": closed({"c": closed({"d": _SHORT})})})}),
    "optional": {"type": "object", "properties": {"a": _SHORT, "b": _SHORT, "c": _SHORT},
                 "additionalProperties": False},
    "optional and required": {
        "type": "object", "properties": {"a": _SHORT, "b": _SHORT, "c": _SHORT, "d": _SHORT},
        "required": ["c"], "additionalProperties": False,
    },
    "required without properties": {
        "type": "object", "required": ["x", "y"], "additionalProperties": {"type": "boolean"}},
    "required in another order": closed({"z": _SHORT, "a": _SHORT}, required=["a", "z"]),
    "map of integers": {
        "type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "names by pattern": {
        "type": "object", "patternProperties": {"^n_[a-z]{1,3}$": {"type": "number"}},
        "additionalProperties": False, "maxProperties": 2,
    },
    "overlapping patterns": {
        "type": "object", "maxProperties": 2, "additionalProperties": False,
        "patternProperties": {"^a[a-c]{0,3}$": {"type": "integer"}, "^[ab]b": {"minimum": 5}},
    },
    "property and pattern": {
        "type": "object", "properties": {"abc": {"type": "integer"}}, "required": ["abc"],
        "patternProperties": {"^a": {"minimum": 7, "maximum": 12}}, "additionalProperties": False,
    },
    "property names": {
        "type": "object", "propertyNames": {"pattern": "^[a-z]{2,4}$"}, "maxProperties": 2,
        "additionalProperties": {"type": "null"},
    },
    "at least one property": {
        "type": "object", "properties": {"a": _SHORT, "b": _SHORT}, "minProperties": 1,
        "additionalProperties": False,
    },
    "two or three of four": {
        "type": "object", "properties": {name: {"type": "null"} for name in "abcd"},
        "minProperties": 2, "maxProperties": 3, "additionalProperties": False,
    },
    "dependent required": {
        "type": "object", "properties": {"card": {"type": "integer"}, "address": _SHORT},
        "dependentRequired": {"card": ["address"]}, "additionalProperties": False,
    },
    "dependent schemas": {
        "type": "object", "properties": {"card": {"type": "integer"}, "address": _SHORT},
        "dependentSchemas": {"card": {"required": ["address"],
                                      "properties": {"address": {"minLength": 3}}}},
        "additionalProperties": False,
    },
    "unevaluated": {
        "type": "object", "allOf": [{"properties": {"a": {"type": "integer"}}}],
        "properties": {"b": {"type": "boolean"}}, "required": ["a"],
        "unevaluatedProperties": False,
    },
    "ref": {"$defs": {"s": _SHORT}, **closed({"a": {"$ref": "#/$defs/s"}})},
    "ref with siblings": {
        "$defs": {"s": {"type": "string"}},
        **closed({"a": {"$ref": "#/$defs/s", "maxLength": 4, "minLength": 2}}),
    },
    "ref by anchor": {
        "$defs": {"s": {"$anchor": "short", **_SHORT}}, **closed({"a": {"$ref": "#short"}})},
    "ref by id": {
        "$id": "https://example.org/root", "$defs": {"s": {"$id": "short", **_SHORT}},
        **closed({"a": {"$ref": "short"}}),
    },
    "recursion": _TREE,
    "recursion to the root": {
        "type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
        "required": ["next"], "additionalProperties": False,
    },
    "mutual recursion": {
        "$defs": {
            "a": closed({"b": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/b"}]}}),
            "b": closed({"a": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}]}}),
        },
        "$ref": "#/$defs/a",
    },
    "definitions of draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {"point": {"type": "array", "items": [{"type": "number"}] * 2,
                                  "additionalItems": False, "minItems": 2}},
        **closed({"at": {"$ref": "#/definitions/point"}}),
    },
    "enum": closed({"color": {"enum": ["red", "green", "blue"]}}),
    "enum of everything": closed({"x": {"enum": [1, 2.5, "a", None, True, [1, "b"], {"k": 0}]}}),
    "enum within a type": closed({"x": {"type": "string", "enum": ["a", 1, "bb", None]}}),
    "enum with bounds": closed({"x": {"enum": [1, 5, 10, 15], "minimum": 4, "maximum": 12}}),
    "const": closed({"version": {"const": 3}, "tag": {"const": "a \"quoted\" \\ text\n"}}),
    "const of an object": closed({"c": {"const": {"b": [1, {}], "a": ""}}}),
    "boolean and null": closed({"a": {"type": "boolean"}, "b": {"type": "null"}}),
    "string length": closed({"s": {"type": "string", "minLength": 3, "maxLength": 7}}),
    "pattern": closed({"s": {"type": "string", "pattern": r"^[A-Z]{2}\d{3}$"}}),
    "pattern without anchors": closed({"s": {"type": "string", "pattern": "ab+c",
                                             "maxLength": 8}}),
    "pattern with an anchor": closed({"s": {"type": "string", "pattern": "^x|y$",
                                            "maxLength": 5}}),
    "pattern with escapes": closed({"s": {"type": "string", "pattern": r'^["\\/\n\t]{1,4}$'}}),
    "pattern with look-ahead": closed(
        {"s": {"type": "string", "pattern": r"^(?=.*\d)(?=.*[A-Z])(?!.*aa)[A-Za-z0-9]{4,9}$"}}),
    "pattern and length": closed(
        {"s": {"type": "string", "pattern": "^(ab)*$", "minLength": 5, "maxLength": 9}}),
    "several patterns": closed({"s": {"allOf": [{"type": "string", "maxLength": 9},
                                                {"pattern": "a"}, {"pattern": "b"},
                                                {"not": {"pattern": "ab"}}]}}),
    "unicode": closed({"größe": {"enum": ["klein", "groß", "très grand", "大きい", "🙂"]},
                       "名前": {"type": "string", "pattern": r"^\p{L}{1,3}$"}}),
    "date and time": closed({name: {"type": "string", "format": name}
                             for name in ("date", "time", "date-time", "duration")}),
    "addresses": closed({name: {"type": "string", "format": name}
                         for name in ("email", "ipv4", "ipv6", "uuid", "hostname")}),
    "links": closed({name: {"type": "string", "format": name, "maxLength": 40}
                     for name in ("uri", "uri-reference", "json-pointer", "iri",
                                  "relative-json-pointer", "uri-template")}),
    "format regex": closed({"r": {"type": "string", "format": "regex", "maxLength": 30}}),
    "integer": closed({"i": {"type": "integer"}, "n": {"type": "number"}}),
    "integer bounds": closed({"i": {"type": "integer", "minimum": -17, "maximum": 4321}}),
    "exclusive bounds": closed({"i": {"type": "integer", "exclusiveMinimum": 9,
                                      "exclusiveMaximum": 12}}),
    "number bounds": closed({"n": {"type": "number", "minimum": -1.25, "exclusiveMaximum": 3.5}}),
    "probability": closed({"p": {"type": "number", "minimum": 0, "maximum": 1}}),
    "one-sided bounds": closed({"n": {"type": "number", "exclusiveMinimum": 0},
                                "m": {"type": "number", "maximum": -0.001}}),
    "multiples": closed({"i": {"type": "integer", "multipleOf": 7},
                         "n": {"type": "number", "multipleOf": 0.25, "minimum": 0,
                               "maximum": 100}}),
    "draft 4 bounds": closed({"n": {"type": "number", "minimum": 0, "exclusiveMinimum": True,
                                    "maximum": 5}},
                             **{"$schema": "http://json-schema.org/draft-04/schema#"}),
    "no fraction but not 3": closed({"i": {"type": "integer", "minimum": 1, "maximum": 5,
                                           "not": {"enum": [3, 4]}}}),
    "not an integer": closed({"n": {"type": "number", "not": {"type": "integer"},
                                    "minimum": -2, "maximum": 2}}),
    "array": closed({"a": {"type": "array", "items": {"type": "integer"}}}),
    "array bounds": closed({"a": {"type": "array", "items": _SHORT, "minItems": 2,
                                  "maxItems": 4}}),
    "array of arrays": closed({"a": {"type": "array", "maxItems": 2, "items": {
        "type": "array", "maxItems": 2, "items": {"type": "boolean"}}}}),
    "tuple": closed({"t": {"type": "array", "minItems": 2, "items": False,
                           "prefixItems": [{"type": "integer"}, _SHORT, {"type": "null"}]}}),
    "tuple and rest": closed({"t": {"type": "array", "prefixItems": [{"const": "x"}],
                                    "items": {"type": "integer"}, "minItems": 1}}),
    "contains": closed({"a": {"type": "array", "items": {"type": "integer"}, "maxItems": 5,
                              "contains": {"minimum": 10}, "minContains": 2}}),
    "contains at most": closed({"a": {"type": "array", "maxItems": 5, "items": {
        "enum": ["x", "y"]}, "contains": {"const": "x"}, "maxContains": 2, "minContains": 0}}),
    "unique items": closed({"a": {"type": "array", "uniqueItems": True, "minItems": 2,
                                  "items": {"enum": ["a", "b", "c", 1]}}}),
    "array of objects": closed({"a": {"type": "array", "items": _CAT, "minItems": 1,
                                      "maxItems": 3}}),
    "any of": closed({"x": {"anyOf": [{"type": "integer"}, _SHORT, _CAT]}}),
    "one of by kind": closed({"pet": {"oneOf": [_CAT, _DOG]}}),
    "one of that overlap": closed({"x": {"type": "integer", "oneOf": [
        {"minimum": 10}, {"maximum": 20}, {"const": 15}]}}),
    "one of by property": {"type": "object", "additionalProperties": False,
                           "properties": {name: {"type": "null"} for name in "abc"},
                           "oneOf": [{"required": [name]} for name in "abc"]},
    "all of": closed({"x": {"allOf": [{"type": "integer"}, {"minimum": 3}, {"maximum": 12}]}}),
    "all of objects": {"allOf": [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"properties": {"b": _SHORT}, "required": ["b"]}], "unevaluatedProperties": False},
    "if, then, else": {
        **closed({"country": {"enum": ["US", "NL"]}, "code": {"type": "string"}}),
        "if": {"properties": {"country": {"const": "US"}}},
        "then": {"properties": {"code": {"pattern": r"^\d{5}$"}}},
        "else": {"properties": {"code": {"pattern": r"^\d{4} [A-Z]{2}$"}}},
    },
    "not": closed({"x": {"type": ["string", "integer"], "maxLength": 3, "maximum": 50,
                         "not": {"anyOf": [{"const": ""}, {"minimum": 10}]}}}),
    "not required": {"type": "object", "properties": {"a": {"type": "null"}, "b": _SHORT},
                     "not": {"required": ["a"]}, "additionalProperties": False},
    "nullable": closed({"x": {"type": ["string", "null"], "maxLength": 5}}),
    "boolean subschemas": {"type": "object", "properties": {"a": {"type": "null"}, "b": False},
                           "additionalProperties": False},
    "a tool call": closed({
        "name": {"const": "get_weather"},
        "arguments": closed({"city": _SHORT, "unit": {"enum": ["celsius", "fahrenheit"]},
                             "days": {"type": "integer", "minimum": 1, "maximum": 14}}),
    }),
    "annotations": closed({"a": {"title": "A", "description": "the a", "default": 1,
                                 "examples": [2], "type": "integer", "x-vendor": {"not": 1}}}),
}  # fmt: skip
