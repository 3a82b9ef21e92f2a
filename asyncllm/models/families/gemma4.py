"""Gemma 4."""

from __future__ import annotations

import re
from typing import ClassVar

from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.activation import ACTIVATIONS
from asyncllm.kernels.types import Norm, Routing
from asyncllm.models.config.gemma4 import Gemma4Config
from asyncllm.models.decoder import MoeDecoderLM
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.block import MakeNorm, SandwichNormBlock
from asyncllm.models.layers.embedding import SharedEmbedding
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.moe import SparseMoE
from asyncllm.models.layers.norm import Float32RMSNorm
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.router import ScaledRouter

_KEYS = re.compile(r"model\.layers\.(\d{1,9})\.self_attn\.[kv]_(proj|norm)\.")


class Gemma4Attention(Attention):
    """With values that are normalised."""

    normalizes_values = True


class Gemma4ForCausalLM(MoeDecoderLM[Gemma4Config]):
    """Gemma 3 with two sizes of heads, keys and values that layers share, and more in each layer:
    a factor, and maybe experts beside the MLP and an input for each token.
    """

    norm_type = Float32RMSNorm
    attention_type = Gemma4Attention
    has_head_norms = True
    renamed: ClassVar[dict[str, str]] = {
        ".router.proj.": ".mlp.moe.gate.",
        ".router.": ".mlp.moe.gate.",
        ".experts.": ".mlp.moe.experts.",
        ".post_feedforward_layernorm_1.": ".mlp.post_feedforward_layernorm_1.",
        ".pre_feedforward_layernorm_2.": ".mlp.pre_feedforward_layernorm_2.",
        ".post_feedforward_layernorm_2.": ".mlp.post_feedforward_layernorm_2.",
        "model.embed_tokens_per_layer.": "model.layer_inputs.embed_tokens_per_layer.",
        "model.per_layer_": "model.layer_inputs.per_layer_",
    }

    def __init__(self, config: Gemma4Config, place: Placement, max_length: int | None = None):
        super().__init__(config, place, max_length)
        if config.hidden_size_per_layer_input:
            self.model.layer_inputs = LayerInputs(config, place)

    def make_mlp(self, config: Gemma4Config, layer: int, place: Placement) -> nn.Module:
        sizes = config.hidden_size, config.mlp_size(layer), config.activation, place
        if config.experts == 0:
            return GatedMLP(*sizes)
        moe = SparseMoE(self.make_router(config, place), self.make_experts(config, place), place)
        return MLPBesideExperts(*sizes, moe, lambda: self.make_norm(config, sizes[0], place))

    def make_router(self, config: Gemma4Config, place: Placement) -> ScaledRouter:
        routing = Routing(config.num_experts_per_tok, "softmax", normalize=True)
        sizes = config.hidden_size, config.experts
        return ScaledRouter(*sizes, place, routing, eps=config.rms_norm_eps)

    def make_block(
        self,
        config: Gemma4Config,
        attention: nn.Module,
        mlp: nn.Module,
        make_norm: MakeNorm,
        place: Placement,
    ) -> nn.Module:
        if config.hidden_size_per_layer_input:
            return Gemma4InputBlock(config, attention, mlp, make_norm, place)
        return Gemma4Block(attention, mlp, make_norm, place)

    def checkpoint_name(self, name: str) -> str | None:
        """Layers that read the keys and values of others have projections of them on disk."""
        own_name = super().checkpoint_name(name)
        if own_name is not None and (keys := _KEYS.match(own_name)) is not None:
            layer = int(keys[1])
            count = self.config.num_hidden_layers
            if layer < count and self.config.kv_source(layer) is not None:
                return None
        return own_name


class Gemma4Block(SandwichNormBlock):
    """Gemma's block, times a factor."""

    def __init__(self, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm, place: Placement):
        super().__init__(attention, mlp, make_norm)
        self.layer_scalar = place.empty(1)

    def forward(self, x: Tensor, rope: Tensor | None, batch: ForwardBatch) -> Tensor:
        return super().forward(x, rope, batch) * self.layer_scalar

    def fill_neutral(self) -> None:
        """Set the factor to one."""
        self.layer_scalar.fill_(1.0)


class Gemma4InputBlock(Gemma4Block):
    """With an input of its own for each token, which a gate weights before it is added."""

    def __init__(
        self,
        config: Gemma4Config,
        attention: nn.Module,
        mlp: nn.Module,
        make_norm: MakeNorm,
        place: Placement,
    ):
        super().__init__(attention, mlp, make_norm, place)
        hidden, size = config.hidden_size, config.hidden_size_per_layer_input
        self.per_layer_input_gate = Linear(hidden, size, place)
        self.per_layer_projection = Linear(size, hidden, place)
        self.post_per_layer_input_norm = make_norm()
        self.act = ACTIVATIONS[config.activation]

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None, batch: ForwardBatch, own: Tensor
    ) -> Tensor:
        """``own``: [tokens, size]."""
        x = SandwichNormBlock.forward(self, x, rope, batch)
        gated = self.act(self.per_layer_input_gate(x)) * batch.needed(own)
        x = x + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x * self.layer_scalar


class MLPBesideExperts(GatedMLP):
    """An MLP and experts, each with a norm after it, added up. The router sees x as it comes."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        act: str,
        place: Placement,
        moe: SparseMoE,
        make_norm: MakeNorm,
    ):
        super().__init__(hidden_size, intermediate_size, act, place)
        self.post_feedforward_layernorm_1 = make_norm()
        self.moe = moe
        self.pre_feedforward_layernorm_2 = make_norm()
        self.post_feedforward_layernorm_2 = make_norm()

    def forward(
        self, x: Tensor, *, norm: Norm | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """``norm`` is of the MLP's input."""
        assert residual is None
        dense = self.post_feedforward_layernorm_1(super().forward(x, norm=norm))
        normed, moe_norm = self.pre_feedforward_layernorm_2.before_projection(x)
        sparse = self.moe(normed, norm=moe_norm, routed_by=x)
        out: Tensor = dense + self.post_feedforward_layernorm_2(sparse)
        return out


class LayerInputs(nn.Module):
    """What each layer gets besides: from a table by token id, and from the token's embedding."""

    def __init__(self, config: Gemma4Config, place: Placement):
        super().__init__()
        size, layers = config.hidden_size_per_layer_input, config.num_hidden_layers
        rows = config.vocab_size_per_layer_input or config.vocab_size
        scale = float(size**0.5)
        self.embed_tokens_per_layer = SharedEmbedding(rows, layers * size, place, scale=scale)
        self.per_layer_model_projection = Linear(config.hidden_size, layers * size, place)
        self.per_layer_projection_norm = Float32RMSNorm(size, config.rms_norm_eps, place)
        self.scale = config.hidden_size**-0.5
        self.layers = layers

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        """[layers, tokens, size].

        Args:
            x: embeddings of the ids, [tokens, hidden].
        """
        shape = len(ids), self.layers, -1
        projected = (self.per_layer_model_projection(x) * self.scale).view(shape)
        by_token = self.embed_tokens_per_layer(ids).view(shape)
        both: Tensor = (self.per_layer_projection_norm(projected) + by_token) * 0.5**0.5
        return both.transpose(0, 1)
