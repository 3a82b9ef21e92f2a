"""The choice of attention kernels, and their first run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, ForwardBatch, KVPages
from asyncllm.attention.flashinfer import library as flashinfer
from asyncllm.attention.flashinfer.backend import FlashInferBackend
from asyncllm.attention.paged import OrderedBackend, PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.config import AttentionName
from asyncllm.errors import ModelError
from asyncllm.kernels.gpu import dotted, gpu_of
from asyncllm.kernels.support import obstacle
from asyncllm.kernels.types import AttentionSpec, HeadEncoding
from asyncllm.kernels.upload import Upload

BackendName = AttentionName | Literal["ordered"]

#: (slot, start, q_len) of each row: a decode row and a longer one, and a decode row alone.
_STEPS = ([[0, 0, 1], [0, 0, 2]], [[0, 0, 1]])


def warm_up(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run every kind of layer, in a step of decode rows and in a mixed one.

    Writes to page 0, so it must come before the first sequence.

    Args:
        specs: of all layers.
        dtype: of the computation.

    Raises:
        Exception: from compiler, loader or driver, for instance because kernels were built for
            another GPU.
    """
    kinds = {spec.kind: spec for spec in specs}
    table = torch.zeros(1, 2, dtype=torch.int32, device=device)
    for step in _STEPS:
        rows = np.array(step, dtype=np.int32)
        tokens = int(rows[:, 2].sum())
        zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
        plan = backend.plan(rows, table)
        batch = ForwardBatch(zeros, zeros, zeros, sample_rows=None, backend=backend, plan=plan)
        for spec in kinds.values():
            qkv = torch.zeros(tokens, spec.projected_size, dtype=dtype, device=device)
            sinks = qkv.new_zeros(spec.num_heads) if spec.has_sinks else None
            backend.forward(qkv, spec, HeadEncoding(None, None, None, sinks), batch)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


log = logging.getLogger(__name__)


def choose_backend(
    name: BackendName,
    kv: KVPages,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    upload: Upload,
) -> AttentionBackend:
    """The attention backend of that name; its kernels are loaded and have run once.

    "triton" is our own kernels, "ordered" those of them of which each token has the same bits in
    any step, "flashinfer" FlashInfer's, "sdpa" PyTorch's. "auto" is our own
    where they work, else PyTorch's; before Hopper, for which ours were tuned, FlashInfer's come
    first. FlashInfer's libraries that are not built are compiled here, which takes minutes.

    Args:
        specs: of all layers.
        dtype: of the computation.

    Raises:
        ModelError: the backend does not work here; the message says why.
    """
    if name == "sdpa":
        return SdpaBackend(kv)
    keys, _ = kv.layer(kv.first_layer)
    of_cache = None if keys.dtype == dtype else keys.dtype
    for candidate in _automatic(device) if name == "auto" else (name,):
        problem = _obstacle(candidate, specs, dtype, device, of_cache)
        cause: Exception | None = None
        if problem is None:
            try:
                backend = _made(candidate, kv, specs, dtype, device, upload)
                warm_up(backend, specs, dtype, device)
            except Exception as error:  # compiler, loader and driver raise various types
                problem, cause = _summary(error), error
            else:
                return backend
        if name != "auto":
            raise ModelError(f"attention {name}: {problem}", param="attention") from cause
        log.warning("attention does not run on %s: %s", candidate, problem)
    return SdpaBackend(kv)


def _automatic(device: torch.device) -> tuple[BackendName, ...]:
    """What "auto" tries in turn. ``say_what_runs`` has logged why our kernels do not run at all."""
    if device.type != "cuda" or obstacle(device) is not None:
        return ()
    if gpu_of(device).has_pdl or not flashinfer.installed():
        return ("triton",)
    return ("flashinfer", "triton")


def own_backend(name: BackendName) -> type[PagedBackend]:
    """The backend of our own kernels."""
    return OrderedBackend if name == "ordered" else PagedBackend


def _made(
    name: BackendName,
    kv: KVPages,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    upload: Upload,
) -> AttentionBackend:
    if name != "flashinfer":
        return own_backend(name)(kv, upload)
    gpu = gpu_of(device)
    return FlashInferBackend(kv, specs, dtype, device, gpu.capability, gpu.multiprocessors, upload)


def _obstacle(
    name: BackendName,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
    of_cache: torch.dtype | None,
) -> str | None:
    """Why these kernels cannot work here, as far as can be known before loading them."""
    if device.type != "cuda":
        return "it needs a CUDA device"
    if name == "flashinfer":
        return _flashinfer_obstacle(specs, dtype, gpu_of(device).capability, of_cache)
    return obstacle(device)


def _flashinfer_obstacle(
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    capability: tuple[int, int],
    of_cache: torch.dtype | None,
) -> str | None:
    """Why FlashInfer's kernels cannot work on such a GPU."""
    if capability < flashinfer.MIN_CAPABILITY:
        return (
            f"it needs compute capability {dotted(flashinfer.MIN_CAPABILITY)}, and this GPU has "
            f"{dotted(capability)}"
        )
    if not flashinfer.installed():
        return "it is not installed (pip install -e '.[cuda]')"
    problem = flashinfer.unsupported(specs, dtype)
    if problem is not None:
        return problem
    libraries = flashinfer.libraries_for(specs, dtype, capability, of_cache)
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
