"""Load a model with a head that drafts for it, which has a folder of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final, Literal

import torch

from asyncllm.errors import ModelError
from asyncllm.kernels.choice import FASTEST, Kernels
from asyncllm.models.base import CausalLM
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.eagle3 import Eagle3Head
from asyncllm.models.eagle3_config import Eagle3Config
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.loading.checkpoint import Header, read_headers, read_tensor
from asyncllm.models.loading.copy_files import copy_files
from asyncllm.models.loading.loader import Progress, fill_dummy, load_model, make_model, match
from asyncllm.models.loading.weight_files import weight_files
from asyncllm.models.loading.weight_stream import WeightStream
from asyncllm.models.spec import ModelSpec
from asyncllm.parallel.ranks import Alone, Ranks

#: The differences between ids of the model's tokens and of those that the head can draft.
_TO_TARGET: Final = "d2t"
#: Which of the model's tokens these are, which follows from the differences.
_IS_DRAFTED: Final = "t2d"
_EMBEDDING: Final = "embed_tokens.weight"
_META: Final = torch.device("meta")


def load_with_head(
    folder: Path,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    load_format: Literal["auto", "dummy"] = "auto",
    progress: Progress | None = None,
    *,
    max_length: int | None = None,
    ranks: Ranks | None = None,
    kernels: Kernels = FASTEST,
) -> CausalLM:
    """``load_model``, and the EAGLE-3 head that ``spec`` names.

    Raises:
        ModelError: as ``load_model``. Or the head's checkpoint is incomplete, damaged or of another
            head, or it cannot draft for this model; then nothing has been loaded.
    """
    config, headers = spec.eagle3, dict[str, Header]()
    if config is not None and load_format != "dummy":
        headers = _headers(config.folder)
        sketch = make_with_head(spec, torch.float32, _META, max_length, headers=headers)
        assert isinstance(sketch.head, Eagle3Head)
        match(sketch.head, config.folder, _weights(headers), {})
        _target_ids(config, headers)
    source = folder, spec, dtype, device, load_format, progress
    model = load_model(*source, max_length=max_length, ranks=ranks, kernels=kernels)
    if config is None:
        return model
    place = Placement(dtype, device, ranks=ranks or Alone(), kernels=kernels)
    with torch.no_grad():
        head = _make_head(model, config, place, max_length, headers)
        if load_format == "dummy":
            fill_dummy(head, lambda done, total: None)
        else:
            _fill(head, config, headers, device)
    model.head = head
    return model


def make_with_head(
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    max_length: int | None = None,
    *,
    headers: Mapping[str, Header] | None = None,
    ranks: Ranks | None = None,
    kernels: Kernels = FASTEST,
    **options: Any,
) -> CausalLM:
    """``make_model``, and its head.

    Args:
        headers: of the head's checkpoint; without, it has the usual tensors.
    """
    model = make_model(spec, dtype, device, max_length, ranks=ranks, kernels=kernels, **options)
    if spec.eagle3 is not None:
        place = Placement(dtype, device, ranks=ranks or Alone(), kernels=kernels)
        model.head = _make_head(model, spec.eagle3, place, max_length, headers or {})
    return model


def _make_head(
    model: CausalLM,
    config: Eagle3Config,
    place: Placement,
    max_length: int | None,
    headers: Mapping[str, Header],
) -> Eagle3Head:
    """Allocate the head; it shares the model's embedding if its checkpoint has none."""
    if not isinstance(model, DecoderLM) or model.model.last_with_keys + 1 < max(config.reads):
        raise ModelError(
            f"EAGLE-3 heads cannot draft for {type(model).__name__}: it lacks the hidden states "
            "of all tokens that they read",
            param="speculative_config",
        )
    if (has_own := _EMBEDDING in headers) is False and (
        config.layer.hidden_size != model.config.hidden_size
    ):
        raise ModelError(
            f"{config.folder} has no {_EMBEDDING}, and the model's has another hidden_size",
            param="speculative_config",
        )
    embedding = None if has_own else model.model.embed_tokens
    length = max_length or model.config.context_length
    return Eagle3Head(config, model.config.num_hidden_layers, embedding, length, place)


def _headers(folder: Path) -> dict[str, Header]:
    """By the head's names: ``midlayer`` is the only layer."""
    return {
        header.name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): header
        for header in read_headers(weight_files(folder))
    }


def _weights(headers: dict[str, Header]) -> dict[str, Header]:
    others = (_TO_TARGET, _IS_DRAFTED)
    return {name: header for name, header in headers.items() if name not in others}


def _fill(
    head: Eagle3Head, config: Eagle3Config, headers: dict[str, Header], device: torch.device
) -> None:
    plans = match(head, config.folder, _weights(headers), {})
    ids = _target_ids(config, headers)
    head.target_ids = None if ids is None else ids.to(device)
    with WeightStream(device) if device.type == "cuda" else nullcontext() as stream:
        copy_files(weight_files(config.folder), plans, device, stream, lambda done, total: None)


def _target_ids(config: Eagle3Config, headers: dict[str, Header]) -> torch.Tensor | None:
    """The model's id of each token that the head drafts, int64 [draft_vocab_size]; None: the
    same."""
    size, most = config.draft_vocab_size, config.layer.vocab_size
    if (header := headers.get(_TO_TARGET)) is None:
        if size == most:
            return None
        raise ModelError(
            f"{config.folder} has no tensor {_TO_TARGET!r}, which says what the {size} tokens of "
            "draft_vocab_size are",
            param="speculative_config",
        )
    if header.dtype not in ("I64", "I32") or header.shape != [size]:
        raise ModelError(
            f"{header.file}: tensor {header.name!r} is {header.dtype} {header.shape}, not I64 "
            f"[{size}], draft_vocab_size"
        )
    ids = torch.arange(size) + read_tensor(header).long()
    if int(ids.min()) < 0 or int(ids.max()) >= most:
        raise ModelError(f"{header.file}: tensor {header.name!r} leads to ids beyond {most}")
    return ids
