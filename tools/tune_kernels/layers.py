"""The projections of a model."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from asyncllm.kernels.tuning import Shape
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import PreNormBlock, SandwichNormBlock
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.parallel.ranks import Ranks


def layers(model: nn.Module, ranks: Ranks) -> Iterator[tuple[Shape, ...]]:
    """The projections of each layer, in the order they run, and then of the output.

    Args:
        ranks: what several of them add up is added to the residual by their sum.
    """
    for block in model.modules():
        if not isinstance(block, PreNormBlock):
            continue
        adds = ranks.size == 1 and not isinstance(block, SandwichNormBlock)
        into_stream = "residual" if adds else ""
        projections: list[tuple[object, bool, str]] = []
        attention, mlp = block.self_attn, block.mlp
        if isinstance(attention, Attention):
            projections.append((attention.qkv_proj.weight, True, ""))
            projections.append((attention.o_proj.weight, False, into_stream))
        if isinstance(mlp, GatedMLP):
            projections.append((mlp.gate_up_proj.weight, True, "gated"))
            projections.append((mlp.down_proj.weight, False, into_stream))
        shapes = [
            Shape.of(weight, norm, epilogue)
            for weight, norm, epilogue in projections
            if isinstance(weight, Tensor)  # not quantized
        ]
        if shapes:
            yield tuple(shapes)
    if isinstance(model, DecoderLM):
        yield (Shape.of(model.model.embed_tokens.weight, True, ""),)
