"""``quantization_config`` of config.json, and the supported formats. Imports no torch."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

import msgspec

from asyncllm.errors import ModelError

#: Rows and columns of a block that shares a scale; checkpoints have no other size.
BLOCK = (128, 128)

Method = Literal["fp8", "awq", "gptq", "mxfp4"]


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """The format of quantised matrices in a checkpoint.

    The tensors themselves show which matrices are quantised, and in what groups; ``blocked``,
    ``group_size`` and ``ignored`` are for dummy weights.

    Attributes:
        method: "fp8", 8-bit floating point (e4m3) with a scale for each matrix, row or block; "awq"
            or "gptq", 4-bit integers with a scale and a zero point for each group of columns, as
            AutoAWQ ("gemm") or GPTQ tools pack them; "mxfp4", 4-bit floating point (e2m1) with a
            power of two for 32 numbers, of experts only.
        zero_offset: added to stored zero points.
        reordered: columns may belong to groups in any order (``g_idx``).
        blocked: "fp8" with a scale for each block.
        group_size: columns of a group of "awq" and "gptq"; -1 for all columns.
        ignored: modules that are not quantised; see ``ignores``.
        while_loading: the checkpoint is not quantised; its projections and experts become "fp8"
            with a scale for each block.
    """

    method: Method
    zero_offset: int = 0
    reordered: bool = False
    blocked: bool = False
    group_size: int = 128
    ignored: tuple[str, ...] = ()
    while_loading: bool = False

    def ignores(self, module: str) -> bool:
        """Whether ``ignored`` has this module.

        Entries are consecutive parts of a module's name, or regular expressions after "re:".
        """
        return any(
            re.match(entry[3:], module) is not None
            if entry.startswith("re:")
            else f".{entry}." in f".{module}."
            for entry in self.ignored
        )


#: What ``--quantization fp8`` makes of a checkpoint that is not quantised. Modules that are neither
#: projections nor experts are never quantised; the ignored ones, which yield a number for each head
#: of a delta net, are left out in published checkpoints, too.
WHILE_LOADING: Final = Quantization(
    method="fp8",
    blocked=True,
    ignored=("lm_head", "in_proj_a", "in_proj_b", "in_proj_ba"),
    while_loading=True,
)


def served_quantization(stored: Quantization | None, wanted: str | None) -> Quantization | None:
    """The quantisation with which weights are served.

    Args:
        stored: that of the checkpoint.
        wanted: ``EngineConfig.quantization``.

    Raises:
        ModelError: the weights cannot have the format that is wanted.
    """
    if stored is None and wanted == WHILE_LOADING.method:
        return WHILE_LOADING
    if wanted in (None, None if stored is None else stored.method):
        return stored
    if stored is None:
        problem = "are not quantised, and only fp8 can be made of them while they are loaded"
    else:
        problem = f"are quantised with {stored.method}, and are served as they are"
    raise ModelError(f"quantization {wanted}: the weights {problem}", param="quantization")


def parse_quantization(raw: Any) -> Quantization | None:
    """Parse ``quantization_config``, which may be None or empty.

    Raises:
        ModelError: it is not supported; the message names the field.
    """
    if not raw:
        return None
    if not isinstance(raw, dict):
        raise ModelError("quantization_config is not a JSON object")
    match raw.get("quant_method"):
        case "compressed-tensors":
            return _compressed_tensors(raw)
        case "fp8":
            return _fp8(raw)
        case "awq":
            return _awq(raw)
        case "gptq":
            return _gptq(raw)
        case "mxfp4":
            return Quantization(method="mxfp4", ignored=_names(raw, "modules_to_not_convert"))
    supported = "compressed-tensors, fp8, awq, gptq, mxfp4"
    raise _unsupported(raw, "quant_method", supported)


def _compressed_tensors(raw: dict[str, Any]) -> Quantization:
    """vLLM's compressor: groups of layers, each with the format of its weights."""
    _require(raw, "format", "float-quantized", "naive-quantized")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported(raw, "config_groups", "at least one group")
    for name, group in groups.items():
        at = f"config_groups.{name}."
        weights = group.get("weights") or {}
        _require(weights, "type", "float", at=f"{at}weights.")
        _require(weights, "num_bits", 8, at=f"{at}weights.")
        _require(weights, "symmetric", True, None, at=f"{at}weights.")
        _require(weights, "strategy", "tensor", "channel", "block", at=f"{at}weights.")
        if weights["strategy"] == "block":
            _require(weights, "block_structure", list(BLOCK), at=f"{at}weights.")
        # Our kernels quantise activations more finely; see kernels.fp8.
        activations = group.get("input_activations")
        if activations is not None:
            _require(activations, "type", "float", at=f"{at}input_activations.")
            _require(activations, "num_bits", 8, at=f"{at}input_activations.")
    _require(raw.get("sparsity_config") or {}, "format", "dense", None, at="sparsity_config.")
    return Quantization(
        method="fp8",
        blocked=any(group["weights"]["strategy"] == "block" for group in groups.values()),
        ignored=_names(raw, "ignore"),
    )


