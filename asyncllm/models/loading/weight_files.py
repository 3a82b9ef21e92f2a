"""The files of a checkpoint, found and checked without torch."""

from __future__ import annotations

from pathlib import Path, PurePath
from typing import Final, Literal

import msgspec
from safetensors import SafetensorError, safe_open

from asyncllm.errors import ModelError
from asyncllm.models.wrong_files import about_safetensors, about_weights

#: In order of preference; each may also be shards with an index.
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")


class _Index(msgspec.Struct):
    """model.safetensors.index.json: the file of every tensor."""

    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """``model.safetensors`` or its shards, else ``pytorch_model.bin`` or its shards.

    Raises:
        ModelError: no weights, or missing shards.
    """
    for name in _WEIGHTS:
        single, index = folder / name, folder / f"{name}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            return _shards(index)
    names = " nor ".join(f"{name}, nor {name}.index.json" for name in _WEIGHTS)
    raise ModelError(f"{folder} has no weights: neither {names}{about_weights(folder)}")


def _shards(index: Path) -> list[Path]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise ModelError(f"{index} is not an index of shards: {error}") from None
    names = sorted(set(weight_map.values()))
    for name in names:
        # Files may be links, as in the hub's cache, but names must not be paths.
        if name in ("", "..") or name != PurePath(name).name or not name.isprintable():
            raise ModelError(f"{index} lists {name!r}, which is not the name of a file beside it")
        if not (index.parent / name).is_file():
            raise ModelError(f"{index.parent / name} is missing; {index.name} lists it")
    if not names:
        raise ModelError(f"{index} is not an index of shards: it lists none")
    return [index.parent / name for name in names]


def check_weights(folder: Path) -> None:
    """Check that the weights are there and whole, as far as their headers tell.

    Raises:
        ModelError: as ``weight_files``; or a file of safetensors is damaged.
    """
    for file in weight_files(folder):
        if not is_torch_file(file):
            with open_safetensors(file, "np"):
                pass


def is_torch_file(file: Path) -> bool:
    """Whether the file was written by ``torch.save``; else it is safetensors."""
    return file.suffix == ".bin"


def open_safetensors(file: Path, framework: Literal["pt", "np"] = "pt") -> safe_open:
    """Open a file of tensors, of torch or of numpy.

    Raises:
        ModelError: it is damaged or cannot be read.
    """
    try:
        return safe_open(file, framework=framework)
    except SafetensorError as error:
        why = about_safetensors(file) or error
        raise ModelError(f"{file} is damaged or incomplete: {why}") from None
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from None
