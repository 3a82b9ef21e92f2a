"""config.json, typed: one struct per family, with the family's own defaults.

Field names are those on disk; other fields there are ignored. Both spellings of rotary settings are
understood: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``. Unsupported values raise
ModelError on construction, or msgspec's ValidationError when decoding.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from asyncllm.errors import ModelError
from asyncllm.models.rope import RopeConfig

FULL = "full_attention"
SLIDING = "sliding_attention"

#: Bounds far beyond any existing model; larger values are mistakes or attacks on memory.
Layers = Annotated[int, msgspec.Meta(ge=1, le=2**10)]
Experts = Annotated[int, msgspec.Meta(ge=0, le=2**12)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Length = Annotated[int, msgspec.Meta(ge=1, le=2**25)]
VocabSize = Annotated[int, msgspec.Meta(ge=1, le=2**24)]


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of every family."""

    vocab_size: VocabSize
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    max_position_embeddings: Length
    tie_word_embeddings: bool = False

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads of one layer."""
        return self.num_attention_heads

    @property
    def head_size(self) -> int:
        """Elements of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def context_length(self) -> int:
        """The longest sequence."""
        return self.max_position_embeddings

    @property
    def output_size(self) -> int:
        """Elements of a final hidden state."""
        return self.hidden_size


class OPTConfig(Config, frozen=True, kw_only=True):
    """OPT. ``word_embed_proj_dim`` None means ``hidden_size``."""

    ffn_dim: Size
    tie_word_embeddings: bool = True
    activation_function: str = "relu"
    do_layer_norm_before: bool = True
    remove_final_layer_norm: bool = msgspec.field(default=False, name="_remove_final_layer_norm")
    word_embed_proj_dim: Size | None = None
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True

    @property
    def output_size(self) -> int:
        return self.word_embed_proj_dim or self.hidden_size


