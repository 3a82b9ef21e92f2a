"""Which attention kernels a run takes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from asyncllm.attention.flashinfer import FlashInferBackend, unsupported
from asyncllm.attention.prebuild import find_nvcc, installed, modules_for
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.attention.base import AttentionBackend, AttentionSpec, KVPages
    from asyncllm.config import AttentionName

log = logging.getLogger(__name__)

#: The oldest GPUs that FlashInfer's kernels are built for here: Ampere.
MIN_CAPABILITY = (8, 0)


def choose_backend(
    name: AttentionName,
    kv: KVPages,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionBackend:
    """The attention backend of that name; FlashInfer's kernels are loaded and have run once.

    With "auto" that is FlashInfer where it works, and otherwise PyTorch's own kernels; on a GPU a
    log line says why. Kernels that are not built are compiled here, which takes minutes.

    Args:
        specs: of all layers.
        dtype: that the model computes in and K and V are stored in.

    Raises:
        ModelError: "flashinfer" was asked for and does not work here; the message says why.
    """
    if name == "sdpa":
        return SdpaBackend(kv)
    obstacle = _obstacle(specs, dtype, device)
    cause: Exception | None = None
    if obstacle is None:
        try:
            return _flashinfer(kv, specs, dtype, device)
        except Exception as error:  # of the compiler, the loader and the driver, each its own
            obstacle, cause = _summary(error), error
    if name == "flashinfer":
        raise ModelError(f"attention flashinfer: {obstacle}", param="attention") from cause
    if device.type == "cuda":
        log.warning("attention on PyTorch's kernels instead of FlashInfer's: %s", obstacle)
    return SdpaBackend(kv)


def _obstacle(
    specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device
) -> str | None:
    """What can be known to stand in the way of FlashInfer before it is imported."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if not installed():
        return "it is not installed (pip install 'asyncllm[cuda]')"
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    return unsupported(specs, dtype)


def _flashinfer(
    kv: KVPages, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device
) -> FlashInferBackend:
    missing = [module for module in modules_for(specs, dtype) if not module.is_built()]
    if missing:
        if find_nvcc() is None:
            raise ModelError(
                f"{len(missing)} of its kernels are not built, and there is no nvcc to compile "
                "them ('asyncllm kernels build' does so ahead of time)"
            )
        log.warning(
            "compiling %d of FlashInfer's kernels, about a minute each unless cached "
            "('asyncllm kernels build' does so ahead of time)",
            len(missing),
        )
    backend = FlashInferBackend(kv, specs, dtype, device)
    backend.warm_up()
    return backend


def _summary(error: Exception) -> str:
    """One line: what the compiler printed can be thousands."""
    if isinstance(error, ModelError):
        return error.message
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"


__all__ = ["choose_backend"]
