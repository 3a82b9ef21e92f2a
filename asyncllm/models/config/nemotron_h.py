"""Nemotron-H, Nemotron 2 and 3 Nano: each layer is Mamba-2, attention, an MLP or a mixture."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from asyncllm.errors import ModelError
from asyncllm.models.config.base import FULL, LINEAR, Count, Experts, MoeConfig, Size, Width
from asyncllm.models.rope import RopeConfig
from asyncllm.models.state import StateShape, StepLimit, step_limits

MLP, MOE = "mlp", "moe"
#: Of ``hybrid_override_pattern``.
_LETTERS: Final = {"M": LINEAR, "*": FULL, "-": MLP, "E": MOE}
#: The names that layers have in different versions of config.json.
_KINDS: Final = {name: name for name in (LINEAR, FULL, MLP, MOE)} | {
    "mamba": LINEAR,
    "attention": FULL,
}


class NemotronHConfig(MoeConfig, frozen=True, kw_only=True):
    """Attention has no positions, and MLPs and experts are not gated.

    The kinds of layers are in ``layers_block_type`` or, as letters, in ``hybrid_override_pattern``;
    then ``num_hidden_layers`` may be missing. ``time_step_min`` only initialises weights; that
    transformers limits the steps of prompts by it, but not those of later tokens, is not followed.
    """

    experts_field: ClassVar[str] = "n_routed_experts"
    gated_mlp: ClassVar[bool] = False

    num_hidden_layers: int = 0
    intermediate_size: Size = 21504
    num_key_value_heads: Size | None = 8
    head_dim: Size | None = 128
    rms_norm_eps: float = msgspec.field(default=1e-5, name="layer_norm_epsilon")
    mlp_hidden_act: str = "relu2"
    mlp_bias: bool = False
    layers_block_type: tuple[str, ...] | None = None
    hybrid_override_pattern: str | None = None
    ssm_state_size: Size = 128
    mamba_num_heads: Size = 128
    mamba_head_dim: Size = 64
    mamba_hidden_act: str = "silu"
    n_groups: Size = 8
    conv_kernel: Width = 4
    use_conv_bias: bool = True
    use_bias: bool = False
    time_step_limit: StepLimit | None = None
    n_routed_experts: Experts = 8
    num_experts_per_tok: Size = 2
    moe_intermediate_size: Size = 7688
    moe_shared_expert_intermediate_size: Size = 7688
    moe_latent_size: Size | None = None
    norm_topk_prob: bool = True
    n_group: Count = 1
    topk_group: Count = 1
    routed_scaling_factor: float = 1.0

    def __post_init__(self) -> None:
        count, kinds = self.num_hidden_layers, self.kinds
        if count not in (0, len(kinds)):
            field = "layers_block_type" if self.layers_block_type else "hybrid_override_pattern"
            raise ModelError(f"{field} has {len(kinds)} entries for {count} layers")
        msgspec.structs.force_setattr(self, "num_hidden_layers", len(kinds))
        super().__post_init__()
        _ = self.step_limits
        if self.mamba_hidden_act != "silu":
            raise ModelError(
                f"mamba_hidden_act is {self.mamba_hidden_act!r}; only 'silu' is supported"
            )
        if MOE in kinds and self.mlp_hidden_act != "relu2":
            raise ModelError(
                f"mlp_hidden_act is {self.mlp_hidden_act!r}; experts have only 'relu2'"
            )
        if self.moe_latent_size is not None:
            raise ModelError("moe_latent_size: experts in a latent space are not supported")
        if self.mamba_num_heads % self.n_groups:
            raise ModelError(
                f"mamba_num_heads ({self.mamba_num_heads}) is not a multiple of n_groups "
                f"({self.n_groups})"
            )

    @property
    def kinds(self) -> tuple[str, ...]:
        """FULL, LINEAR, MLP or MOE, of each layer."""
        if self.layers_block_type is not None:
            field, known, given = "layers_block_type", _KINDS, self.layers_block_type
        else:
            field, known = "hybrid_override_pattern", _LETTERS
            given = tuple(self.hybrid_override_pattern or ())
        if unknown := [kind for kind in given if kind not in known]:
            raise ModelError(f"{field} has {unknown[0]!r}; there are {', '.join(known)}")
        if not given:
            raise ModelError("neither layers_block_type nor hybrid_override_pattern has a layer")
        return tuple(known[kind] for kind in given)

    @property
    def step_limits(self) -> tuple[float, float]:
        """See ``kernels.types.recurrent.Mamba``."""
        return step_limits(self.time_step_limit)

    @property
    def activation(self) -> str:
        return self.mlp_hidden_act

    @property
    def experts(self) -> int:
        return self.n_routed_experts if MOE in self.kinds else 0

    @property
    def shared_expert_size(self) -> int:
        return self.moe_shared_expert_intermediate_size

    @property
    def inner_size(self) -> int:
        """Elements of all heads of a Mamba-2 layer."""
        return self.mamba_num_heads * self.mamba_head_dim

    def layer_type(self, layer: int) -> str:
        return self.kinds[layer]

    def has_attention(self, layer: int) -> bool:
        return self.layer_type(layer) == FULL

    def is_sparse(self, layer: int) -> bool:
        return self.layer_type(layer) == MOE

    def mlp_size(self, layer: int) -> int:
        sizes = {MOE: self.shared_expert_size, MLP: self.intermediate_size}
        return sizes.get(self.layer_type(layer), 0)

    def rope(self, layer: int) -> RopeConfig | None:
        return None

    def state(self, layer: int) -> StateShape | None:
        if self.layer_type(layer) != LINEAR:
            return None
        return StateShape(
            channels=self.inner_size + 2 * self.n_groups * self.ssm_state_size,
            width=self.conv_kernel,
            heads=self.mamba_num_heads,
            keys=self.ssm_state_size,
            values=self.mamba_head_dim,
            dtype=self.state_dtype,
        )

    @property
    def more_params(self) -> tuple[int, int]:
        channels = self.inner_size + 2 * self.n_groups * self.ssm_state_size
        each = self.hidden_size * (2 * self.inner_size + channels + self.mamba_num_heads)
        return self.kinds.count(LINEAR) * (each + channels * self.conv_kernel), 0
