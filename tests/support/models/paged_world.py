"""Sequences in a small paged KV cache on the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from asyncllm.attention.paged import PagedBackend
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.kernels.types import AttentionSpec
from tests.support.models.attending import UNCHANGED, attend
from tests.support.models.dense_attention import DenseBackend

HEADS, KV_HEADS, DIM, PAGE_SIZE, SLOTS, MAX_PAGES = 4, 2, 8, 4, 8, 12
CPU = torch.device("cpu")

row_lists = st.lists(
    st.tuples(st.integers(0, 20), st.one_of(st.just(1), st.integers(1, 9))),
    min_size=1,
    max_size=SLOTS - 1,
)


def specs(
    window: int | None = None, softcap: float | None = None, has_sinks: bool = False
) -> AttentionSpec:
    return AttentionSpec(0, HEADS, KV_HEADS, DIM, DIM**-0.5, window, softcap, has_sinks)


class World:
    """Sequences in shuffled pages that hold NaN wherever no row may look.

    Args:
        scales: float32 [2, KV_HEADS], for pages in 8 bits; ``dense`` has none.
    """

    def __init__(
        self, lens: list[tuple[int, int]], spec: AttentionSpec, scales: Tensor | None = None
    ):
        self.spec = spec
        sinks = torch.linspace(-3.0, 3.0, HEADS) if spec.has_sinks else None
        self.encoding = UNCHANGED._replace(sinks=sinks)
        slots = torch.randperm(SLOTS - 1)[: len(lens)].tolist()
        self.rows = np.array(
            [(s, *span) for s, span in zip(slots, lens, strict=True)], dtype=np.int32
        )
        kind = torch.float32, CPU
        if scales is None:
            self.pool = KVPool([spec], SLOTS * MAX_PAGES, PAGE_SIZE, *kind)
        else:
            kind = torch.float8_e4m3fn, CPU
            self.pool = KVPool([spec], SLOTS * MAX_PAGES, PAGE_SIZE, *kind, {0: scales})
        self.pool.storage.fill_(torch.nan)
        self.table = torch.randperm(SLOTS * MAX_PAGES).int().view(SLOTS, MAX_PAGES)
        self.dense = DenseBackend()
        before = np.array([(s, 0, n) for s, n, _ in self.rows if n > 0], dtype=np.int32)
        if len(before):
            # As earlier steps would have left it.
            qkv = self.qkv(before)
            for backend in (PagedBackend(self.pool, torch.from_numpy), self.dense):
                self._attend(backend, qkv, before)

    def qkv(self, rows: np.ndarray) -> Tensor:
        return torch.randn(int(rows[:, 2].sum()), HEADS + 2 * KV_HEADS, DIM)

    def run(self, backend: Any, qkv: Tensor, plan: Any = None) -> Tensor:
        return self._attend(backend, qkv, self.rows, plan)

    def _attend(self, backend: Any, qkv: Tensor, rows: np.ndarray, plan: Any = None) -> Tensor:
        where = rows, self.table, PAGE_SIZE
        return attend(backend, qkv, self.spec, *where, encoding=self.encoding, plan=plan)
