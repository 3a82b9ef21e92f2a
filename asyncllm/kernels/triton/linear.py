"""Projections on a GPU: which kernel takes them.

One row goes to ``gemv`` or ``direct``, a few to ``direct``. On Hopper GPUs a few to dozens of rows
go to ``held`` if the weight is small, and to ``stream`` if it is large; more go to cuBLAS. The
tables of ``kernels.tuning`` say where the borders are. The four projections of a layer on an H200
in microseconds, bfloat16, with norms, activation and residual, all layers in one CUDA graph
(torch 2.11, Triton 3.6; reading the weights at 4.3 TB/s takes 7.3 and 89.7):

| rows | Qwen3-0.6B | with cuBLAS | Qwen3-8B | with cuBLAS |
|--|--|--|--|--|
| 1 | 11.1 | 35.4 | 91.3 | 112.4 |
| 8 | 11.3 | 29.6 | 94.7 | 118.0 |
| 16 | 12.8 | 29.8 | 98.9 | 113.0 |
| 32 | 17.6 | 30.5 | 105.0 | 115.5 |
| 64 | 23.2 | 31.2 | 113.3 | 117.8 |

Small weights are not what those of the 0.6B take long for: with all of them in the L2 cache it
takes 10.9, 10.3, 12.0, 16.0 and 21.6. It is the way from one kernel to the next (0.6 with 128
programs, 1.8 with 1,024), loading x, which every program needs the whole of or its columns, and
adding up.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from asyncllm.kernels.linear import linear_reference
from asyncllm.kernels.norm import Norm, rms_norm
from asyncllm.kernels.triton.direct import direct
from asyncllm.kernels.triton.gemv import gemv
from asyncllm.kernels.triton.held import held
from asyncllm.kernels.triton.launch import next_power_of_2
from asyncllm.kernels.triton.stream import stream
from asyncllm.kernels.tuning import (
    DirectTile,
    GemvTile,
    HeldTile,
    Shape,
    StreamTile,
    Tile,
    choose,
)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """See ``kernels.linear.linear``."""
    epilogue = "gated" if act is not None else "" if residual is None else "residual"
    shape = Shape.of(weight, norm is not None, epilogue)
    name, hopper = _device(x.device)
    tile = choose(name, len(x), shape, hopper=hopper) if len(x) > 0 else None
    # Kernels of our own copy 16 bytes of the weight at a time.
    if tile is None or not fits(tile, x, shape) or weight.data_ptr() % 16 > 0:
        return linear_reference(x, weight, bias, norm=norm, residual=residual, act=act)
    return project(tile, x, weight, bias, norm=norm, residual=residual, act=act)


def project(
    tile: Tile,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    act: str | None = None,
) -> Tensor:
    """``linear`` on one of our kernels."""
    out = residual
    if out is None:
        size = weight.shape[0] if act is None else weight.shape[0] // 2
        out = torch.empty(len(x), size, dtype=x.dtype, device=x.device)
    if norm is not None and normed_apart(tile):
        x, norm = rms_norm(x, norm), None
    add = residual is not None
    if isinstance(tile, GemvTile):
        gemv(tile, x, weight, bias, norm, act, out, add=add)
    elif isinstance(tile, DirectTile):
        direct(tile, x, weight, bias, norm, act, out, add=add)
    elif isinstance(tile, HeldTile):
        held(tile, x, weight, bias, norm, act, out, add=add)
    else:
        stream(tile, x, weight, bias, act, out, add=add)
    return out


def fits(tile: Tile, x: Tensor, shape: Shape) -> bool:
    """Whether the kernel can take these rows.

    The tensor cores' kernel multiplies x by the norm's weight in the dtype of x before it divides
    by the root of the mean square: bfloat16 has the range for that, float16 does not.
    """
    if x.stride(1) != 1:
        return False
    if isinstance(tile, GemvTile):
        return len(x) == 1
    if x.element_size() != 2:
        return False
    in_kernel = shape.norm and not normed_apart(tile)
    if in_kernel and x.dtype == torch.float16:
        return False
    if isinstance(tile, DirectTile):
        return shape.columns % tile.block_k == 0
    blocks, rest = divmod(shape.columns, tile.fold * tile.splits * tile.block_k)
    sums = tile.fold * max(8, next_power_of_2(len(x)))  # of products, in registers
    if isinstance(tile, HeldTile):
        has_room = sums <= 256
    else:
        has_room = sums * tile.parts <= 192 and 2 <= tile.x_stages <= tile.stages <= blocks
    is_aligned = x.stride(0) % 16 == x.data_ptr() % 16 == 0
    is_whole = rest == 0 and (shape.epilogue != "gated" or shape.size % 16 == 0)
    return has_room and is_aligned and is_whole and not (in_kernel and tile.splits > 1)


def normed_apart(tile: Tile) -> bool:
    """Whether a kernel before the projection's normalises x."""
    if isinstance(tile, GemvTile):
        return False
    return isinstance(tile, StreamTile) or tile.norm_apart


@cache
def _device(device: torch.device) -> tuple[str, bool]:
    """Its name, and whether it has the tensor cores that Hopper GPUs alone have."""
    return torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device) == (9, 0)
