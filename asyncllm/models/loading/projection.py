"""Whether a checkpoint has an output projection of its own, where config.json is wrong about it."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import torch

from asyncllm.models.loading.checkpoint import Header, read_tensor
from asyncllm.models.registry import is_backbone
from asyncllm.models.spec import ModelSpec

log = logging.getLogger(__name__)

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
