"""The files of a checkpoint and the headers of their tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from typing import Final, NamedTuple, Protocol

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.models.loading.torch_file import TorchFile
from asyncllm.models.wrong_files import about_safetensors, about_weights

#: In order of preference; each may also be shards with an index.
_WEIGHTS: Final = ("model.safetensors", "pytorch_model.bin")

#: By their names in safetensors.
DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_DTYPE_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


class Header(NamedTuple):
    """The header of a tensor; ``dtype`` is safetensors' name."""

    file: Path
    name: str
    dtype: str
    shape: list[int]


class Reader(Protocol):
    """An open file of tensors."""

    def get_tensor(self, name: str, /) -> Tensor: ...


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


def read_headers(files: list[Path]) -> list[Header]:
    """The headers of all tensors in file order; reads no tensor.

    Raises:
        ModelError: a file is damaged.
    """
    headers = []
    for file in files:
        if is_torch_file(file):
            with TorchFile(file) as tensors:
                headers += [
                    Header(file, name, _name_of(tensor.dtype), list(tensor.shape))
                    for name, tensor in tensors.items()
                ]
            continue
        with _open_safetensors(file) as reader:
            for name in reader.offset_keys():
                tensor = reader.get_slice(name)
                headers.append(Header(file, name, tensor.get_dtype(), tensor.get_shape()))
    return headers


def is_torch_file(file: Path) -> bool:
    """Whether the file was written by ``torch.save``; else it is safetensors."""
    return file.suffix == ".bin"


def open_file(file: Path) -> AbstractContextManager[Reader]:
    """Open a file for reading.

    Raises:
        ModelError: the file is damaged or cannot be read.
    """
    return TorchFile(file) if is_torch_file(file) else _open_safetensors(file)


def read_tensor(header: Header) -> Tensor:
    """The tensor of a header; its file is opened for it."""
    with open_file(header.file) as reader:
        return reader.get_tensor(header.name)


def _open_safetensors(file: Path) -> safe_open:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        why = about_safetensors(file) or error
        raise ModelError(f"{file} is damaged or incomplete: {why}") from None
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from None


def _name_of(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
