"""Steps as CUDA graphs, from the embedding to the sampled tokens.

Some sizes are captured before serving starts, and the others when the engine is idle, or now and
then between two steps. Until then, a step is padded to a larger size.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from asyncllm.config import EngineLimits
from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.sampling.sampler import Sampled
from asyncllm.executor.step.capture import borrowed, capturing
from asyncllm.executor.step.drafter import HeadDrafter, Taken
from asyncllm.executor.step.eager import EagerForward, Samples
from asyncllm.executor.step.graph_kinds import GraphKinds, Kind
from asyncllm.executor.step.inputs import StepRows
from asyncllm.executor.step.padded_steps import PaddedSteps, columns_of
from asyncllm.parallel.ranks import Alone, Ranks, RanksBroken

log = logging.getLogger(__name__)

#: Between two captures, so that another engine of the process can launch a step.
GIVE_WAY_SECONDS: Final = 0.0005
#: A program that waits for the whole device in another thread makes a capture fail.
CAPTURE_ATTEMPTS: Final = 3
#: How far a rank may be behind, which compiles a kernel before it captures.
CAPTURE_SECONDS: Final = 120.0
#: What an attempt has come to, from the worst.
_NEVER, _AGAIN, _CAPTURED = range(3)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and its results.

    Attributes:
        plans: the attention backend's, one for each decode step.
        tokens: int64 [decode_steps, rows].
        logits: [rows, vocab], of the last decode step; valid until the next replay of any graph.
        slots: int32 [rows].
        taken: see ``Samples``; valid as long as ``logits``.
    """

    graph: torch.cuda.CUDAGraph
    kind: Kind
    plans: list[Any]
    tokens: Tensor
    logits: Tensor
    slots: Tensor
    taken: Taken | None


