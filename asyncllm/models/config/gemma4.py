"""Gemma 4."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from asyncllm.errors import ModelError
from asyncllm.models.config.base import (
    FULL,
    SLIDING,
    Layers,
    Length,
    MoeConfig,
    Size,
    SizeOrZero,
    VocabSize,
    Window,
)
from asyncllm.models.rope import RopeConfig

_ROPES: Final[dict[str, dict[str, Any]]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
}


class _LayerSizes(msgspec.Struct, frozen=True):
    """An entry of ``per_layer_config``: what a layer has of its own."""

    head_dim: Size | None = None
    num_key_value_heads: Size | None = None


class Gemma4Config(MoeConfig, frozen=True, kw_only=True):
    """The text part of Gemma 4, dense and with experts beside the MLP of each layer.

    Every sixth layer and the last one are full; these have heads of another size, and maybe another
    number of them for keys and values. config.json says so for the kind (``global_...``) or for
    each of these layers (``per_layer_config``). The last ``num_kv_shared_layers`` layers have no
    keys and values of their own: they read those of the last layer of the same type before them.

    Multimodal checkpoints omit values equal to these defaults.

    Attributes:
        attention_k_eq_v: full layers have no projection of values, but use that of keys.
        use_double_wide_mlp: MLPs of layers without keys are twice as large.
        hidden_size_per_layer_input: size of the input that each layer gets besides, made of the
            token alone; 0: there is none.
        num_experts_per_tok: config.json calls it ``top_k_experts``.
    """

    vocab_size: VocabSize = 262_144
    hidden_size: Size = 2304
    intermediate_size: Size = 9216
    num_hidden_layers: Layers = 30
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    head_dim: Size | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: Length = 131_072
    tie_word_embeddings: bool = True
    sliding_window: Window | None = 512
    final_logit_softcapping: float | None = None
    global_head_dim: Size | None = 512
    num_global_key_value_heads: Size | None = None
    per_layer_config: dict[str, _LayerSizes] | None = None
    attention_k_eq_v: bool = False
    num_kv_shared_layers: SizeOrZero = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: SizeOrZero = 256
    vocab_size_per_layer_input: VocabSize | None = 262_144
    enable_moe_block: bool = False
    top_k_experts: Size | None = None
    num_experts_per_tok: Size = 1

    def __post_init__(self) -> None:
        if self.enable_moe_block:
            if (
                self.experts == 0
                or self.top_k_experts is None
                or self.moe_intermediate_size is None
            ):
                raise ModelError(
                    "enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size"
                )
            if self.top_k_experts > self.experts:
                raise ModelError(
                    f"top_k_experts is {self.top_k_experts}, but num_experts is {self.experts}"
                )
            msgspec.structs.force_setattr(self, "num_experts_per_tok", self.top_k_experts)
        for layer in range(self.num_hidden_layers):
            self.kv_source(layer)
        super().__post_init__()

    @property
    def activation(self) -> str:
        return self.hidden_activation

    @property
    def attention_scale(self) -> float:
        return 1.0

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping

    @property
    def embedding_scale(self) -> float | None:
        return float(self.hidden_size**0.5)

    @property
    def experts(self) -> int:
        return super().experts if self.enable_moe_block else 0

    @property
    def more_params(self) -> tuple[int, int]:
        size = self.num_hidden_layers * self.hidden_size_per_layer_input
        # A projection for all layers, and two in each; and a table.
        return 3 * self.hidden_size * size, (self.vocab_size_per_layer_input or 0) * size

    def layer_type(self, layer: int) -> str:
        if layer == self.num_hidden_layers - 1:
            return FULL
        return self._listed_layer_type(layer) or (SLIDING if (layer + 1) % 6 else FULL)

    def rope(self, layer: int) -> RopeConfig:
        given = (self.rope_parameters or _ROPES).get(self.layer_type(layer)) or {}
        return self._rope({"rope_theta": self.theta, **given}, layer)

    def head_size(self, layer: int) -> int:
        return self._sizes(layer).head_dim or super().head_size(layer)

    def kv_heads(self, layer: int) -> int:
        return self._sizes(layer).num_key_value_heads or super().kv_heads(layer)

    def kv_source(self, layer: int) -> int | None:
        first_shared = self.num_hidden_layers - self.num_kv_shared_layers
        if layer < first_shared:
            return None
        kind = self.layer_type(layer)
        for source in range(first_shared - 1, -1, -1):
            if self.layer_type(source) == kind:
                return source
        raise ModelError(
            f"num_kv_shared_layers is {self.num_kv_shared_layers} of {self.num_hidden_layers}: "
            f"layer {layer} has no {kind} layer before these to share keys and values with"
        )

    def values_are_keys(self, layer: int) -> bool:
        return self.attention_k_eq_v and self.layer_type(layer) == FULL

    def mlp_size(self, layer: int) -> int:
        is_double = self.use_double_wide_mlp and self.kv_source(layer) is not None
        return self.intermediate_size * (2 if is_double else 1)

    def _sizes(self, layer: int) -> _LayerSizes:
        if self.per_layer_config is not None:
            return self.per_layer_config.get(str(layer), _LayerSizes())
        if self.layer_type(layer) == SLIDING:
            return _LayerSizes()
        kv_heads = self.num_global_key_value_heads if self.attention_k_eq_v else None
        return _LayerSizes(self.global_head_dim, kv_heads)


class Gemma4UnifiedConfig(Gemma4Config, frozen=True, kw_only=True):
    """The text part of those Gemma 4 whose images and sound need no encoder, such as 12B."""

    max_position_embeddings: Length = 262_144
    sliding_window: Window | None = 1024
    hidden_size_per_layer_input: SizeOrZero = 0
