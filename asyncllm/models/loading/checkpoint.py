"""The files of a checkpoint and the headers of their tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import torch
from torch import Tensor

from asyncllm.models.loading.torch_file import TorchFile
from asyncllm.models.loading.weight_files import is_torch_file, open_safetensors

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
        with open_safetensors(file) as reader:
            for name in reader.offset_keys():
                tensor = reader.get_slice(name)
                headers.append(Header(file, name, tensor.get_dtype(), tensor.get_shape()))
    return headers


def open_file(file: Path) -> AbstractContextManager[Reader]:
    """Open a file for reading.

    Raises:
        ModelError: the file is damaged or cannot be read.
    """
    return TorchFile(file) if is_torch_file(file) else open_safetensors(file)


def read_tensor(header: Header) -> Tensor:
    """The tensor of a header; its file is opened for it."""
    with open_file(header.file) as reader:
        return reader.get_tensor(header.name)


def _name_of(dtype: torch.dtype) -> str:
    return _DTYPE_NAMES.get(dtype, str(dtype).removeprefix("torch."))
