"""StarCoder2."""

from __future__ import annotations

from torch import nn

from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.config.starcoder2 import Starcoder2Config
from asyncllm.models.decoder import DecoderLM
from asyncllm.models.layers.mlp import PlainMLP
from asyncllm.models.layers.norm import LayerNorm
from asyncllm.models.layers.parameter import Placement


class Starcoder2ForCausalLM(DecoderLM[Starcoder2Config]):
    """Layer norms, an MLP of two matrices, and biases everywhere."""

    def make_attention(
        self, config: Starcoder2Config, spec: AttentionSpec, place: Placement
    ) -> nn.Module:
        bias = config.use_bias
        return self._attention(config, spec, place, qkv_bias=bias, out_bias=bias)

    def make_mlp(self, config: Starcoder2Config, layer: int, place: Placement) -> nn.Module:
        size, bias = config.intermediate_size, config.use_bias
        return PlainMLP(config.hidden_size, size, config.activation, place, bias=bias)

    def make_norm(self, config: Starcoder2Config, size: int, place: Placement) -> LayerNorm:
        return LayerNorm(size, place, eps=config.norm_epsilon)

    def checkpoint_name(self, name: str) -> str | None:
        name = name.replace(".c_fc.", ".up_proj.").replace(".c_proj.", ".down_proj.")
        return super().checkpoint_name(name)
