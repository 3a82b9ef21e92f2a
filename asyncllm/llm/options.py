"""The configuration of an engine, from the arguments of a call."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest
from asyncllm.system.suggest import did_you_mean
from asyncllm.types.validate import check_kind
from asyncllm.vllm_options.table import options as vllm_options
from asyncllm.vllm_options.translate import translate
from asyncllm.vllm_options.values import own_word

log = logging.getLogger(__name__)


def engine_config(
    model: str | PathLike[str] | None,
    config: EngineConfig | None,
    options: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """The configuration, from the arguments of ``AsyncLLM``.

    Args:
        options: by our names or by vLLM's; for those of vLLM's that change nothing, a line is
            logged.
        defaults: values of options that are not given.

    Raises:
        BadRequest: an argument is of the wrong type, or an option is unknown or has a bad value.
    """
    if isinstance(model, EngineConfig):
        raise BadRequest(
            "model must be a folder or hub id; use config=EngineConfig(...)", param="model"
        )
    if model is not None and not isinstance(model, (str, PathLike)):
        raise BadRequest(f"model must be str or Path, not {type(model).__name__}", param="model")
    check_kind("config", config, EngineConfig)
    if config is not None:
        if model is not None or options:
            raise BadRequest("give either config or model and options, not both", param="config")
        return config
    known = EngineConfig.__struct_fields__
    translated = translate({k: v for k, v in options.items() if k in vllm_options()})
    own = {k: own_word(k, v) for k, v in options.items() if k not in vllm_options()}
    for name in own:
        if name not in known:
            raise BadRequest(f"unknown option {name!r}{did_you_mean(name, known)}", param=name)
    for name in translated.fields.keys() - set(known):
        raise BadRequest(f"{name} is an option of the server, not of a model", param=name)
    for name in own.keys() & translated.fields.keys():
        raise BadRequest(f"{name} is given twice, by vLLM's name as well", param=name)
    for note in translated.notes:
        log.warning(note)
    values = {**(defaults or {}), "model": model, **own, **translated.fields}
    return EngineConfig(
        **{k: fspath(v) if isinstance(v, PathLike) else v for k, v in values.items()}
    )
