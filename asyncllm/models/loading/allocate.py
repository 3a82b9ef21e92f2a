"""Allocate weights of projections in the quantised form of the checkpoint, if kernels take it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from math import lcm, prod
from typing import Final, Literal

import torch

from asyncllm.kernels.gpu import Gpu, gpu_of
from asyncllm.kernels.support import obstacle
from asyncllm.kernels.types import FP8_BLOCK, MXFP4_BLOCK, packed_block
from asyncllm.models.base import CausalLM
from asyncllm.models.layers.linear import FusedLinear, Linear, MixedLinear, RowLinear
from asyncllm.models.layers.moe import Experts, SparseMoE
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.loading.quantized_tensors import Fp8Layout, Int4Layout, Layout, Mxfp4Layout
from asyncllm.models.quant.config import Quantization
from asyncllm.models.quant.formats import keeps_blocks
from asyncllm.models.quant.weight import Fp8Weight, Int4Weight, Mxfp4Weight, QuantizedWeight

log = logging.getLogger(__name__)

#: The layout of a matrix by the name of its module (the model's) and its columns on this rank; None
#: if it is not quantised.
LayoutOf = Callable[[str, int], Layout | None]

#: The weights that stay quantised. "large": experts, and projections of ``LARGE`` numbers or more.
Kept = Literal["all", "large", "experts", "none"]

#: On Hopper GPUs, smaller projections take less time in 16 bits: what counts is not reading them,
#: but how long one kernel takes after the other, and rounding activations is one more.
LARGE: Final = 2**23


def can_keep(quantization: Quantization, dtype: torch.dtype, device: torch.device) -> Kept:
    """Which weights kernels on this device take as they are stored."""
    if device.type != "cuda" or obstacle(device) is not None:
        return "none"
    return kernels_take(quantization, dtype, gpu_of(device))


def kernels_take(quantization: Quantization | None, dtype: torch.dtype, gpu: Gpu) -> Kept:
    """Which quantised weights kernels for this GPU take as they are stored."""
    if quantization is None:
        return "none"
    if quantization.method == "mxfp4":
        return "all" if dtype == torch.bfloat16 else "none"
    if dtype not in (torch.bfloat16, torch.float16):
        return "none"
    if quantization.method != "fp8":
        return "all"
    if not gpu.has_fp8:
        return "none"
    if gpu.is_hopper:
        return "large"
    # cuBLAS multiplies by scales of blocks on Hopper only. Experts are multiplied by our kernels.
    return "experts" if quantization.blocked else "all"


def allocate(model: CausalLM, place: Placement, layout_of: LayoutOf, keep: Kept = "all") -> None:
    """Allocate the weights of projections and experts; the model was made with ``place``."""
    _set_shared_apart(model, layout_of)
    for projection, modules in _projections(model):
        least = LARGE if keep == "large" else 0
        stays = keep in ("all", "large") and prod(projection.weight.shape) >= least
        if isinstance(projection, MixedLinear):
            first = [name for name in modules if name.rpartition(".")[2] not in projection.last]
            if stays and any(layout_of(n, projection.weight.shape[1]) for n in first):
                projection.set_apart(place)
                modules = first
        size, depth = projection.weight.shape
        layouts = {layout_of(name, depth) for name in modules}
        weight = None
        if projection is not model.lm_head and len(layouts) == 1 and stays:
            layout = layouts.pop()
            if not (
                (_is_reordered(layout) and _has_some_columns(projection))
                or (_is_blocked(layout) and _cuts_blocks(projection))
            ):
                weight = _weight(layout, size, _bounds(projection), depth, place.device)
        if weight is None:
            projection.weight = place.empty(size, depth)
        else:
            del projection.weight  # a parameter's name cannot become a module's
            projection.weight = weight
    kept = [
        _allocate_experts(experts, path.rpartition(".")[0], place, layout_of)
        for path, experts in list(model.named_modules())
        if isinstance(experts, Experts)
    ]
    if not all(kept):
        log.warning(
            "experts are expanded to %s when loaded: no kernels take them as they are stored",
            str(place.dtype).removeprefix("torch."),
        )


def quantisable(model: CausalLM) -> Iterator[str]:
    """The names of all tensors of projections and experts, however they may be stored."""
    for _, modules in _projections(model):
        yield from (f"{module}.weight" for module in modules)
    for path, experts in model.named_modules():
        if isinstance(experts, Experts):
            around = path.rpartition(".")[0]
            for name, stored in experts.modules_on_disk().items():
                yield f"{around}.experts.{name}"
                yield from (f"{around}.{module}.weight" for module in stored)


def _set_shared_apart(model: CausalLM, layout_of: LayoutOf) -> None:
    """Give shared experts weights of their own where their format is another one, or where they
    cannot be cut into experts in it."""
    for path, moe in list(model.named_modules()):
        if isinstance(moe, SparseMoE) and moe.experts.shared:
            found = _experts_layouts(moe.experts, path, layout_of)
            layouts = {name: next(iter(each)) for name, each in found.items() if len(each) == 1}
            units = [_unit(name, layout) for name, layout in layouts.items()]
            is_cut = moe.experts.shared > 1 and moe.experts.inner.whole % lcm(*units)
            if is_cut or len(layouts) < len(found) or Mxfp4Layout() in layouts.values():
                moe.set_apart()


def _experts_layouts(
    experts: Experts, around: str, layout_of: LayoutOf
) -> dict[str, set[Layout | None]]:
    """The layouts of the matrices of each weight; experts are children of the module ``around``."""
    layouts: dict[str, set[Layout | None]] = {}
    depths = {"gate_up_proj": experts.hidden_size, "down_proj": experts.inner.whole}
    for name, modules in experts.modules_on_disk().items():
        layout = layout_of(f"{around}.experts.{name}", depths[name])
        if isinstance(layout, Mxfp4Layout):
            layouts[name] = {layout}
        else:
            layouts[name] = {layout_of(f"{around}.{module}", depths[name]) for module in modules}
    return layouts


def _allocate_experts(experts: Experts, around: str, place: Placement, layout_of: LayoutOf) -> bool:
    """Allocate the weights of experts; returns whether those that are quantised stay so."""
    found = _experts_layouts(experts, around, layout_of)
    layouts = {name: next(iter(each)) if len(each) == 1 else None for name, each in found.items()}
    units = {name: _unit(name, layout) for name, layout in layouts.items()}
    unit = lcm(*units.values())
    if any(bound % unit for bound in _bounds_of(experts)):
        experts.align(unit, place)
    is_kept = True
    for name, shape in experts.shapes().items():
        count, rows, depth = shape
        weight = None
        if not any(bound % units[name] for bound in _bounds_of(experts)):
            bound = experts.padded if name == "gate_up_proj" else rows
            weight = _experts_weight(layouts[name], count * rows, bound, depth, place.device)
        is_kept &= weight is not None or found[name] == {None}
        delattr(experts, name)
        setattr(experts, name, place.empty(*shape) if weight is None else weight)
        if experts.padded > experts.inner.size:
            for parameter in [getattr(experts, name)] if weight is None else weight.parameters():
                parameter.zero_()
    return is_kept


def _bounds_of(experts: Experts) -> list[int]:
    """Where this rank's features of an expert begin and end on disk; with padding."""
    (share,) = experts.inner.slices
    return [share.start, share.start + experts.padded]


