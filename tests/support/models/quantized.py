"""Tiny checkpoints with quantised weights, and the same with what those weights stand for.

Written from the formats' descriptions, with numpy, and without the code that reads them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.models import tiny_models

Tensors = dict[str, Tensor]

#: Of the eight codes in an int32, the number of that in the lowest four bits, the next, ...
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GPTQ_ORDER = tuple(range(8))


def channel_fp8(weight: Tensor, _generator: np.random.Generator) -> tuple[Tensors, Tensor]:
    """The tensors of a matrix, and what they stand for."""
    scale = weight.abs().amax(1, keepdim=True) / 448
    data = (weight / scale).to(torch.float8_e4m3fn)
    return {"weight": data, "weight_scale": scale}, data.float() * scale


def tensor_fp8(weight: Tensor, _generator: np.random.Generator) -> tuple[Tensors, Tensor]:
    scale = (weight.abs().amax() / 448).bfloat16()
    data = (weight / scale.float()).to(torch.float8_e4m3fn)
    tensors = {"weight": data, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
    tensors["activation_scale"] = torch.tensor(0.1)  # transformers' name for the same
    return tensors, data.float() * scale.float()


def block_fp8(weight: Tensor, _generator: np.random.Generator) -> tuple[Tensors, Tensor]:
    size, depth = weight.shape
    blocks = [range(0, size, 128), range(0, depth, 128)]
    scale = torch.empty(*map(len, blocks))
    data = torch.empty(size, depth, dtype=torch.float8_e4m3fn)
    meant = torch.empty(size, depth)
    for i, row in enumerate(blocks[0]):
        for j, column in enumerate(blocks[1]):
            block = (slice(row, row + 128), slice(column, column + 128))
            scale[i, j] = weight[block].abs().amax() / 448
            data[block] = (weight[block] / scale[i, j]).to(torch.float8_e4m3fn)
            meant[block] = data[block].float() * scale[i, j]
    return {"weight": data, "weight_scale_inv": scale}, meant


def awq(weight: Tensor, generator: np.random.Generator, group: int = 32) -> tuple[Tensors, Tensor]:
    codes, zeros, scales, meant = _int4(weight, np.arange(weight.shape[1]) // group, generator)
    return {
        "qweight": _packed(codes.T, AWQ_ORDER, 1),
        "qzeros": _packed(zeros, AWQ_ORDER, 1),
        "scales": scales,
    }, meant


def gptq(
    weight: Tensor,
    generator: np.random.Generator,
    group: int = 32,
    *,
    first_version: bool = True,
    order_seed: int | None = None,
) -> tuple[Tensors, Tensor]:
    """``order_seed``: the order of columns by activation that gave them their groups."""
    groups = np.arange(weight.shape[1]) // group
    if order_seed is not None:
        groups = np.random.default_rng(order_seed).permutation(groups)
    codes, zeros, scales, meant = _int4(weight, groups, generator)
    return {
        "qweight": _packed(codes.T, GPTQ_ORDER, 0),
        "qzeros": _packed(zeros - 1 if first_version else zeros, GPTQ_ORDER, 1),
        "scales": scales,
        "g_idx": torch.from_numpy(groups.astype(np.int32)),
    }, meant


def _int4(
    weight: Tensor, groups: np.ndarray, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, Tensor, Tensor]:
    """Codes [N, K], zero points and scales [groups, N], and what they stand for."""
    values = weight.numpy()
    count = int(groups.max()) + 1
    zeros = generator.integers(5, 11, (count, len(values)))
    largest = np.stack([abs(values[:, groups == g]).max(1) for g in range(count)])
    scales = (largest / np.minimum(zeros, 15 - zeros)).astype(np.float16)
    scale, zero = scales.astype(np.float32)[groups].T, zeros[groups].T
    codes = np.clip(np.round(values / scale) + zero, 0, 15).astype(np.int64)
    meant = (codes - zero).astype(np.float32) * scale
    return codes, zeros, torch.from_numpy(scales), torch.from_numpy(meant)


def _packed(codes: np.ndarray, order: tuple[int, ...], axis: int) -> Tensor:
    """Eight codes along an axis as one int32."""
    packed = np.zeros_like(codes.take(range(0, codes.shape[axis], 8), axis))
    for place, number in enumerate(order):
        packed |= codes.take(range(number, codes.shape[axis], 8), axis) << (4 * place)
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32))


Quantize = Callable[[Tensor, np.random.Generator], tuple[Tensors, Tensor]]

_COMPRESSED_TENSORS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "token"},
        }
    },
    "ignore": ["lm_head", "re:.*layers.1.mlp.*"],
    "quantization_status": "compressed",
}
_BLOCK_FP8: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.1.mlp"],
}
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}

#: By name: what quantises a matrix, and ``quantization_config``.
FORMATS: dict[str, tuple[Quantize, dict[str, Any]]] = {
    "compressed-tensors": (channel_fp8, _COMPRESSED_TENSORS),
    "fp8": (tensor_fp8, {"quant_method": "fp8", "activation_scheme": "static"}),
    "fp8-blocks": (block_fp8, _BLOCK_FP8),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
    "gptq": (gptq, _GPTQ),
    "gptq-v2": (
        lambda weight, generator: gptq(weight, generator, first_version=False),
        {**_GPTQ, "checkpoint_format": "gptq_v2"},
    ),
    "gptq-ordered": (
        # All projections of one input have the same order, as they have in real checkpoints.
        lambda weight, generator: gptq(weight, generator, order_seed=weight.shape[1]),
        {**_GPTQ, "desc_act": True},
    ),
}


def make(name: str, folder: Path, family: str = "qwen3", **overrides: Any) -> tuple[Path, Path]:
    """Write a checkpoint with quantised projections, and one with what they stand for.

    The MLP of layer 1, where the format's list says so, and all but the layers are not quantised.

    Args:
        folder: to write them to.
        overrides: as for ``tiny_models.make``.

    Returns:
        The folder of either.
    """
    quantize, config = FORMATS[name]
    dense = tiny_models.make(family, folder / "dense", **overrides)
    weights = load_file(dense / "model.safetensors")
    generator = np.random.default_rng(0)
    stored: Tensors = {}
    for key, weight in sorted(weights.items()):
        module = key.removesuffix(".weight")
        ignored = name in ("compressed-tensors", "fp8-blocks") and ".layers.1.mlp" in key
        if key == module or not module.endswith(("_proj", "_qkv", "_qkvz", "_z")) or ignored:
            stored[key] = weight
            continue
        tensors, weights[key] = quantize(weight, generator)
        stored.update({f"{module}.{field}": part for field, part in tensors.items()})
    save_file(weights, dense / "model.safetensors", {"format": "pt"})
    quantized = folder / "quantized"
    quantized.mkdir()
    for file in dense.glob("*.json"):
        (quantized / file.name).write_text(file.read_text())
    save_file(
        {key: part.contiguous() for key, part in stored.items()}, quantized / "model.safetensors"
    )
    tiny_models.edit_config(quantized, quantization_config=config)
    return quantized, dense


def edit(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    """Change the tensors of a checkpoint."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def shard(folder: Path, first: Callable[[str], bool]) -> None:
    """Cut a checkpoint into two files: the first has the tensors of these names."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: "a.safetensors" if first(name) else "b.safetensors" for name in weights}
    for file in sorted(set(files.values())):
        save_file({n: w for n, w in weights.items() if files[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
