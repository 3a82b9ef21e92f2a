"""Gated activations."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.reference.activation import gated_reference
from asyncllm.kernels.support import has_triton_kernels


def gated(x: Tensor, act: str) -> Tensor:
    """act(gate) * up of [tokens, 2 * size], gate first: [tokens, size].

    Args:
        act: a name in ``reference.activation.ACTIVATIONS``.
    """
    if has_triton_kernels(x):
        from asyncllm.kernels.triton.activation import gated as launch
    else:
        launch = gated_reference
    return launch(x, act)
