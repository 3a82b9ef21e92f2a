"""Sums and rows of several ranks, all of them on one device here.

On a GPU they run beside each other on streams. In the interpreter one runs after the other: the
others push their words first, and do not wait.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.all_reduce import (
    WORDS,
    Channel,
    place_bytes,
    programs_for,
    rows_of_all,
    sum_of_all,
)
from asyncllm.parallel.push import is_small

PROGRAMS = 8
#: One rounding, which Triton's interpreter does by truncation.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


class Team:
    """Ranks, and the memory that each of them pushes to."""

    def __init__(self, size: int, launches: int = 0):
        words = place_bytes(PROGRAMS, size) // 8
        self._memories = [torch.zeros(words, dtype=torch.int64, device=DEVICE) for _ in range(size)]
        addresses = torch.tensor([memory.data_ptr() for memory in self._memories], device=DEVICE)
        counts = torch.full([size, PROGRAMS], launches, dtype=torch.int32, device=DEVICE)
        on_gpu = DEVICE == "cuda"
        self.channels = [
            Channel(
                addresses, counts[rank], torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu), rank
            )
            for rank in range(size)
        ]

    def run(self, launch: Callable[[Channel], Tensor]) -> list[Tensor]:
        """The results of all ranks; ``launch`` must leave its inputs as they are."""
        if DEVICE == "cuda":
            # Loading a rank's kernel waits for all that runs, and so for a rank that waits for this
            # one. So other ranks, which have given up, load all kernels first.
            in_vain = Team(len(self.channels))
            for channel in in_vain.channels:
                channel.gives_up.fill_(1)
            streams = [torch.cuda.Stream() for _ in self.channels]
            in_vain._run_beside(launch, streams)
            return self._run_beside(launch, streams)
        return [self._last(rank, launch) for rank in range(len(self.channels))]

    def _run_beside(
        self, launch: Callable[[Channel], Tensor], streams: list[torch.cuda.Stream]
    ) -> list[Tensor]:
        torch.cuda.synchronize()
        results = []
        for channel, stream in zip(self.channels, streams, strict=True):
            with torch.cuda.stream(stream):
                results.append(launch(channel))
        torch.cuda.synchronize()
        return results

    def _last(self, rank: int, launch: Callable[[Channel], Tensor]) -> Tensor:
        """The result of a rank that runs after all others, of a launch that all repeat later."""
        is_last = rank == len(self.channels) - 1
        before = [channel.counts.clone() for channel in self.channels]
        for channel in self.channels:
            if channel.rank != rank:
                launch(channel._replace(gives_up=torch.ones(1, dtype=torch.int32)))
        result = launch(self.channels[rank])
        if not is_last:
            for channel, counts in zip(self.channels, before, strict=True):
                channel.counts.copy_(counts)
        return result


def parts_of(size: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(size)]


def check_sum(team: Team, parts: list[Tensor], residual: Tensor | None) -> None:
    def launch(channel: Channel) -> Tensor:
        base = None if residual is None else residual.clone()
        return sum_of_all(parts[channel.rank].clone(), base, channel)

    results = team.run(launch)
    expected = torch.stack(parts).double().sum(dim=0)
    if residual is not None:
        expected += residual.double()
    tolerance = TOLERANCE[parts[0].dtype]
    torch.testing.assert_close(results[0].double(), expected, rtol=tolerance, atol=tolerance)
    for other in results[1:]:
        assert torch.equal(other, results[0])


def check_rows(team: Team, parts: list[Tensor]) -> None:
    for rows in team.run(lambda channel: rows_of_all(parts[channel.rank], channel)):
        assert torch.equal(rows, torch.cat(parts, dim=1))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [2, 4])
def test_sums_with_and_without_a_residual(size: int, dtype: torch.dtype) -> None:
    team = Team(size)
    for shape in [(1, 2), (1, 2 * WORDS), (3, 200)]:
        parts = parts_of(size, *shape, dtype=dtype)
        check_sum(team, parts, None)
        check_sum(team, parts, torch.randn(shape, device=DEVICE).to(dtype))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [2, 3])
def test_rows_lie_side_by_side(size: int, dtype: torch.dtype) -> None:
    team = Team(size)
    for shape in [(1, 2), (3, 100), (2, 3 * WORDS)]:
        check_rows(team, parts_of(size, *shape, dtype=dtype))


def test_launches_of_different_sizes_follow_each_other() -> None:
    """Programs of high numbers have launched less often than others."""
    team = Team(2)
    for rows in (1, 7, 2, 8, 1):
        check_sum(team, parts_of(2, rows, WORDS, dtype=torch.float32), None)
        check_rows(team, parts_of(2, 1, rows * WORDS, dtype=torch.float32))


def test_the_count_of_launches_wraps() -> None:
    team = Team(2, launches=2**31 - 3)
    for _ in range(4):
        check_sum(team, parts_of(2, 3, WORDS, dtype=torch.float32), None)
    assert team.channels[0].counts[0] == -(2**31) + 1


def test_nothing_waits_once_it_is_given_up() -> None:
    """The other rank never comes."""
    first, _ = Team(2).channels
    first.gives_up.fill_(1)
    x = torch.ones(4, WORDS, device=DEVICE)
    assert sum_of_all(x, None, first).shape == x.shape
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_programs_cover_all_words() -> None:
    assert programs_for(torch.empty(1, 2 * WORDS, dtype=torch.bfloat16)) == 1
    assert programs_for(torch.empty(1, 2 * WORDS + 2, dtype=torch.bfloat16)) == 2
    assert programs_for(torch.empty(0, 64)) == 0


def test_small_tensors_of_whole_words_are_pushed() -> None:
    def pushed(rows: int, columns: int, size: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        x = torch.empty(rows, columns, dtype=dtype, device="meta")
        return is_small(x, x.shape[1], size)

    assert [pushed(rows, 4096, 2) for rows in (0, 1, 1536, 1537)] == [False, True, True, False]
    assert [pushed(rows, 4096, 4) for rows in (511, 512)] == [True, False]
    assert [pushed(1, columns, 2) for columns in (7, 8)] == [False, True]
    assert not pushed(1, 8, 2, torch.int64)
