"""Root-mean-square normalisation."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.reference.norm import rms_norm_reference
from asyncllm.kernels.support import has_triton_kernels
from asyncllm.kernels.types import Norm


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """Normalise [..., size], whose last dimension is contiguous; the same shape and dtype."""
    if has_triton_kernels(x):
        from asyncllm.kernels.triton.norm import rms_norm as launch
    else:
        launch = rms_norm_reference
    return launch(x, norm)
