"""Steps as CUDA graphs: from the embedding to the sampled tokens, launched at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from asyncllm.config import EngineLimits
from asyncllm.executor.device import Device
from asyncllm.executor.sampling.sampler import Level, Sampled, Sampler
from asyncllm.executor.step.eager import Samples, StepForward
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.padded_steps import Size, StepPrograms
from asyncllm.executor.step.slots import SlotTable

#: Levels at which a graph samples.
DRAWN_LEVELS = (Level.GREEDY, Level.DRAW, Level.FILTER)


class _Kind(NamedTuple):
    """What a graph is good for; only decode rows are captured in several steps."""

    size: Size
    level: Level
    decode_steps: int = 1


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and where it leaves tokens, int64 [decode_steps, rows], or each row's logits.

    ``slots`` is int32 [rows], of each row.
    """

    graph: torch.cuda.CUDAGraph
    output: Tensor
    slots: Tensor


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
        limits: EngineLimits,
    ):
        self._programs = programs
        self._otherwise = otherwise
        self._sampler = sampler
        self._table = table
        self._device = device
        self._max_decode_steps = limits.max_decode_steps
        self._multi_step_rows = limits.multi_step_rows
        #: What differs between steps; every graph reads it from the beginning.
        self._flat = torch.zeros(
            programs.max_ints * limits.max_decode_steps,
            dtype=torch.int32,
            device=device.torch_device,
        )
        self._graphs: dict[_Kind, _Captured] = {}
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device.torch_device)

    def __call__(self, step: StepRows, decode_steps: int = 1) -> Samples | None:
        size = self._programs.size_of(step)
        if size is None or step.reads_prompts:
            return self._otherwise(step, decode_steps)
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
        """Capture what nearly all steps need; the rest is captured when it is first met."""
        # The largest first: the others then find their memory in its pool.
        for size in reversed(self._programs.decode_sizes):
            for level in dict.fromkeys(self._captured_level(level, size) for level in DRAWN_LEVELS):
                self._capture(_Kind(size, level))
                if size.rows <= self._multi_step_rows and self._max_decode_steps > 1:
                    self._capture(_Kind(size, level, self._max_decode_steps))
        for size in reversed(self._programs.mixed_sizes):
            self._capture(_Kind(size, Level.FILTER))

    def _sample_eagerly(self, size: Size, step: StepRows) -> Sampled:
        captured = self._replay(_Kind(size, Level.EAGER), step)
        logits = self._sampling(captured.output, step)
        sampled = self._sampler.sample(logits, step.slots, step.lengths)
        self._table.relay(self._sampling(captured.slots, step).long(), sampled.tokens)
        return sampled

    def _sampling(self, by_row: Tensor, step: StepRows) -> Tensor:
        """Of the rows that sample; [rows, ...] -> [samples, ...]."""
        if len(step.sampling) == len(step.rows):
            return by_row[: len(step.rows)]
        return by_row.index_select(0, self._device.upload(step.sampling))

    def _replay(self, kind: _Kind, step: StepRows) -> _Captured:
        captured = self._graphs.get(kind) or self._capture(kind)
        self._fill(
            [self._programs.pack(kind.size, step.continued(i)) for i in range(kind.decode_steps)]
        )
        captured.graph.replay()
        return captured

    def _fill(self, parts: list[np.ndarray]) -> Tensor:
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        target = self._flat[: len(flat)]
        self._device.upload_into(target, flat)
        return target

    def _capture(self, kind: _Kind) -> _Captured:
        flat = self._fill([self._programs.pack(kind.size, None)] * kind.decode_steps)
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Once without capturing: kernels are loaded and libraries set up at the first launch.
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
        """Each row's tokens, int64 [decode_steps, rows], or logits; and slots."""
        size, level, decode_steps = kind
        tokens = []
        for part in flat.chunk(decode_steps):
            logits, rows = self._programs.run(size, part)
            if level is Level.EAGER:
                return logits, rows.slots
            relay = self._table.last_token
            tokens.append(self._sampler.draw(logits, rows.slots, rows.lengths, level, relay=relay))
        return torch.stack(tokens) if decode_steps > 1 else tokens[0].unsqueeze(0), rows.slots

    def _captured_level(self, level: Level, size: Size) -> Level:
        """The level of the graph that runs a step of this one.

        A graph that can do more costs a few microseconds a step, and saves thousands of them at the
        start, as one fewer is captured. Only for the smallest decode steps those few matter.
        """
        is_small = size.rows <= self._multi_step_rows and not size.mixed
        if level is Level.EAGER or (level is Level.GREEDY and is_small):
            return level
        return Level.FILTER
