"""Projections on a GPU: which kernel takes them.

One row goes to ``gemv``, a few to ``direct``, dozens to ``skinny`` and more to cuBLAS; the tables
of ``kernels.tuning`` say where the borders are. The four projections of a layer on an H200 in
microseconds, bfloat16, with norms, activation and residual, all layers in one CUDA graph
(torch 2.11, Triton 3.6; reading the weights at 4.3 TB/s takes 7.3 and 89.7):

| rows | Qwen3-0.6B | with cuBLAS | Qwen3-8B | with cuBLAS |
|--|--|--|--|--|
| 1 | 11.1 | 35.4 | 91.3 | 112.4 |
| 8 | 12.6 | 29.6 | 108.5 | 118.0 |
| 16 | 18.0 | 29.8 | 108.1 | 113.0 |
| 32 | 22.9 | 30.5 | 109.7 | 115.5 |
| 64 | 26.4 | 31.2 | 115.7 | 117.8 |

Small weights are not what those of the 0.6B take long for: with all of them in the L2 cache it
takes the same 10.9 and 12.6 at 1 and 8 rows. It is the way from one kernel to the next (0.6 with
128 programs, 1.8 with 1,024), loading x and adding up.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from asyncllm.kernels.linear import linear_reference
from asyncllm.kernels.norm import Norm, rms_norm
from asyncllm.kernels.triton.direct import direct
from asyncllm.kernels.triton.gemv import gemv
from asyncllm.kernels.triton.skinny import skinny
from asyncllm.kernels.tuning import DirectTile, GemvTile, Shape, SkinnyTile, Tile, choose


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
    tile = choose(_device_name(x.device), len(x), shape) if len(x) > 0 else None
    if tile is None or not fits(tile, x, shape):
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
    else:
        skinny(tile, x, weight, bias, act, out, add=add)
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
    if isinstance(tile, SkinnyTile):
        return shape.columns % (tile.splits * tile.block_k) == 0
    if shape.norm and x.dtype == torch.float16 and not tile.norm_apart:
        return False
    return shape.columns % tile.block_k == 0


def normed_apart(tile: Tile) -> bool:
    """Whether a kernel before the projection's normalises x."""
    return isinstance(tile, SkinnyTile) or (isinstance(tile, DirectTile) and tile.norm_apart)


@cache
def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
