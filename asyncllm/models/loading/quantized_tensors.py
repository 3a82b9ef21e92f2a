"""The quantised matrices among the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.kernels.types import FP8_BLOCK
from asyncllm.models.loading.checkpoint import FLOATS, Header
from asyncllm.models.quant.config import Quantization
from asyncllm.models.quant.formats import (
    UNUSED,
    check_experts,
    fields,
    fp8_matrix,
    group_order,
    made_fp8,
    main_field,
    mxfp4_shape,
    read_matrix,
    stored_shape,
)
from asyncllm.models.quant.weight import Fp8Experts, Matrix, Mxfp4Blocks

#: Reads the tensor of a header.
Read = Callable[[Header], Tensor]

_CODES = ("F8_E4M3", "I32")
_SCALES = {"F16": torch.float16, "BF16": torch.float32, "F32": torch.float32}


class Fp8Layout(NamedTuple):
    """The common layout of the 8-bit matrices of a projection."""

    blocked: bool


class Int4Layout(NamedTuple):
    """The common layout of the 4-bit matrices of a projection.

    Attributes:
        scale: dtype of the scales.
        order: ``Int4Matrix.order`` as bytes.
    """

    group: int
    scale: torch.dtype
    order: bytes | None


class Mxfp4Layout(NamedTuple):
    """The layout of the mxfp4 matrices of all experts."""


Layout = Fp8Layout | Int4Layout | Mxfp4Layout


class StoredMatrix(NamedTuple):
    """A matrix of a checkpoint that is quantised, or will be while it is loaded; or the matrices of
    all experts in one tensor.

    Attributes:
        module: name of the module whose weight it is, in the model.
        tensors: by the last part of their names.
        shape: [N, K], or [experts, N, K].
    """

    module: str
    quantization: Quantization
    tensors: dict[str, Header]
    shape: list[int]

    @property
    def main(self) -> Header:
        """The largest tensor."""
        return self.tensors[main_field(self.quantization)]

    def read(self, read: Read, device: torch.device) -> Matrix | Mxfp4Blocks | Fp8Experts:
        """Read it, and convert it on a device."""
        stored = {field: read(header).to(device) for field, header in self.tensors.items()}
        if self.quantization.method == "mxfp4" and len(self.shape) == 3:
            return Mxfp4Blocks(stored["blocks"], stored["scales"])
        if len(self.shape) == 3:
            if self.quantization.while_loading:
                return Fp8Experts(map(made_fp8, stored["weight"]))
            parts = ((part[expert] for part in stored.values()) for expert in range(self.shape[0]))
            return Fp8Experts(fp8_matrix(dict(zip(stored, each, strict=True))) for each in parts)
        if self.quantization.while_loading:
            return made_fp8(stored["weight"])
        return read_matrix(self.quantization, self.module, stored)

    def layout(self, read: Read) -> Layout:
        """Its layout, if it is kept quantised."""
        if self.quantization.method == "mxfp4":
            return Mxfp4Layout()
        if self.quantization.method == "fp8":
            scale = self._fp8_scales()
            return Fp8Layout(
                len(scale) == 2 and scale[1] * scale[0] > 1 and scale != [self.shape[-2], 1]
            )
        groups = self.tensors["scales"].shape[0]
        order = None
        if self.quantization.reordered:
            order = group_order(self.module, read(self.tensors["g_idx"]), groups)
        return Int4Layout(
            self.shape[1] // groups,
            _SCALES[self.tensors["scales"].dtype],
            None if order is None else order.numpy().tobytes(),
        )

    def _fp8_scales(self) -> list[int]:
        """The shape of the scales of a matrix."""
        if self.quantization.while_loading:
            return [-(-size // FP8_BLOCK) for size in self.shape[-2:]]
        scale = next(h.shape for field, h in self.tensors.items() if field != "weight")
        return scale if len(self.shape) == 2 else scale[1:]


def matrices_to_quantise(
    quantization: Quantization, headers: dict[str, Header], names: Iterable[str]
) -> dict[str, StoredMatrix]:
    """Take the tensors that are quantised while they are loaded out of the headers.

    Args:
        headers: by the model's names; changed in place.
        names: of all tensors of projections and experts.
    """
    found: dict[str, StoredMatrix] = {}
    for name in names:
        header, module = headers.get(name), name.removesuffix(".weight")
        if header is None or header.dtype not in FLOATS or quantization.ignores(module):
            continue
        if len(header.shape) in (2, 3):  # others are refused, as they are in 16 bits
            del headers[name]
            found[name] = StoredMatrix(module, quantization, {"weight": header}, header.shape)
    return found


def find_matrices(
    quantization: Quantization, headers: dict[str, Header], known: Collection[str], read: Read
) -> dict[str, StoredMatrix]:
    """Take the tensors of quantised matrices out of the headers; returns the matrices by name.

    Args:
        headers: by the model's names; changed in place.
        known: names of all tensors that the model has a place for.

    Raises:
        ModelError: the tensors of a matrix do not fit each other.
    """
    if quantization.method == "mxfp4":
        return _find_mxfp4(quantization, headers)
    main = main_field(quantization)
    found: dict[str, StoredMatrix] = {}
    for name, header in list(headers.items()):
        module, _, field = name.rpartition(".")
        if field != main or header.dtype not in _CODES:
            continue
        tensors = {
            field: headers.pop(f"{module}.{field}")
            for field in fields(quantization)
            if f"{module}.{field}" in headers
        }
        for other in tensors.values():
            if other.dtype not in (*_CODES, *_SCALES):
                raise ModelError(f"{other.file}: tensor {other.name!r} is {other.dtype}")
        shapes = {field: tensor.shape for field, tensor in tensors.items()}
        shape = stored_shape(quantization, module, shapes)
        found[f"{module}.weight"] = StoredMatrix(module, quantization, tensors, shape)
    if quantization.method == "fp8":
        found |= _find_experts(quantization, headers)
    for name, header in list(headers.items()):
        module, _, field = name.rpartition(".")
        # GPTQ tools write a bias of zeros for modules without one.
        empty = field == "bias" and f"{module}.weight" in found and name not in known
        if field in UNUSED or (empty and not read(header).any()):
            del headers[name]
    return found


def _find_experts(
    quantization: Quantization, headers: dict[str, Header]
) -> dict[str, StoredMatrix]:
    """Take the fp8 tensors of all experts out of the headers."""
    found: dict[str, StoredMatrix] = {}
    for name, header in list(headers.items()):
        if header.dtype != "F8_E4M3" or len(header.shape) != 3:
            continue
        scale = headers.pop(f"{name}_scale_inv", None)
        if scale is None:
            raise ModelError(f"{header.file}: tensor {header.name!r} is 8-bit, but has no scales")
        check_experts(name, header.shape, scale.shape)
        for field in UNUSED:
            headers.pop(f"{name}_{field}", None)
        tensors = {"weight": headers.pop(name), "weight_scale_inv": scale}
        found[name] = StoredMatrix(name, quantization, tensors, header.shape)
    return found


def _find_mxfp4(quantization: Quantization, headers: dict[str, Header]) -> dict[str, StoredMatrix]:
    """Take the mxfp4 tensors of all experts out of the headers."""
    found: dict[str, StoredMatrix] = {}
    for name, header in list(headers.items()):
        if header.dtype != "U8" or not name.endswith("_blocks"):
            continue
        module = name.removesuffix("_blocks")
        scales = headers.pop(f"{module}_scales", None)
        if scales is None or scales.dtype != "U8":
            raise ModelError(
                f"{header.file}: tensor {header.name!r} is 4-bit, but has no scales of type U8"
            )
        if module in headers:
            raise ModelError(f"{header.file}: {module!r} is in the checkpoint in 4 bits, too")
        shape = mxfp4_shape(module, header.shape, scales.shape)
        tensors = {"blocks": headers.pop(name), "scales": scales}
        found[module] = StoredMatrix(module, quantization, tensors, shape)
    return found
