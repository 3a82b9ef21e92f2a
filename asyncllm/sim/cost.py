"""Step times of the simulated device: measured ones, else a roofline of one GPU and one model.

In the roofline a step takes ``t0 + max(weights / BW, 2 P tokens / F) + attention``: matmuls are
bound by memory or by arithmetic, and attention adds up over the rows. Its constants are those of
steps measured on an H200: it is within 15 % of most of them, and a ``Profile`` within 3 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Self

import msgspec
import numpy as np

from asyncllm.errors import ModelError
from asyncllm.models.config.base import Config, DecoderConfig, MoeConfig
from asyncllm.models.config.opt import OPTConfig
from asyncllm.models.spec import ModelSpec
from asyncllm.sim.profile import Profile, StepShape
from asyncllm.sim.timeline import StepTiming


class Gpu(msgspec.Struct, frozen=True, kw_only=True):
    """What a device reaches in practice, in bytes, seconds and floating-point operations.

    ``flops`` is of matmuls, ``attention_flops`` of prompt attention, ``kernel_seconds`` the gap
    after each kernel, ``copy_bandwidth`` to and from host memory in each direction.
    """

    memory: float
    host_memory: float
    bandwidth: float
    flops: float
    attention_flops: float
    kernel_seconds: float
    copy_bandwidth: float


#: Fitted to the profiles of Qwen3-8B and 0.6B: decode steps of one row, prompts of 8,000 tokens.
#: ``memory`` is what those engines had for weights and KV cache, over ``gpu_memory_utilization``.
H200 = Gpu(
    memory=147.8e9,
    host_memory=2e12,
    bandwidth=4.28e12,
    flops=640e12,
    attention_flops=500e12,
    kernel_seconds=0.93e-6,
    copy_bandwidth=50e9,
)
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
        params: weights of the matmuls of every token, without the head.
        expert_params, expert_params_per_token: weights of all experts, and of those one token uses.
        head_params: of the matmul for logits, for rows that sample.
        embedding_params: of tables that only take memory.
        context_length: longest sequence.
    """

    num_layers: int
    attention: tuple[Attention, ...]
    kv_size: int
    params: int
    expert_params: int = 0
    expert_params_per_token: int = 0
    head_params: int
    embedding_params: int
    context_length: int

    @property
    def stored_params(self) -> int:
        return self.params + self.expert_params + self.head_params + self.embedding_params

    def work(self, itemsize: int) -> Work:
        """What its steps read and compute, with weights and KV of ``itemsize`` bytes."""
        return Work(
            kernels=KERNELS_PER_STEP
            + self.num_layers * (KERNELS_PER_LAYER + KERNELS_OF_EXPERTS * (self.expert_params > 0)),
            weight_bytes=(self.params + self.head_params) * itemsize,
            expert_bytes=self.expert_params * itemsize,
            token_expert_bytes=self.expert_params_per_token * itemsize,
            kv_bytes=self.kv_size * itemsize,
            token_flops=2 * (self.params + self.expert_params_per_token),
            sample_flops=2 * self.head_params,
            attention=self.attention,
            kv_itemsize=itemsize,
        )


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What steps of a model read and compute on one device, of any kind.

    Attributes:
        kernels: of one step.
        weight_bytes: what every step reads.
        expert_bytes, token_expert_bytes: of all experts, and of those that one token uses.
        kv_bytes: of the KV of one token.
        token_flops, sample_flops: of the matmuls of one token, and of the logits of one row.
        attention: of all layers.
        kv_itemsize: bytes of an element of the KV.
    """

    kernels: int
    weight_bytes: float
    expert_bytes: float = 0.0
    token_expert_bytes: float = 0.0
    kv_bytes: int
    token_flops: float
    sample_flops: float
    attention: tuple[Attention, ...]
    kv_itemsize: int


class Roofline:
    """The step times of some work on one device, by bandwidth and arithmetic alone."""

    def __init__(self, work: Work, gpu: Gpu):
        # A step that computes nothing.
        self.base_seconds = gpu.kernel_seconds * work.kernels
        # Reading: the weights of every step, all experts.
        self.weight_seconds = work.weight_bytes / gpu.bandwidth
        self.expert_seconds = work.expert_bytes / gpu.bandwidth
        # The share of experts that one token uses.
        self.used_experts = work.token_expert_bytes / (work.expert_bytes or 1.0)
        # Arithmetic: one token, the logits of one row, attention of one query and one key.
        self.token_seconds = work.token_flops / gpu.flops
        self.sample_seconds = work.sample_flops / gpu.flops
        pair_flops = sum(4 * layers.heads_size for layers in work.attention)
        self.pair_seconds = pair_flops / gpu.attention_flops
        # By window: reading one cached token, attention of one query and one key.
        self._attention = [
            (
                layers.window,
                layers.kv_size * work.kv_itemsize / gpu.bandwidth,
                4 * layers.heads_size / gpu.attention_flops,
            )
            for layers in work.attention
        ]

    def step(
        self, starts: np.ndarray, lengths: np.ndarray, num_samples: int, decode_steps: int = 1
    ) -> float:
        """The seconds of a step; see ``SimCost.seconds``."""
        # fsum is exact, so the same on every machine.
        return math.fsum(
            self._once(starts + after, lengths, num_samples) for after in range(decode_steps)
        )

    def matmuls(self, tokens: int, num_samples: int) -> float:
        """The seconds of all but attention."""
        # Of experts drawn at random; where tokens are alike, they need fewer.
        unused = _power(1.0 - self.used_experts, tokens)
        weights = self.weight_seconds + (1.0 - unused) * self.expert_seconds
        arithmetic = tokens * self.token_seconds + num_samples * self.sample_seconds
        return self.base_seconds + max(weights, arithmetic)

    def _once(self, starts: np.ndarray, lengths: np.ndarray, num_samples: int) -> float:
        ends = starts + lengths
        seconds = self.matmuls(int(lengths.sum()), num_samples)
        for window, read_seconds, pair_seconds in self._attention:
            # Token i of a row sees start + i + 1 keys. Decode rows are bound by reading cached
            # tokens, all but the shortest chunks by arithmetic.
            pairs = lengths * np.minimum(starts + ends + 1, 2 * window)
            read = np.minimum(ends, window + lengths)
            rows = np.maximum(read * read_seconds, pairs * (pair_seconds / 2))
            seconds += math.fsum(rows.tolist())
        return seconds


def _power(base: float, exponent: int) -> float:
    """``base ** exponent``, with the same bits on every machine."""
    result = 1.0
    while exponent:
        result *= base if exponent & 1 else 1.0
        base, exponent = base * base, exponent >> 1
    return result


class SimCost(Roofline):
    """The step times of one model on one device.

    Attributes:
        weight_bytes, kv_bytes: memory of all weights, and of the KV of one token.
        profile: measured times, if there are any; ``seconds`` is from its tables.
    """

    def __init__(self, shape: Shape, gpu: Gpu, itemsize: int, profile: Profile | None = None):
        """``itemsize``: bytes of a weight, and of an element of the KV."""
        work = shape.work(itemsize)
        super().__init__(work, gpu)
        self.weight_bytes = shape.stored_params * itemsize
        self.kv_bytes = work.kv_bytes
        self._copy_bandwidth = gpu.copy_bandwidth
        self.profile = profile
        self._times = None
        if profile is not None:
            self._times = profile.steps.extended(
                lambda rows: self.matmuls(rows, rows), lambda tokens: self.matmuls(tokens, 1)
            )

    def seconds(
        self, starts: np.ndarray, lengths: np.ndarray, num_samples: int, decode_steps: int = 1
    ) -> float:
        """The time that a step of this shape takes, as a rule.

        Args:
            starts, lengths: int64 [n], n > 0; tokens already cached, and new ones, of each row.
            num_samples: rows that sample.
            decode_steps: tokens that the step yields of each row, if all are decode rows.
        """
        if self._times is not None:
            return self._times.seconds(StepShape.of(starts, lengths, num_samples), decode_steps)
        return self.step(starts, lengths, num_samples, decode_steps)

    def timing(
        self,
        step: int,
        starts: np.ndarray,
        lengths: np.ndarray,
        num_samples: int,
        decode_steps: int = 1,
    ) -> StepTiming:
        """The times of step number ``step``: as measured, no two steps take equally long."""
        if self.profile is None or self._times is None:
            return StepTiming(self.seconds(starts, lengths, num_samples, decode_steps))
        shape = StepShape.of(starts, lengths, num_samples)
        seconds = self._times.seconds(shape, decode_steps)
        return self.profile.timing(step, shape, seconds, decode_steps)

    def copy_seconds(self, num_pages: int, page_size: int) -> float:
        """The time to copy pages in one direction."""
        return num_pages * page_size * self.kv_bytes / self._copy_bandwidth


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
}


def shape_of(profile: str, spec: ModelSpec) -> Shape:
    """The shape of a profile that comes with asyncllm; with any other the model's own."""
    if profile in SHAPES:
        return SHAPES[profile]
    config = spec.config
    layers = range(spec.num_layers)
    mlp, experts, used_experts = _mlp_params(config)
    queries = [config.num_attention_heads * config.head_size(layer) for layer in layers]
    keys = [config.kv_heads(layer) * config.head_size(layer) for layer in layers]
    windows = [config.window(layer) for layer in layers]
    kinds = [
        0 if config.kv_source(layer) is not None else 1 if config.values_are_keys(layer) else 2
        for layer in layers
    ]
    projected = sum(2 * queries[i] + kinds[i] * keys[i] for i in layers)
    more, tables = config.more_params
    head = spec.vocab_size * spec.hidden_size
    return Shape(
        num_layers=spec.num_layers,
        attention=Attention.of((windows[i], 2 * keys[i], queries[i]) for i in layers),
        kv_size=spec.kv_bytes_per_token(1),
        params=spec.hidden_size * projected + mlp + more,
        expert_params=experts,
        expert_params_per_token=used_experts,
        head_params=head,
        embedding_params=tables + (0 if config.tie_word_embeddings else head),
        context_length=spec.max_position_embeddings,
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
