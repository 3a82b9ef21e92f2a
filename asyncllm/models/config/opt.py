"""OPT."""

from __future__ import annotations

import msgspec

from asyncllm.models.config.base import Config, Size, check_activation


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

    def __post_init__(self) -> None:
        super().__post_init__()
        check_activation(self.activation_function)

    @property
    def output_size(self) -> int:
        return self.word_embed_proj_dim or self.hidden_size