class DecoderConfig(Config, frozen=True, kw_only=True):
    """The settings of families with rotary positions."""

    intermediate_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    rope_theta: float | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    partial_rotary_factor: float = 1.0
    original_max_position_embeddings: Length | None = None
    sliding_window: Count | None = None
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_kv_heads:
            raise ModelError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                f"num_key_value_heads ({self.num_kv_heads})"
            )
        for layer in range(self.num_hidden_layers):
            self.window(layer)
            self.rope(layer)

    @property
    def num_kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def context_length(self) -> int:
        rope = self.rope(0)
        if rope.rope_type != "yarn":
            return self.max_position_embeddings
        stretched = int(rope.original_max_position_embeddings * rope.stretch)
        return max(self.max_position_embeddings, stretched)

    @property
    def activation(self) -> str:
        """Name of the MLP's activation."""
        return self.hidden_act

    @property
    def attention_scale(self) -> float:
        """Factor of the dot products of attention."""
        return float(self.head_size**-0.5)

    @property
    def attention_softcap(self) -> float | None:
        """``AttentionSpec.softcap``."""
        return None

    @property
    def logit_softcap(self) -> float | None:
        """None, or c in ``c * tanh(logit / c)``."""
        return None

    @property
    def embedding_scale(self) -> float | None:
        """None, or the factor of token embeddings."""
        return None

    def layer_type(self, layer: int) -> str:
        """FULL or SLIDING."""
        return FULL

    def window(self, layer: int) -> int | None:
        """``AttentionSpec.window``; None also where the window covers the whole context."""
        if self.layer_type(layer) == FULL or self.sliding_window is None:
            return None
        return self.sliding_window if self.sliding_window < self.context_length else None

    def rope(self, layer: int) -> RopeConfig:
        """The rotary encoding of a layer."""
        given = self.rope_scaling or self.rope_parameters or {}
        of_layer = given.get(self.layer_type(layer), given)
        return self._rope({"rope_theta": self.rope_theta or 10_000.0, **of_layer})

    def _rope(self, given: dict[str, Any]) -> RopeConfig:
        """Resolve one set of rotary settings."""
        turned = given.get("partial_rotary_factor", self.partial_rotary_factor)
        original = self.original_max_position_embeddings
        if original is None:
            original = given.get("original_max_position_embeddings", self.max_position_embeddings)
        values = {
            **given,
            "rope_type": self._rope_type(given.get("rope_type", given.get("type", "default"))),
            "rotary_dim": int(self.head_size * turned),
            "max_position_embeddings": self.max_position_embeddings,
            "original_max_position_embeddings": original,
        }
        try:
            return msgspec.convert(values, RopeConfig)
        except msgspec.ValidationError as error:
            raise ModelError(f"rotary settings: {error}") from None

    def _rope_type(self, name: str) -> str:
        return name

    def _listed_layer_type(self, layer: int) -> str | None:
        """The entry of ``layer_types``, None without such a list."""
        if self.layer_types is None:
            return None
        if len(self.layer_types) < self.num_hidden_layers:
            raise ModelError(
                f"layer_types has {len(self.layer_types)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        if self.layer_types[layer] not in (FULL, SLIDING):
            raise ModelError(f"layer type {self.layer_types[layer]!r} is not supported")
        return self.layer_types[layer]


class LlamaConfig(DecoderConfig, frozen=True, kw_only=True):
    """Llama 2 and 3."""

    mlp_bias: bool = False


class MistralConfig(DecoderConfig, frozen=True, kw_only=True):
    """Mistral; ``sliding_window`` null means none."""

    sliding_window: Count | None = 4096

    def layer_type(self, layer: int) -> str:
        return FULL if self.sliding_window is None else SLIDING


class Phi3Config(DecoderConfig, frozen=True, kw_only=True):
    """Phi-3. Early checkpoints call longrope "su" or "yarn"."""

    rms_norm_eps: float = 1e-5
    original_max_position_embeddings: Length | None = 4096

    def layer_type(self, layer: int) -> str:
        return FULL if self.sliding_window is None else SLIDING

    def _rope_type(self, name: str) -> str:
        return "longrope" if name in ("su", "yarn") else name


class Qwen2Config(DecoderConfig, frozen=True, kw_only=True):
    """Qwen2 and Qwen2.5: with ``use_sliding_window``, layers from ``max_window_layers`` slide."""

    sliding_window: Count | None = 4096
    use_sliding_window: bool = False
    max_window_layers: int = 28

    def layer_type(self, layer: int) -> str:
        if not self.use_sliding_window or self.sliding_window is None:
            return FULL
        by_rule = SLIDING if layer >= self.max_window_layers else FULL
        return self._listed_layer_type(layer) or by_rule


class Qwen3Config(Qwen2Config, frozen=True, kw_only=True):
    """Qwen3."""

    head_dim: Size | None = 128


class Qwen3MoeConfig(DecoderConfig, frozen=True, kw_only=True):
    """Qwen3 with a mixture of experts; ``use_sliding_window`` holds for every layer.

    The number of experts has two spellings.
    """

    moe_intermediate_size: Size
    num_experts_per_tok: Size
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    norm_topk_prob: bool = False
    decoder_sparse_step: Count = 1
    mlp_only_layers: tuple[int, ...] | None = None
    sliding_window: Count | None = 4096
    use_sliding_window: bool = False

    def layer_type(self, layer: int) -> str:
        return SLIDING if self.use_sliding_window and self.sliding_window is not None else FULL

    @property
    def experts(self) -> int:
        """Number of experts in a sparse layer."""
        return self.num_experts or self.num_local_experts or 0

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts instead of one MLP."""
        if self.experts == 0 or layer in (self.mlp_only_layers or ()):
            return False
        return (layer + 1) % self.decoder_sparse_step == 0


class Gemma2Config(DecoderConfig, frozen=True, kw_only=True):
    """Gemma 2: every other layer slides, the first one included."""

    head_dim: Size | None = 256
    hidden_activation: str | None = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    query_pre_attn_scalar: float = 256
    sliding_window: Count | None = 4096
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0
    use_bidirectional_attention: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_bidirectional_attention:
            raise ModelError("bidirectional attention is not supported")

    @property
    def activation(self) -> str:
        return self.hidden_activation or "gelu_pytorch_tanh"

    @property
    def attention_scale(self) -> float:
        return float(self.query_pre_attn_scalar**-0.5)

    @property
    def attention_softcap(self) -> float | None:
        return self.attn_logit_softcapping

    @property
    def logit_softcap(self) -> float | None:
        return self.final_logit_softcapping

    @property
    def embedding_scale(self) -> float | None:
        return float(self.hidden_size**0.5)

    def layer_type(self, layer: int) -> str:
        by_rule = FULL if layer % 2 else SLIDING
        return self._listed_layer_type(layer) or by_rule


class Gemma3Config(Gemma2Config, frozen=True, kw_only=True):
    """The text part of Gemma 3: every sixth layer is full, with its own rotary base.

    Multimodal checkpoints omit values equal to these defaults. ``rope_scaling`` applies to full
    layers only.
    """

    vocab_size: VocabSize = 262_208
    num_attention_heads: Size = 8
    num_key_value_heads: Size | None = 4
    max_position_embeddings: Length = 131_072
    final_logit_softcapping: float | None = None
    sliding_window_pattern: Count = 6
    rope_local_base_freq: float = 10_000.0

    @property
    def attention_softcap(self) -> float | None:
        return None

    def layer_type(self, layer: int) -> str:
        by_rule = SLIDING if (layer + 1) % self.sliding_window_pattern else FULL
        return self._listed_layer_type(layer) or by_rule

    def rope(self, layer: int) -> RopeConfig:
        kind = self.layer_type(layer)
        given = (self.rope_parameters or {}).get(kind) or {}
        if kind == SLIDING:
            return self._rope({"rope_theta": self.rope_local_base_freq, **given})
        theta = self.rope_theta or 1_000_000.0
        return self._rope({"rope_theta": theta, **given, **(self.rope_scaling or {})})
