"""How a sentence-transformers folder makes vectors: modules.json and 1_Pooling."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Any

import msgspec

from asyncllm.errors import ModelError
from asyncllm.text.model_files import read_json
from asyncllm.types.embedding import EmbeddingParams, Pooling

#: Poolings by their names there, before and since version 5.
_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
_PREFIX = "pooling_mode_"


class _Module(msgspec.Struct):
    type: str
    path: str = ""


def read_embedding_params(folder: Path) -> EmbeddingParams:
    """The pooling and normalisation of a folder; those of ``EmbeddingParams`` if it has no file.

    Raises:
        ModelError: a file is broken, or vectors are made in another way.
    """
    file = folder / "modules.json"
    try:
        modules = msgspec.json.decode(file.read_bytes(), type=list[_Module])
    except FileNotFoundError:
        return EmbeddingParams()
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{file} is not a list of modules: {error}") from None
    pooling: Pooling = "last"
    normalize = False
    for module in modules:
        match module.type.rpartition(".")[2]:
            case "Transformer":
                continue
            case "Pooling":
                pooling = _read_pooling(file, module)
            case "Normalize":
                normalize = True
            case other:
                raise ModelError(f"{file}: a module of type {other!r} is not supported")
    return EmbeddingParams(pooling=pooling, normalize=normalize)


def _read_pooling(file: Path, module: _Module) -> Pooling:
    if not module.path.isprintable() or PurePath(module.path).name != module.path.rstrip("/"):
        raise ModelError(f"{file}: {module.path!r} is not the name of a folder beside it")
    path = file.parent / module.path / "config.json"
    modes = _modes(read_json(path))
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        supported = ", ".join(_POOLINGS)
        raise ModelError(f"{path}: the pooling is {modes}; only one of {supported} is supported")
    return _POOLINGS[modes[0]]


def _modes(config: dict[str, Any]) -> list[str]:
    if isinstance(mode := config.get("pooling_mode"), str):
        return [mode]
    on = [name for name, value in config.items() if name.startswith(_PREFIX) and value is True]
    return [name.removeprefix(_PREFIX) for name in on]
