"""The families with rotary positions, dense or with experts: Llama, and what others override."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import AttentionSpec, Norm, Routing
from asyncllm.models.base import CausalLM
from asyncllm.models.config.base import DecoderConfig, MoeConfig
from asyncllm.models.layers.attention import Attention, HeadShare
from asyncllm.models.layers.block import MakeNorm, PreNormBlock
from asyncllm.models.layers.embedding import OutputProjection, TokenEmbedding
from asyncllm.models.layers.mlp import GatedMLP
from asyncllm.models.layers.moe import Experts, SparseMoE
from asyncllm.models.layers.norm import LayerNorm, RMSNorm
from asyncllm.models.layers.parameter import Placement
from asyncllm.models.layers.recurrent import RecurrentLayer
from asyncllm.models.layers.rotary import rotary_table
from asyncllm.models.layers.router import Router
from asyncllm.models.rope import RopeConfig
from asyncllm.parallel.ranks import Apart

C = TypeVar("C", bound=DecoderConfig)


class DecoderLM(CausalLM, Generic[C]):
    """Llama; a family overrides what it has different.

    Attributes:
        norm_type, attention_type, block_type: the classes of these parts.
        has_head_norms: queries and keys have a norm each.
        rotates_neighbours: on disk, elements 2i and 2i + 1 of a head are rotated together.
    """

    norm_type: type[RMSNorm] = RMSNorm
    attention_type: type[Attention] = Attention
    block_type: type[nn.Module] = PreNormBlock
    has_head_norms = False
    rotates_neighbours = False

    def __init__(self, config: C, place: Placement, max_length: int | None = None):
        super().__init__()
        self.config = config
        numbers = range(config.num_hidden_layers)
        specs = [attention_spec(config, i) for i in numbers if config.has_attention(i)]
        self.attention_specs = [HeadShare.of(spec, place.ranks).spec for spec in specs]
        by_layer = {spec.layer: spec for spec in specs}
        mixers = [self._make_mixer(config, i, by_layer.get(i), place) for i in numbers]
        self.states = {
            i: mixer.state for i, mixer in enumerate(mixers) if isinstance(mixer, RecurrentLayer)
        }
        scale = config.embedding_scale
        self.model = _Stack(
            TokenEmbedding(config.vocab_size, config.hidden_size, place, scale=scale),
            [self._make_layer(config, i, mixers[i], place) for i in numbers],
            self.make_norm(config, config.hidden_size, place),
            [config.rope(i) if config.has_attention(i) else None for i in numbers],
            max([spec.kv_layer for spec in specs] + list(self.states)),
            max_length or config.context_length,
            place,
        )
        tied = config.tie_word_embeddings
        sizes = config.hidden_size, config.vocab_size
        self.lm_head = None if tied else OutputProjection(*sizes, place)

    def make_attention(self, config: C, spec: AttentionSpec, place: Placement) -> nn.Module:
        """The attention of layer ``spec.layer``; the spec is of all ranks' heads."""
        bias = config.attention_bias
        return self._attention(config, spec, place, qkv_bias=bias, out_bias=bias)

    def make_recurrent(self, config: C, layer: int, place: Placement) -> RecurrentLayer:
        """What a layer without attention has in its place."""
        raise NotImplementedError

    def make_mlp(self, config: C, layer: int, place: Placement) -> nn.Module:
        """The feed-forward part of a layer."""
        return GatedMLP(config.hidden_size, config.mlp_size(layer), config.activation, place)

    def make_norm(self, config: C, size: int, place: Placement) -> RMSNorm | LayerNorm:
        """A norm of the residual stream."""
        return self.norm_type(size, config.rms_norm_eps, place)

    def make_block(
        self, config: C, attention: nn.Module, mlp: nn.Module, make_norm: MakeNorm, place: Placement
    ) -> nn.Module:
        """A layer of these parts."""
        return self.block_type(attention, mlp, make_norm)

    def _attention(
        self,
        config: C,
        spec: AttentionSpec,
        place: Placement,
        *,
        has_head_norms: bool | None = None,
        **options: bool,
    ) -> Attention:
        """The family's attention, with these options."""
        if has_head_norms is None:
            has_head_norms = self.has_head_norms
        rope = config.rope(spec.layer)
        head_norm = partial(self.norm_type, eps=config.rms_norm_eps, place=place)
        return self.attention_type(
            spec,
            config.hidden_size,
            place,
            head_norm=head_norm if has_head_norms else None,
            neighbours=rope.rotary_dim if rope is not None and self.rotates_neighbours else 0,
            **options,
        )

    def _make_mixer(
        self, config: C, layer: int, spec: AttentionSpec | None, place: Placement
    ) -> nn.Module:
        if spec is None:
            return self.make_recurrent(config, layer, place)
        return self.make_attention(config, spec, place)

    def _make_layer(self, config: C, layer: int, mixer: nn.Module, place: Placement) -> nn.Module:
        mlp = self.make_mlp(config, layer, place)
        make_norm = partial(self.make_norm, config, config.hidden_size, place)
        return self.make_block(config, mixer, mlp, make_norm, place)

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden: Tensor = self.model(batch)
        return hidden

    def final(self, hidden: Tensor) -> Tensor:
        states: Tensor = self.model.norm(hidden)
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        return self.scores(*self.model.norm.before_projection(hidden))

    def scores(self, hidden: Tensor, norm: Norm | None) -> Tensor:
        """As ``logits``, of states that this norm normalises first."""
        if self.lm_head is None:
            scores: Tensor = self.model.embed_tokens.scores(hidden, norm)
        else:
            scores = self.lm_head(hidden, norm=norm)
        if (divisor := self.config.logit_divisor) != 1.0:
            scores = scores / divisor
        if (cap := self.config.logit_softcap) is not None:
            scores = torch.tanh(scores / cap) * cap
        return scores

    def checkpoint_name(self, name: str) -> str | None:
        """Embedding models are often saved without the ``model.`` prefix."""
        bare = name.startswith(("embed_tokens.", "layers.", "norm."))
        return super().checkpoint_name(f"model.{name}" if bare else name)


