"""The Mamba-2 layer of Granite 4 and Nemotron-H."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import Norm
from asyncllm.kernels.types.recurrent import LayerState, Mamba, StateRows
from asyncllm.models.layers.linear import FusedLinear, Kept, RowLinear
from asyncllm.models.layers.norm import GroupedRMSNorm, RMSNorm, SharedRMSNorm
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.recurrent import HeadNumbers, RecurrentLayer, ShortConvolution
from asyncllm.models.state import StateShape


class MambaLayer(RecurrentLayer):
    """[tokens, hidden] -> [needed tokens, hidden]; ranks share heads, and the groups of keys and
    queries if there are several.

    Args:
        layer: its number.
        state: of all ranks' heads.
        eps: of the norm of the heads of a group.
        limits: see ``kernels.types.recurrent.Mamba``.
    """

    def __init__(
        self,
        hidden_size: int,
        state: StateShape,
        layer: int,
        place: Placement,
        *,
        eps: float,
        limits: tuple[float, float],
        conv_bias: bool,
        bias: bool,
    ):
        super().__init__()
        self.layer = layer
        count = (state.channels - state.heads * state.values) // (2 * state.keys)
        groups = Kept(1, (slice(0, 1),))  # all ranks have it
        if count > 1:
            groups = Kept.share(count, "groups of keys", place.ranks)
        self.kernels = place.kernels
        heads = Kept.share(state.heads, "mamba_n_heads", place.ranks)
        values, keys = heads.times(state.values), groups.times(state.keys)
        channels = Kept.of(values, keys, keys)
        inputs = {"in_proj": Kept.of(values, values, keys, keys, heads)}
        self.in_proj = FusedLinear(hidden_size, inputs, place, bias=bias)
        self.conv1d = ShortConvolution(channels, state.width, place, bias=conv_bias)
        self.numbers = HeadNumbers(heads, ("A_log", "dt_bias", "D"), place)
        if count > 1:
            size = state.heads // count * state.values
            self.norm: RMSNorm = GroupedRMSNorm(values, size, eps, place)
        else:
            self.norm = SharedRMSNorm(values, partial(RMSNorm, eps=eps, place=place), place.ranks)
        self.out_proj = RowLinear(values, hidden_size, place, bias=bias)
        self.limits = limits
        self.groups = groups.size
        self.state = state._replace(channels=channels.size, heads=heads.size)

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None,
        batch: ForwardBatch,
        *,
        norm: Norm | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        net = Mamba(
            heads=self.state.heads,
            groups=self.groups,
            key_dim=self.state.keys,
            value_dim=self.state.values,
            convolution=self.conv1d.weight,
            bias=self.conv1d.bias,
            decay=self.numbers["A_log"],
            step_bias=self.numbers["dt_bias"],
            skip=self.numbers["D"],
            limits=self.limits,
        )

        def mix(inputs: tuple[Tensor, ...], state: LayerState, rows: StateRows) -> Tensor:
            return self.kernels.mamba(*inputs, net, state, rows)

        mixed = batch.recur(self.layer, mix, self.in_proj(x, norm=norm))
        out: Tensor = self.out_proj(self.norm(batch.needed(mixed)), residual=residual)
        return out
