"""Read ``pytorch_model.bin``, the format of checkpoints before safetensors."""

from __future__ import annotations

from collections.abc import ItemsView
from pathlib import Path
from typing import Any, Final, Self

import torch
from torch import Tensor

from asyncllm.errors import ModelError

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
