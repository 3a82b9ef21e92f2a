"""Decode steps as CUDA graphs: from the embedding to the sampled token, launched at once.

A captured graph repeats the same kernels on the same addresses. So what differs between two steps
(which slots, which positions) is written to fixed buffers first, and everything else that a kernel
needs (block table, last tokens, lengths, sampling parameters) it finds on the device by slot. The
number of rows is rounded up to a bucket; rows that pad it belong to a slot that nobody has.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import AttentionBackend, ForwardBatch
from asyncllm.config import EngineLimits
from asyncllm.executor.device import Device
from asyncllm.executor.eager import StepForward
from asyncllm.executor.inputs import LAST_TOKEN, StepRows
from asyncllm.executor.sampler import Level, Sampled, Sampler
from asyncllm.executor.slots import SlotTable
from asyncllm.kernels.tokens import locate_tokens
from asyncllm.models.base import CausalLM

#: Captured before the first request: what nearly all steps need.
USUAL_LEVELS = (Level.GREEDY, Level.DRAW)


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose kernels read on the device what differs between steps."""

    def device_plan(self, slots: Tensor, lengths: Tensor) -> Any:
        """A plan of rows of one token each, good for whatever these tensors hold later.

        Args:
            slots: int32 [n]. lengths: int32 [n], the row's own token included; 0 is padding.
        """


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and where it leaves tokens, int64 [bucket], or else logits [bucket, vocab]."""

    graph: torch.cuda.CUDAGraph
    output: Tensor


class GraphedForward:
    """``StepForward`` that replays a graph where every row samples its only token.

    Args:
        otherwise: runs all other steps.
    """

    def __init__(
        self,
        otherwise: StepForward,
        model: CausalLM,
        backend: GraphBackend,
        sampler: Sampler,
        table: SlotTable,
        limits: EngineLimits,
        device: Device,
    ):
        self._otherwise = otherwise
        self._model = model
        self._backend = backend
        self._sampler = sampler
        self._table = table
        self._page_size = limits.page_size
        self._device = device
        self._buckets = row_buckets(limits.max_num_seqs)
        #: Rows of ``StepRows.entries`` and of lengths, each bucket in the same place.
        self._entries = torch.zeros(
            4 * limits.max_num_seqs, dtype=torch.int32, device=device.torch_device
        )
        self._graphs: dict[tuple[int, Level], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device.torch_device)

    def __call__(self, step: StepRows) -> Sampled | None:
        count = len(step.rows)
        if not step.each_samples_its_only_token or count > self._buckets[-1]:
            return self._otherwise(step)
        bucket = self._buckets[bisect_left(self._buckets, count)]
        level = self._sampler.level(step.slots, step.lengths)
        captured = self._graphs.get((bucket, level)) or self._capture(bucket, level)
        entries = np.empty((4, bucket), dtype=np.int32)
        entries[:, count:] = self._padding
        entries[:3, :count] = step.entries
        entries[3, :count] = step.lengths
        self._device.upload_into(self._entries[: 4 * bucket], entries.reshape(-1))
        captured.graph.replay()
        if level is not Level.EAGER:
            return Sampled(captured.output[:count], None)
        sampled = self._sampler.sample(captured.output[:count], step.slots, step.lengths)
        self._table.relay(self._entries[bucket : bucket + count].to(torch.int64), sampled.tokens)
        return sampled

    def capture(self) -> None:
        """Capture what nearly all steps need; the rest is captured when it is first met."""
        # The largest first: the others then find their memory in its pool.
        for bucket in reversed(self._buckets):
            for level in USUAL_LEVELS:
                self._capture(bucket, level)

    @property
    def _padding(self) -> np.ndarray:
        """A column of ``_entries`` that stands for no row."""
        return np.array([[LAST_TOKEN], [self._table.dummy_slot], [-1], [0]], dtype=np.int32)

    def _capture(self, bucket: int, level: Level) -> _Captured:
        entries = self._entries[: 4 * bucket].view(4, bucket)
        entries.copy_(self._device.upload(np.broadcast_to(self._padding, (4, bucket)).copy()))
        # Once without capturing: kernels are loaded and libraries set up at their first launch.
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._run(entries, level)
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output = self._run(entries, level)
            finally:
                graph.capture_end()
        self._graphs[bucket, level] = captured = _Captured(graph, output)
        return captured

    def _run(self, entries: Tensor, level: Level) -> Tensor:
        """The step itself; entries int32 [4, bucket]."""
        table = self._table
        tokens = locate_tokens(entries[:3], table.last_token, table.block_table, self._page_size)
        plan = self._backend.device_plan(entries[1], entries[3])
        batch = ForwardBatch(*tokens, sample_rows=None, backend=self._backend, plan=plan)
        logits = self._model.logits(self._model(batch))
        if level is Level.EAGER:
            return logits
        return self._sampler.draw(logits, entries[1], entries[3], level, relay=table.last_token)


def row_buckets(max_rows: int) -> list[int]:
    """Numbers of rows to capture graphs for, rising.

    What padding costs is mostly reading weights in tiles of 16 rows, so there it is nothing.
    """
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, max_rows, 64)]
    return [*(size for size in sizes if size < max_rows), max_rows]
