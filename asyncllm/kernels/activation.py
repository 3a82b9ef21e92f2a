"""Gated activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.native import has_triton_kernels

Activation = Callable[[Tensor], Tensor]

#: By their names in config.json.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def gated(x: Tensor, act: str) -> Tensor:
    """act(gate) * up of [tokens, 2 * size], gate first: [tokens, size].

    Args:
        act: one of ``ACTIVATIONS``.
    """
    if has_triton_kernels(x):
        from asyncllm.kernels.triton.activation import gated as launch

        return launch(x, act)
    return gated_reference(x, act)


def gated_reference(x: Tensor, act: str) -> Tensor:
    """``gated`` in plain torch."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[act](gate) * up


__all__ = ["ACTIVATIONS", "Activation", "gated", "gated_reference"]
