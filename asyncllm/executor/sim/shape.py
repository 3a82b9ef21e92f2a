"""The sizes of models that step times depend on, from their configurations alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Self

import msgspec

from asyncllm.errors import ModelError
from asyncllm.models.config.base import Config, DecoderConfig, MoeConfig
from asyncllm.models.config.opt import OPTConfig
from asyncllm.models.quant.config import Quantization
from asyncllm.models.spec import ModelSpec

KERNELS_PER_LAYER = 9
KERNELS_PER_STEP = 6
#: Of a layer with experts, beyond those of one without.
KERNELS_OF_EXPERTS = 5


class Attention(msgspec.Struct, frozen=True):
    """What layers that see as many positions read and compute.

    Attributes:
        window: positions that they see; infinity without a window.
        kv_size: elements of K and V of one position that they read.
        heads_size: elements of their queries of one token.
    """

    window: float
    kv_size: int
    heads_size: int

    @classmethod
    def of(cls, layers: Iterable[tuple[int | None, int, int]]) -> tuple[Self, ...]:
        """Layers by window.

        Args:
            layers: of each layer, its window or None, and the two sizes.
        """
        sums: dict[float, tuple[int, int]] = {}
        for window, kv_size, heads_size in layers:
            kv, heads = sums.get(window or math.inf, (0, 0))
            sums[window or math.inf] = kv + kv_size, heads + heads_size
        return tuple(cls(window, *sizes) for window, sizes in sums.items())


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a model that its speed depends on.

    Attributes:
        kv_size: elements of K and V of one token.
        state_matrices: bytes of the matrices of one sequence's recurrent state.
        state_inputs: elements of the rest of it.
        params: weights of the matmuls of every token, without the head.
        expert_params, expert_params_per_token: weights of all experts, and of those one token uses.
        head_params: of the matmul for logits, for rows that sample.
        embedding_params: of tables that only take memory.
        context_length: longest sequence.
        quantization: of all matmuls but the head's, or of experts alone.
    """

    num_layers: int
    attention: tuple[Attention, ...]
    kv_size: int
    state_matrices: int = 0
    state_inputs: int = 0
    params: int
    expert_params: int = 0
    expert_params_per_token: int = 0
    head_params: int
    embedding_params: int
    context_length: int
    quantization: Quantization | None = None

    @property
    def stored_params(self) -> int:
        return self.params + self.expert_params + self.head_params + self.embedding_params

    def stored_bytes(self, itemsize: int) -> float:
        """Memory of all weights, if those that are not quantised have so many bytes."""
        work = self.work(itemsize)
        return work.weight_bytes + work.expert_bytes + self.embedding_params * itemsize

    def _itemsizes(self, itemsize: int) -> tuple[float, float]:
        """Bytes of each of ``params`` and ``expert_params``, with their scales."""
        found = self.quantization
        if found is None or itemsize > 2:  # as on a CPU, and nothing multiplies float32 by codes
            return itemsize, itemsize
        if found.method == "mxfp4":
            return itemsize, 4 / 8 + 1 / 32
        if found.method == "fp8":
            return 1.0, 1.0
        each = 4 / 8 + (3 / found.group_size if found.group_size > 0 else 0)
        return each, each

    def work(self, itemsize: int, kv_itemsize: int | None = None) -> Work:
        """What its steps read and compute.

        Args:
            itemsize: bytes of an element of weights that are not quantised.
            kv_itemsize: of the KV, if not the same.
        """
        kv_itemsize = kv_itemsize or itemsize
        dense, expert = self._itemsizes(itemsize)
        return Work(
            kernels=KERNELS_PER_STEP
            + self.num_layers * (KERNELS_PER_LAYER + KERNELS_OF_EXPERTS * (self.expert_params > 0)),
            weight_bytes=self.params * dense + self.head_params * itemsize,
            expert_bytes=self.expert_params * expert,
            token_expert_bytes=self.expert_params_per_token * expert,
            kv_bytes=self.kv_size * kv_itemsize,
            state_bytes=self.state_matrices + self.state_inputs * itemsize,
            token_flops=2 * (self.params + self.expert_params_per_token),
            sample_flops=2 * self.head_params,
            attention=self.attention,
            kv_itemsize=kv_itemsize,
        )


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What steps of a model read and compute on one device, of any kind.

    Attributes:
        kernels: of one step.
        weight_bytes: what every step reads.
        expert_bytes, token_expert_bytes: of all experts, and of those that one token uses.
        kv_bytes: of the KV of one token.
        state_bytes: of the recurrent state of one sequence, which each step reads and writes.
        token_flops, sample_flops: of the matmuls of one token, and of the logits of one row.
        attention: of all layers.
        kv_itemsize: bytes of an element of the KV.
    """

    kernels: int
    weight_bytes: float
    expert_bytes: float = 0.0
    token_expert_bytes: float = 0.0
    kv_bytes: int
    state_bytes: int = 0
    token_flops: float
    sample_flops: float
    attention: tuple[Attention, ...]
    kv_itemsize: int


def _qwen3_30b_a3b() -> Shape:
    layers, hidden, experts, expert = 48, 2048, 128, 3 * 2048 * 768
    kv_size = layers * 2 * 4 * 128
    return Shape(
        num_layers=layers,
        attention=(Attention(math.inf, kv_size, layers * 32 * 128),),
        kv_size=kv_size,
        params=layers * (_attention_params(hidden, 32, 4, 128) + hidden * experts),
        expert_params=layers * experts * expert,
        expert_params_per_token=layers * 8 * expert,
        head_params=151936 * hidden,
        embedding_params=151936 * hidden,
        context_length=40960,
    )


def _dense(layers: int, hidden: int, heads: int, mlp: int, vocab: int, *, tied: bool) -> Shape:
    """A Qwen3 with 8 key and value heads of 128."""
    kv_size = layers * 2 * 8 * 128
    return Shape(
        num_layers=layers,
        attention=(Attention(math.inf, kv_size, layers * heads * 128),),
        kv_size=kv_size,
        params=layers * (_attention_params(hidden, heads, 8, 128) + 3 * hidden * mlp),
        head_params=vocab * hidden,
        embedding_params=0 if tied else vocab * hidden,
        context_length=40960,
    )


def _attention_params(hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    return hidden * (heads + 2 * kv_heads) * head_dim + heads * head_dim * hidden


#: Shapes of the profiles that come with asyncllm, by name.
SHAPES = {
    "h200-8b": _dense(36, 4096, 32, 12288, 151936, tied=False),
    "h200-0.6b": _dense(28, 1024, 16, 3072, 151936, tied=True),
    "h200-30b-a3b": _qwen3_30b_a3b(),
}


def shape_of(profile: str, spec: ModelSpec) -> Shape:
    """The shape of a profile that comes with asyncllm; with any other the model's own."""
    if profile in SHAPES:
        return SHAPES[profile]
    config = spec.config
    layers = [layer for layer in range(spec.num_layers) if config.has_attention(layer)]
    mlp, experts, used_experts = _mlp_params(config)
    queries = {i: config.num_attention_heads * config.head_size(i) for i in layers}
    keys = {i: config.kv_heads(i) * config.head_size(i) for i in layers}
    kinds = {
        i: 0 if config.kv_source(i) is not None else 1 if config.values_are_keys(i) else 2
        for i in layers
    }
    projected = sum(2 * queries[i] + kinds[i] * keys[i] for i in layers)
    more, tables = config.more_params
    head = spec.vocab_size * spec.hidden_size
    return Shape(
        num_layers=spec.num_layers,
        attention=Attention.of((config.window(i), 2 * keys[i], queries[i]) for i in layers),
        kv_size=spec.kv_bytes_per_token(1),
        state_matrices=(matrices := spec.state_bytes(0)),
        state_inputs=spec.state_bytes(1) - matrices,
        params=spec.hidden_size * projected + mlp + more,
        expert_params=experts,
        expert_params_per_token=used_experts,
        head_params=head,
        embedding_params=tables + (0 if config.tie_word_embeddings else head),
        context_length=spec.max_position_embeddings,
        quantization=spec.quantization,
    )


def _mlp_params(config: Config) -> tuple[int, int, int]:
    """Weights of all dense MLPs, of all experts, and of the experts that one token uses."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    if isinstance(config, OPTConfig):
        return layers * 2 * hidden * config.ffn_dim, 0, 0
    if not isinstance(config, DecoderConfig):
        raise ModelError(f"device sim does not know the shape of {type(config).__name__}")
    matrices = 3 if config.gated_mlp else 2
    dense = matrices * hidden * sum(config.mlp_size(layer) for layer in range(layers))
    if not isinstance(config, MoeConfig):
        return dense, 0, 0
    sparse = sum(config.is_sparse(layer) for layer in range(layers))
    expert = sparse * 3 * hidden * config.expert_size
    routers = sparse * hidden * config.experts
    return dense + routers, config.experts * expert, config.num_experts_per_tok * expert
