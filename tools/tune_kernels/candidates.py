"""The projections of a model, and the tiles worth trying for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from torch import Tensor, nn

from asyncllm.kernels.tuning import (
    SHARED_BYTES,
    GemvTile,
    RegisterSkinnyTile,
    Shape,
    SmemResidentTile,
    Tile,
    TmaSplitTile,
    TmaTile,
    smem_resident_bytes,
    tma_split_stages,
    tma_stages,
)
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import PreNormBlock, SandwichNormBlock
from asyncllm.models.layers.delta_net import GatedDeltaNet
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
        if isinstance(attention, GatedDeltaNet):
            projections.append((attention.in_proj.weight, True, ""))
            projections.append((attention.out_proj.weight, False, into_stream))
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


#: Registers of a thread for its parts of the weight, of x and of the norm's weight.
_REGISTERS = 200


def candidates(
    rows: int, shape: Shape, *, hopper: bool, multiprocessors: int = 132
) -> Iterator[Tile]:
    """The tiles worth trying; ``hopper``: on a device of compute capability 9.0."""
    halves = 2 if shape.epilogue == "gated" else 1
    if rows == 1:
        yield from _gemv_tiles(shape, halves)
    if rows <= (8 if hopper else 32):
        yield from _register_skinny_tiles(rows, shape, halves)
    if hopper and 2 <= rows <= 64:
        yield from _smem_resident_tiles(rows, shape)
        yield from _tma_tiles(rows, shape)
    if hopper and rows >= 64:
        yield from _tma_split_tiles(rows, shape, multiprocessors)


def _gemv_tiles(shape: Shape, halves: int) -> Iterator[GemvTile]:
    for block_n in (1, 2, 4, 8, 16):
        for warps, block_k in ((4, 1024), (8, 1024), (8, 2048)):
            per_thread = block_n * halves * shape.columns / (32 * warps)
            if 16 <= per_thread <= 128 and block_k <= max(shape.columns, 1024):
                yield GemvTile(block_n, block_k, warps, pdl_late=False)
                yield GemvTile(block_n, block_k, warps, pdl_late=True)


def _register_skinny_tiles(rows: int, shape: Shape, halves: int) -> Iterator[RegisterSkinnyTile]:
    x_rows = max(8, rows) * (2 if shape.norm else 1)
    for block_n, (warps, chains) in itertools.product(
        (8, 16, 32), ((2, 4), (4, 2), (4, 4), (8, 1), (8, 2))
    ):
        block_rows = block_n * halves
        per_register = 64 * warps  # elements of all threads
        preloads = (block_rows + x_rows) * shape.columns <= _REGISTERS * per_register
        sizes = [
            size
            for size in (2048, 1024, 512, 256)
            if shape.columns % size == 0 and size >= 32 * warps * chains
        ]
        if shape.size < 64 * block_rows:
            continue
        for block_k in sizes[:1] if preloads else sizes:
            registers = (block_rows + x_rows) * block_k / per_register
            if preloads or 32 <= registers <= _REGISTERS * 3 // 4:
                for pdl_late in (False, True) if preloads else (False,):
                    tile = RegisterSkinnyTile(block_n, block_k, preloads, warps, chains, pdl_late)
                    yield tile
                    if shape.norm and rows >= 16:
                        yield tile._replace(separate_norm=True)


def _smem_resident_tiles(rows: int, shape: Shape) -> Iterator[SmemResidentTile]:
    for fold, splits in itertools.product((1, 2, 4, 8), (1, 2, 4)):
        programs = -(-shape.size // (64 // fold)) * splits
        x_rows = fold * max(8, rows)
        if (
            not 60 <= programs <= (400 if fold * splits == 1 else 264)
            or x_rows > 256
            or (shape.epilogue == "gated" and fold > 4)
            or (shape.norm and splits > 1)
        ):
            continue
        columns, rest = divmod(shape.columns, fold * splits)
        sizes = [
            size for size in (512, 256, 128) if columns % size == 0 and 2 <= columns // size <= 8
        ]
        for block_k in sizes[:2] if rest == 0 else ():
            if smem_resident_bytes(rows, shape, fold, columns, block_k) <= SHARED_BYTES:
                for warps, pdl_late in itertools.product((4, 8), (False, True)):
                    if warps == 4 or x_rows >= 64:
                        yield SmemResidentTile(fold, block_k, splits, warps, pdl_late)


def _tma_tiles(rows: int, shape: Shape) -> Iterator[TmaTile]:
    for parts, fold, splits in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 4)):
        programs = -(-shape.size // (parts * 64 // fold)) * splits
        if (
            programs < 60
            or (programs > 264 and fold * splits > 1)
            or (fold > 1 and (parts == 2 or splits == 4))
            or parts * fold * max(8, rows) > 192
        ):
            continue
        found: dict[TmaTile, None] = {}
        for block_k, shared in itertools.product((64, 128), (SHARED_BYTES // 2, SHARED_BYTES)):
            blocks, rest = divmod(shape.columns, fold * splits * block_k)
            x_stages = 5 if parts == 1 and block_k == 64 else 3
            stages = tma_stages(rows, parts, fold, block_k, x_stages, shared)
            stages = min(stages, blocks)
            if rest == 0 and stages >= 2:
                x_stages = min(x_stages, stages)
                tile = TmaTile(parts, fold, block_k, splits, stages, x_stages)
                found[tile] = None
                if parts == 1 and block_k == 128:
                    found[tile._replace(stagger=True)] = None
        yield from found


def _tma_split_tiles(rows: int, shape: Shape, multiprocessors: int) -> Iterator[TmaSplitTile]:
    is_gated = shape.epilogue == "gated"
    for parts, splits in itertools.product((1, 2, 3), (1, 2, 4, 8)):
        blocks, rest = divmod(shape.columns, 64 * splits)
        programs = -(-shape.size // (parts * 64)) * splits
        shares = splits > 1 or shape.epilogue == "residual"
        if (
            rest > 0
            or programs < 60
            or (shares and programs > multiprocessors)
            or (is_gated and splits > 1)
        ):
            continue
        most = min(tma_split_stages(rows, parts), blocks, 12)
        for stages in (most, most - 1):
            if stages >= max(2, -(-rows // 64)):
                yield TmaSplitTile(parts, splits, stages)