class _Stack(nn.Module):
    """From token ids to hidden states before the last norm.

    Attributes:
        last_with_keys: the last layer with a state, or with keys and values of its own. Those after
            it need only the tokens that yield logits.
        layer_inputs: None, or makes a further argument of each layer, of ids and embeddings.
    """

    layer_inputs: nn.Module | None

    def __init__(
        self,
        embed_tokens: TokenEmbedding,
        layers: list[nn.Module],
        norm: RMSNorm | LayerNorm,
        ropes: list[RopeConfig | None],
        last_with_keys: int,
        max_length: int,
        place: Placement,
    ):
        super().__init__()
        kinds = list(dict.fromkeys(ropes))
        self.embed_tokens = embed_tokens
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        sizes = max_length, place.device
        tables = [None if kind is None else rotary_table(kind, *sizes) for kind in kinds]
        for number, table in enumerate(tables):
            self.register_buffer(f"rope{number}", table, persistent=False)
        self.ropes = [tables[kinds.index(rope)] for rope in ropes]
        self.last_with_keys = last_with_keys
        self.layer_inputs = None

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed_tokens(batch.input_ids)
        own = None if self.layer_inputs is None else self.layer_inputs(batch.input_ids, x)
        last = len(self.layers) - 1  # ``first_layers`` leaves some out
        hidden = batch.hidden
        for number, layer in enumerate(self.layers):
            if hidden is not None:
                hidden.see(number, x)
            if hidden is not None and hidden.from_layer(number):
                pass  # those of all tokens are wanted
            elif number == last:
                batch = batch.for_last_layer()
            elif number == self.last_with_keys:
                batch = batch.before_sharing_layers()
            x = layer(x, self.ropes[number], batch, *(() if own is None else (own[number],)))
            if number == self.last_with_keys < last:
                if batch.sample_rows is not None and len(batch.sample_rows) == 0:
                    break  # nobody reads what the other layers would make
                if batch.logit_rows_only:
                    own = None if own is None else own.index_select(1, batch.sample_rows)
                    batch = batch.of_logit_rows()
        if hidden is not None:
            hidden.end(x)
        return x if batch.logit_rows_only else batch.sampling(x)


def attention_spec(config: DecoderConfig, layer: int) -> AttentionSpec:
    """The attention of a layer, of all ranks' heads."""
    rope = config.rope(layer)
    return AttentionSpec(
        layer=layer,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.kv_heads(layer),
        head_dim=config.head_size(layer),
        scale=config.attention_scale,
        window=config.window(layer),
        softcap=config.attention_softcap,
        has_sinks=config.has_sinks,
        shares=config.kv_source(layer),
        values_are_keys=config.values_are_keys(layer),
        pair_distance=rope.spread // 2 if rope is not None and rope.spread is not None else None,
    )


M = TypeVar("M", bound=MoeConfig)


class MoeDecoderLM(DecoderLM[M]):
    """A decoder with experts or, in the layers that config.json names, one MLP.

    Attributes:
        fuses_shared_expert: gate and up of the shared expert are one matrix in the checkpoint.
        has_shared_gate: the output of the shared expert is weighted for each token.
        renamed: parts of names in the checkpoint, and what they are called here.
    """

    fuses_shared_expert = False
    has_shared_gate = False
    renamed: ClassVar[dict[str, str]] = {}

    def make_mlp(self, config: M, layer: int, place: Placement) -> nn.Module:
        if not config.is_sparse(layer):
            return super().make_mlp(config, layer, place)
        shared = None
        if config.shared_expert_size > 0:
            sizes = config.hidden_size, config.shared_expert_size
            apart, fused = beside_experts(place), self.fuses_shared_expert
            shared = partial(GatedMLP, *sizes, config.activation, apart, fused_on_disk=fused)
        router, experts = self.make_router(config, place), self.make_experts(config, place)
        return SparseMoE(router, experts, place, shared=shared)

    def make_experts(self, config: M, place: Placement) -> Experts:
        """The experts of a sparse layer."""
        return Experts(
            config.experts,
            config.hidden_size,
            config.expert_size,
            config.activation,
            place,
            shared=shared_experts(config),
            is_shared_fused=self.fuses_shared_expert,
        )

    def make_router(self, config: M, place: Placement) -> Router:
        """The router of a sparse layer."""
        return Router(config.hidden_size, config.experts, place, self.routing(config))

    def routing(self, config: M) -> Routing:
        """How tokens choose experts."""
        return Routing(
            config.num_experts_per_tok,
            "softmax",
            config.norm_topk_prob,
            shared=shared_experts(config),
            has_gate=self.has_shared_gate and config.shared_expert_size > 0,
        )

    def checkpoint_name(self, name: str) -> str | None:
        for stored, own in self.renamed.items():
            name = name.replace(stored, own)
        return super().checkpoint_name(name)


def beside_experts(place: Placement) -> Placement:
    """For a shared expert beside the others, with which its share is added to those of ranks."""
    return replace(place, ranks=Apart(place.ranks.rank, place.ranks.size))


def shared_experts(config: MoeConfig) -> int:
    """How many experts the shared one is computed as; 0: it is an MLP beside them.

    Many more experts for every token would cost prompts more than an MLP does, as its rows need no
    grouping and no sum.
    """
    count, rest = divmod(config.shared_expert_size, config.expert_size)
    return count if rest == 0 and 2 * count <= config.num_experts_per_tok else 0
