"""Sampler against plain numpy and Python references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.executor.device import CpuDevice
from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.kernels.random_streams import stream_of, uniforms
from asyncllm.kernels.sampling import MAX_SELECT, TILE, cut_offs, keep_from, pick
from asyncllm.wire.messages import BAD_TOKEN, RowParams
from tests.support.kernels.distributions import check_distribution, distribution
from tests.support.models.constraining import unpacked

NO_TOKENS = np.empty(0, dtype=np.int32)


def make_sampler(vocab_size: int, *params: RowParams) -> Sampler:
    """A sampler with one slot for each of ``params``."""
    sampler = Sampler(len(params), vocab_size, CpuDevice())
    for slot, each in enumerate(params):
        sampler.admit(slot, each, NO_TOKENS, 0)
    return sampler


def sample_all(sampler: Sampler, logits: Tensor, position: int = 0) -> list[int]:
    """One token for slots 0, 1, ..., which are the rows of ``logits``."""
    slots = np.arange(len(logits))
    return sampler.sample(logits, slots, np.full(len(logits), position)).tokens.tolist()


def test_parameters_outlast_a_failed_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    device = CpuDevice()
    sampler = Sampler(1, 50, device)
    sampler.admit(0, RowParams(temperature=5.0, seed=3), NO_TOKENS, 0)

    def fail(array: np.ndarray) -> Tensor:
        raise RuntimeError("out of pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(device, "upload", fail)
        with pytest.raises(RuntimeError, match="pinned"):
            sampler.flush()
    logits = torch.linspace(0, 1, 50).unsqueeze(0)
    drawn = [sample_all(sampler, logits, position) for position in range(20)]
    expected = make_sampler(50, RowParams(temperature=5.0, seed=3))
    assert drawn == [sample_all(expected, logits, position) for position in range(20)]
    assert len({tokens[0] for tokens in drawn}) > 5  # the temperature has arrived


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.7},
        {"min_p": 0.1},
        {"top_k": 6, "top_p": 0.8, "temperature": 1.5},
        {"top_k": 8, "top_p": 0.95, "min_p": 0.15, "temperature": 2.0},
        {"top_p": 0.9, "min_p": 0.2},
        {"top_p": 1e-9},
        {"top_k": 500},
    ],
    ids=str,
)
@pytest.mark.parametrize("vocab_size", [13, 3 * TILE, 3 * TILE + 100])
def test_distribution(filters: dict[str, Any], vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    # Sharper than random logits, so that the filters cut where there is something to cut.
    logits = (rng.normal(size=vocab_size) * 2).astype(np.float32)
    slots, steps = 1500, 12
    seeds = rng.integers(-(2**63), 2**63, size=slots, dtype=np.int64)
    sampler = make_sampler(vocab_size, *(RowParams(seed=int(s), **filters) for s in seeds))
    rows = torch.from_numpy(logits).expand(slots, -1)
    tokens = [t for step in range(steps) for t in sample_all(sampler, rows, step)]
    expected = distribution(logits.astype(np.float64), **filters)
    check_distribution(np.bincount(tokens, minlength=vocab_size), expected)


@pytest.mark.parametrize("top_k", [2, MAX_SELECT, MAX_SELECT + 1, 900, 1000])
@pytest.mark.parametrize("top_p", [0.2, 0.9, 1.0])
def test_filters_keep_what_the_reference_keeps(top_k: int, top_p: float) -> None:
    logits = np.random.default_rng(top_k).normal(size=(4, 1000)) * 3
    weights = torch.from_numpy(np.exp(logits - logits.max(axis=1, keepdims=True))).float()
    least = cut_offs(weights, torch.full((4,), top_k), torch.full((4,), top_p), depth=top_k)
    kept = keep_from(weights.clone(), least) > 0
    for i in range(4):
        assert np.array_equal(kept[i].numpy(), distribution(logits[i], 1.0, top_k, top_p) > 0)


def test_filters_treat_ties_alike() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 1.0, 5.0]])
    kinds: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.5}]
    for filters in kinds:
        params = [RowParams(seed=seed, **filters) for seed in range(200)]
        tokens = sample_all(make_sampler(5, *params), logits.expand(200, -1))
        assert set(tokens) == {1, 2, 4}


def python_uniform(seed: int, position: int) -> float:
    """splitmix64 in Python's integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    gamma = 0x9E3779B97F4A7C15
    stream = mix((seed + gamma) % 2**64)
    return ((mix((stream + position * gamma) % 2**64) >> 12) + 0.5) / 2**52