def _fp8(raw: dict[str, Any]) -> Quantization:
    """Qwen and DeepSeek: a scale for each block or, without ``weight_block_size``, one in all."""
    _require(raw, "fmt", "e4m3", "float8_e4m3fn", None)
    _require(raw, "activation_scheme", "dynamic", "static", None)
    _require(raw, "weight_block_size", list(BLOCK), None)
    ignored = _names(raw, "modules_to_not_convert") + _names(raw, "ignored_layers")
    return Quantization(
        method="fp8", blocked=raw.get("weight_block_size") is not None, ignored=ignored
    )


def _awq(raw: dict[str, Any]) -> Quantization:
    _require(raw, "bits", 4)
    _require(raw, "version", "gemm", "GEMM", None)
    _require(raw, "zero_point", True, None)
    return Quantization(
        method="awq", group_size=_group_size(raw), ignored=_names(raw, "modules_to_not_convert")
    )


def _gptq(raw: dict[str, Any]) -> Quantization:
    _require(raw, "bits", 4)
    _require(raw, "checkpoint_format", "gptq", "gptq_v2", None)
    dynamic = raw.get("dynamic") or {}
    for pattern, changes in dynamic.items():
        _require(changes or {}, "bits", 4, None, at=f"dynamic.{pattern}.")
    return Quantization(
        method="gptq",
        # The first version of the format stores one less than the zero point.
        zero_offset=0 if raw.get("checkpoint_format") == "gptq_v2" else 1,
        reordered=bool(raw.get("desc_act")),
        group_size=_group_size(raw),
        ignored=tuple(f"re:{name[2:]}" for name in dynamic if name.startswith("-:"))
        + _names(raw, "modules_to_not_convert"),
    )


def _group_size(raw: dict[str, Any]) -> int:
    size = raw.get("group_size", 128)
    if not isinstance(size, int) or (size != -1 and (size < 8 or size % 8)):
        raise _unsupported(raw, "group_size", "-1 and multiples of 8")
    return size


def _names(raw: dict[str, Any], field: str) -> tuple[str, ...]:
    names = raw.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ModelError(f"quantization_config.{field} is not a list of names")
    return tuple(names)


def _require(raw: dict[str, Any], field: str, *values: object, at: str = "") -> None:
    if raw.get(field) not in values:
        expected = " or ".join(repr(value) for value in values if value is not None)
        raise _unsupported(raw, field, expected, at)


def _unsupported(raw: dict[str, Any], field: str, expected: str, at: str = "") -> ModelError:
    got = repr(raw.get(field))
    shown = got if len(got) < 60 else f"{got[:57]}..."
    return ModelError(
        f"quantization_config.{at}{field} is {shown}, which is not supported; only {expected}"
    )
