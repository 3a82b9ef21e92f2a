"""StarCoder2."""

from __future__ import annotations

from typing import ClassVar

from asyncllm.models.config.base import FULL, SLIDING, DecoderConfig


class Starcoder2Config(DecoderConfig, frozen=True, kw_only=True):
    """StarCoder2: layer norms, an MLP of two matrices, biases everywhere."""

    gated_mlp: ClassVar[bool] = False

    hidden_act: str = "gelu_pytorch_tanh"
    norm_epsilon: float = 1e-5
    use_bias: bool = True
    tie_word_embeddings: bool = True

    def layer_type(self, layer: int) -> str:
        return FULL if self.sliding_window is None else SLIDING
