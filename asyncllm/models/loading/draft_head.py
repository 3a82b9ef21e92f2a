"""Load a head that drafts, from a folder of its own."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Final, Literal

import torch

from asyncllm.errors import ModelError
from asyncllm.models.base import CausalLM
from asyncllm.models.config.eagle3 import Eagle3Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.eagle3 import Eagle3Head
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.loading.checkpoint import Header, read_headers, read_tensor
from asyncllm.models.loading.copy_files import copy_files
from asyncllm.models.loading.loader import Progress, fill_dummy, match
from asyncllm.models.loading.weight_files import weight_files
from asyncllm.models.loading.weight_stream import WeightStream

#: The differences between ids of the model's tokens and of those that the head can draft.
_TO_TARGET: Final = "d2t"
#: Which of the model's tokens these are, which follows from the differences.
_IS_DRAFTED: Final = "t2d"
_EMBEDDING: Final = "embed_tokens.weight"


def add_eagle3(
    model: CausalLM,
    folder: Path,
    config: Eagle3Config,
    place: Placement,
    max_length: int,
    load_format: Literal["auto", "dummy"],
    report: Progress,
) -> None:
    """Give a model the head in this folder.

    Args:
        place: as the model's.
        max_length: of a sequence.

    Raises:
        ModelError: the checkpoint is incomplete, damaged or of another head; or no head can read
            the states of this model.
    """
    check_readable(model, config)
    assert isinstance(model, DecoderLM)
    headers = {} if load_format == "dummy" else _headers(folder)
    has_own = _EMBEDDING in headers
    if not has_own and config.layer.hidden_size != model.config.hidden_size:
        raise ModelError(
            f"{folder} has no {_EMBEDDING}, and the model's has another hidden_size",
            param="speculative_config",
        )
    embedding = None if has_own else model.model.embed_tokens
    number = model.config.num_hidden_layers
    with torch.no_grad():
        head = Eagle3Head(config, number, embedding, max_length, place)
        if load_format == "dummy":
            fill_dummy(head, report)
        else:
            _fill(head, folder, config, headers, place.device, report)
    model.head = head


def check_readable(model: CausalLM, config: Eagle3Config) -> None:
    """Check that the model has hidden states of all tokens where the head reads them.

    Raises:
        ModelError: it has not.
    """
    if not isinstance(model, DecoderLM) or model.model.last_with_keys + 1 < max(config.reads):
        raise ModelError(
            f"EAGLE-3 heads cannot draft for {type(model).__name__}: it lacks the hidden states "
            "of all tokens that they read",
            param="speculative_config",
        )


def _headers(folder: Path) -> dict[str, Header]:
    """By the head's names: ``midlayer`` is the only layer."""
    return {
        header.name.removeprefix("model.").replace("layers.0.", "midlayer.", 1): header
        for header in read_headers(weight_files(folder))
    }


def _fill(
    head: Eagle3Head,
    folder: Path,
    config: Eagle3Config,
    headers: dict[str, Header],
    device: torch.device,
    report: Progress,
) -> None:
    to_target = headers.pop(_TO_TARGET, None)
    headers.pop(_IS_DRAFTED, None)
    plans = match(head, folder, headers, {})
    if to_target is not None:
        head.target_ids = _target_ids(to_target, config).to(device)
    elif config.draft_vocab_size < config.layer.vocab_size:
        raise ModelError(
            f"{folder} has no tensor {_TO_TARGET!r}, which says what the "
            f"{config.draft_vocab_size} tokens of draft_vocab_size are",
            param="speculative_config",
        )
    with WeightStream(device) if device.type == "cuda" else nullcontext() as stream:
        copy_files(weight_files(folder), plans, device, stream, report)


def _target_ids(header: Header, config: Eagle3Config) -> torch.Tensor:
    """The model's id of each token that the head drafts: int64 [draft_vocab_size]."""
    size, most = config.draft_vocab_size, config.layer.vocab_size
    if header.dtype not in ("I64", "I32") or header.shape != [size]:
        raise ModelError(
            f"{header.file}: tensor {header.name!r} is {header.dtype} {header.shape}, not I64 "
            f"[{size}], draft_vocab_size"
        )
    ids = torch.arange(size) + read_tensor(header).long()
    if int(ids.min()) < 0 or int(ids.max()) >= most:
        raise ModelError(f"{header.file}: tensor {header.name!r} leads to ids beyond {most}")
    return ids
