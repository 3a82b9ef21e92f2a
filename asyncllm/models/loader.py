"""Build a model and stream its checkpoint into place.

Every tensor is checked before the first byte is copied, so that a folder that does not fit fails at
once. Then each is copied from the mapped file into the parameter (or the part of a fused one) that
it belongs to, converted on the way; host memory holds no second copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.models.base import CausalLM
from asyncllm.models.layers.norm import LayerNorm, RMSNorm
from asyncllm.models.registry import model_class
from asyncllm.models.spec import ModelSpec

#: Called with bytes done and bytes in all.
Progress = Callable[[int, int], None]

_FLOATS = ("BF16", "F16", "F32", "F64")
_SHOWN = 3  # names in an error message


def load_model(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: Literal["auto", "dummy"] = "auto",
    progress: Progress | None = None,
    *,
    max_length: int | None = None,
) -> CausalLM:
    """Build the model that ``spec`` describes and fill it.

    Args:
        folder: holds ``model.safetensors``, or shards with their index; unused for "dummy".
        dtype: of the parameters, whatever the checkpoint's is.
        load_format: "auto" reads the checkpoint; "dummy" fills in small random numbers, the same
            ones each time on a kind of device.
        max_length: longest sequence to be served; by default ``spec.max_position_embeddings``.

    Raises:
        ModelError: the checkpoint is incomplete, damaged or of another model; the message names
            file, tensor and shapes.
    """
    build = model_class(spec.architecture)
    model = build(spec.config, dtype, torch.device(device), max_length)
    report = progress or (lambda done, total: None)
    with torch.no_grad():
        if load_format == "dummy":
            _fill_dummy(model, report)
        else:
            _fill(model, Path(folder), report)
    return model


class _Index(msgspec.Struct):
    """model.safetensors.index.json: the file of every tensor."""

    weight_map: dict[str, str]


class _Copy(NamedTuple):
    """One tensor of a file, by its name there, and where it goes."""

    name: str
    place: Tensor


def _fill(model: CausalLM, folder: Path, report: Progress) -> None:
    files = _weight_files(folder)
    plans = _match(model, folder, files)
    total = sum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        copied = 0
        with _open(file) as reader:
            for name, place in plans[file]:
                tensor = reader.get_tensor(name)
                place.copy_(tensor)
                copied += tensor.nbytes
                report(done + copied, total)
        done += file.stat().st_size
        report(done, total)


def _match(model: CausalLM, folder: Path, files: list[Path]) -> dict[Path, list[_Copy]]:
    """Find the place of every tensor in the files, without reading any."""
    missing = model.checkpoint_tensors()
    found: dict[str, Path] = {}
    unexpected: list[str] = []
    plans: dict[Path, list[_Copy]] = {file: [] for file in files}
    for file in files:
        with _open(file) as reader:
            for name in reader.offset_keys():
                wanted = model.checkpoint_name(name)
                if wanted is None:
                    continue
                if wanted in found:
                    raise ModelError(f"{file}: tensor {name!r} is also in {found[wanted]}")
                if wanted not in missing:
                    unexpected.append(f"{name!r} in {file.name}")
                    continue
                place = missing.pop(wanted)
                _check(reader.get_slice(name), name, place, file)
                found[wanted] = file
                plans[file].append(_Copy(name, place))
    absent = [f"{name!r} {list(place.shape)}" for name, place in missing.items()]
    problems = [f"missing {_listed(absent)}"] if absent else []
    problems += [f"unexpected {_listed(unexpected)}"] if unexpected else []
    if problems:
        kind = type(model).__name__
        raise ModelError(f"{folder}: tensors do not fit {kind}: {'; '.join(problems)}")
    return plans


def _check(header: Any, name: str, place: Tensor, file: Path) -> None:
    shape, dtype = list(header.get_shape()), header.get_dtype()
    if shape != list(place.shape):
        expected = list(place.shape)
        raise ModelError(f"{file}: tensor {name!r} has shape {shape}, expected {expected}")
    if dtype not in _FLOATS:
        supported = ", ".join(_FLOATS)
        raise ModelError(f"{file}: tensor {name!r} is {dtype}; only {supported} can be loaded")


def _listed(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        if any(folder.glob("*.bin")):
            raise ModelError(f"{folder} has PyTorch .bin weights only; convert them to safetensors")
        raise ModelError(f"{folder} has neither {single.name} nor {index.name}")
    try:
        names = sorted(
            set(msgspec.json.decode(index.read_bytes(), type=_Index).weight_map.values())
        )
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelError(f"{index} is not an index of shards: {error}") from None
    for name in names:
        if not (folder / name).exists():
            raise ModelError(f"{folder / name} is missing; {index.name} lists it")
    return [folder / name for name in names]


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{file} is damaged or incomplete: {error}") from None
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from None


def _fill_dummy(model: CausalLM, report: Progress) -> None:
    parameters = list(model.parameters())
    total = sum(parameter.nbytes for parameter in parameters)
    done = 0
    generator = torch.Generator(device=parameters[0].device).manual_seed(0)
    for parameter in parameters:
        parameter.normal_(0.0, 0.02, generator=generator)
        done += parameter.nbytes
        report(done, total)
    for module in model.modules():
        if isinstance(module, RMSNorm | LayerNorm):
            module.fill_neutral()
