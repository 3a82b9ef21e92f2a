"""Build a model and stream its checkpoint into place.

First, every tensor is checked against the model on the meta device, so that a folder that does not
fit fails before anything is allocated, whatever sizes config.json has. Then each tensor is copied
into its parameter, or part of one, and converted on the way: streamed to a GPU, or from the mapped
file; host memory holds no second copy of the model. A quantised matrix is several tensors; it is
dequantised if there are no kernels for it.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from asyncllm.errors import ModelError
from asyncllm.kernels.choice import FASTEST, Kernels
from asyncllm.models.base import CausalLM, Checkpointed
from asyncllm.models.layers.moe import Experts
from asyncllm.models.layers.parameter import HasNeutral, Placement
from asyncllm.models.loading.allocate import (
    Kept,
    LayoutOf,
    allocate,
    can_keep,
    dummy_layout,
    quantisable,
)
from asyncllm.models.loading.checkpoint import (
    FLOATS,
    Header,
    check_sizes,
    name_on_disk,
    read_headers,
    read_tensor,
    text_part,
)
from asyncllm.models.loading.copy_files import Source, copy_files
from asyncllm.models.loading.kv_scales import is_kv_scale
from asyncllm.models.loading.quantized_tensors import (
    Layout,
    StoredMatrix,
    find_matrices,
    matrices_to_quantise,
)
from asyncllm.models.loading.weight_files import weight_files
from asyncllm.models.loading.weight_stream import WeightStream
from asyncllm.models.quant.place import Each, Place, Sliced
from asyncllm.models.quant.weight import QuantizedWeight
from asyncllm.models.registry import is_backbone, is_multimodal, model_class
from asyncllm.models.spec import ModelSpec
from asyncllm.parallel.ranks import Alone, Ranks

log = logging.getLogger(__name__)

#: Called with bytes done and the total.
Progress = Callable[[int, int], None]

#: The module of a matrix of one expert, and the tensor that may have those of all.
_OF_EXPERT = re.compile(r"\.experts\.\d+\.(gate_proj|up_proj|down_proj)$")
_IN_ALL = {
    **dict.fromkeys(("gate_proj", "up_proj"), ".experts.gate_up_proj"),
    "down_proj": ".experts.down_proj",
}
_MAX_NAMES, _MAX_CHARACTERS = 3, 200  # of names in an error message


def load_model(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device | str,
    load_format: Literal["auto", "dummy"] = "auto",
    progress: Progress | None = None,
    *,
    max_length: int | None = None,
    ranks: Ranks | None = None,
    kernels: Kernels = FASTEST,
) -> CausalLM:
    """Build the model that ``spec`` describes and fill it.

    Args:
        folder: holds ``model.safetensors`` or ``pytorch_model.bin``, or shards with their index;
            unused for "dummy".
        dtype: of parameters that are not quantised, whatever the checkpoint's is.
        load_format: "auto" reads the checkpoint; "dummy" fills in small random numbers, which are
            reproducible on each kind of device.
        max_length: longest sequence to serve; by default ``spec.max_position_embeddings``.
        ranks: whose share of the model is loaded; by default all of it.
        kernels: what its layers launch.

    Raises:
        ModelError: the checkpoint is incomplete, damaged or of another model; the message names
            file, tensor and shapes. Or the model cannot be divided among the ranks.
    """
    device = torch.device(device)
    make = partial(make_model, dtype=dtype, device=device, max_length=max_length)
    make = partial(make, ranks=ranks, kernels=kernels)
    report = progress or (lambda done, total: None)
    quantization = spec.quantization
    keep: Kept = "none" if quantization is None else can_keep(quantization, dtype, device)
    is_asked = device.type == "cuda" or (quantization is not None and quantization.while_loading)
    if quantization is not None and is_asked and keep in ("experts", "none"):
        log.warning(
            "%s weights%s are expanded to %s when loaded, as no kernels for this device take them",
            quantization.method,
            " but those of experts" if keep == "experts" else "",
            str(dtype).removeprefix("torch."),
        )
    with torch.no_grad():
        if load_format == "dummy":
            model = make(spec, keep=keep)
            fill_dummy(model, report)
        else:
            checkpoint = _read_checkpoint(Path(folder), spec)
            spec = checkpoint.spec
            model = make(spec, keep=keep, layout_of=partial(_layout, checkpoint.matrices))
            plans = match(model, checkpoint.folder, checkpoint.headers, checkpoint.matrices)
            with WeightStream(device) if device.type == "cuda" else nullcontext() as stream:
                copy_files(checkpoint.files, plans, device, stream, report)
    return model


def make_model(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int | None = None,
    *,
    keep: Kept = "none",
    layout_of: LayoutOf | None = None,
    ranks: Ranks | None = None,
    kernels: Kernels = FASTEST,
) -> CausalLM:
    """Allocate the parameters of a model, or of one rank's share, without filling them.

    Args:
        keep: the weights that stay quantised.
        layout_of: see ``allocate``; by default, as config.json says.
    """
    quantization = None if keep == "none" else spec.quantization
    place = Placement(dtype, device, quantization is not None, ranks or Alone(), kernels)
    model = model_class(spec.architecture)(spec.config, place, max_length)
    if spec.predicts_ahead:
        model.add_predictor(place)
    if quantization is not None:
        allocate(model, place, layout_of or dummy_layout(quantization), keep)
    return model


class _Checkpoint(NamedTuple):
    """A checkpoint that fits its model: files, tensors and matrices by the model's names."""

    folder: Path
    spec: ModelSpec
    files: list[Path]
    headers: dict[str, Header]
    matrices: dict[str, StoredMatrix]


