"""From options by vLLM's names to our fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.vllm_options.table import options
from asyncllm.vllm_options.values import Missing, merged, own_value


class Translation(msgspec.Struct):
    """Our fields for options of vLLM's, and a line for each option that changes nothing here."""

    fields: dict[str, Any] = {}
    notes: list[str] = []


def translate(given: Mapping[str, Any], spell: Callable[[str], str] = str) -> Translation:
    """Our fields for options by vLLM's names.

    Args:
        given: values by name, as Python has them or as text.
        spell: how messages write a name.

    Raises:
        BadRequest: a value is wrong, or options are missing here; the message names all of these.
    """
    found = Translation()
    missing: dict[str, list[str]] = {}
    for name, value in given.items():
        option = options()[name]
        if value is None:
            continue  # as if it were not given
        try:
            fields = option.fields_of(value)
            for field, own in fields.items():
                found.fields[field] = merged(found.fields.get(field), own_value(field, own))
        except Missing as error:
            asked = f"{spell(name)} {error.value}".rstrip()
            missing.setdefault(str(error), []).append(asked)
        except (BadRequest, ValueError, TypeError) as error:
            raise BadRequest(f"{spell(name)}: {error}", param=name) from None
        else:
            if not fields and option.status == "missing":
                found.notes.append(f"{spell(name)} {value} is not needed: it is so anyway")
            elif not fields:
                found.notes.append(f"{spell(name)} is not needed: {option.says}")
    if missing:
        problems = (f"{_are(asked)} not supported: {why}" for why, asked in missing.items())
        raise BadRequest("; ".join(problems))
    return found


def _are(names: list[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last} are" if others else f"{last} is"
