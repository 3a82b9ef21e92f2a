"""Activations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from asyncllm.kernels.support import in_triton

Activation = Callable[[Tensor], Tensor]

#: By their names in config.json, which ``models.config.base`` has too.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
}


@in_triton("activation")
def gated(x: Tensor, act: str) -> Tensor:
    """act(gate) * up of [tokens, 2 * size], gate first: [tokens, size].

    Args:
        act: a name in ``ACTIVATIONS``.
    """
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[act](gate) * up


@in_triton("activation")
def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """x * sigmoid(gate) of [tokens, size] each, whose rows may be any distance apart."""
    return (x.float() * gate.float().sigmoid()).to(x.dtype)
