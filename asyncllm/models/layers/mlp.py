"""Feed-forward layers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from asyncllm.errors import ModelError
from asyncllm.models.layers.linear import FusedLinear, Linear
from asyncllm.models.layers.parameter import Placement

Activation = Callable[[Tensor], Tensor]

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": F.gelu,
    "gelu_pytorch_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def activation(name: str) -> Activation:
    """The activation config.json calls by this name.

    Raises:
        ModelError: it is not supported.
    """
    if name not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ModelError(f"activation {name!r} is not supported; {supported} are")
    return _ACTIVATIONS[name]


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): [tokens, hidden] -> [tokens, hidden].

    Args:
        act: name of the activation.
        fused_on_disk: the checkpoint, too, has gate and up in one matrix.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        place: Placement,
        *,
        bias: bool = False,
        fused_on_disk: bool = False,
    ):
        super().__init__()
        apart = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        outputs = {"gate_up_proj": 2 * intermediate_size} if fused_on_disk else apart
        self.gate_up_proj = FusedLinear(hidden_size, outputs, place, bias=bias)
        self.down_proj = Linear(intermediate_size, hidden_size, place, bias=bias)
        self.act = activation(act)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(self.act(gate) * up)
        return out
