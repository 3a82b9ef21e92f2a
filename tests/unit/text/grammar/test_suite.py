"""The official JSON-Schema-Test-Suite, draft 2020-12: what is admitted is valid, always."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jsonschema
import pytest
import referencing
import referencing.exceptions

from asyncllm.errors import BadRequest
from asyncllm.text.grammar import JsonSchema
from asyncllm.text.grammar.matcher import Grammar
from tests.support.text.grammar_sampling import accepts, check_valid, compiled, sample, suite_groups

#: Valid against any schema that admits objects at all but for those that want certain properties.
_PROBES: tuple[Any, ...] = ({}, {"foo": 1}, {"a": "b", "foo": "bar"})
_SEEDS = range(12)


class Group(NamedTuple):
    name: str
    schema: Any
    tests: list[dict[str, Any]]


GROUPS = [
    Group(f"{name}: {group['description']}", group["schema"], group["tests"])
    for name, group in suite_groups()
]


def grammar_of(schema: Any) -> Grammar | str:
    """The grammar, or why there is none."""
    try:
        return compiled(JsonSchema(schema))
    except BadRequest as error:
        return error.message


def admits_objects(group: Group) -> bool:
    if any(test["valid"] and isinstance(test["data"], dict) for test in group.tests):
        return True
    # References to other documents are not followed, and nothing is fetched.
    validator = jsonschema.Draft202012Validator(group.schema, registry=referencing.Registry())
    try:
        return any(map(validator.is_valid, _PROBES))
    except referencing.exceptions.Unresolvable:
        return False


def finished_outputs(grammar: Grammar, wanted: int = 3) -> list[str]:
    found = []
    for seed in _SEEDS:
        output = sample(grammar, seed, most=300)
        if output.finished:
            found.append(output.text)
        if len(found) == wanted:
            break
    return found


@pytest.fixture(scope="module")
def answers() -> dict[str, list[str]]:
    """Per supported group, some outputs that came to their end."""
    grammars = {group.name: grammar_of(group.schema) for group in GROUPS}
    return {
        name: finished_outputs(grammar)
        for name, grammar in grammars.items()
        if isinstance(grammar, Grammar)
    }


def test_the_suite_is_there() -> None:
    assert len(GROUPS) == 438


def test_every_output_is_valid(answers: dict[str, list[str]]) -> None:
    wrong = {}
    for group in GROUPS:
        for text in answers.get(group.name, ()):
            try:
                check_valid(group.schema, text)
            except jsonschema.ValidationError as error:
                wrong[group.name] = (text, error.message)
    assert not wrong
    assert sum(map(len, answers.values())) > 900


def test_most_schemas_of_objects_are_answered(answers: dict[str, list[str]]) -> None:
    groups = [group for group in GROUPS if admits_objects(group)]
    required = [group for group in groups if not group.name.startswith("optional")]
    assert len(groups) > 320
    for some in (groups, required):
        answered = sum(bool(answers.get(group.name)) for group in some)
        print(f"{answered} of {len(some)} schemas answered")
        assert answered / len(some) >= 0.92, f"{answered} of {len(some)}"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_what_is_refused_is_named(group: Group) -> None:
    found = grammar_of(group.schema)
    if isinstance(found, str):
        assert found.startswith("schema #")
        assert "'" in found or "is valid against it" in found  # the keyword, in quotes


def test_what_admits_nothing_is_refused() -> None:
    for group in GROUPS:
        if "is valid against it" in str(grammar_of(group.schema)):
            assert not any(test["valid"] for test in group.tests), group.name


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_no_invalid_instance_is_admitted(group: Group) -> None:
    grammar = grammar_of(group.schema)
    if isinstance(grammar, str):
        return
    for test in group.tests:
        text = json.dumps(test["data"], ensure_ascii=False)
        if not test["valid"]:
            assert not accepts(grammar, text), test["description"]


def test_most_valid_instances_are_admitted() -> None:
    """Those that are not differ in form: order of properties, digits, rare ones of a format."""
    admitted = refused = 0
    for group in GROUPS:
        grammar = grammar_of(group.schema)
        if isinstance(grammar, Grammar) and not group.name.startswith("format"):
            for test in group.tests:
                if test["valid"]:
                    text = json.dumps(test["data"], ensure_ascii=False)
                    admitted += accepts(grammar, text)
                    refused += not accepts(grammar, text)
    assert admitted / (admitted + refused) > 0.92
