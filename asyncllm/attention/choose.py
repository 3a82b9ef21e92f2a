"""The choice of attention kernels."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from asyncllm.attention.flashinfer import FlashInferPrompts, unsupported
from asyncllm.attention.flashinfer_library import find_nvcc, installed, libraries_for
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.errors import ModelError
from asyncllm.kernels.support import MIN_CAPABILITY

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.attention.base import AttentionBackend, KVPages
    from asyncllm.config import AttentionName
    from asyncllm.kernels.types import AttentionSpec
    from asyncllm.kernels.upload import Upload

log = logging.getLogger(__name__)


def choose_backend(
    name: AttentionName,
    kv: KVPages,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    upload: Upload,
) -> AttentionBackend:
    """The attention backend of that name; its kernels are loaded and have run once.

    "triton" is our own kernels; "flashinfer" is the same, with FlashInfer's kernels for prompts;
    "sdpa" is PyTorch's. "auto" is our own where they work, else PyTorch's; on a GPU, a log line
    says why. FlashInfer's libraries that are not built are compiled here, which takes minutes.

    Args:
        specs: of all layers.
        dtype: of the computation and of K and V.

    Raises:
        ModelError: the backend does not work here; the message says why.
    """
    if name == "sdpa":
        return SdpaBackend(kv)
    obstacle = _obstacle(device)
    if obstacle is None and name == "flashinfer":
        obstacle = _flashinfer_obstacle(specs, dtype)
    cause: Exception | None = None
    if obstacle is None:
        try:
            prompts = FlashInferPrompts(kv, specs, dtype, device) if name == "flashinfer" else None
            backend = PagedBackend(kv, upload, prompts)
            backend.warm_up(specs, dtype, device)
        except Exception as error:  # compiler, loader and driver raise various types
            obstacle, cause = _summary(error), error
        else:
            return backend
    if name != "auto":
        raise ModelError(f"attention {name}: {obstacle}", param="attention") from cause
    if device.type == "cuda":
        log.warning("attention on PyTorch's kernels instead of our own: %s", obstacle)
    return SdpaBackend(kv)


def _obstacle(device: torch.device) -> str | None:
    """Why our own kernels cannot work here, as far as can be known before importing them."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if find_spec("triton") is None:
        return "Triton is not installed"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        needed, has = (".".join(map(str, pair)) for pair in (MIN_CAPABILITY, capability))
        return f"it needs compute capability {needed}, and this GPU has {has}"
    return None


def _flashinfer_obstacle(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> str | None:
    """Why FlashInfer's kernels cannot work here."""
    if not installed():
        return "it is not installed (pip install -e '.[cuda]')"
    problem = unsupported(specs, dtype)
    if problem is not None:
        return problem
    missing = [library for library in libraries_for(specs, dtype) if not library.is_built()]
    if missing and find_nvcc() is None:
        return (
            f"{len(missing)} of its kernels are not built, and there is no nvcc to compile them "
            "('asyncllm kernels build' does so ahead of time)"
        )
    if missing:
        log.warning(
            "compiling %d of FlashInfer's kernels, about a minute each unless cached "
            "('asyncllm kernels build' does so ahead of time)",
            len(missing),
        )
    return None


def _summary(error: Exception) -> str:
    """One line, as a compiler prints thousands."""
    if isinstance(error, ModelError):
        return error.message
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"
