"""What the configurations of families have in common."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import msgspec

from asyncllm.errors import ModelError
from asyncllm.models.rope import RopeConfig
from asyncllm.models.state import STATE_BYTES, StateShape

FULL = "full_attention"
SLIDING = "sliding_attention"
#: Of layers with a recurrent state instead of keys and values.
LINEAR = "linear_attention"

#: Bounds far beyond any existing model; larger values are mistakes or attacks on memory.
Layers = Annotated[int, msgspec.Meta(ge=1, le=2**10)]
Experts = Annotated[int, msgspec.Meta(ge=0, le=2**12)]
Size = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
SizeOrZero = Annotated[int, msgspec.Meta(ge=0, le=2**20)]
Count = Annotated[int, msgspec.Meta(ge=1, le=2**31)]
Window = Annotated[int, msgspec.Meta(ge=0, le=2**31)]  # 0: none
#: Tokens that a short convolution sees.
Width = Annotated[int, msgspec.Meta(ge=2, le=16)]
MAX_LENGTH = 2**25
Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_LENGTH)]
VocabSize = Annotated[int, msgspec.Meta(ge=1, le=2**24)]

#: Of MLPs.
ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu")


def check_activation(name: str) -> None:
    """Check the name of an activation.

    Raises:
        ModelError: it is not supported.
    """
    if name not in ACTIVATIONS:
        supported = ", ".join(ACTIVATIONS)
        raise ModelError(f"activation {name!r} is not supported; {supported} are")


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of every family.

    Attributes:
        mamba_ssm_cache_dtype: see ``state_dtype``.
    """

    vocab_size: VocabSize
    hidden_size: Size
    num_hidden_layers: Layers
    num_attention_heads: Size
    max_position_embeddings: Length
    tie_word_embeddings: bool = False
    is_causal: bool = True
    use_bidirectional_attention: bool | str | None = None
    mamba_ssm_cache_dtype: str | None = None

    def __post_init__(self) -> None:
        # "vision": among the tokens of an image only.
        if not self.is_causal or self.use_bidirectional_attention not in (None, False, "vision"):
            raise ModelError("bidirectional attention is not supported")

    @property
    def more_params(self) -> tuple[int, int]:
        """Weights besides attention, MLPs, experts and vocabulary: in matmuls, and in tables."""
        return 0, 0

    @property
    def state_dtype(self) -> str:
        """``StateShape.dtype``; float32 unless config.json or an option asks for bfloat16."""
        asked = self.mamba_ssm_cache_dtype
        return "float32" if asked is None or asked not in STATE_BYTES else asked

    def state(self, layer: int) -> StateShape | None:
        """The recurrent state of a layer; None if it has none."""
        return None

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has keys and values."""
        return self.state(layer) is None

    def kv_heads(self, layer: int) -> int:
        """Key and value heads of a layer."""
        return self.num_attention_heads

    def head_size(self, layer: int) -> int:
        """Elements of one head of a layer."""
        return self.hidden_size // self.num_attention_heads

    def kv_source(self, layer: int) -> int | None:
        """``AttentionSpec.shares``."""
        return None

    def values_are_keys(self, layer: int) -> bool:
        """``AttentionSpec.values_are_keys``."""
        return False

    def window(self, layer: int) -> int | None:
        """``AttentionSpec.window``."""
        return None

    @property
    def context_length(self) -> int:
        """The longest sequence."""
        return self.max_position_embeddings

    @property
    def output_size(self) -> int:
        """Elements of a final hidden state."""
        return self.hidden_size


class DecoderConfig(Config, frozen=True, kw_only=True):
    """The settings of families with rotary positions.

    Attributes:
        default_theta: ``rope_theta`` where config.json has none.
        has_partial_rotary: ``partial_rotary_factor`` counts; elsewhere transformers does not read
            it either.
        gated_mlp: an MLP has three matrices (gate, up, down), not two.
        has_sinks: ``AttentionSpec.has_sinks``.
    """

    default_theta: ClassVar[float] = 10_000.0
    has_partial_rotary: ClassVar[bool] = False
    gated_mlp: ClassVar[bool] = True
    has_sinks: ClassVar[bool] = False

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
    sliding_window: Window | None = None
    layer_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation(self.activation)
        for layer in range(self.num_hidden_layers):
            if self.num_attention_heads % self.kv_heads(layer):
                raise ModelError(
                    f"num_attention_heads ({self.num_attention_heads}) is not a multiple of "
                    f"num_key_value_heads ({self.kv_heads(layer)})"
                )
            self.window(layer)
            self.rope(layer)

    def kv_heads(self, layer: int) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    def head_size(self, layer: int) -> int:
        return self.head_dim or super().head_size(layer)

    @property
    def context_length(self) -> int:
        ropes = (self.rope(layer) for layer in range(self.num_hidden_layers))
        rope = next((rope for rope in ropes if rope is not None), None)
        if rope is None or rope.rope_type != "yarn":
            return self.max_position_embeddings
        stretched = rope.original_max_position_embeddings * rope.stretch
        if stretched > MAX_LENGTH:
            raise ModelError(
                f"a rotary factor of {rope.stretch:g} gives a context of {stretched:g} tokens; "
                f"at most {MAX_LENGTH:,} are supported"
            )
        return max(self.max_position_embeddings, int(stretched))

    @property
    def theta(self) -> float:
        """``rope_theta``, where rotary settings do not have their own."""
        return self.default_theta if self.rope_theta is None else self.rope_theta

    @property
    def activation(self) -> str:
        """Name of the MLP's activation."""
        return self.hidden_act

    @property
    def attention_scale(self) -> float:
        """Factor of the dot products of attention."""
        return float(self.head_size(0) ** -0.5)

    @property
    def attention_softcap(self) -> float | None:
        """``AttentionSpec.softcap``."""
        return None

    @property
    def logit_softcap(self) -> float | None:
        """None, or c in ``c * tanh(logit / c)``."""
        return None

    @property
    def logit_divisor(self) -> float:
        """The number by which logits are divided."""
        return 1.0

    @property
    def embedding_scale(self) -> float | None:
        """None, or the factor of token embeddings."""
        return None

    def mlp_size(self, layer: int) -> int:
        """Hidden elements of a layer's MLP, or of the one that all tokens go through."""
        return self.intermediate_size

    def layer_type(self, layer: int) -> str:
        """FULL or SLIDING."""
        return FULL

    def window(self, layer: int) -> int | None:
        """As ``Config.window``; None also where the window covers the whole context."""
        if self.layer_type(layer) == FULL or not self.sliding_window:
            return None
        return self.sliding_window if self.sliding_window < self.context_length else None

    def rope(self, layer: int) -> RopeConfig | None:
        """The rotary encoding of a layer; None if it has no positions."""
        given = self.rope_scaling or self.rope_parameters or {}
        of_layer = given.get(self.layer_type(layer), given) or {}
        return self._rope({"rope_theta": self.theta, **of_layer}, layer)

    def _rope(self, given: dict[str, Any], layer: int) -> RopeConfig:
        """Resolve the rotary settings of a layer."""
        size = self.head_size(layer)
        turned = given.get("partial_rotary_factor", self.partial_rotary_factor)
        if not isinstance(turned, int | float) or not 0 < turned <= 1:
            raise ModelError(f"partial_rotary_factor is {turned!r}, not above 0 and up to 1")
        original = self.original_max_position_embeddings
        if original is None:
            original = given.get("original_max_position_embeddings", self.max_position_embeddings)
        rope_type = self._rope_type(given.get("rope_type", given.get("type", "default")))
        values = {
            **given,
            "rope_type": rope_type,
            "rotary_dim": int(size * turned) if self.has_partial_rotary else size,
            "max_position_embeddings": self.max_position_embeddings,
            "original_max_position_embeddings": original,
        }
        if rope_type == "proportional":
            values |= {"rotary_dim": 2 * int(size * turned / 2), "spread": size}
        try:
            return msgspec.convert(values, RopeConfig)
        except msgspec.ValidationError as error:
            raise ModelError(f"rotary settings: {error}") from None

    def _rope_type(self, name: str) -> str:
        return name

    def _require_silu(self) -> None:
        """For families whose recurrent layers have SiLU built in, or whose MLPs always have it."""
        if self.hidden_act != "silu":
            raise ModelError(f"hidden_act is {self.hidden_act!r}; only 'silu' is supported")

    def _listed_layer_type(
        self, layer: int, known: tuple[str, ...] = (FULL, SLIDING)
    ) -> str | None:
        """The entry of ``layer_types``, None without such a list."""
        if self.layer_types is None:
            return None
        if len(self.layer_types) != self.num_hidden_layers:
            raise ModelError(
                f"layer_types has {len(self.layer_types)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        if self.layer_types[layer] not in known:
            raise ModelError(f"layer type {self.layer_types[layer]!r} is not supported")
        return self.layer_types[layer]


class MoeConfig(DecoderConfig, frozen=True, kw_only=True):
    """The settings of families with a mixture of experts; their number has several names.

    Attributes:
        experts_field: the name of ``experts`` in config.json.
    """

    experts_field: ClassVar[str] = "num_experts"

    num_experts_per_tok: Size
    num_experts: Experts | None = None
    num_local_experts: Experts | None = None
    moe_intermediate_size: Size | None = None
    norm_topk_prob: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if 0 < self.experts < self.num_experts_per_tok:
            raise ModelError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, but {self.experts_field} is "
                f"{self.experts}"
            )

    @property
    def experts(self) -> int:
        """Number of experts in a sparse layer."""
        return self.num_experts or self.num_local_experts or 0

    @property
    def expert_size(self) -> int:
        """Hidden elements of one expert."""
        return self.moe_intermediate_size or self.intermediate_size

    @property
    def shared_expert_size(self) -> int:
        """Hidden elements of the expert that all tokens go through; 0 if there is none."""
        return 0

    def mlp_size(self, layer: int) -> int:
        return self.shared_expert_size if self.is_sparse(layer) else self.intermediate_size

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts instead of one MLP."""
        return self.experts > 0
