"""The sampling kernels against the reference, and what they promise."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from asyncllm.kernels import sampling
from asyncllm.kernels.random_streams import stream_of, uniforms
from asyncllm.kernels.sampling import RECORD
from asyncllm.wire.messages import BAD_TOKEN
from tests.support.kernels.device import DEVICE
from tests.support.kernels.distributions import check_distribution, distribution

pytest.importorskip("triton")

from asyncllm.kernels.triton.sampling.sampling import sample_tokens

# numpy, in the interpreter, tells of what floats are meant to do here.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]

NATIVE = DEVICE == "cuda"
ROWS = 256 if NATIVE else 4
VOCABS = [13, 1000, 9001, 151_936] if NATIVE else [13, 1000, 5003]
DTYPES = [torch.float32, torch.bfloat16] if NATIVE else [torch.bfloat16]
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "all": {"top_k": 50, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    "much": {"top_k": 700, "top_p": 0.99},
    "nearly all": {"top_p": 0.9999, "temperature": 3.0},
}


def make_table(*records: dict[str, Any], seed: int = 0) -> Tensor:
    """A record for each slot, each with a seed of its own."""
    table = np.zeros(len(records), dtype=RECORD)
    seeds = np.random.default_rng(seed).integers(-(2**63), 2**63, size=len(records))
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
    for slot, record in enumerate(records):
        stream = stream_of(torch.tensor(int(seeds[slot]))).item()
        values = {**defaults, **record, "stream": stream}
        table[slot] = tuple(values[name] for name in RECORD.names or ())
    return torch.from_numpy(table.view(np.int64).reshape(-1, 3)).to(DEVICE)


def launch(logits: Tensor, table: Tensor, position: int = 0, **options: Any) -> Tensor:
    """Rows are slots 0, 1, ... ."""
    slots = torch.arange(len(logits), device=DEVICE, dtype=torch.int32)
    options = {"draws": True, "filters": True, **options}
    return sample_tokens(logits, table, slots, torch.full_like(slots, position), **options)


def reference(logits: Tensor, table: Tensor, position: int = 0) -> Tensor:
    """What ``launch`` should yield."""
    slots = torch.arange(len(logits), device=DEVICE)
    positions = torch.full_like(slots, position)
    return sampling.sample_tokens.reference(
        logits, table, slots, positions, draws=True, filters=True
    )


def random_logits(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * 3).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_reference(kind: str, vocab: int, dtype: torch.dtype) -> None:
    table = make_table(*[KINDS[kind]] * ROWS)
    logits = random_logits(ROWS, vocab, dtype=dtype)
    got, want = launch(logits, table, 5), reference(logits, table, 5)
    differ = (got != want).nonzero().squeeze(1).tolist()
    # Sums are rounded differently, so a draw at the border between two tokens may differ.
    assert len(differ) <= (0.04 * ROWS if vocab > 100_000 else 1 if NATIVE else 0)
    if kind == "plain":
        for row in differ:
            weights = (logits[row].double() - logits[row].max().double()).exp()
            upto = weights.cumsum(0) / weights.sum()
            uniform = uniforms(table[row : row + 1, 0], torch.tensor([5], device=DEVICE)).item()
            assert upto[got[row]] - weights[got[row]] / weights.sum() - 2e-6 < uniform
            assert uniform < upto[got[row]] + 2e-6


@pytest.mark.skipif(not NATIVE, reason="too many draws for the interpreter")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "greedy"])
@pytest.mark.parametrize("vocab", [300, 9001])
def test_draws_follow_the_distribution(kind: str, vocab: int) -> None:
    slots, steps = 2000, 20
    logits = random_logits(vocab, dtype=torch.float32)
    table = make_table(*[KINDS[kind]] * slots)
    rows = logits.expand(slots, -1)
    tokens = torch.cat([launch(rows, table, step) for step in range(steps)]).cpu().numpy()
    expected = distribution(logits.double().cpu().numpy(), **KINDS[kind])
    check_distribution(np.bincount(tokens, minlength=vocab), expected)


@pytest.mark.skipif(not NATIVE, reason="the interpreter has no lanes")
@pytest.mark.parametrize("kind", ["top_p", "much", "nearly all"])
@pytest.mark.parametrize("vocab", [3000, 9001, 32_000])
def test_every_row_comes_to_an_end(kind: str, vocab: int) -> None:
    """A kernel whose lanes disagree on a sum waits for itself, in one row of hundreds."""
    rows = 4000
    logits = random_logits(rows, vocab, dtype=torch.float32)
    tokens = launch(logits, make_table(*[KINDS[kind]] * rows))
    assert ((tokens >= 0) & (tokens < vocab)).all()


def test_a_row_does_not_depend_on_its_batch() -> None:
    kinds = list(KINDS.values())
    count, vocab = (256, 151_936) if NATIVE else (len(kinds), 5003)
    table = make_table(*(kinds[i % len(kinds)] for i in range(count)))
    logits = random_logits(count, vocab)
    together = launch(logits, table)
    order = torch.randperm(count, device=DEVICE)
    positions = torch.zeros_like(order)
    options: Any = {"draws": True, "filters": True}
    shuffled = sample_tokens(logits[order], table, order, positions, **options)
    assert torch.equal(shuffled, together[order])
    for row in range(0, count, 5 if NATIVE else 1):
        part = slice(row, row + 1)
        assert launch(logits[part], table[part])[0] == together[row]
        kind = kinds[row % len(kinds)]
        if kind.keys() <= {"temperature"}:
            draws = kind.get("temperature") != 0
            alone = launch(logits[part], table[part], draws=draws, filters=False)
            assert alone[0] == together[row]


def test_rows_that_are_not_finite_are_reported() -> None:
    for record in KINDS.values():
        logits = random_logits(6, 5003)
        logits[0, 2] = math.nan
        logits[1, 5002] = math.inf
        logits[2] = -math.inf
        logits[3] = math.nan
        logits[4, 10:] = -math.inf
        relay = torch.full((7,), -1, device=DEVICE)
        tokens = launch(logits, make_table(*[record] * 6), relay=relay).tolist()
        assert tokens[:4] == [BAD_TOKEN] * 4
        assert 0 <= tokens[4] < 10
        assert 0 <= tokens[5] < 5003
        assert relay.tolist() == [0, 0, 0, 0, *tokens[4:], -1]


def test_the_first_of_equal_scores_is_the_best() -> None:
    logits = torch.zeros(4, 9001, device=DEVICE, dtype=torch.bfloat16)
    logits[0, [5000, 5001, 9000]] = 2.0
    logits[1, [17, 8000]] = 1.0
    logits[2] = -logits[2]  # -0.0 and 0.0 are equal
    logits[2, 7] = 0.0
    for draws in (False, True):
        tokens = launch(logits, make_table(*[{"temperature": 0.0}] * 4), draws=draws)
        assert tokens.tolist() == [5000, 17, 0, 0]


def test_tokens_that_tie_are_kept_alike() -> None:
    count = 200 if NATIVE else 4
    logits = torch.full((count, 4200), 0.5, device=DEVICE, dtype=torch.bfloat16)
    tied = [3, 4, 900, 4199]
    logits[:, tied] = 3.0
    for record in ({"top_k": 2}, {"top_p": 0.01}, {"min_p": 0.9}, {"top_k": 3, "top_p": 0.4}):
        tokens = set(launch(logits, make_table(*[record] * count)).tolist())
        assert tokens == set(tied) if NATIVE else tokens <= set(tied)


def test_a_cut_off_among_ties_leaves_the_whole_vocabulary() -> None:
    logits = torch.zeros(ROWS // 2, 5003, device=DEVICE, dtype=torch.bfloat16)
    for record in ({"top_k": 2}, {"top_p": 0.3}, {"top_k": 600, "top_p": 0.5}):
        table = make_table(*[record] * len(logits))
        assert torch.equal(launch(logits, table), reference(logits, table))


def test_extreme_temperatures() -> None:
    logits = random_logits(3, 1000, dtype=torch.float32) * 1e4
    tiny = float(np.finfo(np.float32).tiny)
    tokens = launch(logits, make_table(*({"temperature": t} for t in (tiny, 1e-30, 1e-6))))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_rows_may_be_part_of_a_wider_tensor() -> None:
    wide = random_logits(4, 5120)
    wide[:, 5003:] = math.nan
    logits = wide[:, :5003]
    table = make_table({}, {"top_k": 9}, {"top_p": 0.7}, {"temperature": 0.0})
    assert torch.equal(launch(logits, table), launch(logits.contiguous(), table))


@pytest.mark.skipif(not NATIVE, reason="graphs are CUDA's")
def test_in_a_graph() -> None:
    kinds = list(KINDS.values()) * 4
    tables = [make_table(*kinds, seed=seed) for seed in range(3)]
    inputs = [random_logits(len(kinds), 9001) for _ in tables]
    want = [launch(*pair) for pair in zip(inputs, tables, strict=True)]
    logits, table = inputs[0].clone(), tables[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = launch(logits, table)
    for i in (1, 2, 0):
        logits.copy_(inputs[i])
        table.copy_(tables[i])
        graph.replay()
        assert torch.equal(got, want[i])
