"""Sequences in a paged KV cache on the GPU, with dense attention in float64 as their reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import AttentionBackend
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.kernels.types import AttentionSpec
from tests.support.models import attending, dense_attention

DEVICE = torch.device("cuda")
NUM_SLOTS = 24
MAX_LENGTH = 4096
#: Absolute and relative.
TOLERANCE = {torch.bfloat16: (1e-2, 2e-2), torch.float16: (2e-3, 4e-3), torch.float32: (1e-5, 1e-5)}


@dataclass(frozen=True)
class Case:
    """A model's attention; ``kinds`` are (window, softcap) of its layers, and all or none of them
    have sinks."""

    dtype: torch.dtype
    head_dim: int
    group: int
    kinds: tuple[tuple[int | None, float | None], ...] = ((None, None),)
    page_size: int = 16
    num_kv_heads: int = 2
    has_sinks: bool = False

    def specs(self) -> list[AttentionSpec]:
        return [
            AttentionSpec(
                layer=layer,
                num_heads=self.group * self.num_kv_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                scale=self.head_dim**-0.5,
                window=window,
                softcap=softcap,
                has_sinks=self.has_sinks,
            )
            for layer, (window, softcap) in enumerate(self.kinds)
        ]

    def __str__(self) -> str:
        kinds = "+".join(f"w{window}c{softcap}" for window, softcap in self.kinds)
        name = str(self.dtype).removeprefix("torch.")
        sinks = "-sinks" if self.has_sinks else ""
        return f"{name}-d{self.head_dim}-g{self.group}-p{self.page_size}-{kinds}{sinks}"


class PagedSequences:
    """Sequences with random K and V in shuffled pages; all other positions hold NaN."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self.specs = case.specs()
        self._random = torch.Generator(DEVICE).manual_seed(seed)
        max_pages = MAX_LENGTH // case.page_size
        num_pages = NUM_SLOTS * max_pages
        self.pool = KVPool(self.specs, num_pages, case.page_size, case.dtype, DEVICE)
        self.pool.storage.fill_(torch.nan)
        shuffled = torch.randperm(num_pages, generator=self._random, device=DEVICE)
        self.block_table = shuffled.to(torch.int32).view(NUM_SLOTS, max_pages)
        num_heads = case.group * case.num_kv_heads
        # From those that hardly count to one that takes nearly all the weight.
        sinks = torch.linspace(-9.0, 9.0, num_heads, device=DEVICE).to(case.dtype)
        self.encoding = attending.UNCHANGED._replace(sinks=sinks if case.has_sinks else None)
        self._dense: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def remember(self, slot: int, length: int) -> None:
        """Fill the first ``length`` positions of a slot, as earlier steps would have."""
        if length == 0:
            return
        positions = torch.arange(length, device=DEVICE)
        pages = self.block_table[slot][positions // self.case.page_size].long()
        offsets = positions % self.case.page_size
        for spec in self.specs:
            k, v = self._extend(spec, slot, 0, length)
            keys, values = self.pool.layer(spec.layer)
            keys[pages, offsets], values[pages, offsets] = k, v

    def step(self, rows: np.ndarray) -> list[Layer]:
        """Random inputs of one step, and what each layer must answer."""
        layers = []
        for spec in self.specs:
            q = self._normal(int(rows[:, 2].sum()), spec.num_heads)
            new = [self._extend(spec, *row) for row in rows.tolist()]
            k, v = (torch.cat(parts) for parts in zip(*new, strict=True))
            qkv = torch.cat((q, k, v), dim=1)
            layers.append(Layer(self, spec, rows, qkv, self._reference(spec, rows, q)))
        return layers

    def _normal(self, tokens: int, heads: int) -> Tensor:
        shape = (tokens, heads, self.case.head_dim)
        return torch.randn(shape, generator=self._random, device=DEVICE).to(self.case.dtype)

    def _extend(
        self, spec: AttentionSpec, slot: int, start: int, q_len: int
    ) -> tuple[Tensor, Tensor]:
        """K and V of positions from ``start`` on, which the reference reads from now on."""
        k, v = (self._normal(q_len, spec.num_kv_heads) for _ in range(2))
        old = self._dense.get((spec.layer, slot))
        assert start == (0 if old is None else len(old[0]))
        joined = (k, v) if old is None else (torch.cat((old[0], k)), torch.cat((old[1], v)))
        self._dense[spec.layer, slot] = joined
        return k, v

    def _reference(self, spec: AttentionSpec, rows: np.ndarray, q: Tensor) -> Tensor:
        answers = []
        first = 0
        for slot, start, q_len in rows.tolist():
            queries = q[first : first + q_len].double()
            first += q_len
            seen = self._dense[spec.layer, slot]
            with DEVICE:  # where the reference makes its positions
                answers.append(
                    dense_attention.attend(queries, *seen, spec, start, self.encoding.sinks)
                )
        return torch.cat(answers)


@dataclass(frozen=True)
class Layer:
    """Inputs of one layer in one step, and the reference's answer in float64."""

    world: PagedSequences
    spec: AttentionSpec
    rows: np.ndarray
    qkv: Tensor
    expected: Tensor

    def run(self, backend: AttentionBackend, plan: Any = None) -> Tensor:
        """By default with a plan of the backend's own."""
        table, page_size = self.world.block_table, self.world.case.page_size
        where = self.rows, table, page_size
        encoding = self.world.encoding
        return attending.attend(backend, self.qkv, self.spec, *where, encoding=encoding, plan=plan)

    def check(self, answer: Tensor) -> None:
        atol, rtol = TOLERANCE[self.qkv.dtype]
        torch.testing.assert_close(answer.double(), self.expected, atol=atol, rtol=rtol)
