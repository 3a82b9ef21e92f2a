"""Feed-forward layers."""

from __future__ import annotations

from torch import Tensor, nn

from asyncllm.kernels.activation import ACTIVATIONS
from asyncllm.kernels.types import Norm
from asyncllm.models.layers.linear import FusedLinear, Kept, RowLinear
from asyncllm.models.layers.parameter import Placement


class PlainMLP(nn.Module):
    """down(act(up(x))): [tokens, hidden] -> [tokens, hidden]."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        place: Placement,
        *,
        bias: bool = False,
    ):
        super().__init__()
        inner = Kept.share(intermediate_size, "intermediate_size", place.ranks)
        self.up_proj = FusedLinear(hidden_size, {"up_proj": inner}, place, bias=bias)
        self.down_proj = RowLinear(inner, hidden_size, place, bias=bias)
        self.act = ACTIVATIONS[act]

    def forward(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Normalises x first, and adds to ``residual`` in place."""
        out: Tensor = self.down_proj(self.act(self.up_proj(x, norm=norm)), residual=residual)
        return out


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): [tokens, hidden] -> [tokens, hidden].

    Args:
        act: name of the activation.
        fused_on_disk: gate and up are one matrix in the checkpoint too.
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
        inner = Kept.share(intermediate_size, "intermediate_size", place.ranks)
        apart = {"gate_proj": inner, "up_proj": inner}
        outputs = {"gate_up_proj": Kept.of(inner, inner)} if fused_on_disk else apart
        self.gate_up_proj = FusedLinear(hidden_size, outputs, place, bias=bias)
        self.down_proj = RowLinear(inner, hidden_size, place, bias=bias)
        self.act = act

    def forward(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Normalises x first, and adds to ``residual`` in place."""
        hidden = self.gate_up_proj.gated(x, self.act, self.down_proj, norm=norm)
        out: Tensor = self.down_proj(hidden, residual=residual)
        return out
