"""``asyncllm kernels tune``: measure how a model's projections run best on this GPU."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from asyncllm.cli.options import add_model, usage_error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from asyncllm.cli.options import Commands
    from asyncllm.kernels.tuning import Shape


def add_tune(actions: Commands) -> None:
    parser = actions.add_parser(
        "tune",
        help="measure how a model's projections run best on this GPU",
        description="Measure how a model's projections run best on this GPU, for batches of up to "
        "256 rows, and keep it in the user's cache folder, where later runs find it. Takes minutes "
        "and the whole GPU.",
        allow_abbrev=False,
    )
    add_model(parser, required=True)
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    if "model" not in args:
        usage_error(args, "name the MODEL to tune for")

    import torch

    if not torch.cuda.is_available():
        usage_error(args, "there is no GPU to measure")

    from asyncllm.kernels.tuner import BUCKETS, compile_all, tune
    from asyncllm.kernels.tuning import save
    from asyncllm.models.loading.hub import resolve_folder
    from asyncllm.models.registry import model_class
    from asyncllm.models.spec import read_spec

    spec = read_spec(resolve_folder(args.model, weights=False))
    dtype = torch.bfloat16
    model = model_class(spec.architecture)(spec.config, dtype, torch.device("meta"), 1)
    kinds = list(dict.fromkeys(layers(model)))
    compile_all(kinds, dtype)
    for layer in kinds:
        for rows in BUCKETS:
            tuned = tune(layer, rows, dtype)
            path = save(torch.cuda.get_device_name(), rows, tuned.tiles)
            print(
                f"{rows} rows: {tuned.microseconds:.1f} us instead of "
                f"{tuned.library_microseconds:.1f}, {', '.join(shape.key for shape in layer)}"
            )
    print(f"kept in {path}")
    return 0


def layers(model: nn.Module) -> Iterator[tuple[Shape, ...]]:
    """The projections of each layer, in the order they run, and then of the output."""
    from torch import Tensor

    from asyncllm.kernels.tuning import Shape
    from asyncllm.models.decoder import DecoderLM
    from asyncllm.models.layers.attention import Attention
    from asyncllm.models.layers.block import PreNormBlock, SandwichNormBlock
    from asyncllm.models.layers.mlp import GatedMLP

    for block in model.modules():
        if not isinstance(block, PreNormBlock):
            continue
        into_stream = "" if isinstance(block, SandwichNormBlock) else "residual"
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
