"""The files of a checkpoint and the tensors that they say they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from safetensors import SafetensorError, safe_open

from asyncllm.errors import ModelError


class Header(NamedTuple):
    """What a file says of one of its tensors; ``dtype`` as safetensors calls it."""

    file: Path
    name: str
    dtype: str
    shape: list[int]


class _Index(msgspec.Struct):
    """model.safetensors.index.json: the file of every tensor."""

    weight_map: dict[str, str]


def weight_files(folder: Path) -> list[Path]:
    """``model.safetensors``, or the shards that its index lists.

    Raises:
        ModelError: there are none, or not all of them.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        if any(folder.glob("*.bin")):
            raise ModelError(f"{folder} has PyTorch .bin weights only; convert them to safetensors")
        raise ModelError(f"{folder} has neither {single.name} nor {index.name}")
    try:
        names = sorted(
            set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        )
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{index} is not an index of shards: {error}") from None
    for name in names:
        if not (folder / name).exists():
            raise ModelError(f"{folder / name} is missing; {index.name} lists it")
    return [folder / name for name in names]


def read_headers(files: list[Path]) -> list[Header]:
    """Those of all tensors, in the order in which they are in the files; no tensor is read.

    Raises:
        ModelError: a file is damaged.
    """
    headers = []
    for file in files:
        with open_file(file) as reader:
            for name in reader.offset_keys():
                tensor = reader.get_slice(name)
                headers.append(Header(file, name, tensor.get_dtype(), tensor.get_shape()))
    return headers


def open_file(file: Path) -> Any:
    """A safetensors reader.

    Raises:
        ModelError: the file is damaged or cannot be read.
    """
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged or incomplete: {error}") from None
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from None