def _read_checkpoint(folder: Path, spec: ModelSpec) -> _Checkpoint:
    """Read and check everything but the tensors' contents."""
    files = weight_files(folder)
    stored = read_headers(files)
    own_name = text_part if is_multimodal(spec.architecture) else str
    named = [(name, header) for header in stored if (name := own_name(header.name)) is not None]
    check_sizes(spec.config, (name for name, _ in named))
    spec = with_projection(spec, folder, named)
    sketch = make_model(spec, torch.float32, torch.device("meta"))
    headers = _wanted(sketch, named)
    if spec.predicts_ahead and not any(name.startswith("predictor.") for name in headers):
        raise ModelError(f"{folder} has no layer that predicts further tokens (MTP)")
    matrices: dict[str, StoredMatrix] = {}
    quantization = spec.quantization
    if quantization is not None and quantization.while_loading:
        matrices = matrices_to_quantise(quantization, headers, quantisable(sketch))
    elif quantization is not None:
        known = sketch.checkpoint_tensors()
        matrices = find_matrices(quantization, headers, known, read_tensor)
    match(sketch, folder, headers, matrices)
    return _Checkpoint(folder, spec, files, headers, matrices)


def _layout(matrices: Mapping[str, StoredMatrix], module: str, _: int) -> Layout | None:
    in_all = _OF_EXPERT.sub(lambda found: _IN_ALL[found[1]], module)
    stored = matrices.get(f"{module}.weight") or matrices.get(in_all)
    return None if stored is None else stored.layout(read_tensor)


def _wanted(model: CausalLM, headers: list[tuple[str, Header]]) -> dict[str, Header]:
    """The headers that the model uses, by its names."""
    wanted: dict[str, Header] = {}
    for stored_name, header in headers:
        name = model.checkpoint_name(stored_name)
        # Empty ones are such as those of no shared expert.
        if name is None or 0 in header.shape or is_kv_scale(stored_name):
            continue
        if name in wanted:
            raise ModelError(
                f"{header.file}: tensor {header.name!r} is also in {wanted[name].file}"
            )
        wanted[name] = header
    return wanted


def match(
    model: Checkpointed, folder: Path, headers: dict[str, Header], matrices: dict[str, StoredMatrix]
) -> dict[Path, list[Source]]:
    """The place of every tensor, by the file that holds it or the largest part of it."""
    all_stored: dict[str, Header | StoredMatrix] = {**headers, **matrices}
    missing = _experts_as_stored(model, all_stored)
    unexpected: list[str] = []
    plans: dict[Path, list[Source]] = defaultdict(list)
    for name, stored in all_stored.items():
        main = stored if isinstance(stored, Header) else stored.main
        if name not in missing:
            unexpected.append(f"{main.name!r} in {main.file.name}")
            continue
        target = missing.pop(name)
        _check(stored, main, target)
        plans[main.file].append(Source(stored, target))
    known = {name: stored.name for name, stored in headers.items()}
    absent = [
        f"{(name_on_disk(name, known) if number < _MAX_NAMES else name)!r} {list(target.shape)}"
        for number, (name, target) in enumerate(missing.items())
    ]
    problems = [f"missing {_listed(absent)}"] if absent else []
    problems += [f"unexpected {_listed(unexpected)}"] if unexpected else []
    if problems:
        kind = type(model).__name__
        raise ModelError(f"{folder}: tensors do not fit {kind}: {'; '.join(problems)}")
    return plans


