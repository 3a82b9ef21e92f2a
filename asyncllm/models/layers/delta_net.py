"""The gated delta net of Qwen3-Next and Qwen3.5."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import Norm
from asyncllm.kernels.types.recurrent import DeltaNet, LayerState, StateRows
from asyncllm.models.config.qwen3_next import Qwen3NextConfig
from asyncllm.models.layers.linear import Kept, MixedLinear, RowLinear, rows_by_part
from asyncllm.models.layers.norm import RMSNorm
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.recurrent import HeadNumbers, RecurrentLayer, ShortConvolution


class GatedDeltaNet(RecurrentLayer):
    """[tokens, hidden] -> [needed tokens, hidden]; ranks share key heads, and the value heads that
    those serve.

    Args:
        layer: its number.
        grouped_on_disk: there is one matrix of queries, keys, values and gates in the checkpoint,
            sorted by key heads, and one for the other two projections; otherwise there are four.
    """

    def __init__(
        self, config: Qwen3NextConfig, layer: int, place: Placement, *, grouped_on_disk: bool
    ):
        super().__init__()
        self.layer = layer
        self.kernels = place.kernels
        hidden, ranks = config.hidden_size, place.ranks
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        group = config.linear_num_value_heads // config.linear_num_key_heads
        key_heads = Kept.share(config.linear_num_key_heads, "linear_num_key_heads", ranks)
        own = key_heads.size
        keys, heads = key_heads.times(key_dim), key_heads.times(group)
        values = heads.times(value_dim)
        channels = Kept.of(keys, keys, values)
        if grouped_on_disk:
            sizes = key_dim, key_dim, group * value_dim, group * value_dim
            inputs = {"in_proj_qkvz": key_heads.times(sum(sizes))}
            gates = {"in_proj_ba": heads.times(2)}
            orders = {
                "in_proj_qkvz": torch.cat(rows_by_part(own, sizes)),
                "in_proj_ba": torch.cat(rows_by_part(own, (group, group))),
            }
        else:
            inputs, orders = {"in_proj_qkv": channels, "in_proj_z": values}, {}
            gates = {"in_proj_b": heads, "in_proj_a": heads}
        self.in_proj = MixedLinear(hidden, inputs, gates, place, orders=orders)
        self.conv1d = ShortConvolution(channels, config.linear_conv_kernel_dim, place)
        self.numbers = HeadNumbers(heads, ("A_log", "dt_bias"), place)
        self.norm = RMSNorm(value_dim, config.rms_norm_eps, place)
        self.out_proj = RowLinear(values, hidden, place)
        self.sizes = own, heads.size, key_dim, value_dim
        state = config.state(layer)
        assert state is not None
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
        net = DeltaNet(
            *self.sizes,
            self.conv1d.weight,
            self.numbers["A_log"],
            self.numbers["dt_bias"],
            self.norm.weight,
            self.norm.eps,
        )

        def mix(inputs: tuple[Tensor, ...], state: LayerState, rows: StateRows) -> Tensor:
            projected, gates = inputs
            return self.kernels.gated_delta_net(projected, gates, net, state, rows)

        mixed = batch.recur(self.layer, mix, *self.in_proj(x, norm=norm))
        out: Tensor = self.out_proj(batch.needed(mixed), residual=residual)
        return out
