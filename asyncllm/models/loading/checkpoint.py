"""The files of a checkpoint, and the headers and names of their tensors."""

from __future__ import annotations

import re
from collections.abc import ItemsView, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.models.config.base import Config, MoeConfig
from asyncllm.models.loading.weight_files import is_torch_file, open_safetensors

_ZIP: Final = b"PK\x03\x04"


class TorchFile:
    """An open file; executes no code in it.

    Tensors are mapped, so each is read when it is copied. Files of PyTorch before 1.6 are not zip
    archives and cannot be mapped: they are read as a whole.
    """

    def __init__(self, file: Path):
        """
        Raises:
            ModelError: the file is damaged, cannot be read, or holds something else.
        """
        tensors = _load(file)
        # In file order, which is the order of mapped tensors in memory.
        ordered = sorted(tensors.items(), key=lambda item: item[1].data_ptr())
        self._tensors: dict[str, Tensor] = dict(ordered)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors = {}

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()

    def get_tensor(self, name: str, /) -> Tensor:
        return self._tensors[name]


def _load(file: Path) -> dict[str, Tensor]:
    try:
        with open(file, "rb") as raw:
            is_zip = raw.read(len(_ZIP)) == _ZIP
        content: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from None
    except Exception as error:  # the unpickler raises many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{file} is damaged, or holds more than tensors: {reason}") from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) and _is_plain(tensor)
        for name, tensor in content.items()
    ):
        raise ModelError(f"{file} does not hold tensors by name")
    return content


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type == "cpu"


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
#: Those that are not quantised.
FLOATS: Final = ("BF16", "F16", "F32", "F64")
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


#: What names of other tensors begin with, after ``model.``.
_OTHERS = (
    *("visual.", "vision_tower.", "vision_model.", "multi_modal_projector."),
    *("audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."),
)


def text_part(name: str) -> str | None:
    """The name of a tensor in a checkpoint of the text part alone; None if it belongs to another.

    There is ``model.language_model.X``, ``language_model.model.X`` and plain ``model.X``.
    """
    if name.removeprefix("model.").startswith(_OTHERS):
        return None
    return name.replace("language_model.", "", 1)


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


_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.)")


def name_on_disk(name: str, known: Mapping[str, str]) -> str:
    """What the checkpoint would call a missing tensor: as in another layer, or as its neighbours.

    Args:
        known: the names on disk of other tensors, by the model's.
    """
    kind, numbers = _NUMBER.sub("#", name), iter(_NUMBER.findall(name))
    for own, stored in known.items():
        if _NUMBER.sub("#", own) == kind:
            return _NUMBER.sub(lambda _: next(numbers, ""), stored)
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        around = ".".join(parts[:count]) + "."
        for own, stored in known.items():
            rest = own.removeprefix(around)
            if rest != own and stored.endswith(rest):
                return stored.removesuffix(rest) + name.removeprefix(around)
    return name
