"""Everything that acts on scores, together, against plain Python on the same logits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.executor.device import CpuDevice
from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.kernels.random_streams import stream_of, uniforms
from asyncllm.wire.messages import BAD_TOKEN, Constraints, RowParams
from tests.support.kernels.distributions import check_distribution, distribution
from tests.support.models.constraining import row_params, unpacked

NO_TOKENS = np.empty(0, dtype=np.int32)


def reference_scores(
    logits: np.ndarray, prompt: list[int], generated: list[int], params: RowParams
) -> np.ndarray:
    """float64 [vocab], in the order that ``Sampler`` promises."""
    scores = logits.astype(np.float64)
    asked = params.constraints or Constraints()
    ids = np.frombuffer(asked.bias_ids, dtype="<i4").tolist()
    biases = np.frombuffer(asked.biases, dtype="<f4").tolist()
    for token, bias in zip(ids, biases, strict=True):
        scores[token] += bias
    for token in {*prompt, *generated}:
        factor = params.repetition_penalty
        scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
    for token in set(generated):
        scores[token] -= params.presence_penalty
        scores[token] -= params.frequency_penalty * generated.count(token)
    for token in range(len(logits)):
        words = np.frombuffer(asked.mask, dtype="<u4")
        if asked.mask and not int(words[token // 32]) >> token % 32 & 1:
            scores[token] = -math.inf
    for *before, last in asked.bad_words:
        if generated[len(generated) - len(before) :] == before:
            scores[last] = -math.inf
    if len(prompt) + len(generated) < params.min_length:
        scores[list(params.stop_ids)] = -math.inf
    return scores


def reference_token(scores: np.ndarray, position: int, params: RowParams) -> tuple[int, bool]:
    """The token, and whether rounding may decide otherwise."""
    if scores.max() == -math.inf:
        return BAD_TOKEN, False
    if params.temperature == 0 or params.top_k == 1:
        best = np.sort(scores)[::-1]
        return int(scores.argmax()), bool(len(best) > 1 and best[0] - best[1] < 1e-4)
    filters = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
    }
    weights = distribution(scores, **filters)  # type: ignore[arg-type]
    stream = stream_of(torch.tensor([params.seed]))
    uniform = uniforms(stream, torch.tensor([position])).item()
    upto = weights.cumsum()
    unsure = bool((abs(upto - uniform) < 1e-4).any())
    for change in (-1e-4, 1e-4):  # where filters cut may be a matter of rounding, too
        nearby = {**filters, "top_p": min(max(params.top_p + change, 1e-9), 1.0)}
        nearby["min_p"] = max(params.min_p + change, 0.0) if params.min_p else 0.0
        near = distribution(scores, **nearby)  # type: ignore[arg-type]
        unsure |= bool(((near > 0) != (weights > 0)).any())
    return int(np.searchsorted(upto, uniform)), unsure


@st.composite
def sequences(draw: st.DrawFn, vocab: int) -> tuple[RowParams, list[int]]:
    """Parameters in which anything may be combined with anything, and a prompt."""
    token = st.integers(0, vocab - 1)

    def off_or(off: Any, value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.just(off) | value

    params = row_params(
        vocab,
        bias=draw(st.dictionaries(token, st.floats(-100, 100, width=32) | st.floats(-2, 2))),
        allowed=draw(off_or([], st.lists(token, min_size=1))),
        bad_words=tuple(
            set(draw(st.lists(st.lists(token, min_size=1, max_size=3).map(tuple), max_size=9)))
        ),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, vocab, 99])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.9, 0.4])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1, 0.7])),
        presence_penalty=draw(off_or(0.0, st.floats(-2, 2))),
        frequency_penalty=draw(off_or(0.0, st.floats(-2, 2))),
        repetition_penalty=draw(off_or(1.0, st.floats(0.2, 5))),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        logprobs=draw(st.sampled_from([-1, -1, 0, 2])),
        min_length=draw(st.integers(0, 12)),
        stop_ids=tuple(draw(st.sets(token, max_size=2))),
    )
    return params, draw(st.lists(token, min_size=1, max_size=6))


@st.composite
def batches(draw: st.DrawFn) -> tuple[int, list[tuple[RowParams, list[int]]]]:
    vocab = draw(st.sampled_from([2, 5, 31, 32, 33, 70]))
    return vocab, draw(st.lists(sequences(vocab), min_size=1, max_size=5))


class Run:
    """Sequences that a sampler continues together, with logits that depend on their tokens."""

    def __init__(self, vocab: int, asked: list[tuple[RowParams, list[int]]], seed: int):
        self.vocab = vocab
        self.asked = asked
        self.sampler = Sampler(len(asked) + 2, vocab, CpuDevice())
        self.generated: list[list[int]] = [[] for _ in asked]
        self.seed = seed
        self.slots: list[int] = []
        self.enter(list(range(len(asked))))

    def enter(self, slots: list[int]) -> None:
        """All come in, or come back from a preemption."""
        self.slots = slots
        for (params, prompt), slot, generated in zip(
            self.asked, slots, self.generated, strict=True
        ):
            known = np.array(prompt + generated, dtype=np.int32)
            self.sampler.admit(slot, params, known, len(prompt))

    def logits(self, i: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, i, len(self.generated[i]), *self.generated[i]])
        noise: np.ndarray = (rng.normal(size=self.vocab) * 3).astype(np.float32)
        return noise

    def step(self, rows: list[int]) -> dict[int, int]:
        """Sample for some of them; what a BAD_TOKEN ended goes on with token 0."""
        logits = torch.from_numpy(np.stack([self.logits(i) for i in rows]))
        slots = np.array([self.slots[i] for i in rows])
        lengths = np.array([len(self.asked[i][1]) + len(self.generated[i]) for i in rows])
        sampled = self.sampler.sample(logits, slots, lengths)
        tokens = dict(zip(rows, sampled.tokens.tolist(), strict=True))
        assert all(tokens[rows[at]] == BAD_TOKEN for at in sampled.failures)
        return tokens


@settings(max_examples=120, derandomize=True)
@given(batches(), st.integers(0, 2**32), st.data())
def test_all_constraints_together_are_those_of_the_reference(
    batch: tuple[int, list[tuple[RowParams, list[int]]]], seed: int, data: st.DataObject
) -> None:
    vocab, asked = batch
    run = Run(vocab, asked, seed)
    live = list(range(len(asked)))
    for _ in range(8):
        if data.draw(st.integers(0, 4)) == 0:
            run.enter(data.draw(st.permutations(range(len(asked) + 2)))[: len(asked)])
        order = data.draw(st.permutations(live))
        tokens = run.step(order)
        for i, token in tokens.items():
            params, prompt = asked[i]
            scores = reference_scores(run.logits(i), prompt, run.generated[i], params)
            position = len(prompt) + len(run.generated[i])
            want, unsure = reference_token(scores, position, params)
            assert token == want or unsure
            if token == BAD_TOKEN:
                live.remove(i)
            else:
                assert scores[token] > -math.inf
                run.generated[i].append(token)
        if not live:
            break


@settings(max_examples=60, derandomize=True)
@given(batches(), st.integers(0, 2**32))
def test_the_batch_does_not_show_in_a_row(
    batch: tuple[int, list[tuple[RowParams, list[int]]]], seed: int
) -> None:
    vocab, asked = batch
    together, alone = Run(vocab, asked, seed), Run(vocab, asked, seed)
    for _ in range(6):
        tokens = together.step(list(range(len(asked))))
        assert tokens == {i: alone.step([i])[i] for i in reversed(range(len(asked)))}
        for run in (together, alone):
            for i, token in tokens.items():
                run.generated[i].append(max(token, 0))
        if BAD_TOKEN in tokens.values():
            return


def draws(logits: torch.Tensor, count: int, **kwargs: Any) -> np.ndarray:
    """How often each token is sampled from the same logits, with as many seeds."""
    vocab = logits.shape[0]
    sampler = Sampler(count, vocab, CpuDevice())
    for slot in range(count):
        sampler.admit(
            slot, row_params(vocab, seed=slot, **kwargs), np.array([0], dtype=np.int32), 1
        )
    lengths = np.ones(count, dtype=np.int64)
    tokens = sampler.sample(logits.expand(count, -1), np.arange(count), lengths).tokens
    return np.bincount(tokens.numpy(), minlength=vocab)


def test_constrained_draws_follow_the_distribution() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))
    kwargs: dict[str, Any] = {
        "bias": {3: 2.0, 17: -1.5, 40: 0.5},
        "allowed": [*range(0, 45, 3), 17, 40],
        "bad_words": ((9,), (12, 3)),
        "repetition_penalty": 1.3,
    }
    counts = draws(logits, 20_000, **kwargs)
    scores = reference_scores(logits.numpy(), [0], [], row_params(50, **kwargs))
    check_distribution(counts, distribution(scores))
    kwargs |= {"temperature": 1.7, "top_k": 8, "top_p": 0.9, "min_p": 0.02}
    counts = draws(logits, 20_000, **kwargs)
    filters = {name: kwargs[name] for name in ("temperature", "top_k", "top_p", "min_p")}
    check_distribution(counts, distribution(scores, **filters))


def test_logprobs_are_of_the_model_whatever_is_constrained() -> None:
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(1, 40, CpuDevice())
    best = int(logits.argmax())
    params = row_params(40, bias={5: 100.0}, bad_words=((best,),), temperature=0.0, logprobs=1)
    sampler.admit(0, params, NO_TOKENS, 0)
    sampled = sampler.sample(logits, np.array([0]), np.array([0]))
    assert sampled.tokens.tolist() == [5]
    assert sampled.logprobs is not None
    (entry,) = unpacked(sampled.logprobs)
    want = logits[0].double().log_softmax(-1)
    assert entry.sampled == pytest.approx(want[5].item(), abs=1e-5)
    assert entry.top_ids == (best,)


def test_a_slot_forgets_what_its_last_sequence_was_asked() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    sampler = Sampler(1, 4, CpuDevice())

    def sample(**kwargs: Any) -> int:
        sampler.admit(0, row_params(4, temperature=0.0, **kwargs), NO_TOKENS, 0)
        return int(sampler.sample(logits, np.array([0]), np.array([0])).tokens)

    assert sample(bias={0: 9.0, 1: 8.0}) == 0
    assert sample(bias={1: 2.5}) == 1
    assert sample() == 3
    assert sample(allowed=[2]) == 2
    assert sample(bad_words=((3,), (2, 1))) == 2
    # The 2 that was sampled last is on its way to the words before, not to these.
    assert sample(bad_words=((2, 3),)) == 3
    assert sample() == 3


def test_ids_without_a_logit_are_ignored() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    sampler = Sampler(1, 3, CpuDevice())
    params = row_params(32, bias={31: 5.0, 1: 3.0}, bad_words=[(1, 40)], temperature=0.0)
    sampler.admit(0, params, NO_TOKENS, 0)
    for length in range(3):
        sampled = sampler.sample(logits, np.array([0]), np.array([length]))
        assert sampled.tokens.tolist() == [1]


def test_constrained_rows_are_eager() -> None:
    sampler = Sampler(6, 50, CpuDevice())
    asked: list[dict[str, Any]] = [
        {},
        {"bias": {1: 1.0}},
        {"allowed": [3]},
        {"bad_words": [(1,)]},
        {"bad_words": [(1, 2)]},
        {"grammar": b"x"},
    ]
    kinds = [row_params(50, **kwargs) for kwargs in asked]
    for slot, params in enumerate(kinds):
        sampler.admit(slot, params, NO_TOKENS, 0)
    levels = [sampler.level(np.array([slot]), np.array([0])) for slot in range(6)]
    assert levels == [Level.DRAW] + [Level.EAGER] * 5


@pytest.mark.parametrize("kind", ["bias", "allowed", "bad_words"])
def test_constrained_rows_that_are_not_finite_are_reported(kind: str) -> None:
    kwargs = {
        "bias": {"bias": {2: 1.0}},
        "allowed": {"allowed": list(range(200))},
        "bad_words": {"bad_words": ((2, 3), (4,))},
    }[kind]
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    logits[0, 250], logits[1, 4], logits[2] = math.nan, math.inf, -math.inf
    sampler = Sampler(4, 300, CpuDevice())
    for slot in range(4):
        sampler.admit(slot, row_params(300, **kwargs), NO_TOKENS, 0)  # type: ignore[arg-type]
    sampled = sampler.sample(logits, np.arange(4), np.zeros(4, dtype=np.int64))
    tokens = sampled.tokens.tolist()
    assert tokens[:3] == [BAD_TOKEN] * 3
    assert tokens[3] >= 0
    assert sampled.failures == {}
    # Nothing was accepted for them, and the next step is not disturbed.
    healthy = sampler.sample(logits[[3] * 4], np.arange(4), np.ones(4, dtype=np.int64))
    assert min(healthy.tokens.tolist()) >= 0
