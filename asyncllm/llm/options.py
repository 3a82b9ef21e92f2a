"""The configuration of an engine, from the arguments of a call."""

from __future__ import annotations

from os import PathLike, fspath
from typing import Any

from asyncllm.config import EngineConfig
from asyncllm.errors import BadRequest
from asyncllm.suggest import did_you_mean
from asyncllm.validate import check_kind


def engine_config(
    model: str | PathLike[str] | None, config: EngineConfig | None, options: dict[str, Any]
) -> EngineConfig:
    """The configuration, from the arguments of ``AsyncLLM``.

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
    for name in options:
        if name not in known:
            raise BadRequest(f"unknown option {name!r}{did_you_mean(name, known)}", param=name)
    paths = {"model": model, **options}
    return EngineConfig(
        **{k: fspath(v) if isinstance(v, PathLike) else v for k, v in paths.items()}
    )
