"""CUDA graphs without a GPU: what was captured is run again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.executor.step import graphs
from asyncllm.executor.step.drafter import HeadDrafter
from asyncllm.executor.step.graphs import GraphedForward


class Graph:
    """Runs again what was run between its begin and its end."""

    recording: Graph | None = None

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        Graph.recording = self

    def capture_end(self) -> None:
        Graph.recording = None

    def replay(self) -> None:
        Graph.replays += 1
        for output, value in zip(self.outputs, self.run(), strict=True):
            output.copy_(value)

    replays = 0
    run: Callable[[], list[Tensor]]
    outputs: list[Tensor]


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have steps, and what follows them, captured without a GPU."""

    class Stream:
        def __init__(self, device: object = None) -> None: ...

        def synchronize(self) -> None: ...

    for name, fake in {
        "graph_pool_handle": lambda: None,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "synchronize": lambda device: None,
        "CUDAGraph": Graph,
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs, "borrowed", lambda tensor: tensor)

    def flat(found: Any) -> list[Tensor]:
        if found is None:
            return []
        tokens, logits, _, taken = found
        features = [] if taken.features is None else [taken.features]
        return [tokens, logits, taken.positions, taken.slot_mapping, *features]

    for kind in (GraphedForward, HeadDrafter):

        def recorded(self: Any, *args: Any, run: Any = kind._run) -> Any:
            found = run(self, *args)
            if (graph := Graph.recording) is not None:
                graph.outputs, graph.run = flat(found), lambda: flat(run(self, *args))
            return found

        monkeypatch.setattr(kind, "_run", recorded)