class GraphedForward:
    """``StepForward`` that replays a graph if the step fits a size.

    The graph also samples for rows that do not. This is harmless: nobody reads the token, and the
    slot's ``last_token`` is overwritten by the row that does sample.

    Args:
        eager: runs all other steps.
        drafter: what it does after a step is captured after that.
        drafts: see ``GraphKinds``.
    """

    def __init__(
        self,
        padded: PaddedSteps,
        eager: EagerForward,
        limits: EngineLimits,
        ranks: Ranks | None = None,
        drafter: HeadDrafter | None = None,
        *,
        drafts: bool = False,
    ):
        self._padded = padded
        self._eager = eager
        self._sampler = eager.sampler
        self._table = eager.table
        self._device = device = eager.device
        self._ranks = ranks or Alone()
        self._drafter = drafter
        self._kinds = GraphKinds(
            padded.decode_sizes,
            padded.mixed_sizes,
            limits.max_decode_steps,
            limits.multi_step_rows,
            drafts=drafts,
        )
        #: The input of every graph, which reads it from the beginning.
        self._flat = torch.zeros(
            padded.max_ints * limits.max_decode_steps, dtype=torch.int32, device=device.torch_device
        )
        self._graphs: dict[Kind, _Captured] = {}
        self._missing: deque[Kind] = deque()
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = _capture_stream(device.torch_device)

    def __call__(self, step: StepRows, decode_steps: int = 1) -> Samples | None:
        if step.reads_prompts:
            return self._eager(step, decode_steps)
        level = self._sampler.level(step.slots, step.least_lengths)
        if level is Level.EAGER or self._padded.plans_on_host:
            step = step.settled(self._table)
            level = self._sampler.level(step.slots, step.lengths)
        captured = self._find(step, level, decode_steps)
        if captured is None:
            return self._eager(step, decode_steps)
        if level is Level.EAGER:
            steps = map(step.continued, range(decode_steps))
            samples = Samples.of([self._sample_eagerly(captured, each) for each in steps])
            return replace(samples, taken=captured.taken)
        if captured.kind.decode_steps == decode_steps:
            self._replay(captured, step)
            tokens = captured.tokens
        else:
            parts = []
            for i in range(decode_steps):
                self._replay(captured, step.continued(i))
                parts.append(captured.tokens.clone())
            tokens = torch.cat(parts)
        if len(step.sampling) == 0 and captured.taken is None:
            return None
        return Samples(tokens, columns=columns_of(step), taken=captured.taken)

    def capture_first(self) -> None:
        """Capture what serving starts with: a graph for every step, if with more padding.

        Raises:
            RuntimeError: something cannot be captured.
        """
        for kind in self._kinds.first():
            self._capture(kind)
            time.sleep(GIVE_WAY_SECONDS)
        self._missing.extend(self._kinds.others())

    def capture_next(self) -> bool:
        """Capture one more graph; returns whether others are missing.

        If this fails, the steps that it is for go on with the graphs that there are.

        Raises:
            RuntimeError: the device is lost.
        """
        if self._missing:
            kind = self._missing.popleft()
            try:
                self._capture(kind)
            except Exception as error:  # compilers and loaders raise various types
                self._device.check()
                self._missing.clear()
                reason = str(error).partition("\n")[0]
                log.warning("%d graphs serve: no other can be captured: %s", self.count, reason)
        return bool(self._missing)

    @property
    def count(self) -> int:
        """The number of captured graphs."""
        return len(self._graphs)

    def _find(self, step: StepRows, level: Level, decode_steps: int) -> _Captured | None:
        """The graph that runs the step with the least padding, in one replay or in several."""
        wanted: Kind | None = None
        by_one: _Captured | None = None
        if level is Level.EAGER:
            level, decode_steps = Level.FILTER, 1
        for size in self._padded.sizes_of(step):
            kind = Kind(size, self._kinds.level(level, size), decode_steps)
            captured = self._graphs.get(kind)
            if captured is not None:
                if wanted is not None:
                    self._hurry(wanted)
                return captured
            wanted = wanted or kind
            by_one = by_one or self._graphs.get(kind._replace(decode_steps=1))
        if wanted is not None:
            self._hurry(wanted)
        return by_one

    def _hurry(self, kind: Kind) -> None:
        """Capture this kind next: a step has just asked for it."""
        if self._missing and self._missing[0] != kind and kind in self._missing:
            self._missing.remove(kind)
            self._missing.appendleft(kind)

    def _sample_eagerly(self, captured: _Captured, step: StepRows) -> Sampled:
        self._replay(captured, step)
        logits = self._sampling(captured.logits, step)
        sampled = self._sampler.sample(logits, step.slots, step.lengths, step.drafts)
        self._table.keep_last(self._sampling(captured.slots, step).long(), sampled.tokens)
        return sampled

    def _sampling(self, by_row: Tensor, step: StepRows) -> Tensor:
        """The rows that sample: [rows, ...] -> [samples, ...]."""
        if len(step.sampling) == len(step.rows) and step.drafts is None:
            return by_row[: len(step.rows)]
        return by_row.index_select(0, self._device.upload(columns_of(step)))

    def _replay(self, captured: _Captured, step: StepRows) -> None:
        parts = []
        for i, plan in enumerate(captured.plans):
            following = step.continued(i)
            self._padded.before_replay(plan, following)
            parts.append(self._padded.pack(captured.kind.size, following))
        self._fill(parts)
        if not step.is_settled:
            self._table.settle(self._flat, self._padded.fixes(captured.kind.size, step, parts[0]))
        captured.graph.replay()

    def _fill(self, parts: list[np.ndarray]) -> None:
        flat = parts[0] if len(parts) == 1 else np.concatenate(parts)
        self._device.upload_into(self._flat[: len(flat)], flat)

    def _capture(self, kind: Kind) -> None:
        """Capture a graph on all ranks, or on none."""
        for attempt in range(1, CAPTURE_ATTEMPTS + 1):
            error = self._try(kind)
            # Graphs are padded, and what the ranks add up must have the same size.
            outcome = _outcome(error, is_last=attempt == CAPTURE_ATTEMPTS)
            worst = self._ranks.least(outcome, CAPTURE_SECONDS)
            if worst == _CAPTURED:
                return
            self._graphs.pop(kind, None)
            if worst == _NEVER:
                raise error or RuntimeError("another rank cannot capture it")
            if not self._graphs:  # a pool that its last graph has left cannot be used again
                self._pool = torch.cuda.graph_pool_handle()

    def _try(self, kind: Kind) -> Exception | None:
        """Capture a graph; returns what went wrong."""
        try:
            with self._device.exclusive(), torch.cuda.stream(self._stream):
                self._run_once(kind)
                with self._ranks.recording():
                    self._graphs[kind] = captured = self._captured(kind)
                if self._drafter is not None and captured.taken is not None:
                    captured.graph.replay()  # of padding, so that there is something to read
                    for rows in self._padded.drafting_rows(kind.size, self._drafter.most):
                        with self._ranks.recording():
                            self._drafter.capture(captured.taken, rows)
        except RanksBroken:
            raise
        except Exception as error:  # compilers and loaders raise various types
            self._device.check()
            return error
        return None

    def _run_once(self, kind: Kind) -> None:
        """Run a step of padding on the current stream, as it is captured next.

        This loads kernels and libraries. Without it, replays of Qwen3-0.6B's smallest graphs take
        4 % longer on an H200, even if the step has run on another stream.
        """
        torch.cuda.synchronize(self._flat.device)  # steps in flight read the same input
        self._fill([self._padded.pack(kind.size, None)] * kind.decode_steps)
        self._run(kind, self._prepare(kind))
        self._stream.synchronize()

    def _prepare(self, kind: Kind) -> list[tuple[Tensor, Any]]:
        """The input and a new plan of each decode step, prepared for steps of padding."""
        parts = self._flat[: kind.size.num_ints * kind.decode_steps].chunk(kind.decode_steps)
        plans = [self._padded.plan(kind.size, part) for part in parts]
        for plan in plans:
            self._padded.before_replay(plan, None)
        return list(zip(parts, plans, strict=True))

    def _captured(self, kind: Kind) -> _Captured:
        decode_steps = self._prepare(kind)
        self._stream.synchronize()
        with capturing(self._pool, self._flat.device) as graph:
            tokens, logits, slots, taken = self._run(kind, decode_steps)
        plans = [plan for _, plan in decode_steps]
        taken = None if taken is None else taken.borrowed(borrowed)
        return _Captured(graph, kind, plans, tokens, borrowed(logits), slots, taken)

    def _run(
        self, kind: Kind, decode_steps: list[tuple[Tensor, Any]]
    ) -> tuple[Tensor, Tensor, Tensor, Taken | None]:
        """``_Captured.tokens``, ``logits``, ``slots`` and ``taken``."""
        tokens = []
        for part, plan in decode_steps:
            logits, rows, taken = self._padded.run(kind.size, part, plan)
            relay = self._table.last_token
            tokens.append(
                self._sampler.draw(logits, rows.slots, rows.lengths, kind.level, relay=relay)
            )
        return torch.stack(tokens), logits, rows.slots, taken


def _outcome(error: Exception | None, *, is_last: bool) -> int:
    """What an attempt has come to, for a comparison with other ranks."""
    if error is None:
        return _CAPTURED
    may_pass = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
    return _AGAIN if may_pass and not is_last else _NEVER


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all engines on the device, whose captures exclude each other: PyTorch keeps a cuBLAS
    workspace for every stream for good."""
    return torch.cuda.Stream(device)
