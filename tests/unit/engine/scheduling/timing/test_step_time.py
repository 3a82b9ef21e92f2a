"""The step-time model against made-up machines: what it learns, and what it lets prompts have."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.engine.scheduling.timing.prefill_room import (
    MIN_CHUNK,
    PrefillRoom,
    StepCost,
    StepShape,
    num_pairs,
)
from asyncllm.engine.scheduling.timing.step_time import DECODE_MULTIPLE, MAX_CELLS, StepTimeModel


class Machine(NamedTuple):
    """The truth; by default about an 8B model in bf16 on an H200."""

    overhead: float = 0.6e-3
    weights: float = 3.9e-3
    per_token: float = 23e-6
    knee: int = 170
    per_kv: float = 35e-9
    per_pair: float = 1.3e-9
    slowdown: float = 1.0

    def seconds(self, shape: StepShape) -> float:
        arithmetic = self.per_token * max(0, shape.num_tokens - self.knee)
        attention = self.per_kv * shape.kv_tokens + self.per_pair * shape.attention
        return self.slowdown * (self.overhead + self.weights + arithmetic + attention)


H200 = Machine()
CPU = Machine(1e-3, 10e-3, 2e-3, 4, 1e-6, 5e-9)


def pairs(start: int, q_len: int) -> float:
    return q_len * (start + q_len / 2)


def decodes(num_rows: int, context: int) -> StepShape:
    return StepShape(num_rows, num_rows * context, 0.0)


def random_shapes(seed: int, count: int) -> Iterator[StepShape]:
    rng = random.Random(seed)
    for _ in range(count):
        rows = rng.choice([0, 1, 2, 4, 8, 16, 32, 64, 128, 200, 256])
        kv_tokens = sum(rng.randint(50, 2000) for _ in range(rows))
        most = rng.choice([0, 0, 16, 64, 256, 512, 2048] if rows else [64, 512, 2048])
        q_len = rng.randint(most // 2, most)
        yield StepShape(rows + q_len, kv_tokens, pairs(rng.randrange(8000), q_len))


def train(model: StepTimeModel, machine: Machine, seed: int, count: int) -> None:
    noise = random.Random(seed)
    for shape in random_shapes(seed, count):
        model.observe(shape, machine.seconds(shape) * noise.gauss(1.0, 0.05))


def worst_error(model: StepTimeModel, machine: Machine) -> float:
    shapes = random_shapes(seed=99, count=300)
    return max(abs(model.seconds(shape) / machine.seconds(shape) - 1.0) for shape in shapes)


def trained(machine: Machine = H200, seed: int = 1) -> StepTimeModel:
    model = StepTimeModel()
    train(model, machine, seed, 400)
    return model


# --- What it learns


@pytest.mark.parametrize("seed", range(5))
def test_noisy_steps_of_random_shapes_teach_the_machine(seed: int) -> None:
    assert worst_error(trained(seed=seed), H200) < 0.10


def test_the_cost_of_prompts_is_learned_too() -> None:
    found = trained().prefill_seconds(8000)
    assert found == pytest.approx(8000 * 23e-6 + 1.3e-9 * 8000**2 / 2, rel=0.1)
    assert trained().prefill_seconds(500, start=7500) > trained().prefill_seconds(500)


def test_short_prompts_teach_little_of_the_attention_of_long_ones() -> None:
    """From them alone, a long prompt might seem to take minutes, and wait as long for its turn."""
    model, rng = StepTimeModel(), random.Random(0)
    for _ in range(200):
        chunk = rng.randint(50, 150)
        shape = StepShape(chunk + 4, 400 + chunk, num_pairs(0, chunk))
        model.observe(shape, 6e-3 + 2e-7 * shape.attention)  # noise that looks like attention
    assert model.fitted
    assert model.prefill_seconds(100) == pytest.approx(2e-7 * num_pairs(0, 100), rel=0.3)
    assert model.prefill_seconds(40_000) < 40_000 * 2e-7 * 2 * 100


@pytest.mark.parametrize("slowdown", [0.5, 2.0])
def test_a_machine_that_changes_is_learned_anew(slowdown: float) -> None:
    model = trained()
    changed = H200._replace(slowdown=slowdown)
    assert worst_error(model, changed) > 0.4
    train(model, changed, seed=2, count=600)
    assert worst_error(model, changed) < 0.10


def test_what_is_not_seen_for_long_is_not_forgotten() -> None:
    model = trained()
    for i in range(5000):
        shape = decodes(32, 1000 + i % 500)
        model.observe(shape, H200.seconds(shape))
    assert worst_error(model, H200) < 0.12


def test_hiccups_do_not_wreck_it() -> None:
    model = StepTimeModel()
    rng = random.Random(3)
    for shape in random_shapes(seed=3, count=800):
        hiccup = rng.choice([3, 10, 1000]) if rng.random() < 0.02 else 1
        model.observe(shape, hiccup * H200.seconds(shape) * rng.gauss(1.0, 0.05))
    errors = sorted(
        abs(model.seconds(shape) / H200.seconds(shape) - 1.0)
        for shape in random_shapes(seed=99, count=300)
    )
    assert errors[150] < 0.10
    assert errors[-1] < 0.30


def test_slow_steps_now_and_then_do_not_count_in_full() -> None:
    model = StepTimeModel()
    for i in range(1000):
        shape = decodes((1, 8, 64)[i % 3], 1000)
        model.observe(shape, H200.seconds(shape) * (20 if i % 16 == 15 else 1))
    for rows in (1, 8, 64):
        expected = H200.seconds(decodes(rows, 1000))
        assert expected <= model.seconds(decodes(rows, 1000)) < 1.25 * expected


def test_a_slow_first_step_of_its_kind_is_replaced_by_the_next_ones() -> None:
    model = StepTimeModel()
    for rows in (1, 8, 64):
        shape = decodes(rows, 1000)
        model.observe(shape, 5.0)
        for _ in range(6):
            model.observe(shape, H200.seconds(shape))
    assert model.seconds(decodes(8, 1000)) == pytest.approx(4.8e-3, rel=0.1)


def test_nothing_is_predicted_before_enough_different_steps() -> None:
    model = StepTimeModel()
    for _ in range(100):
        model.observe(decodes(4, 500), 5e-3)
    assert (model.fitted, model.seconds(decodes(4, 500)), model.prefill_seconds(9)) == (False, 0, 0)
    for _ in range(30):
        model.observe(StepShape(260, 2000, pairs(0, 256)), 9e-3)
    assert model.fitted
    assert model.seconds(decodes(4, 500)) == pytest.approx(5e-3, rel=0.1)


def test_times_that_mean_nothing_are_ignored() -> None:
    model, twin = trained(), trained()
    for seconds in (0.0, 1e-200, -1.0, float("nan"), float("inf")):
        model.observe(decodes(3, 100), seconds)
    model.observe(StepShape(0, 0, 0.0), 1.0)
    train(model, H200, 5, 100)
    train(twin, H200, 5, 100)
    assert model.cost == twin.cost


def test_memory_is_bounded() -> None:
    model = StepTimeModel()
    rng = random.Random(0)
    for _ in range(1000):
        shape = StepShape(2 ** rng.randrange(14), 2 ** rng.randrange(22), 4.0 ** rng.randrange(14))
        model.observe(shape, H200.seconds(shape))
    assert len(model._cells) == MAX_CELLS
    assert model.seconds(decodes(64, 500)) == pytest.approx(
        H200.seconds(decodes(64, 500)), rel=0.15
    )


def test_copies_of_pages() -> None:
    assert StepTimeModel().copy_seconds(10) == 0.0
    model = StepTimeModel(page_copy_seconds=1e-4)
    assert model.copy_seconds(10) == pytest.approx(1e-3)
    for _ in range(50):
        model.observe_copy(64, 64 * 4e-5)
    assert model.copy_seconds(10) == pytest.approx(4e-4, rel=0.01)
    model.observe_copy(1, 4e-4)  # its fixed cost says little about large copies
    assert model.copy_seconds(10) == pytest.approx(4e-4, rel=0.05)
    for _ in range(100):
        model.observe_copy(64, 64 * 8e-5)
    assert model.copy_seconds(10) == pytest.approx(8e-4, rel=0.01)


# --- What it promises whatever it has seen

shapes = st.builds(
    lambda rows, context, start, q_len: StepShape(
        rows + q_len, rows * context, pairs(start, q_len)
    ),
    st.integers(1, 512),
    st.integers(1, 30_000),
    st.integers(0, 30_000),
    st.integers(0, 8192),
)
times = st.floats(1e-5, 100.0)
models = st.lists(st.tuples(shapes, times), min_size=8, max_size=60)
chunks = st.lists(st.tuples(st.integers(0, 30_000), st.integers(1, 8192)), max_size=5)


def model_of(observations: list[tuple[StepShape, float]]) -> StepTimeModel:
    model = StepTimeModel()
    for shape, seconds in observations:
        model.observe(shape, seconds)
    return model


@settings(max_examples=60)
@given(models, shapes, st.integers(0, 1000), st.integers(0, 10**6))
def test_costs_are_never_negative_and_predictions_never_fall(
    observations: list[tuple[StepShape, float]], shape: StepShape, tokens: int, more: int
) -> None:
    model = model_of(observations)
    assert min(model.cost) >= 0
    n, kv, attention = shape
    least = model.seconds(shape)
    assert model.seconds(StepShape(n + tokens, kv, attention)) >= least
    assert model.seconds(StepShape(n, kv + more, attention)) >= least
    assert model.seconds(StepShape(n, kv, attention + more)) >= least


costs = st.builds(
    StepCost,
    st.floats(0, 1),
    st.just(0.0) | st.floats(1e-9, 1e-2),
    st.floats(0, 1e-5),
    st.just(0.0) | st.floats(1e-12, 1e-5),
    st.sampled_from([0, 32, 170, 512]),
)


@settings(max_examples=150)
@given(costs, st.integers(1, 300), st.integers(0, 9000), st.floats(0, 10), chunks)
def test_chunks_keep_to_the_time_and_the_tokens(
    cost: StepCost, rows: int, tokens: int, seconds: float, wanted: list[tuple[int, int]]
) -> None:
    room = PrefillRoom(tokens, seconds, cost, rows)
    alone = cost.seconds(rows, 0, 0.0)
    count, attention = rows, 0.0
    for start, most in wanted:
        first = count == rows
        q_len = room.fit(start, most)
        assert 0 <= q_len <= min(most, room.tokens)
        if first:
            assert q_len >= min(most, MIN_CHUNK, tokens)
        if q_len:
            room.take(start, q_len)
        count += q_len
        attention += pairs(start, q_len)
        spent = cost.seconds(count, 0, attention) - alone
        if first and q_len <= MIN_CHUNK:
            seconds = max(seconds, spent)
        assert spent <= seconds + 1e-9 * (1 + alone + seconds)
    assert room.tokens == tokens - (count - rows)


@settings(max_examples=150)
@given(costs, st.integers(1, 300), st.floats(0, 10), st.integers(0, 30_000), st.booleans())
def test_the_chunk_found_is_the_longest(
    cost: StepCost, rows: int, seconds: float, start: int, fresh: bool
) -> None:
    room = PrefillRoom(9000, seconds, cost, rows)
    if not fresh:
        room.take(0, 0)
    sizes = [room.fit(start, wanted) for wanted in range(0, 9100, 70)]
    assert sizes == sorted(sizes)
    longest = room.fit(start, 9000)
    if longest < 9000:
        one_more = cost.seconds(rows + longest + 1, 0, pairs(start, longest + 1))
        assert one_more - cost.seconds(rows, 0, 0.0) >= seconds - 1e-9 * (1 + one_more)


@settings(max_examples=60)
@given(models, shapes, st.floats(0, 1), st.integers(0, 8192), st.integers(1, 8192))
def test_prompts_always_progress(
    observations: list[tuple[StepShape, float]],
    running: StepShape,
    target: float,
    ceiling: int,
    wanted: int,
) -> None:
    model = model_of(observations)
    room = model.room(running, target, ceiling)
    assert min(wanted, MIN_CHUNK, ceiling) <= room.fit(0, wanted) <= min(wanted, ceiling)


# --- What it gives prompts


NOTHING = StepShape(0, 0, 0.0)


def test_only_the_ceiling_binds_without_a_target() -> None:
    for model in (StepTimeModel(), trained()):
        for running in (NOTHING, decodes(4, 100)):
            assert model.room(running, 0.0, 8192).fit(0, 100_000) == 8192
            assert model.room(running, 0.0, 0).fit(0, 100_000) == 0


def test_without_decode_rows_a_step_ends_in_time_for_those_who_arrive() -> None:
    model = trained()
    for start in (0, 30_000):
        q_len = model.room(NOTHING, 0.027, 100_000).fit(start, 100_000)
        assert model.seconds(StepShape(q_len, 0, pairs(start, q_len))) == pytest.approx(0.1, 0.01)
    # Nobody is promised more than the target.
    q_len = model.room(NOTHING, 1.0, 100_000).fit(0, 100_000)
    assert model.seconds(StepShape(q_len, 0, pairs(0, q_len))) == pytest.approx(0.92, 0.01)
    assert model.room(NOTHING, 0.027, 100).fit(0, 100_000) == 100


def test_on_a_slow_device_what_any_step_costs_stays_a_small_share() -> None:
    model = trained(Machine(0.1, 0.0, 1e-3, 0, 1e-6, 0.0))
    q_len = model.room(NOTHING, 0.027, 100_000).fit(0, 100_000)
    assert model.seconds(StepShape(q_len, 0, pairs(0, q_len))) == pytest.approx(20 * 0.1, 0.1)


def test_prompts_alone_are_fitted_soon() -> None:
    """Or a server whose answers are one token each would never learn how long a step may be."""
    for ceiling in (8192, 1536):
        model = StepTimeModel()
        start = 0
        for _ in range(24):
            q_len = model.room(NOTHING, 0.027, ceiling).fit(start, 100_000)
            shape = StepShape(q_len, 0, pairs(start, q_len))
            model.observe(shape, H200.seconds(shape))
            start = (start + q_len) % 8000
        assert model.fitted


def test_before_the_first_fit_prompts_get_little_beside_decode_rows() -> None:
    model = StepTimeModel()
    room = model.room(decodes(4, 100), 10.0, 8192)
    assert room.fit(0, 8000) == 512
    room.take(0, 400)
    assert room.fit(0, 8000) == 112
    assert model.room(decodes(4, 100), 10.0, 100).fit(0, 8000) == 100


def test_prompts_get_more_than_half_a_step_when_the_target_is_out_of_reach() -> None:
    model = trained()
    running = decodes(200, 2000)
    q_len = model.room(running, 1e-6, 8192).fit(0, 8000)
    shape = StepShape(200 + q_len, running.kv_tokens, pairs(0, q_len))
    assert model.seconds(shape) == pytest.approx(DECODE_MULTIPLE * model.seconds(running), rel=0.01)


def test_a_step_ends_where_more_would_hardly_speed_its_prompts_up() -> None:
    model = trained()
    for rows, context in ((32, 500), (64, 1000)):
        running = decodes(rows, context)
        q_len = model.room(running, 10.0, 8192).fit(0, 8000)
        seconds = model.seconds(StepShape(rows + q_len, running.kv_tokens, pairs(0, q_len)))
        cost = model.cost
        fixed = cost.base - cost.per_token * cost.knee  # the part that prompt tokens do not hide
        fixed += cost.per_token * rows + cost.per_kv * running.kv_tokens
        least = DECODE_MULTIPLE * model.seconds(running)
        assert seconds == pytest.approx(max(11 * fixed, least), rel=0.01)


def test_the_model_is_not_trusted_far_beyond_what_was_measured() -> None:
    model = StepTimeModel()
    for i in range(100):
        shape = StepShape(32 + i % 2 * 300, 32_000, pairs(0, i % 2 * 300))
        model.observe(shape, H200.seconds(shape))
    assert model.fitted
    assert model.room(decodes(32, 100_000), 100.0, 8192).fit(0, 8000) == 2 * 332 - 32


class Served(NamedTuple):
    """``excess``: each step's time over the target, or over what its decode rows allow."""

    excess: list[float]
    sizes: list[int]
    finished: int


