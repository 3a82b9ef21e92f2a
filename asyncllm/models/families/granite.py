"""Granite 3 and 4, dense and with experts."""

from __future__ import annotations

from typing import ClassVar

from torch import nn

from asyncllm.models.config.granite import GraniteConfig, GraniteHybridConfig
from asyncllm.models.decoder import MoeDecoderLM
from asyncllm.models.layers.block import MakeNorm, ScaledResidualBlock
from asyncllm.models.layers.mamba import MambaLayer
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.parameter import Placement


class GraniteForCausalLM(MoeDecoderLM[GraniteConfig]):
    """Llama with factors of embeddings, attention scores, residuals and logits.

    Layers have an MLP, or experts and maybe a shared one.
    """

    fuses_shared_expert = True
    renamed: ClassVar[dict[str, str]] = {
        ".block_sparse_moe.router.": ".mlp.gate.",
        ".mlp.gate.layer.": ".mlp.gate.",
        ".block_sparse_moe.experts.": ".mlp.experts.",
        ".block_sparse_moe.input_linear.weight": ".mlp.experts.gate_up_proj",
        ".block_sparse_moe.output_linear.weight": ".mlp.experts.down_proj",
        ".shared_mlp.input_linear.": ".mlp.shared_expert.gate_up_proj.",
        ".shared_mlp.output_linear.": ".mlp.shared_expert.down_proj.",
    }

    def make_mlp(self, config: GraniteConfig, layer: int, place: Placement) -> nn.Module:
        if config.is_sparse(layer):
            return super().make_mlp(config, layer, place)
        size, bias = config.intermediate_size, config.mlp_bias
        return GatedMLP(config.hidden_size, size, config.activation, place, bias=bias)

    def make_block(
        self,
        config: GraniteConfig,
        attention: nn.Module,
        mlp: nn.Module,
        make_norm: MakeNorm,
        place: Placement,
    ) -> nn.Module:
        factor = config.residual_multiplier
        return ScaledResidualBlock(attention, mlp, make_norm, factor=factor)


class GraniteHybridForCausalLM(GraniteForCausalLM):
    """Granite 4: Mamba-2 beside attention."""

    def make_recurrent(self, config: GraniteConfig, layer: int, place: Placement) -> MambaLayer:
        state = config.state(layer)
        assert isinstance(config, GraniteHybridConfig)
        assert state is not None
        return MambaLayer(
            config.hidden_size,
            state,
            layer,
            place,
            eps=config.rms_norm_eps,
            limits=config.step_limits,
            conv_bias=config.mamba_conv_bias,
            bias=config.mamba_proj_bias,
        )

    def make_mlp(self, config: GraniteConfig, layer: int, place: Placement) -> nn.Module:
        if config.is_sparse(layer):
            return super().make_mlp(config, layer, place)
        sizes = config.hidden_size, config.mlp_size(layer)
        return GatedMLP(*sizes, config.activation, place, fused_on_disk=True)

    def checkpoint_name(self, name: str) -> str | None:
        own_name = super().checkpoint_name(name.replace(".mamba.", ".self_attn."))
        if own_name is None or self.config.experts:
            return own_name
        return own_name.replace(".mlp.shared_expert.", ".mlp.")