def _unit(name: str, layout: Layout | None) -> int:
    """How many features of an expert cannot be divided in the layout of that weight."""
    match layout:
        case Fp8Layout(blocked):
            return FP8_BLOCK if blocked else 16
        case Int4Layout(group) if name == "down_proj":
            return group
        case Mxfp4Layout() if name == "down_proj":
            return MXFP4_BLOCK
    return 1


def _experts_weight(
    layout: Layout | None, size: int, bound: int, depth: int, device: torch.device
) -> QuantizedWeight | None:
    """A weight of that layout for all experts; None if the kernels do not take it.

    Args:
        size: rows, of all experts.
        bound: rows of a part of an expert.
    """
    match layout:
        case Mxfp4Layout():
            return Mxfp4Weight(size, depth, device)
        case Fp8Layout(blocked=True):
            if depth % FP8_BLOCK or bound % FP8_BLOCK:
                return None
            return Fp8Weight(size, depth, device, blocked=True)
        case Int4Layout(order=order) if order is not None:
            return None
    return _weight(layout, size, [bound], depth, device)


def dummy_layout(quantization: Quantization) -> LayoutOf:
    """The layouts of a model without a checkpoint."""

    def layout_of(module: str, depth: int) -> Layout | None:
        if quantization.ignores(module):
            return None
        if quantization.method == "mxfp4":
            return Mxfp4Layout()
        if quantization.method == "fp8":
            return Fp8Layout(quantization.blocked)
        group = depth if quantization.group_size == -1 else quantization.group_size
        return None if depth % group else Int4Layout(group, torch.float16, None)

    return layout_of


