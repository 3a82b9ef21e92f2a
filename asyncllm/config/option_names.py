"""Names of fields on the command line: max_num_seqs is --max-num-seqs."""

from __future__ import annotations

import re
from typing import Final

from asyncllm.config import EngineConfig
from asyncllm.config.ray_config import RayConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.types import SamplingParams

_FIELDS: Final = {
    name
    for struct in (EngineConfig, ServerConfig, RayConfig, SamplingParams)
    for name in struct.__struct_fields__
}
#: Quoted names are those of a user's file.
_SNAKE_CASE: Final = re.compile(r"(?<!')\b[a-z]+(?:_[a-z]+)+\b(?!')")


def option_of(field: str) -> str:
    """The option for a field."""
    return "--" + field.replace("_", "-")


def name_options(message: str, param: str | None = None) -> str:
    """An error message about fields, with the names of their options.

    Args:
        param: the field at fault. A name without an underscore may be an ordinary word, so it is
            only replaced at the start of the message.
    """
    if param in _FIELDS and "_" not in param and re.match(rf"{param}\b", message):
        message = f"--{message}"
    return _SNAKE_CASE.sub(lambda m: option_of(m[0]) if m[0] in _FIELDS else m[0], message)
