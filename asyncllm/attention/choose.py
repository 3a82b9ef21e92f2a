"""The choice of attention kernels."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from asyncllm.attention.flashinfer import library as flashinfer
from asyncllm.attention.flashinfer.backend import FlashInferBackend
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.attention.warm_up import warm_up
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

    "triton" is our own kernels, "flashinfer" FlashInfer's, "sdpa" PyTorch's. "auto" is our own
    where they work, else PyTorch's; on a GPU, a log line says why. FlashInfer's libraries that are
    not built are compiled here, which takes minutes.

    Args:
        specs: of all layers.
        dtype: of the computation and of K and V.

    Raises:
        ModelError: the backend does not work here; the message says why.
    """
    if name == "sdpa":
        return SdpaBackend(kv)
    if name == "flashinfer":
        obstacle = _flashinfer_obstacle(specs, dtype, device)
    else:
        obstacle = _obstacle(device)
    cause: Exception | None = None
    if obstacle is None:
        try:
            backend: AttentionBackend
            if name == "flashinfer":
                backend = _flashinfer(kv, specs, dtype, device, upload)
            else:
                backend = PagedBackend(kv, upload)
            warm_up(backend, specs, dtype, device)
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
        return _too_old(MIN_CAPABILITY, capability)
    return None


def _too_old(least: tuple[int, int], capability: tuple[int, int]) -> str:
    needed, has = (".".join(map(str, pair)) for pair in (least, capability))
    return f"it needs compute capability {needed}, and this GPU has {has}"


def _flashinfer(
    kv: KVPages,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    upload: Upload,
) -> FlashInferBackend:
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    gpu = torch.cuda.get_device_capability(device), multiprocessors
    return FlashInferBackend(kv, specs, dtype, device, *gpu, upload)


def _flashinfer_obstacle(
    specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device
) -> str | None:
    """Why FlashInfer's kernels cannot work here."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if capability < flashinfer.MIN_CAPABILITY:
        return _too_old(flashinfer.MIN_CAPABILITY, capability)
    if not flashinfer.installed():
        return "it is not installed (pip install -e '.[cuda]')"
    problem = flashinfer.unsupported(specs, dtype)
    if problem is not None:
        return problem
    libraries = flashinfer.libraries_for(specs, dtype, capability)
    missing = [library for library in libraries if not library.is_built()]
    if missing and flashinfer.find_nvcc() is None:
        return (
            f"{len(missing)} of its kernels are not built, and there is no nvcc to compile them "
            "('asyncllm kernels build' does so ahead of time)"
        )
    if missing:
        log.warning(
            "compiling %d of FlashInfer's kernels, a minute or more each unless cached "
            "('asyncllm kernels build' does so ahead of time): %s",
            len(missing),
            ", ".join(map(str, missing)),
        )
    return None


def _summary(error: Exception) -> str:
    """One line, as a compiler prints thousands."""
    if isinstance(error, ModelError):
        return error.message
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"
