"""EAGLE-3: a layer of its own that drafts tokens from three hidden states of a model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.models.base import Checkpointed
from asyncllm.models.decoder import attention_spec
from asyncllm.models.eagle3_config import Eagle3Config
from asyncllm.models.layers.attention import Attention
from asyncllm.models.layers.embedding import OutputProjection, TokenEmbedding
from asyncllm.models.layers.linear import Linear
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.norm import RMSNorm
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.rotary import rotary_table


class Eagle3Head(Checkpointed):
    """``DraftHead`` of a model that has no such layer itself.

    Names of its parts are those of checkpoints, with ``midlayer`` for the layer.

    Args:
        layer: its number among the layers with K and V.
        embedding: the model's; None: the head has its own.
        max_length: of a sequence.
    """

    target_ids: Tensor | None

    def __init__(
        self,
        config: Eagle3Config,
        layer: int,
        embedding: TokenEmbedding | None,
        max_length: int,
        place: Placement,
    ):
        super().__init__()
        own = config.layer
        self.size = size = own.hidden_size
        make_norm = partial(RMSNorm, size, own.rms_norm_eps, place)
        attention = Attention(
            attention_spec(own, 0),
            size,
            place,
            qkv_bias=own.attention_bias,
            out_bias=own.attention_bias,
            input_size=2 * size,
        )
        self.spec = attention.spec = replace(attention.spec, layer=layer)
        self.reads = config.reads
        self.fc = Linear(len(config.reads) * config.target_hidden_size, size, place)
        mlp = GatedMLP(size, own.intermediate_size, own.activation, place, bias=own.mlp_bias)
        self.midlayer = _JoiningBlock(attention, mlp, make_norm, config.norm_before_residual)
        self.norm = make_norm()
        self.lm_head = OutputProjection(size, config.draft_vocab_size, place)
        self.embed_tokens = None
        if embedding is None:
            self.embed_tokens = TokenEmbedding(own.vocab_size, size, place)
        # In a tuple, as its weights are not this module's.
        self._embedding = (self.embed_tokens or embedding,)
        rope = own.rope(0)
        table = None if rope is None else rotary_table(rope, max_length, place.device)
        self.register_buffer("rope", table, persistent=False)
        self.target_ids = None

    def features(self, read: list[Tensor]) -> Tensor:
        """See ``DraftHead``."""
        found: Tensor = self.fc(torch.cat(read, dim=1))
        return found

    def predict(self, batch: ForwardBatch, hidden: Tensor) -> Tensor:
        """See ``DraftHead``."""
        (embed,) = self._embedding
        assert embed is not None
        out: Tensor = self.midlayer(embed(batch.input_ids), hidden, self.rope, batch)
        return out if batch.logit_rows_only else batch.sampling(out)

    def drafts(self, states: Tensor) -> Tensor:
        """See ``DraftHead``."""
        best: Tensor = self.lm_head(states, norm=self.norm.norm).argmax(dim=1)
        return best if self.target_ids is None else self.target_ids[best]

    def carried(self, states: Tensor) -> Tensor:
        """See ``DraftHead``."""
        return states


class _JoiningBlock(nn.Module):
    """A layer whose attention sees a token's embedding and a hidden state, each with its norm."""

    def __init__(
        self,
        attention: Attention,
        mlp: GatedMLP,
        make_norm: partial[RMSNorm],
        norm_before_residual: bool,
    ):
        super().__init__()
        self.input_layernorm = make_norm()
        self.hidden_norm = make_norm()
        self.self_attn = attention
        self.post_attention_layernorm = make_norm()
        self.mlp = mlp
        self.norm_before_residual = norm_before_residual

    def forward(
        self, embedded: Tensor, hidden: Tensor, rope: Tensor | None, batch: ForwardBatch
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        joined = torch.cat((self.input_layernorm(embedded), normed), dim=1)
        # A copy where it is needed: the sum is written to it.
        residual = batch.needed(normed if self.norm_before_residual else hidden)
        residual = self.self_attn(joined, rope, batch, residual=residual)
        x, norm = self.post_attention_layernorm.before_projection(residual)
        out: Tensor = self.mlp(x, norm=norm, residual=residual)
        return out
