"""Allocate weights of projections in the quantised form of the checkpoint, if kernels take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from asyncllm.kernels.gpu import Gpu, gpu_of
from asyncllm.kernels.support import obstacle
from asyncllm.kernels.types import FP8_BLOCK, MXFP4_BLOCK, packed_block
from asyncllm.models.base import CausalLM
from asyncllm.models.layers.linear import FusedLinear, Linear, RowLinear
from asyncllm.models.layers.moe import Experts
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.loading.quantized_tensors import Fp8Layout, Int4Layout, Layout, Mxfp4Layout
from asyncllm.models.quant.config import Quantization
from asyncllm.models.quant.weight import Fp8Weight, Int4Weight, Mxfp4Weight, QuantizedWeight

#: The layout of a matrix by the name of its module (the model's) and its columns on this rank; None
#: if it is not quantised.
LayoutOf = Callable[[str, int], Layout | None]


def can_keep(quantization: Quantization, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels on this device take weights as they are stored."""
    if device.type != "cuda" or obstacle(device) is not None:
        return False
    return kernels_take(quantization, dtype, gpu_of(device))


def kernels_take(quantization: Quantization, dtype: torch.dtype, gpu: Gpu) -> bool:
    """Whether kernels for this GPU take weights as they are stored."""
    if quantization.method == "mxfp4":
        return dtype == torch.bfloat16
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    if quantization.method != "fp8":
        return True
    # cuBLAS multiplies by scales of blocks on Hopper only.
    return gpu.is_hopper if quantization.blocked else gpu.has_fp8


def allocate(model: CausalLM, place: Placement, layout_of: LayoutOf) -> None:
    """Allocate the weights of projections and experts; the model was made with ``place``."""
    for projection, modules in _projections(model):
        size, depth = projection.weight.shape
        layouts = {layout_of(name, depth) for name in modules}
        weight = None
        if projection is not model.lm_head and len(layouts) == 1:
            layout = layouts.pop()
            if not (_is_reordered(layout) and _has_some_columns(projection)):
                weight = _weight(layout, size, _bounds(projection), depth, place.device)
        if weight is None:
            projection.weight = place.empty(size, depth)
        else:
            del projection.weight  # a parameter's name cannot become a module's
            projection.weight = weight
    for path, experts in list(model.named_modules()):
        if isinstance(experts, Experts):
            _allocate_experts(experts, path.rpartition(".")[0], place, layout_of)


def _allocate_experts(experts: Experts, around: str, place: Placement, layout_of: LayoutOf) -> None:
    """Allocate the weights of experts, which are children of the module at ``around``."""
    for name, modules in experts.modules_on_disk().items():
        shape = getattr(experts, name).shape
        _, rows, depth = shape
        size = experts.count * rows
        layout = layout_of(f"{around}.experts.{name}", depth)
        if not isinstance(layout, Mxfp4Layout):
            layouts = {layout_of(f"{around}.{module}", depth) for module in modules}
            layout = layouts.pop() if len(layouts) == 1 else None
        (share,) = experts.inner.slices
        bounds = [share.start, share.stop]
        if name == "gate_up_proj":
            weight = _experts_weight(layout, size, bounds, depth, place.device)
        elif _divides(layout, bounds):
            weight = _experts_weight(layout, size, [rows], depth, place.device)
        else:
            weight = None
        delattr(experts, name)
        setattr(experts, name, place.empty(*shape) if weight is None else weight)


def _divides(layout: Layout | None, bounds: list[int]) -> bool:
    """Whether columns in such a layout can be divided there."""
    match layout:
        case Fp8Layout(blocked=True):
            return not any(bound % FP8_BLOCK for bound in bounds)
        case Int4Layout(group):
            return not any(bound % group for bound in bounds)
        case Mxfp4Layout():
            return not any(bound % MXFP4_BLOCK for bound in bounds)
    return True


def _experts_weight(
    layout: Layout | None, size: int, bounds: list[int], depth: int, device: torch.device
) -> QuantizedWeight | None:
    """A weight of that layout for all experts; None if the kernels do not take it.

    Args:
        size: rows, of all experts.
        bounds: of the parts of an expert's rows.
    """
    match layout:
        case Mxfp4Layout():
            return Mxfp4Weight(size, depth, device)
        case Fp8Layout(blocked=True):
            if depth % FP8_BLOCK or any(bound % FP8_BLOCK for bound in bounds):
                return None
            return Fp8Weight(size, depth, device, blocked=True)
        case Int4Layout(order=order) if order is not None:
            return None
    return _weight(layout, size, bounds, depth, device)


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


def _projections(model: CausalLM) -> Iterator[tuple[Linear | FusedLinear, dict[str, int]]]:
    """The projections, each with its modules in the checkpoint and their output features."""
    for path, module in list(model.named_modules()):
        if isinstance(module, FusedLinear):
            around = path.rpartition(".")[0]
            yield module, {f"{around}.{name}": kept.size for name, kept in module.outputs.items()}
        elif isinstance(module, Linear):
            yield module, {path: module.weight.shape[0]}


def _bounds(projection: Linear | FusedLinear) -> list[int]:
    """Where this rank's parts of the rows begin and end on disk."""
    if isinstance(projection, Linear):
        return [0, projection.weight.shape[0]]
    slices = [part for kept in projection.outputs.values() for part in kept.slices]
    return [bound for part in slices for bound in (part.start, part.stop)]


def _is_reordered(layout: Layout | None) -> bool:
    return isinstance(layout, Int4Layout) and layout.order is not None


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