def serve(
    model: StepTimeModel,
    machine: Machine,
    *,
    rows: int,
    target: float,
    gap: float,
    steps: int = 1000,
    hiccups: float = 0.0,
) -> Served:
    """Decode rows, and an 8,000-token prompt every ``gap`` seconds, as a scheduler would do it."""
    rng = random.Random(7)
    contexts = [rng.randint(500, 1500) for _ in range(rows)]
    prompts: list[int] = []  # positions computed
    now = next_prompt = 0.0
    excess, sizes, finished = [], [], 0
    for _ in range(steps):
        while now >= next_prompt:
            prompts.append(0)
            next_prompt += gap
        running = StepShape(rows, sum(contexts), 0.0)
        room = model.room(running, target, 8192 - rows)
        count, attention = rows, 0.0
        for i, start in enumerate(prompts):
            if (q_len := room.fit(start, 8000 - start)) == 0:
                break
            room.take(start, q_len)
            count += q_len
            attention += pairs(start, q_len)
            prompts[i] += q_len
        shape = StepShape(count, running.kv_tokens, attention)
        seconds = machine.seconds(shape)
        excess.append(seconds / max(target, DECODE_MULTIPLE * machine.seconds(running)))
        sizes.append(count)
        now += seconds
        hiccup = 20 if rng.random() < hiccups else 1
        model.observe(shape, hiccup * seconds * rng.gauss(1.0, 0.03))
        finished += sum(start >= 8000 for start in prompts)
        prompts = [start for start in prompts if start < 8000]
        contexts = [500 if context > 1500 else context + 1 for context in contexts]
    return Served(excess, sizes, finished)


