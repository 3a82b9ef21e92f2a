"""Step times of the simulated device: measured ones, else a roofline of one GPU and one model.

In the roofline a step takes ``t0 + max(weights / BW, 2 P tokens / F) + attention``: matmuls are
bound by memory or by arithmetic, and attention adds up over the rows. Its constants are those of
steps measured on an H200: it is within 15 % of most of them, and a ``Profile`` within 3 %.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from asyncllm.executor.sim.profile import Profile, StepShape
from asyncllm.executor.sim.shape import Shape, Work
from asyncllm.executor.sim.timeline import StepTiming


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


class Roofline:
    """The step times of some work on one device, by bandwidth and arithmetic alone."""

    def __init__(self, work: Work, gpu: Gpu):
        # A step that computes nothing.
        self.base_seconds = gpu.kernel_seconds * work.kernels
        # Reading: the weights of every step, all experts.
        self.weight_seconds = work.weight_bytes / gpu.bandwidth
        self.expert_seconds = work.expert_bytes / gpu.bandwidth
        # Reading and writing the recurrent state of one row.
        self.state_seconds = 2 * work.state_bytes / gpu.bandwidth
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
        seconds = self.matmuls(int(lengths.sum()), num_samples) + len(lengths) * self.state_seconds
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
        weight_bytes, kv_bytes, state_bytes: memory of all weights, of the KV of one token, and of
            the recurrent state of one sequence.
        profile: measured times, if there are any; ``seconds`` is from its tables.
    """

    def __init__(
        self,
        shape: Shape,
        gpu: Gpu,
        itemsize: int,
        profile: Profile | None = None,
        kv_itemsize: int | None = None,
    ):
        """``itemsize`` and ``kv_itemsize``: see ``Shape.work``."""
        work = shape.work(itemsize, kv_itemsize)
        super().__init__(work, gpu)
        self.weight_bytes = int(shape.stored_bytes(itemsize))
        self.kv_bytes, self.state_bytes = work.kv_bytes, work.state_bytes
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
