"""Steps as CUDA graphs, from the embedding to the sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.config import EngineLimits
from asyncllm.executor.device import Device
from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.sampling.sampler import Sampled, Sampler
from asyncllm.executor.step.eager import Samples, StepForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.padded_steps import PaddedSteps, Size
from asyncllm.executor.step.slots import SlotTable

#: Levels that graphs sample at; at ``EAGER`` they end with the logits.
CAPTURED_LEVELS = (Level.GREEDY, Level.DRAW, Level.FILTER)


class _Kind(NamedTuple):
    """What a graph runs; only decode rows are captured for several decode steps."""

    size: Size
    level: Level
    decode_steps: int = 1


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and its output: tokens, int64 [decode_steps, rows], or logits, [rows, vocab].

    ``slots`` are int32 [rows].
    """

    graph: torch.cuda.CUDAGraph
    output: Tensor
    slots: Tensor


class GraphedForward:
    """``StepForward`` that replays a graph if the step fits a size.

    The graph also samples for rows that do not. This is harmless: nobody reads the token, and the
    slot's ``last_token`` is overwritten by the row that does sample.

    Args:
        eager: runs all other steps.
    """

    def __init__(
        self,
        padded: PaddedSteps,
        eager: StepForward,
        sampler: Sampler,
        table: SlotTable,
        device: Device,
        limits: EngineLimits,
    ):
        self._padded = padded
        self._eager = eager
        self._sampler = sampler
        self._table = table
        self._device = device
        self._max_decode_steps = limits.max_decode_steps
        self._multi_step_rows = limits.multi_step_rows
        #: The input of every graph, which reads it from the beginning.
        self._flat = torch.zeros(
            padded.max_ints * limits.max_decode_steps,
            dtype=torch.int32,
            device=device.torch_device,
        )
        self._graphs: dict[_Kind, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device.torch_device)

    def __call__(self, step: StepRows, decode_steps: int = 1) -> Samples | None:
        size = self._padded.size_of(step)
        if size is None or step.reads_prompts:
            return self._eager(step, decode_steps)
        level = self._captured_level(self._sampler.level(step.slots, step.lengths), size)
        if level is Level.EAGER:
            sampled = [
                self._sample_eagerly(size, step.continued(after)) for after in range(decode_steps)
            ]
            return Samples.of(sampled)
        tokens = self._replay(_Kind(size, level, decode_steps), step).output
        if len(step.sampling) == 0:
            return None
        return Samples(tokens, columns=step.sampling)

    def capture(self) -> None:
        """Capture what nearly all steps need; other kinds are captured at their first step."""
        # The largest first: the others then reuse its memory.
        for size in reversed(self._padded.decode_sizes):
            for level in dict.fromkeys(
                self._captured_level(level, size) for level in CAPTURED_LEVELS
            ):
                self._capture(_Kind(size, level))
                if size.rows <= self._multi_step_rows and self._max_decode_steps > 1:
                    self._capture(_Kind(size, level, self._max_decode_steps))
        for size in reversed(self._padded.mixed_sizes):
            self._capture(_Kind(size, Level.FILTER))

    def _sample_eagerly(self, size: Size, step: StepRows) -> Sampled:
        captured = self._replay(_Kind(size, Level.EAGER), step)
        logits = self._sampling(captured.output, step)
        sampled = self._sampler.sample(logits, step.slots, step.lengths)
        self._table.keep_last(self._sampling(captured.slots, step).long(), sampled.tokens)
        return sampled

    def _sampling(self, by_row: Tensor, step: StepRows) -> Tensor:
        """The rows that sample: [rows, ...] -> [samples, ...]."""
        if len(step.sampling) == len(step.rows):
            return by_row[: len(step.rows)]
        return by_row.index_select(0, self._device.upload(step.sampling))

    def _replay(self, kind: _Kind, step: StepRows) -> _Captured:
        captured = self._graphs.get(kind) or self._capture(kind)
        self._fill(
            [self._padded.pack(kind.size, step.continued(i)) for i in range(kind.decode_steps)]
        )
        captured.graph.replay()
        return captured

    def _fill(self, parts: list[np.ndarray]) -> Tensor:
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        target = self._flat[: len(flat)]
        self._device.upload_into(target, flat)
        return target

    def _capture(self, kind: _Kind) -> _Captured:
        flat = self._fill([self._padded.pack(kind.size, None)] * kind.decode_steps)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # The first launch loads kernels and sets up libraries, which cannot be captured.
            self._run(kind, flat)
            self._stream.synchronize()
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                output, slots = self._run(kind, flat)
            finally:
                graph.capture_end()
        self._graphs[kind] = captured = _Captured(graph, output, slots)
        return captured

    def _run(self, kind: _Kind, flat: Tensor) -> tuple[Tensor, Tensor]:
        """``_Captured.output`` and ``slots``."""
        size, level, decode_steps = kind
        tokens = []
        for part in flat.chunk(decode_steps):
            logits, rows = self._padded.run(size, part)
            if level is Level.EAGER:
                return logits, rows.slots
            relay = self._table.last_token
            tokens.append(self._sampler.draw(logits, rows.slots, rows.lengths, level, relay=relay))
        return torch.stack(tokens) if decode_steps > 1 else tokens[0].unsqueeze(0), rows.slots

    def _captured_level(self, level: Level, size: Size) -> Level:
        """The level of the graph that runs steps of this level.

        A higher level costs a few microseconds a step, which matter for the smallest decode steps
        only; each graph less saves milliseconds of start-up.
        """
        is_small = size.rows <= self._multi_step_rows and not size.mixed
        if level is Level.EAGER or (level is Level.GREEDY and is_small):
            return level
        return Level.FILTER
