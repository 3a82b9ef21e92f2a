from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]

#: By their names in config.json.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def gated_reference(x: Tensor, act: str) -> Tensor:
    """See ``kernels.activation.gated``."""
    gate, up = x.chunk(2, dim=-1)
    return ACTIVATIONS[act](gate) * up
