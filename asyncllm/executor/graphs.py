"""Steps as CUDA graphs: from the embedding to the sampled tokens, launched at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.executor.eager import StepForward
from asyncllm.executor.inputs import StepRows
from asyncllm.executor.programs import RowTensors, Size, StepPrograms
from asyncllm.executor.sampler import Level, Sampled, Sampler
from asyncllm.executor.slots import SlotTable

#: Captured before the first request: what nearly all steps need.
USUAL_LEVELS = (Level.GREEDY, Level.DRAW)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and where it leaves each row's token, int64 [rows], or logits, [rows, vocab]."""

    graph: torch.cuda.CUDAGraph
    output: Tensor
    rows: RowTensors


class GraphedForward:
    """``StepForward`` that replays a graph where a step has a size.

    Rows that do not sample are sampled all the same, which is harmless: nobody looks at the token,
    and what is relayed is overwritten by the row that does sample.

    Args:
        otherwise: runs all other steps.
    """

    def __init__(
        self,
        programs: StepPrograms,
        otherwise: StepForward,
        sampler: Sampler,
        table: SlotTable,
        device: Device,
    ):
        self._programs = programs
        self._otherwise = otherwise
        self._sampler = sampler
        self._table = table
        self._device = device
        #: What differs between steps; every graph reads it from the beginning.
        self._flat = torch.zeros(programs.max_ints, dtype=torch.int32, device=device.torch_device)
        self._graphs: dict[tuple[Size, Level], _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device.torch_device)

    def __call__(self, step: StepRows) -> Sampled | None:
        size = self._programs.size_of(step)
        if size is None:
            return self._otherwise(step)
        level = self._sampler.level(step.slots, step.lengths)
        captured = self._graphs.get((size, level)) or self._capture(size, level)
        flat = self._programs.pack(size, step)
        self._device.upload_into(self._flat[: len(flat)], flat)
        captured.graph.replay()
        if len(step.sampling) == 0:
            return None
        output = self._sampling(captured.output, step)
        if level is not Level.EAGER:
            return Sampled(output, None)
        sampled = self._sampler.sample(output, step.slots, step.lengths)
        self._table.relay(self._sampling(captured.rows.slots, step).long(), sampled.tokens)
        return sampled

    def capture(self) -> None:
        """Capture what nearly all steps need; the rest is captured when it is first met."""
        # The largest first: the others then find their memory in its pool.
        for size in reversed(self._programs.decode_sizes):
            for level in USUAL_LEVELS:
                self._capture(size, level)

    def _sampling(self, by_row: Tensor, step: StepRows) -> Tensor:
        """Of the rows that sample."""
        if len(step.sampling) == len(step.rows):
            return by_row[: len(step.rows)]
        return by_row.index_select(0, self._device.upload(step.sampling))

    def _capture(self, size: Size, level: Level) -> _Captured:
        padding = self._programs.pack(size, None)
        flat = self._flat[: len(padding)]
        self._device.upload_into(flat, padding)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Once without capturing: kernels are loaded and libraries set up at the first launch.
            self._run(size, flat, level)
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output, rows = self._run(size, flat, level)
            finally:
                graph.capture_end()
        self._graphs[size, level] = captured = _Captured(graph, output, rows)
        return captured

    def _run(self, size: Size, flat: Tensor, level: Level) -> tuple[Tensor, RowTensors]:
        logits, rows = self._programs.run(size, flat)
        if level is Level.EAGER:
            return logits, rows
        relay = self._table.last_token
        return self._sampler.draw(logits, rows.slots, rows.lengths, level, relay=relay), rows
