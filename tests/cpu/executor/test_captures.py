"""What a failed capture leaves behind. Captures themselves need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncllm.executor.step.graphs import end_capture

POOL = (0, 1)
PLACE = torch.device("cuda", 1)


class Graph:
    """A graph whose capture ends with an error, or without."""

    def __init__(self, error: Exception | None = None):
        self._error = error

    def capture_end(self) -> None:
        if self._error is not None:
            raise self._error


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the allocator is told."""
    calls: list[tuple[Any, ...]] = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: calls.append((name, *args)))
    return calls


def test_a_capture_that_ends_well_needs_nothing_else(told: list[tuple[Any, ...]]) -> None:
    end_capture(Graph(), POOL, PLACE)  # type: ignore[arg-type]
    assert told == []


def test_the_allocator_leaves_the_pool_of_an_invalid_capture(told: list[tuple[Any, ...]]) -> None:
    with pytest.raises(RuntimeError, match="invalidated"):
        end_capture(Graph(RuntimeError("invalidated")), POOL, PLACE)  # type: ignore[arg-type]
    assert told == [
        ("_cuda_endAllocateToPool", 1, POOL),
        ("_cuda_releasePool", 1, POOL),
    ]


def test_a_pool_that_was_left_is_not_released_twice(
    told: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a graph was captured, and cannot be instantiated."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("not currently recording")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    with pytest.raises(RuntimeError, match="no memory"):
        end_capture(Graph(RuntimeError("no memory")), POOL, PLACE)  # type: ignore[arg-type]
    assert told == []