@pytest.mark.parametrize(
    ("machine", "rows", "target", "gap"),
    [
        (H200, 32, 0.02, 0.3),
        (H200, 32, 0.012, 1.0),
        (H200, 1, 0.02, 1.0),
        (H200, 256, 0.02, 0.5),
        (H200, 32, 0.001, 0.3),
        (CPU, 8, 0.1, 60.0),
    ],
)
def test_steps_with_decode_rows_keep_to_the_target(
    machine: Machine, rows: int, target: float, gap: float
) -> None:
    served = serve(StepTimeModel(), machine, rows=rows, target=target, gap=gap)
    assert max(served.excess[200:]) < 1.15
    assert served.finished > 0


def test_hiccups_do_not_push_steps_over_the_target() -> None:
    served = serve(StepTimeModel(), H200, rows=32, target=0.02, gap=0.3, hiccups=0.02)
    assert max(served.excess[200:]) < 1.15


def test_steps_keep_to_the_target_again_after_the_machine_slowed_down() -> None:
    model = StepTimeModel()
    serve(model, H200, rows=64, target=0.03, gap=0.3)
    slow = H200._replace(slowdown=2.0)
    served = serve(model, slow, rows=64, target=0.03, gap=0.3)
    assert max(served.excess[:20]) > 1.5
    assert max(served.excess[300:]) < 1.15


def test_steps_grow_to_what_a_distant_target_allows() -> None:
    """At most twofold beyond the largest step so far."""
    sizes = serve(StepTimeModel(), H200, rows=400, target=10.0, gap=0.05, steps=100).sizes
    assert all(size <= max(912, 2 * max(sizes[:i])) for i, size in enumerate(sizes) if i)
    assert max(sizes[:10]) <= 912 * 4
    assert max(sizes[50:]) > 3 * 912


def test_the_same_steps_give_the_same_bits_in_every_process() -> None:
    code = (
        "from tests.unit.engine.scheduling.timing.test_step_time import *\n"
        "cost = trained().cost\n"
        "model = StepTimeModel()\n"
        "sizes = serve(model, H200, rows=32, target=0.02, gap=0.3, steps=300).sizes\n"
        "print([float(value).hex() for value in (*cost, *model.cost)], sizes)\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[4],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1
    assert b"0x1." in printed.pop()