def _projections(model: CausalLM) -> Iterator[tuple[Linear | FusedLinear, list[str]]]:
    """The projections, each with its modules in the checkpoint."""
    for path, module in list(model.named_modules()):
        if isinstance(module, FusedLinear):
            around = path.rpartition(".")[0]
            yield module, [f"{around}.{name}" for name in module.outputs]
        elif isinstance(module, Linear):
            yield module, [path]


def _bounds(projection: Linear | FusedLinear) -> list[int]:
    """Where this rank's parts of the rows begin and end on disk."""
    if isinstance(projection, Linear):
        return [0, projection.weight.shape[0]]
    slices = [part for kept in projection.outputs.values() for part in kept.slices]
    return [bound for part in slices for bound in (part.start, part.stop)]


def _is_reordered(layout: Layout | None) -> bool:
    return isinstance(layout, Int4Layout) and layout.order is not None


def _is_blocked(layout: Layout | None) -> bool:
    return isinstance(layout, Fp8Layout) and layout.blocked


def _cuts_blocks(projection: Linear | FusedLinear) -> bool:
    """Whether rows leave the block with which they share a scale, as their order is another."""
    if isinstance(projection, Linear):
        return False
    orders = (projection.orders.get(name) for name in projection.outputs)
    return not all(order is None or keeps_blocks(order) for order in orders)


def _has_some_columns(projection: Linear | FusedLinear) -> bool:
    """Whether other ranks have the other columns."""
    if not isinstance(projection, RowLinear):
        return False
    return projection.inputs.size < projection.inputs.whole


def _weight(
    layout: Layout | None, size: int, bounds: list[int], depth: int, device: torch.device
) -> QuantizedWeight | None:
    """A weight of that layout; None if the kernels do not take it.

    Args:
        bounds: of the parts of rows, on disk.
    """
    match layout:
        case Fp8Layout(blocked=True):
            # cuBLAS needs the scales of four blocks side by side.
            if depth % (4 * FP8_BLOCK) or any(bound % FP8_BLOCK for bound in bounds):
                return None
            return Fp8Weight(size, depth, device, blocked=True)
        case Fp8Layout(blocked=False):
            # torch._scaled_mm needs rows of multiples of 16 bytes, in and out.
            if depth % 16 or size % 16:
                return None
            return Fp8Weight(size, depth, device, blocked=False)
        case Int4Layout(group, scale, order):
            # Tensor cores multiply 16 columns at a time, and a byte holds two.
            if packed_block(group) < 32 or depth % group:
                return None
            return Int4Weight(
                size, depth, device, group=group, scale=scale, reordered=order is not None
            )
    return None