def _experts_as_stored(
    model: Checkpointed, stored: Mapping[str, Header | StoredMatrix]
) -> dict[str, Place]:
    """``checkpoint_tensors``, with experts as the checkpoint has them.

    Which layout that is depends on who has written it: three matrices of each expert, or two
    tensors of all, with the two dimensions of an expert in either order (in one order in MXFP4).
    """
    if any(name.endswith(".experts.gate_up_proj") for name in stored):
        for module in model.modules():
            if isinstance(module, Experts):
                module.is_fused_on_disk = True
    places = model.checkpoint_tensors()
    turned = {
        name: place.mT
        for name, place in places.items()
        if name.rpartition(".")[0].endswith(".experts")
        and isinstance(place, Tensor | Sliced | Each)
        and len(place.shape) == 3  # no biases
        and not _is_mxfp4(stored.get(name))
    }
    fits = all(n in stored and stored[n].shape == list(p.shape) for n, p in turned.items())
    return places | turned if fits else places


def _is_mxfp4(stored: Header | StoredMatrix | None) -> bool:
    return isinstance(stored, StoredMatrix) and stored.quantization.method == "mxfp4"


def _check(stored: Header | StoredMatrix, main: Header, target: Place) -> None:
    expected = list(target.shape)
    if stored.shape != expected:
        raise ModelError(
            f"{main.file}: tensor {main.name!r} has shape {stored.shape}, expected {expected}"
        )
    if isinstance(stored, Header) and stored.dtype not in FLOATS:
        supported = ", ".join(FLOATS)
        raise ModelError(
            f"{main.file}: tensor {main.name!r} is {stored.dtype}; only {supported} can be loaded"
        )


def _listed(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(name[:_MAX_CHARACTERS] for name in names[:_MAX_NAMES]) + (
        f" and {more} more" if more > 0 else ""
    )


def fill_dummy(model: Checkpointed, report: Progress) -> None:
    parameters = list(model.parameters())
    total = sum(parameter.nbytes for parameter in parameters)
    done = 0
    generator = torch.Generator(device=parameters[0].device).manual_seed(0)
    for parameter in parameters:
        if parameter.dtype in (torch.float32, torch.float16, torch.bfloat16):
            parameter.normal_(0.0, 0.02, generator=generator)
        done += parameter.nbytes
        report(done, total)
    for module in model.modules():
        if isinstance(module, HasNeutral):
            module.fill_neutral()
        elif isinstance(module, QuantizedWeight):
            module.fill_dummy(generator)


_PROJECTION = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


def with_projection(spec: ModelSpec, folder: Path, named: list[tuple[str, Header]]) -> ModelSpec:
    """``spec`` with ``tie_word_embeddings`` as the weights have it.

    A projection that differs from the token embedding is used, as transformers does, although
    config.json says that they are the same. Embedding models without a projection, such as
    Qwen3-Embedding-8B, may say that they have one.

    Args:
        named: all tensors, by their names in a checkpoint of text alone.
    """
    headers = dict(named)
    if is_backbone(spec.architecture):
        return spec
    own = headers.get(_PROJECTION)
    if spec.config.tie_word_embeddings:
        embedding = next((h for name, h in named if name.endswith(_EMBEDDING)), None)
        if own is None or embedding is None or _is_equal(own, embedding):
            return spec
        log.warning(
            "%s differs from the token embedding and is used, although config.json says that they "
            "are tied",
            own.name,
        )
        return _tied(spec, False)
    has_part = any(name.startswith("lm_head.") for name in headers)
    return spec if has_part or not (folder / "modules.json").is_file() else _tied(spec, True)


def _is_equal(own: Header, embedding: Header) -> bool:
    if (own.dtype, own.shape) != (embedding.dtype, embedding.shape):
        return False
    return torch.equal(read_tensor(own), read_tensor(embedding))


def _tied(spec: ModelSpec, tied: bool) -> ModelSpec:
    config = msgspec.structs.replace(spec.config, tie_word_embeddings=tied)
    return msgspec.structs.replace(spec, config=config)
