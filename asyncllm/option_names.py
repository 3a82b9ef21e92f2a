"""What fields are called on the command line: max_num_seqs is --max-num-seqs."""

from __future__ import annotations

import re
from typing import Final

from asyncllm.config import EngineConfig
from asyncllm.server_config import ServerConfig
from asyncllm.types import SamplingParams

_FIELDS: Final = {
    name
    for struct in (EngineConfig, ServerConfig, SamplingParams)
    for name in struct.__struct_fields__
}
#: What is quoted is a name in a user's file.
_SNAKE_CASE: Final = re.compile(r"(?<!')\b[a-z]+(?:_[a-z]+)+\b(?!')")


def option_of(field: str) -> str:
    """The option for a field."""
    return "--" + field.replace("_", "-")


def name_options(message: str, param: str | None = None) -> str:
    """An error message about fields as one about options.

    Args:
        param: the field at fault. One without an underscore may be an ordinary word, so it is only
            replaced where the message begins with it.
    """
    if param in _FIELDS and "_" not in param and re.match(rf"{param}\b", message):
        message = f"--{message}"
    return _SNAKE_CASE.sub(lambda m: option_of(m[0]) if m[0] in _FIELDS else m[0], message)


__all__ = ["name_options", "option_of"]
