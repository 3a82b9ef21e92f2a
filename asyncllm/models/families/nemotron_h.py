"""Nemotron-H, and Nemotron 2 and 3 Nano."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import AttentionSpec, Routing
from asyncllm.models.config.base import FULL, LINEAR
from asyncllm.models.config.nemotron_h import NemotronHConfig
from asyncllm.models.decoder import MoeDecoderLM, beside_experts
from asyncllm.models.layers.block import MakeNorm
from asyncllm.models.layers.mamba import MambaLayer
from asyncllm.models.layers.mlp import PlainMLP
from asyncllm.models.layers.moe import PlainExperts, SparseMoE
from asyncllm.models.layers.norm import Float32RMSNorm
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.router import BalancedRouter


class MixerBlock(nn.Module):
    """One norm, and one part behind it: attention, Mamba-2, an MLP or a mixture of experts.

    Args:
        mixes_tokens: the part is one of the first two.
    """

    def __init__(self, mixer: nn.Module, make_norm: MakeNorm, *, mixes_tokens: bool):
        super().__init__()
        self.norm = make_norm()
        self.mixer = mixer
        self.mixes_tokens = mixes_tokens

    def forward(self, x: Tensor, rope: Tensor | None, batch: ForwardBatch) -> Tensor:
        residual = batch.needed(x)
        if self.mixes_tokens:
            x, norm = self.norm.before_projection(x)
            out: Tensor = self.mixer(x, rope, batch, norm=norm, residual=residual)
        else:
            x, norm = self.norm.before_projection(residual)
            out = self.mixer(x, norm=norm, residual=residual)
        return out


class NemotronHForCausalLM(MoeDecoderLM[NemotronHConfig]):
    """Layers that predict further tokens ("mtp") are not loaded."""

    norm_type = Float32RMSNorm

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    def make_recurrent(self, config: NemotronHConfig, layer: int, place: Placement) -> MambaLayer:
        state = config.state(layer)
        assert state is not None
        return MambaLayer(
            config.hidden_size,
            state,
            layer,
            place,
            eps=config.rms_norm_eps,
            limits=config.step_limits,
            conv_bias=config.use_conv_bias,
            bias=config.use_bias,
        )

    def make_mlp(self, config: NemotronHConfig, layer: int, place: Placement) -> nn.Module:
        sizes = config.hidden_size, config.mlp_size(layer)
        make = partial(PlainMLP, *sizes, config.activation, bias=config.mlp_bias)
        if not config.is_sparse(layer):
            return make(place)
        experts = PlainExperts(config.experts, config.hidden_size, config.expert_size, place)
        router = BalancedRouter(config.hidden_size, config.experts, place, self.routing(config))
        return SparseMoE(router, experts, place, shared=lambda: make(beside_experts(place)))

    def routing(self, config: NemotronHConfig) -> Routing:
        return Routing(
            config.num_experts_per_tok,
            "sigmoid",
            config.norm_topk_prob,
            config.routed_scaling_factor,
            groups=config.n_group,
            top_groups=config.topk_group,
        )

    def _make_mixer(
        self, config: NemotronHConfig, layer: int, spec: AttentionSpec | None, place: Placement
    ) -> nn.Module:
        if config.layer_type(layer) in (FULL, LINEAR):
            return super()._make_mixer(config, layer, spec, place)
        return self.make_mlp(config, layer, place)

    def _make_layer(
        self, config: NemotronHConfig, layer: int, mixer: nn.Module, place: Placement
    ) -> nn.Module:
        make_norm = partial(self.make_norm, config, config.hidden_size, place)
        return MixerBlock(mixer, make_norm, mixes_tokens=config.layer_type(layer) in (FULL, LINEAR))

    def checkpoint_name(self, name: str) -> str | None:
        if name.startswith("mtp."):
            return None
        name = name.replace("backbone.", "model.", 1)
        for stored, own in (
            ("model.embeddings.", "model.embed_tokens."),
            ("model.norm_f.", "model.norm."),
            (".shared_experts.", ".shared_expert."),
        ):
            name = name.replace(stored, own)
        return super().checkpoint_name(name)
