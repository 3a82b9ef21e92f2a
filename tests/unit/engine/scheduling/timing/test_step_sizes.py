"""Steps fill the sizes that they are padded to, of which each takes its own time."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import Counter

import pytest

from asyncllm.engine.scheduling.timing.prefill_room import PrefillRoom, StepCost, StepShape
from asyncllm.engine.scheduling.timing.step_sizes import FORGET, MOST, StepSizes
from asyncllm.engine.scheduling.timing.step_time import StepTimeModel
from tests.unit.engine.scheduling.timing.test_step_time import pairs

#: Seconds by size: 704 tokens take as long as 768, and 896 nearly as long as 1,024.
TIMES = {512: 11.0e-3, 640: 13.0e-3, 704: 15.1e-3, 768: 15.1e-3, 896: 18.6e-3, 1024: 19.0e-3}
SIZES = tuple(TIMES)
COST = StepCost(0.0, 20e-6, 30e-9, 1e-9, 0)
ROWS, CONTEXT = 100, 1000
DECODES = StepShape(ROWS, ROWS * CONTEXT, 0.0)


def measured(size: int, times: int = 50, slower: float = 1.0) -> StepSizes:
    """After many full steps of one size."""
    sizes = StepSizes(SIZES)
    observe(sizes, size, times, slower)
    return sizes


def observe(sizes: StepSizes, size: int, times: int, slower: float) -> None:
    shape = StepShape(size, 0, 1.0)
    for _ in range(times):
        sizes.observe(shape, slower * COST.seconds(*shape), COST)


def size_of(sizes: StepSizes, limit: float, most: int = 8192, start: int = 0) -> int:
    """What prompts beside the decode rows fill."""
    tokens = sizes.room(DECODES, start, limit, most, COST)
    return ROWS + tokens if tokens else 0


def test_the_largest_size_within_the_limit_is_filled() -> None:
    # 768 tokens take 15.4 ms, reading the cache 3 ms, attention of 668 tokens 0.2 ms.
    assert size_of(StepSizes(SIZES), 18.7e-3) == 768
    assert size_of(StepSizes(SIZES), 18.5e-3) == 704
    assert size_of(StepSizes(SIZES), 10.0) == 1024


def test_attention_makes_it_smaller() -> None:
    sizes = StepSizes(SIZES)
    assert size_of(sizes, 24e-3) == 1024
    assert size_of(sizes, 24e-3, start=4000) == 768


@pytest.mark.parametrize(("slower", "size"), [(1.2, 704), (1.02, 768)])
def test_a_size_that_takes_longer_than_predicted_is_left_out(slower: float, size: int) -> None:
    assert size_of(measured(768, slower=slower), 19.2e-3) == size


def test_a_size_that_takes_less_than_predicted_is_taken() -> None:
    assert size_of(StepSizes(SIZES), 22.0e-3) == 896
    assert size_of(measured(1024, slower=0.9), 22.0e-3) == 1024


def test_what_was_slow_is_tried_again() -> None:
    sizes = measured(768, slower=1.2)
    observe(sizes, 704, FORGET - 1, 1.0)
    assert size_of(sizes, 19.2e-3) == 704
    observe(sizes, 704, 2, 1.0)
    assert size_of(sizes, 19.2e-3) == 768


def test_a_better_fit_does_not_make_a_size_look_slow() -> None:
    """What was learned beside an early fit, by which all steps are quicker, still holds."""
    early = COST._replace(per_token=COST.per_token / 1.2)
    sizes, shape = StepSizes(SIZES), StepShape(768, 0, 1.0)
    for _ in range(50):
        sizes.observe(shape, COST.seconds(*shape), early)
    assert size_of(sizes, 18.7e-3) == 768


def test_a_hiccup_counts_little() -> None:
    sizes = measured(768)
    observe(sizes, 768, 1, 100.0)
    assert size_of(sizes, 18.7e-3 * (1 + (MOST - 1) / 30)) == 768


def test_only_sizes_with_room_for_prompts_and_not_too_much_of_it() -> None:
    sizes = StepSizes(SIZES)
    assert size_of(sizes, 10.0, most=600) == 640
    assert size_of(sizes, 10.0, most=300) == 0
    full = StepShape(SIZES[-1], 0, 0.0)
    assert sizes.room(full, 0, 10.0, 8192, COST) == 0
    assert StepSizes().room(DECODES, 0, 10.0, 8192, COST) == 0


def test_larger_steps_than_the_largest_size_teach_nothing() -> None:
    sizes = StepSizes(SIZES)
    sizes.observe(StepShape(2000, 0, 1.0), 1.0, COST)
    assert size_of(sizes, 24e-3) == 1024


def fitting(model: StepTimeModel, room: PrefillRoom, shape: StepShape) -> int:
    """The next chunk of a prompt of 500 tokens."""
    chunk = room.fit(0, 500)
    if chunk < 500 and model.size_room(room, shape, 0):
        return min(500, room.tokens)
    return chunk


@pytest.mark.parametrize(("target", "size"), [(21e-3, 768), (27e-3, 1024)])
def test_steps_of_a_gpu_with_stairs_keep_to_the_target(target: float, size: int) -> None:
    """Prompts of 500 tokens beside 100 rows, without end but for every tenth step."""
    model, rng = StepTimeModel(sizes=SIZES), random.Random(1)
    sizes, late = Counter[int](), 0
    for step in range(3000):
        if step % 10 == 0:
            rows = rng.randint(1, ROWS)
            alone = StepShape(rows, rows * CONTEXT, 0.0)
            model.observe(alone, 4e-3 + 10e-6 * rows + 40e-9 * alone.kv_tokens)
            continue
        room = model.room(DECODES, target, 8192)
        count, attention = ROWS, 0.0
        while chunk := fitting(model, room, StepShape(count, DECODES.kv_tokens, attention)):
            room.take(0, chunk)
            count, attention = count + chunk, attention + pairs(0, chunk)
        padded = SIZES[min(bisect_left(SIZES, count), len(SIZES) - 1)]
        seconds = TIMES[padded] + 40e-9 * DECODES.kv_tokens + 1e-9 * attention
        model.observe(StepShape(count, DECODES.kv_tokens, attention), seconds * rng.gauss(1, 0.02))
        if step >= 500:
            sizes[count] += 1
            late += seconds > target
    assert late < 0.01 * sizes.total()
    assert sizes[size] > 0.7 * sizes.total()
