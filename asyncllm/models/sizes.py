"""Check the numbers of layers and experts in config.json before allocating any."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from asyncllm.errors import ModelError
from asyncllm.models.config.base import Config, MoeConfig

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
_EXPERT: Final = re.compile(r"\.experts\.(\d{1,9})\.")


def check_sizes(config: Config, names: Iterable[str]) -> None:
    """Compare config.json with the names of tensors; shapes are compared later, with the model.

    Raises:
        ModelError: the checkpoint has fewer.
    """
    layers = experts = 0
    for name in names:
        if (match := _LAYER.search(name)) is not None:
            layers = max(layers, int(match[1]) + 1)
        if (match := _EXPERT.search(name)) is not None:
            experts = max(experts, int(match[1]) + 1)
    _compare("num_hidden_layers", config.num_hidden_layers, layers, "layers")
    if isinstance(config, MoeConfig) and experts > 0:
        _compare(config.experts_field, config.experts, experts, "experts")


def _compare(field: str, claimed: int, stored: int, what: str) -> None:
    if claimed > stored > 0:  # with 0 stored, the names are unusual: listed as unexpected later
        raise ModelError(
            f"config.json has {field} {claimed}, but the weights are of {stored} {what}"
        )
