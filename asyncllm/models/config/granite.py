"""Granite 3 and 4, dense and with experts."""

from __future__ import annotations

from typing import ClassVar, Final, Literal

from asyncllm.errors import ModelError
from asyncllm.models.config.base import FULL, LINEAR, Experts, MoeConfig, Size, SizeOrZero, Width
from asyncllm.models.rope import RopeConfig
from asyncllm.models.state import StateShape, StepLimit, step_limits


class GraniteConfig(MoeConfig, frozen=True, kw_only=True):
    """Granite: factors of embeddings, attention scores and residuals, a divisor of logits.

    Those without experts have an MLP in every layer.
    """

    experts_field: ClassVar[str] = "num_local_experts"

    num_experts_per_tok: Size = 2
    num_local_experts: Experts | None = 0
    norm_topk_prob: bool = True
    mlp_bias: bool = False
    embedding_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logits_scaling: float = 1.0

    @property
    def embedding_scale(self) -> float | None:
        return self.embedding_multiplier

    @property
    def attention_scale(self) -> float:
        return self.attention_multiplier

    @property
    def logit_divisor(self) -> float:
        return self.logits_scaling


class GraniteMoeConfig(GraniteConfig, frozen=True, kw_only=True):
    """Granite with a mixture of experts and, in some, one that all tokens go through."""

    num_local_experts: Experts | None = 8
    shared_intermediate_size: SizeOrZero = 0

    @property
    def shared_expert_size(self) -> int:
        return self.shared_intermediate_size


#: The names that layers have in different versions of config.json.
_KINDS: Final = {"attention": FULL, FULL: FULL, "mamba": LINEAR, LINEAR: LINEAR}


class GraniteHybridConfig(GraniteMoeConfig, frozen=True, kw_only=True):
    """Granite 4: Mamba-2 in the layers that ``layer_types`` says, mostly without positions.

    Those without experts have the shared expert as their MLP.
    """

    num_local_experts: Experts | None = 8
    shared_intermediate_size: SizeOrZero = 1024
    position_embedding_type: str | None = None
    mamba_n_heads: Size = 128
    mamba_n_groups: Size = 1
    mamba_d_state: Size = 256
    mamba_d_head: Size | Literal["auto"] = "auto"
    mamba_d_conv: Width = 4
    mamba_expand: Size = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: StepLimit | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require_silu()
        inner = self.mamba_expand * self.hidden_size
        size = self.mamba_d_head if isinstance(self.mamba_d_head, int) else None
        if inner != self.mamba_n_heads * (size or inner // self.mamba_n_heads):
            raise ModelError(
                f"mamba_n_heads {self.mamba_n_heads} heads of mamba_d_head {self.mamba_d_head} are "
                f"not mamba_expand * hidden_size, which is {inner}"
            )
        _ = self.step_limits

    @property
    def step_limits(self) -> tuple[float, float]:
        """See ``kernels.types.recurrent.Mamba``."""
        return step_limits(self.time_step_limit)

    def layer_type(self, layer: int) -> str:
        return _KINDS[self._listed_layer_type(layer, tuple(_KINDS)) or LINEAR]

    def state(self, layer: int) -> StateShape | None:
        if self.layer_type(layer) == FULL:
            return None
        inner = self.mamba_expand * self.hidden_size
        return StateShape(
            channels=inner + 2 * self.mamba_n_groups * self.mamba_d_state,
            width=self.mamba_d_conv,
            heads=self.mamba_n_heads,
            keys=self.mamba_d_state,
            values=inner // self.mamba_n_heads,
            dtype=self.state_dtype,
        )

    def rope(self, layer: int) -> RopeConfig | None:
        return super().rope(layer) if self.position_embedding_type == "rope" else None

    def mlp_size(self, layer: int) -> int:
        return self.shared_intermediate_size

    @property
    def more_params(self) -> tuple[int, int]:
        total = 0
        for layer in range(self.num_hidden_layers):
            if (state := self.state(layer)) is not None:
                inner = state.heads * state.values
                total += self.hidden_size * (2 * inner + state.channels + state.heads)
                total += state.num_inputs
        return total, 0
