"""Where kernel tests run."""

from __future__ import annotations

import pytest
import torch

from asyncllm.kernels.gpu import gpu_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPU = gpu_of(0) if DEVICE == "cuda" else None

on_hopper = pytest.mark.skipif(GPU is None or not GPU.is_hopper, reason="needs a Hopper GPU")
#: Of what also runs in the interpreter.
needs_fp8 = pytest.mark.skipif(
    GPU is not None and not GPU.has_fp8, reason="this GPU has no fp8: weights are expanded"
)
