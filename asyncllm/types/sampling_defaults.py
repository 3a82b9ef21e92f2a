"""Where sampling values come from that requests leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncllm.errors import BadRequest
from asyncllm.types import Prompt, is_conversation
from asyncllm.types.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling values of generation_config.json; None where it has none.

    ``do_sample`` false means greedy, whatever the other values are.
    """

    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    def params(self, overrides: Mapping[str, Any]) -> SamplingParams:
        """The defaults of requests; ``overrides`` have other values, or None for OpenAI's own.

        Raises:
            BadRequest: a value is out of range.
        """
        values = msgspec.structs.asdict(self) | dict(overrides)
        if "temperature" in overrides:
            values["do_sample"] = overrides.get("do_sample")
        if values.pop("do_sample") is False:
            values["temperature"] = 0.0
        return SamplingParams(**{name: v for name, v in values.items() if v is not None})


def check_overrides(param: str, given: Mapping[str, Any]) -> None:
    """A rule: values that ``SamplingDefaults`` may have."""
    known = SamplingDefaults.__struct_fields__
    for name in given.keys() - set(known):
        names = ", ".join(map(repr, known))
        raise BadRequest(f"{param} has no {name!r}, only {names}", param=param)
    try:
        msgspec.convert(given, SamplingDefaults)
        SamplingDefaults().params(given)
    except msgspec.ValidationError as error:
        what, _, name = str(error).partition(" - at `$.")
        problem = f"{name.rstrip('`')!r}: {what}"
    except BadRequest as error:
        problem = error.message.replace(str(error.param), repr(error.param), 1)
    else:
        return
    raise BadRequest(f"{param}: {problem}", param=param)


#: Limit of an answer to raw text. A chat ends by itself; raw text often goes on until the context
#: is full. OpenAI's 16 would cut nearly every answer.
RAW_MAX_TOKENS: Final = 256


def bounded(
    params: SamplingParams, prompt: Prompt, num_tokens: int, max_model_len: int
) -> SamplingParams:
    """Parameters with the default ``max_tokens``, if they have none and the prompt is no chat."""
    if params.max_tokens is not None or is_conversation(prompt):
        return params
    most = default_max_tokens(params, max(1, max_model_len - num_tokens))
    return msgspec.structs.replace(params, max_tokens=most)


def default_max_tokens(params: SamplingParams, room: int) -> int:
    """The ``max_tokens`` of an answer to raw text, with ``room`` tokens left in the context."""
    return min(room, max(RAW_MAX_TOKENS, params.min_tokens))
