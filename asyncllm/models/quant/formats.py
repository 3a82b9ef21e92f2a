"""From the tensors of a quantised matrix in a checkpoint to the matrix that kernels take.

| method | tensors of a matrix [N, K], in groups of G columns |
|--|--|
| fp8 | weight e4m3 [N, K]; weight_scale or weight_scale_inv: one, [N], [N, 1], or one a block |
| awq | qweight int32 [K, N / 8], qzeros int32 [K / G, N / 8], scales [K / G, N] |
| gptq | qweight int32 [K / 8, N], qzeros and scales as awq, g_idx int32 [K]: groups of columns |
| mxfp4 | blocks uint8 [E, N, K / 32, 16] or [E, N, K / 2], and scales uint8 [E, N, K / 32] |

An int32 has eight codes: in gptq the first is in the lowest bits; in awq their order from the
lowest bits up is 0, 2, 4, 6, 1, 3, 5, 7. A uint8 of mxfp4 has two codes, the first in the lower
bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.kernels.quantized import (
    dequantize_fp8,
    dequantize_int4,
    dequantize_mxfp4,
    pack_int4,
    quantize_fp8,
)
from asyncllm.kernels.types import FP8_BLOCK, MXFP4_BLOCK, Fp8Matrix, Int4Matrix
from asyncllm.models.quant.config import Quantization
from asyncllm.models.quant.place import Each, Place, Reordered, Slice, Sliced
from asyncllm.models.quant.weight import Fp8Experts, Matrix, Mxfp4Blocks, Stack

Shape = Sequence[int]

#: Unused tensors of quantised modules: scales of activations and of the KV cache.
UNUSED = ("input_scale", "activation_scale")

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_SCALES = ("weight_scale", "weight_scale_inv")
_ROWS_AT_ONCE = 1024  # a multiple of FP8_BLOCK


def main_field(quantization: Quantization) -> str:
    """The name of the tensor of codes, which every quantised matrix has."""
    return {"fp8": "weight", "mxfp4": "blocks"}.get(quantization.method, "qweight")


def fields(quantization: Quantization) -> tuple[str, ...]:
    """Names of the tensors of a matrix, without the module's."""
    if quantization.method == "fp8":
        return ("weight", *_SCALES)
    packed = ("qweight", "qzeros", "scales")
    return (*packed, "g_idx") if quantization.method == "gptq" else packed


