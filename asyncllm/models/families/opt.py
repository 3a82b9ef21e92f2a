"""OPT."""

from __future__ import annotations

from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.activation import ACTIVATIONS
from asyncllm.kernels.types import AttentionSpec, HeadEncoding
from asyncllm.models.base import CausalLM
from asyncllm.models.config.opt import OPTConfig
from asyncllm.models.layers.attention import HeadShare
from asyncllm.models.layers.embedding import Embedding, OutputProjection, TokenEmbedding
from asyncllm.models.layers.linear import FusedLinear, Kept, Linear, RowLinear
from asyncllm.models.layers.norm import LayerNorm
from asyncllm.models.layers.parameter import Placement

#: No norms and no rotation.
_UNCHANGED = HeadEncoding(None, None, None)
#: The row of position 0 in the table of learned positions.
_POSITION_OFFSET = 2


class OPTForCausalLM(CausalLM):
    """Learned positions and layer norms, before or (350M) after attention and MLP."""

    def __init__(self, config: OPTConfig, place: Placement, max_length: int | None = None):
        super().__init__()
        head_dim = config.head_size(0)
        heads = config.num_attention_heads
        specs = [
            AttentionSpec(i, heads, heads, head_dim, scale=head_dim**-0.5)
            for i in range(config.num_hidden_layers)
        ]
        self.attention_specs = [HeadShare.of(spec, place.ranks).spec for spec in specs]
        self.decoder = _Decoder(config, specs, place)
        embedding_size = config.word_embed_proj_dim or config.hidden_size
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else OutputProjection(embedding_size, config.vocab_size, place)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden: Tensor = self.decoder(batch)
        return hidden

    def final(self, hidden: Tensor) -> Tensor:
        return hidden  # the norm comes before the projection to the size of embeddings

    def logits(self, hidden: Tensor) -> Tensor:
        if self.lm_head is None:
            return self.decoder.embed_tokens.scores(hidden)
        scores: Tensor = self.lm_head(hidden)
        return scores

    def checkpoint_name(self, name: str) -> str | None:
        """Some checkpoints have the prefix ``model.``."""
        return super().checkpoint_name(name.removeprefix("model."))


class _Decoder(nn.Module):
    def __init__(self, config: OPTConfig, specs: list[AttentionSpec], place: Placement):
        super().__init__()
        hidden = config.hidden_size
        embedding_size = config.word_embed_proj_dim or hidden
        affine = config.layer_norm_elementwise_affine
        projected = embedding_size != hidden
        final_norm = config.do_layer_norm_before and not config.remove_final_layer_norm
        positions = config.max_position_embeddings + _POSITION_OFFSET
        self.embed_tokens = TokenEmbedding(config.vocab_size, embedding_size, place)
        self.embed_positions = Embedding(positions, hidden, place)
        self.project_in = Linear(embedding_size, hidden, place) if projected else None
        self.layers = nn.ModuleList(_Layer(config, spec, place) for spec in specs)
        self.final_layer_norm = LayerNorm(hidden, place, affine=affine) if final_norm else None
        self.project_out = Linear(hidden, embedding_size, place) if projected else None

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        if self.project_in is not None:
            x = self.project_in(x)
        x = x + self.embed_positions(batch.positions + _POSITION_OFFSET)
        for layer in self.layers:
            x = layer(x, batch)
        x = batch.sampling(x)
        if self.final_layer_norm is not None:
            x = self.final_layer_norm(x)
        if self.project_out is not None:
            x = self.project_out(x)
        hidden: Tensor = x
        return hidden


class _Attention(nn.Module):
    def __init__(self, config: OPTConfig, spec: AttentionSpec, place: Placement):
        super().__init__()
        size, bias = config.hidden_size, config.enable_bias
        self.spec, queries, keys = HeadShare.of(spec, place.ranks)
        outputs = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        self.qkv_proj = FusedLinear(size, outputs, place, bias=bias)
        self.out_proj = RowLinear(queries, size, place, bias=bias)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        attended = batch.attend(self.spec, self.qkv_proj(x), _UNCHANGED)
        out: Tensor = self.out_proj(attended)
        return out


class _Layer(nn.Module):
    def __init__(self, config: OPTConfig, spec: AttentionSpec, place: Placement):
        super().__init__()
        size, bias = config.hidden_size, config.enable_bias
        affine = config.layer_norm_elementwise_affine
        self.norm_first = config.do_layer_norm_before
        self.self_attn = _Attention(config, spec, place)
        self.self_attn_layer_norm = LayerNorm(size, place, affine=affine)
        inner = Kept.share(config.ffn_dim, "ffn_dim", place.ranks)
        self.fc1 = FusedLinear(size, {"fc1": inner}, place, bias=bias)
        self.fc2 = RowLinear(inner, size, place, bias=bias)
        self.final_layer_norm = LayerNorm(size, place, affine=affine)
        self.act = ACTIVATIONS[config.activation_function]

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        if self.norm_first:
            x = x + self.self_attn(self.self_attn_layer_norm(x), batch)
            return x + self._mlp(self.final_layer_norm(x))
        x = self.self_attn_layer_norm(x + self.self_attn(x, batch))
        out: Tensor = self.final_layer_norm(x + self._mlp(x))
        return out

    def _mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(x)))
        return out
