"""Sums and rows of several ranks, all of them on one device here.

On a GPU they run beside each other on streams. In the interpreter one runs after the other. There,
all run the same launch twice without waiting: words are there after the first time, and sums of two
shots after the second. What comes of the third time is right.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.kernels.device import DEVICE

pytest.importorskip("triton")

from asyncllm.kernels.triton.collectives.all_gather import rows_of_all
from asyncllm.kernels.triton.collectives.all_reduce import sum_in_one_shot, sum_in_two_shots
from asyncllm.kernels.triton.collectives.push import WORDS, Channel, blocks_of, place_bytes
from asyncllm.lab.planning.cost import CROSSING_KIB
from asyncllm.parallel.push import CROSSING, is_gathered, sum_for

Push = Callable[[Tensor, Tensor | None, Channel], Tensor]

PROGRAMS = 8
SHOTS = 2
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
        before = [channel.counts.clone() for channel in self.channels]
        for _ in range(SHOTS):
            for channel, counts in zip(self.channels, before, strict=True):
                launch(channel._replace(gives_up=torch.ones(1, dtype=torch.int32)))
                channel.counts.copy_(counts)
        return [launch(channel) for channel in self.channels]

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


def parts_of(size: int, *shape: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape, device=DEVICE).to(dtype) for _ in range(size)]


def check_sum(
    team: Team, parts: list[Tensor], residual: Tensor | None, push: Push = sum_in_one_shot
) -> Tensor:
    def launch(channel: Channel) -> Tensor:
        base = None if residual is None else residual.clone()
        return push(parts[channel.rank].clone(), base, channel)

    results = team.run(launch)
    expected = torch.stack(parts).double().sum(dim=0)
    if residual is not None:
        expected += residual.double()
    tolerance = TOLERANCE[parts[0].dtype]
    torch.testing.assert_close(results[0].double(), expected, rtol=tolerance, atol=tolerance)
    for other in results[1:]:
        assert torch.equal(other, results[0])
    return results[0]


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


@pytest.mark.parametrize(
    ("size", "dtype"), [(3, torch.float32), (4, torch.float16), (4, torch.bfloat16)]
)
def test_two_shots_have_the_bits_of_one(size: int, dtype: torch.dtype) -> None:
    team = Team(size)
    for shape in [(1, 2), (5, WORDS + 2)]:
        parts = parts_of(size, *shape, dtype=dtype)
        for residual in (None, torch.randn(shape, device=DEVICE).to(dtype)):
            two = check_sum(team, parts, residual, sum_in_two_shots)
            assert torch.equal(two, check_sum(team, parts, residual))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [2, 3])
def test_rows_lie_side_by_side(size: int, dtype: torch.dtype) -> None:
    team = Team(size)
    for shape in [(1, 2), (3, 100), (2, 3 * WORDS)]:
        check_rows(team, parts_of(size, *shape, dtype=dtype))


def test_launches_of_different_sizes_follow_each_other() -> None:
    """Programs of high numbers have launched less often than others."""
    team = Team(3)
    for rows in (1, 7, 2, 8, 1):
        parts = parts_of(3, rows, WORDS, dtype=torch.float32)
        check_sum(team, parts, None)
        check_sum(team, parts, None, sum_in_two_shots)
        check_rows(team, parts)


def test_the_count_of_launches_wraps() -> None:
    team = Team(3, launches=2**31 - 3)
    for push in (sum_in_one_shot, sum_in_two_shots, sum_in_two_shots, sum_in_one_shot):
        check_sum(team, parts_of(3, 3, WORDS, dtype=torch.float32), None, push)
    assert team.channels[0].counts[0] == -(2**31) + 1


@pytest.mark.parametrize("push", [sum_in_one_shot, sum_in_two_shots])
def test_nothing_waits_once_it_is_given_up(push: Push) -> None:
    """The others never come."""
    first, *_ = Team(3).channels
    first.gives_up.fill_(1)
    x = torch.ones(4, WORDS, device=DEVICE)
    assert push(x, None, first).shape == x.shape
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_blocks_cover_all_words() -> None:
    assert blocks_of(torch.empty(1, 2 * WORDS, dtype=torch.bfloat16)) == 1
    assert blocks_of(torch.empty(1, 2 * WORDS + 2, dtype=torch.bfloat16)) == 2
    assert blocks_of(torch.empty(0, 64)) == 0


def pushed(rows: int, size: int, columns: int = 4096, dtype: torch.dtype = torch.bfloat16) -> Any:
    return sum_for(torch.empty(rows, columns, dtype=dtype, device="meta"), size)


def test_large_sums_of_many_ranks_take_two_shots() -> None:
    one, two = sum_in_one_shot, sum_in_two_shots
    assert [pushed(rows, 2) for rows in (0, 1, 1536, 1537)] == [None, one, one, None]
    # Each of four pushes its 3 KiB to three others, or a quarter of them twice.
    assert [pushed(rows, 4) for rows in (1, 31, 33, 1023, 1025)] == [one, one, two, two, None]
    assert [pushed(rows, 8) for rows in (1, 9, 11)] == [one, one, two]
    assert CROSSING * WORDS * 4 == CROSSING_KIB * 1024, "planning counts on it"


def test_tensors_of_whole_words_are_pushed() -> None:
    assert pushed(1, 2, columns=7) is None
    assert pushed(1, 2, columns=8) is sum_in_one_shot
    assert pushed(1, 2, dtype=torch.int64) is None
    rows = [torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (511, 513)]
    assert [is_gathered(x, 4) for x in rows] == [True, False]
    assert not is_gathered(torch.empty(2, 7, dtype=torch.bfloat16, device="meta"), 4)