def stored_shape(quantization: Quantization, module: str, shapes: Mapping[str, Shape]) -> list[int]:
    """The shape [N, K] of a matrix from the shapes of its tensors.

    Raises:
        ModelError: a tensor is missing, or has a shape that does not fit the others.
    """
    if quantization.method == "fp8":
        return _fp8_shape(module, shapes)
    _require(module, shapes, "qzeros", "scales")
    rows, columns = shapes["qweight"]
    size, depth = (columns * 8, rows) if quantization.method == "awq" else (columns, rows * 8)
    groups = shapes["scales"][0]
    expected = {"scales": [groups, size], "qzeros": [groups, size // 8]}
    if quantization.reordered:
        _require(module, shapes, "g_idx")
        expected["g_idx"] = [depth]
    for field, shape in expected.items():
        if list(shapes[field]) != shape:
            raise _misfit(module, field, shapes, shape)
    if depth % groups or depth // groups % 8:
        raise ModelError(
            f"{module}: {depth} columns in {groups} groups; only groups of equal size, a multiple "
            "of 8, can be loaded"
        )
    return [size, depth]


def _fp8_shape(module: str, shapes: Mapping[str, Shape]) -> list[int]:
    field = next((field for field in _SCALES if field in shapes), None)
    if field is None:
        raise ModelError(f"{module}: 'weight' is 8-bit, but there is no {' or '.join(_SCALES)}")
    size, depth = shapes["weight"]
    blocks = [-(-size // FP8_BLOCK), -(-depth // FP8_BLOCK)]
    if list(shapes[field]) not in ([], [1], [size], [size, 1], blocks):
        raise _misfit(module, field, shapes, f"[], [{size}, 1] or {blocks}")
    return [size, depth]


def check_experts(name: str, shape: Shape, scale: Shape) -> None:
    """Check the shape of the scales of fp8 matrices [experts, N, K]: one for each, or for blocks.

    Raises:
        ModelError: it is another one.
    """
    experts, size, depth = shape
    blocks = [experts, -(-size // FP8_BLOCK), -(-depth // FP8_BLOCK)]
    if list(scale) not in ([experts], [experts, 1, 1], blocks):
        raise ModelError(f"{name}_scale_inv has shape {list(scale)}, expected {blocks}")


def mxfp4_shape(name: str, blocks: Shape, scales: Shape) -> list[int]:
    """The shape [experts, N, K] of mxfp4 matrices from those of their tensors.

    Raises:
        ModelError: the tensors do not fit each other.
    """
    half = MXFP4_BLOCK // 2
    fits = len(scales) == 3 and list(blocks) in ([*scales, half], [*scales[:2], scales[2] * half])
    if not fits:
        raise ModelError(
            f"{name}_blocks has shape {list(blocks)} and {name}_scales {list(scales)}, expected "
            f"[experts, rows, columns / {MXFP4_BLOCK}, {half}] and the first three"
        )
    return [*scales[:2], scales[2] * MXFP4_BLOCK]


def _require(module: str, shapes: Mapping[str, Shape], *needed: str) -> None:
    for field in needed:
        if field not in shapes:
            raise ModelError(f"{module}: tensor {field!r} is missing")


def _misfit(module: str, field: str, shapes: Mapping[str, Shape], expected: object) -> ModelError:
    return ModelError(f"{module}.{field} has shape {list(shapes[field])}, expected {expected}")


def read_matrix(quantization: Quantization, module: str, stored: Mapping[str, Tensor]) -> Matrix:
    """Convert the tensors of a matrix on their device; ``stored_shape`` has accepted their shapes.

    Raises:
        ModelError: groups of columns have different sizes.
    """
    match quantization.method:
        case "fp8":
            return fp8_matrix(stored)
        case "awq":
            qweight, qzeros = stored["qweight"], stored["qzeros"]
            codes = _unpack(qweight, _AWQ_ORDER, 1).t()
            return _int4_matrix(codes, _unpack(qzeros, _AWQ_ORDER, 1), stored["scales"], None)
        case "mxfp4":
            raise ModelError(f"{module}: only experts can be in mxfp4")
        case "gptq":
            codes = _unpack(stored["qweight"], range(8), 0).t()
            zeros = _unpack(stored["qzeros"], range(8), 1) + quantization.zero_offset
            order = None
            if quantization.reordered:
                order = group_order(module, stored["g_idx"], len(zeros))
            return _int4_matrix(codes, zeros, stored["scales"], order)


def made_fp8(weight: Tensor) -> Fp8Matrix:
    """An fp8 matrix with scales of blocks, of a weight that is not quantised."""
    data, scale = quantize_fp8(weight)
    return fp8_matrix({"weight": data, "weight_scale_inv": scale})


def fp8_matrix(stored: Mapping[str, Tensor]) -> Fp8Matrix:
    """An fp8 matrix from its tensors on their device."""
    data = stored["weight"]
    scale = next(stored[field] for field in _SCALES if field in stored).float()
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(len(data), 1)
    return Fp8Matrix(data, scale.unsqueeze(1) if scale.dim() == 1 else scale)


def _int4_matrix(codes: Tensor, zeros: Tensor, scale: Tensor, order: Tensor | None) -> Int4Matrix:
    """From codes [N, K], and zeros and scale [K / G, N]."""
    if order is not None:
        codes = codes[:, order]
    packed = pack_int4(codes, codes.shape[1] // len(zeros))
    scale = scale if scale.dtype == torch.float16 else scale.float()
    return Int4Matrix(packed, scale, zeros, order)


def _unpack(packed: Tensor, order: Sequence[int], dim: int) -> Tensor:
    """Unpack eight uint8 codes along ``dim`` from each int32.

    Args:
        order: the number of the code in each four bits, from the lowest up.
    """
    shape = list(packed.shape)
    shape.insert(dim + 1, 8)
    codes = torch.empty(shape, dtype=torch.uint8, device=packed.device)
    for place, number in enumerate(order):
        codes.select(dim + 1, number).copy_((packed >> (4 * place)) & 15)
    return codes.flatten(dim, dim + 1)


def group_order(module: str, groups: Tensor, count: int) -> Tensor | None:
    """An order of columns, int64 [K], that makes groups consecutive; None if they are already.

    ``groups`` is ``g_idx``: int [K], below ``count``.

    Raises:
        ModelError: the groups are not of the same size.
    """
    regular = torch.arange(count, device=groups.device).repeat_interleave(len(groups) // count)
    if torch.equal(groups.long(), regular):
        return None
    order = groups.argsort(stable=True)
    if not torch.equal(groups[order].long(), regular):
        raise ModelError(f"{module}.g_idx: the groups are not of the same size")
    return order


def fill(place: Place, value: Tensor | Matrix | Mxfp4Blocks | Fp8Experts) -> None:
    """Write a tensor or a quantised matrix of the checkpoint to its place.

    A place that is a tensor takes the numbers that a matrix stands for.

    Raises:
        ModelError: the place does not take the matrix.
    """
    if isinstance(value, Fp8Experts):
        for one, matrix in zip(_by_expert(place), value.matrices, strict=True):
            fill(one, _turned(matrix) if isinstance(place, Each) and place.turned else matrix)
        return
    assert not isinstance(place, Each)
    if isinstance(place, Sliced):
        for part in place.slices:
            fill(part.place, _cut(value, part, place.shape))
        return
    if isinstance(value, Mxfp4Blocks):
        if isinstance(place, Stack):
            place.write(value)
        else:
            assert isinstance(place, Tensor)
            place.copy_(dequantize_mxfp4(*value))
        return
    assert not isinstance(place, Stack)
    if isinstance(place, Reordered):
        order, place = place.order, place.place
        if isinstance(value, Fp8Matrix) and isinstance(place, Tensor):
            value = _dequantized(value, place.shape, place)  # its rows may go anywhere
        value = _reordered(value, order)
    if isinstance(value, Tensor):
        assert isinstance(place, Tensor)
        place.copy_(value)
    elif isinstance(place, Tensor):
        dequantize_into(place, value)
    else:
        place.write(value)


def _by_expert(place: Place) -> Iterable[Place]:
    """The place for the matrix of each expert."""
    if isinstance(place, Each):
        return place.places
    if isinstance(place, Sliced):
        by_part = [_by_expert(part.place) for part in place.slices]
        shape = place.shape[1:]
        return [
            Sliced(
                shape,
                tuple(
                    Slice(part.dim - 1, part.start, one)
                    for part, one in zip(place.slices, ones, strict=True)
                ),
            )
            for ones in zip(*by_part, strict=True)
        ]
    assert isinstance(place, Tensor)
    return place.unbind()


def _turned(matrix: Fp8Matrix) -> Fp8Matrix:
    """A view of the transpose; the scale is of blocks, or the same for all rows."""
    data, scale = matrix
    return Fp8Matrix(data.mT, scale.mT if matrix.is_blocked else scale[:1].expand(data.shape[1], 1))


def _cut(
    value: Tensor | Matrix | Mxfp4Blocks, part: Slice, shape: torch.Size
) -> Tensor | Matrix | Mxfp4Blocks:
    """The part of a tensor or matrix of that shape that a rank has."""
    start, stop = part.start, part.stop
    if isinstance(value, Mxfp4Blocks) and part.dim == 2 and (start | stop) % MXFP4_BLOCK:
        value = dequantize_mxfp4(*value)
    if isinstance(value, Tensor | Mxfp4Blocks):
        return value.narrow(part.dim, start, stop - start)
    place = part.place.place if isinstance(part.place, Reordered) else part.place
    assert not isinstance(place, Stack)
    if not isinstance(place, Tensor):  # kept quantised: ``allocate`` has made sure that it fits
        return value.rows(start, stop) if part.dim == 0 else value.columns(start, stop)
    return _dequantized(value, shape, place).narrow(part.dim, start, stop - start)


def _reordered(value: Tensor | Matrix, order: Tensor) -> Tensor | Matrix:
    """A tensor or matrix with its rows in another order, which ``allocate`` has checked."""
    if isinstance(value, Tensor):
        return value[order.to(value.device)]
    if isinstance(value, Int4Matrix):
        order = order.to(value.packed.device)
        scale, zero = value.scale[:, order], value.zero[:, order]
        return Int4Matrix(value.packed[order], scale, zero, value.order)
    scaled = order
    if value.is_blocked:
        scaled = order[::FP8_BLOCK] // FP8_BLOCK
    data = value.data.view(torch.uint8)[order.to(value.data.device)].view(value.data.dtype)
    return Fp8Matrix(data, value.scale[scaled.to(value.scale.device)])


def keeps_blocks(order: Tensor) -> bool:
    """Whether the rows of each FP8_BLOCK stay together in that order."""
    blocks = (order[::FP8_BLOCK] // FP8_BLOCK).repeat_interleave(FP8_BLOCK)[: len(order)]
    return torch.equal(order // FP8_BLOCK, blocks)


def _dequantized(matrix: Matrix, shape: torch.Size, like: Tensor) -> Tensor:
    """The numbers of a matrix of that shape, in the dtype and on the device of another tensor."""
    whole = like.new_empty(shape)
    dequantize_into(whole, matrix)
    return whole


def dequantize_into(place: Tensor, matrix: Matrix) -> None:
    """Write the dequantised matrix [N, K] to a place on any device and of any dtype."""
    for start in range(0, len(place), _ROWS_AT_ONCE):
        end = min(start + _ROWS_AT_ONCE, len(place))
        if isinstance(matrix, Fp8Matrix):
            place[start:end] = dequantize_fp8(matrix.rows(start, end)).to(place.device)
        else:
            values = dequantize_int4(matrix.rows(start, end)).to(place.device, place.dtype)
            columns = slice(None) if matrix.order is None else matrix.order.to(place.device)
            place[start:end, columns] = values