def test_uniforms_are_splitmix64() -> None:
    # The published first outputs for seed 0: mixing gamma, 2 * gamma, ...
    assert stream_of(torch.tensor(0)).item() == 0xE220A8397B1DCDAF - 2**64
    rng = np.random.default_rng(0)
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), *rng.integers(-(2**63), 2**63, 50).tolist()]
    positions = [0, 1, 2**31, 2**40, 5, *rng.integers(0, 10**6, 50).tolist()]
    got = uniforms(stream_of(torch.tensor(seeds)), torch.tensor(positions))
    assert got.tolist() == [python_uniform(*pair) for pair in zip(seeds, positions, strict=True)]


def test_neighbouring_seeds_and_positions_are_independent() -> None:
    seeds, positions = torch.meshgrid(torch.arange(-100, 100), torch.arange(200), indexing="ij")
    u = uniforms(stream_of(seeds.reshape(-1)), positions.reshape(-1)).view(200, 200).numpy()
    assert 0 < u.min() < u.max() < 1
    assert abs(u.mean() - 0.5) < 4 * math.sqrt(1 / 12 / u.size)
    for a, b in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, 1:], u[:-1, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 4 / math.sqrt(a.size)


@pytest.mark.parametrize("vocab_size", [TILE, 5 * TILE])
def test_pick_never_takes_a_token_of_weight_0(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    edges = [2.0**-53, 1 - 2.0**-53, 0.5, 2.0**-30, 1 - 2.0**-30]
    u = torch.tensor([*edges, *rng.random(2000)], dtype=torch.float64)
    for density in (1.5 / vocab_size, 0.05, 0.9):
        weights = rng.random((len(u), vocab_size)) * (rng.random((len(u), vocab_size)) < density)
        best = rng.integers(vocab_size, size=len(u))
        weights[np.arange(len(u)), best] = 1
        tokens = pick(torch.from_numpy(weights).float(), u, torch.from_numpy(best)).numpy()
        assert (weights[np.arange(len(u)), tokens] > 0).all()
        first, last = (weights > 0).argmax(1), vocab_size - 1 - (weights > 0)[:, ::-1].argmax(1)
        assert tokens[0] == first[0]
        assert tokens[1] == last[1]


def test_pick_takes_the_token_whose_sum_exceeds_the_target() -> None:
    weights = torch.zeros(3, 2 * TILE)
    weights[:, [1, 2, 3, TILE]] = 1.0
    u = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    assert pick(weights, u, torch.ones(3, dtype=torch.int64)).tolist() == [2, 3, TILE]


def test_top_p_stops_when_it_is_reached() -> None:
    weights = torch.tensor([[0.25, 1.0, 0.25, 0.5]])
    for top_p, least in ((0.5, 1.0), (0.75, 0.5), (0.76, 0.25)):
        assert cut_offs(weights, torch.tensor([4]), torch.tensor([top_p]), 4).tolist() == [least]


def test_bfloat16_logits_are_computed_in_float32() -> None:
    torch.manual_seed(0)
    logits = (torch.randn(1, 500) * 4).bfloat16().expand(400, -1)
    params = [RowParams(seed=seed) for seed in range(400)]
    tokens = sample_all(make_sampler(500, *params), logits)
    assert tokens == sample_all(make_sampler(500, *params), logits.float())


def varied_params(seed: int, count: int) -> list[RowParams]:
    """Sampling parameters of all kinds, mixed."""
    rng = np.random.default_rng(seed)
    return [
        RowParams(
            temperature=float(rng.choice([0.0, 0.3, 1.0, 2.0])),
            top_k=int(rng.choice([0, 0, 1, 5, 40, 200])),
            top_p=float(rng.choice([1.0, 1.0, 0.5, 0.9])),
            min_p=float(rng.choice([0.0, 0.0, 0.05])),
            presence_penalty=float(rng.choice([0.0, 0.0, 0.7])),
            frequency_penalty=float(rng.choice([0.0, 0.0, -0.3])),
            repetition_penalty=float(rng.choice([1.0, 1.0, 1.3])),
            seed=int(rng.integers(-(2**63), 2**63)),
            logprobs=int(rng.choice([-1, -1, 0, 3])),
            min_length=int(rng.choice([0, 100])),
            stop_ids=(3, 7),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    count, vocab_size = 40, 700
    params = varied_params(1, count)
    torch.manual_seed(1)
    logits = (torch.randn(count, vocab_size) * 3).to(dtype)
    lengths = np.arange(count) + 80
    together = make_sampler(vocab_size, *params).sample(logits, np.arange(count), lengths)
    order = np.random.default_rng(2).permutation(count)
    shuffled = make_sampler(vocab_size, *params).sample(logits[order], order, lengths[order])
    assert together.tokens[order].tolist() == shuffled.tokens.tolist()
    alone = make_sampler(vocab_size, *params)
    for i in range(count):
        one = alone.sample(logits[i : i + 1], np.array([i]), lengths[i : i + 1])
        assert one.tokens.tolist() == [together.tokens[i].item()]
    # Rows that were sampled twice from the same slot must differ in position to differ in token.
    assert len(set(together.tokens.tolist())) > 10


def reference_penalties(
    logits: list[float], prompt: list[int], generated: list[int], params: RowParams
) -> list[float]:
    scores = list(logits)
    for token in set(prompt) | set(generated):
        if scores[token] > 0:
            scores[token] /= params.repetition_penalty
        else:
            scores[token] *= params.repetition_penalty
    for token in set(generated):
        scores[token] -= params.presence_penalty
        scores[token] -= params.frequency_penalty * generated.count(token)
    return scores


@pytest.mark.parametrize("seed", range(3))
def test_penalties_step_by_step_and_after_preemption(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vocab_size, num_slots, steps = 12, 6, 25
    params = [
        RowParams(
            temperature=0.0,
            presence_penalty=float(rng.uniform(-1, 2)),
            frequency_penalty=float(rng.uniform(-0.2, 0.5)),
            repetition_penalty=float(rng.uniform(0.7, 2)),
        )
        for _ in range(4)
    ]
    params.append(RowParams(temperature=0.0))
    prompts = [rng.integers(vocab_size, size=5).tolist() for _ in params]
    generated: list[list[int]] = [[] for _ in params]
    sampler = Sampler(num_slots, vocab_size, CpuDevice())
    for step in range(steps):
        if step in (0, 8, 17):  # all are preempted, and come back in other slots, used before
            slots = rng.permutation(num_slots)[: len(params)]
            for i, slot in enumerate(slots):
                known = np.array(prompts[i] + generated[i], dtype=np.int32)
                sampler.admit(int(slot), params[i], known, len(prompts[i]))
        logits = torch.from_numpy(rng.normal(size=(len(params), vocab_size)).astype(np.float32))
        lengths = np.array([5 + step] * len(params))
        tokens = sampler.sample(logits, slots, lengths).tokens.tolist()
        for i, each in enumerate(params):
            want = reference_penalties(logits[i].tolist(), prompts[i], generated[i], each)
            assert tokens[i] == int(np.argmax(want))
            generated[i].append(tokens[i])


def test_penalised_sampling_survives_preemption() -> None:
    params = RowParams(presence_penalty=0.8, repetition_penalty=1.2, seed=5)
    prompt = np.arange(4, dtype=np.int32)
    torch.manual_seed(0)
    logits = torch.randn(30, 1, 50)

    def generate(preempt_at: int) -> list[int]:
        sampler = Sampler(2, 50, CpuDevice())
        sampler.admit(0, params, prompt, 4)
        tokens: list[int] = []
        slot = 0
        for step in range(30):
            if step == preempt_at:
                slot = 1
                known = np.concatenate([prompt, np.array(tokens, dtype=np.int32)])
                sampler.admit(slot, params, known, 4)
            sampled = sampler.sample(logits[step], np.array([slot]), np.array([4 + step]))
            tokens += sampled.tokens.tolist()
        return tokens

    assert generate(-1) == generate(1) == generate(13)


def test_known_tokens_without_a_logit_are_ignored() -> None:
    sampler = Sampler(1, 4, CpuDevice())
    params = RowParams(temperature=0.0, presence_penalty=1.0, repetition_penalty=2.0)
    sampler.admit(0, params, np.array([9, 3, 8, 2], dtype=np.int32), 2)
    logits = torch.tensor([[1.0, 1.2, 2.5, 2.0]])
    assert sample_all(sampler, logits) == [1]


def test_bad_tokens_are_not_counted() -> None:
    sampler = make_sampler(2, RowParams(temperature=0.0, presence_penalty=1.0))
    assert sample_all(sampler, torch.full((1, 2), math.nan)) == [BAD_TOKEN]
    assert sample_all(sampler, torch.tensor([[1.0, 0.5]])) == [0]
    assert sample_all(sampler, torch.tensor([[1.0, 0.5]])) == [1]


def test_min_length_bans_stop_tokens() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, 1.0]]).expand(4, -1)
    sampler = make_sampler(
        5,
        RowParams(temperature=0.0, min_length=10, stop_ids=(0, 2, 99)),
        RowParams(temperature=0.0, min_length=10, stop_ids=(1,)),
        RowParams(top_k=2, min_length=12, stop_ids=(0, 1, 2)),
        RowParams(temperature=0.0),
    )
    tokens = sample_all(sampler, logits, position=9)
    assert tokens[:2] + tokens[3:] == [1, 0, 0]
    assert tokens[2] in (3, 4)
    tokens = sample_all(sampler, logits, position=10)
    assert tokens[:2] + tokens[3:] == [0, 0, 0]
    assert tokens[2] in (3, 4)
    assert sample_all(sampler, logits, position=12)[2] in (0, 1)


KINDS = {
    "greedy": RowParams(temperature=0.0),
    "drawn": RowParams(),
    "filtered": RowParams(top_k=3, top_p=0.9, min_p=0.01),
    "sorted": RowParams(top_p=0.9),
    "penalised": RowParams(presence_penalty=1.0, repetition_penalty=1.1),
    "banned": RowParams(temperature=0.0, min_length=99, stop_ids=(2,)),
    "logprobs": RowParams(logprobs=2),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_finite_are_reported(kind: str, dtype: torch.dtype) -> None:
    rows = torch.randn(6, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = rows.clone()
    logits[0, 2] = math.nan
    logits[1, 299] = math.inf
    logits[2] = -math.inf
    logits[3] = math.nan
    logits[4, 10:] = -math.inf
    sampler = make_sampler(300, *[KINDS[kind]] * 6)
    sampled = sampler.sample(logits, np.arange(6), np.zeros(6, dtype=np.int64))
    tokens = sampled.tokens.tolist()
    assert tokens[:4] == [BAD_TOKEN] * 4
    assert 0 <= tokens[4] < 10
    healthy = make_sampler(300, *[KINDS[kind]] * 6)
    assert tokens[5] == sample_all(healthy, rows)[5]
    if sampled.logprobs is not None:
        assert [entry.row for entry in unpacked(sampled.logprobs)] == [4, 5]
    # The next step is not disturbed by what this one reported.
    assert all(token >= 0 for token in sample_all(sampler, rows, position=1))


def test_logprobs_are_of_the_raw_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 60) * 4
    sampler = make_sampler(
        60,
        RowParams(logprobs=3, temperature=0.0),
        RowParams(),
        RowParams(logprobs=0, top_k=5, temperature=2.0, seed=3),
        RowParams(logprobs=20, repetition_penalty=3.0, presence_penalty=2.0, seed=4),
        RowParams(logprobs=1, temperature=0.0, min_length=9, stop_ids=(int(logits[4].argmax()),)),
    )
    before = logits.clone()
    sampled = sampler.sample(logits, np.arange(5), np.zeros(5, dtype=np.int64))
    assert torch.equal(logits, before)
    assert sampled.logprobs is not None
    entries = unpacked(sampled.logprobs)
    assert [entry.row for entry in entries] == [0, 2, 3, 4]
    want = logits.double().log_softmax(-1)
    for entry, count in zip(entries, (3, 0, 20, 1), strict=True):
        row = want[entry.row]
        assert entry.sampled == pytest.approx(row[sampled.tokens[entry.row]].item(), abs=1e-5)
        best = row.topk(count)
        assert list(entry.top_ids) == best.indices.tolist()
        assert list(entry.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-5)
    assert entries[0].sampled == entries[0].top_logprobs[0]
    assert entries[3].sampled < entries[3].top_logprobs[0]


def test_logprobs_leave_out_what_cannot_be() -> None:
    logits = torch.full((1, 50), -math.inf)
    logits[0, 30], logits[0, 7] = 1.0, 1.0
    sampler = make_sampler(50, RowParams(logprobs=5, temperature=0.0))
    sampled = sampler.sample(logits, np.array([0]), np.array([0]))
    assert sampled.logprobs is not None
    (entry,) = unpacked(sampled.logprobs)
    assert entry.top_ids == (7, 30)
    assert entry.top_logprobs == pytest.approx((math.log(0.5),) * 2)


def test_logprobs_name_equal_tokens_in_order() -> None:
    sampler = make_sampler(3000, RowParams(logprobs=20, temperature=0.0))
    sampled = sampler.sample(torch.zeros(1, 3000), np.array([0]), np.array([0]))
    assert sampled.logprobs is not None
    (entry,) = unpacked(sampled.logprobs)
    assert list(entry.top_ids) == sorted(entry.top_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_first_of_equal_scores(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 1000, dtype=dtype)
    logits[0, [411, 412, 999]] = 2.0
    logits[1, [17, 500]] = 1.0
    greedy = RowParams(temperature=0.0)
    assert sample_all(make_sampler(1000, *[greedy] * 3), logits) == [411, 17, 0]
    mixed = make_sampler(1000, greedy, RowParams(top_k=1, seed=9), RowParams())
    assert sample_all(mixed, logits)[:2] == [411, 17]


def test_extreme_temperatures() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 100) * 1e4
    params = [RowParams(temperature=t) for t in (1e-45, 1e-30, 1e-6)]
    assert sample_all(make_sampler(100, *params), logits) == logits.argmax(-1).tolist()
    hot = make_sampler(100, *(RowParams(temperature=100.0, seed=s) for s in range(300)))
    assert len(set(sample_all(hot, torch.randn(1, 100).expand(300, -1)))) > 80


def test_slots_are_read_in_the_order_given() -> None:
    params = [RowParams(temperature=0.0, min_length=9, stop_ids=(slot,)) for slot in range(3)]
    sampler = make_sampler(3, *params)
    logits = torch.tensor([[1.0, 2.0, 3.0]]).expand(2, -1)
    slots, lengths = np.array([2, 0]), np.array([0, 0])
    assert sampler.sample(logits, slots, lengths).tokens.tolist() == [1, 2]


def test_levels_are_the_cheapest_that_serve_all_rows() -> None:
    kinds = [
        RowParams(temperature=0.0, top_p=0.5),
        RowParams(top_k=1, min_p=0.5),
        RowParams(),
        RowParams(top_k=99),  # there are only 50
        RowParams(top_k=49),
        RowParams(top_p=0.9),
        RowParams(min_p=0.1),
        RowParams(temperature=0.0, min_length=7, stop_ids=(1,)),
        RowParams(temperature=0.0, frequency_penalty=0.1),
        RowParams(temperature=0.0, logprobs=0),
    ]
    sampler = make_sampler(50, *kinds)
    greedy, draw, filtered, eager = Level
    want = [greedy, greedy, draw, draw, filtered, filtered, filtered, eager, eager, eager]
    levels = [sampler.level(np.array([slot]), np.array([6])) for slot in range(10)]
    assert levels == want
    assert sampler.level(np.array([7]), np.array([7])) is greedy
    assert sampler.level(np.array([0, 2]), np.array([0, 0])) is draw
    assert sampler.level(np.array([3, 6, 1]), np.array([0, 0, 0])) is filtered
    assert sampler.level(np.array([6, 9]), np.array([0, 0])) is eager
    # The slot after the last one is for padding.
    assert sampler.level(np.array([10]), np.array([0])) is greedy


def test_draw_is_sample_and_relays() -> None:
    params = [RowParams(seed=1), RowParams(temperature=0.0), RowParams(top_k=3, seed=2)]
    sampler = make_sampler(50, *params)
    sampler.flush()
    torch.manual_seed(0)
    logits = torch.randn(4, 50)
    logits[3] = math.nan
    slots, lengths = np.array([2, 1, 0, 3]), np.array([5, 6, 7, 0])
    relay = torch.full((4,), -1)
    keys = torch.from_numpy(slots).int(), torch.from_numpy(lengths).int()
    drawn = sampler.draw(logits, *keys, Level.FILTER, relay=relay).tolist()
    assert drawn[3] == BAD_TOKEN
    assert drawn[:3] == sampler.sample(logits[:3], slots[:3], lengths[:3]).tokens.tolist()
    assert relay.tolist() == [drawn[2], drawn[1], drawn[0], 0]


def test_the_last_admission_to_a_slot_counts() -> None:
    sampler = make_sampler(50, RowParams(temperature=2.0, seed=3))
    sampler.admit(0, RowParams(temperature=0.0), NO_TOKENS, 0)
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    for position in range(5):
        assert sample_all(sampler, logits, position) == [int(logits.argmax())]
    sampler.admit(0, RowParams(temperature=100.0, seed=3), NO_TOKENS, 0)
    assert len({sample_all(sampler, logits, position)[0] for position in range(20)}) > 5
