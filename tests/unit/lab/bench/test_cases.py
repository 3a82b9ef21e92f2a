"""The cases have the prompts that other engines were measured with, and each run the same."""

from __future__ import annotations

import pytest

from asyncllm.lab.bench import cases
from asyncllm.lab.bench.cases import LARGEST_ID, OnlineCase, Work, within

OFFLINE = {case.name: case for case in cases.OFFLINE}
ONLINE = {case.name: case for case in cases.online()}


# ``random.seed(n)``, then ``randint(0, 10000)`` for each token. For the first and the last
# repetition: the first tokens of the first prompt and the last tokens of the last one.
@pytest.mark.parametrize(
    ("name", "count", "num_in", "num_out", "first", "last"),
    [
        ("bs1", 1, 128, 512, ([2386, 7528, 7453], [6984, 7768]), ([2427, 5869], [9366, 3392])),
        ("bs8", 8, 128, 256, ([747, 3333, 497], [4224, 6412]), ([6316, 7683], [6447, 8270])),
        ("bs32", 32, 512, 256, ([9792, 5839, 5647], [3878, 3544]), ([9133, 8831], [9913, 9867])),
        ("bs128", 128, 512, 256, ([5041, 9206, 4158], [3702, 6670]), ([8022, 1594], [475, 4231])),
        ("prefill8k", 1, 8000, 1, ([7562, 8629, 9474], [8712, 713]), ([8282, 5955], [5225, 7109])),
        ("prefill16x2k", 16, 2000, 1, ([4335, 5636], [2292, 2956]), ([6574, 3031], [8589, 3755])),
    ],
)
def test_fixed_cases(
    name: str,
    count: int,
    num_in: int,
    num_out: int,
    first: tuple[list[int], list[int]],
    last: tuple[list[int], list[int]],
) -> None:
    case = OFFLINE[name]
    assert case.temperature == 0.0
    for repetition, (begin, end) in ((0, first), (2, last)):
        work = case.make(repetition)
        assert [len(prompt) for prompt in work.prompts] == [num_in] * count
        assert work.max_tokens == [num_out] * count
        assert work.prompts[0][: len(begin)] == begin
        assert work.prompts[-1][-len(end) :] == end
        assert work.longest == num_in + num_out
    assert case.make(1) == case.make(1) != case.make(2)


def test_the_uneven_case() -> None:
    case = OFFLINE["offline256"]
    work = case.make(0)
    assert work == case.make(2), "the salt keeps repetitions apart, not the prompts"
    assert case.temperature == 0.6
    assert len(work.prompts) == 256
    assert [len(prompt) for prompt in work.prompts[:4]] == [964, 724, 484, 508]
    assert work.prompts[0][:4] == [6311, 6890, 663, 4242]
    assert work.prompts[-1][-3:] == [6642, 9046, 1958]
    assert work.max_tokens[:4] == [845, 312, 607, 843]
    assert (sum(map(len, work.prompts)), sum(work.max_tokens)) == (142_827, 133_966)


def test_small_vocabularies_wrap_around() -> None:
    assert within([0, 9999, 10_000], LARGEST_ID + 1) == [0, 9999, 10_000]
    assert within([0, 9999, 10_000], LARGEST_ID) == [0, 9999, 0]
    assert Work([[1], [2, 3]], [5, 1]).longest == 6


def test_closed_loops() -> None:
    case = ONLINE["c32"]
    assert (case.clients, case.rate, len(case.shots), case.most_at_once) == (32, None, 128, 32)
    # From the back: number 127 goes first. The seed is crc32(b"c32127").
    first, second = case.shots[:2]
    assert tuple(first) == (None, 897, 357, 4083503346, False, None)
    assert first.prompt(151_936)[:3] == [8072, 2524, 394]
    assert second[1:4] == (645, 377, 2221039716)
    assert second.prompt(151_936)[:3] == [5474, 550, 9665]
    assert [(s.num_in, s.num_out) for s in ONLINE["c1"].shots] == [(128, 256)] * 4
    assert (ONLINE["c256"].clients, len(ONLINE["c256"].shots)) == (256, 768)


def test_random_arrivals() -> None:
    case = ONLINE["poisson20"]
    assert (case.clients, case.rate, len(case.shots)) == (0, 20, 200)
    times = [shot.at for shot in case.shots]
    assert times[:3] == pytest.approx([0.0, 0.031088544, 0.054453862])
    assert case.shots[1][1:3] == (373, 170)
    assert case.shots[1].prompt(10_001)[:3] == [9479, 6301, 9037]


def test_interference() -> None:
    case = ONLINE["interfere32"]
    steady, long = case.shots[:32], case.shots[32:]
    assert {shot[:3] + shot[4:] for shot in steady} == {(0.0, 128, 1000, False, None)}
    assert steady[0].prompt(10_001)[:3] == [8151, 4360, 5965]
    assert [shot.at for shot in long] == pytest.approx([0.5 + 0.3 * i for i in range(8)])
    assert {shot[1:3] + shot[4:] for shot in long} == {(8000, 1, True, None)}
    assert long[7].prompt(10_001)[:3] == [5477, 1987, 3311]
    assert case.longest == 8001


def test_another_seed_makes_other_prompts_of_the_same_sizes() -> None:
    def sizes(case: OnlineCase) -> list[tuple[float | None, int, int]]:
        return [shot[:3] for shot in case.shots]

    for case, other in zip(cases.online(), cases.online(seed=1), strict=True):
        assert sizes(case) == sizes(other)
        assert case.shots[0].prompt(10_001) != other.shots[0].prompt(10_001)


def test_sweeps_and_their_warm_up() -> None:
    swept = cases.sweep([1, 300], [0.5, 8])
    assert [case.name for case in swept] == ["1 clients", "300 clients", "0.5/s", "8/s"]
    assert [len(case.shots) for case in swept] == [8, 1200, 16, 80]
    assert [case.rate for case in swept] == [None, None, 0.5, 8]
    assert not {case.name for case in swept} & ONLINE.keys(), "they are not the same requests"
    warm = cases.warm_up(swept[:1])
    assert (warm.clients, len(warm.shots)) == (1, 2)
    assert cases.warm_up(swept).clients == 64
    assert max(shot.num_in for shot in cases.warm_up(swept).shots) > 900


def test_given_lengths() -> None:
    swept = cases.sweep([2], [4], 0, (30, 30), (7, 7), count=5)
    assert [case.name for case in swept] == ["2 clients", "4/s"]
    assert all([shot[1:3] for shot in case.shots] == [(30, 7)] * 5 for case in swept)
    warm = cases.warm_up(swept)
    assert all(shot.num_in <= 30 for shot in warm.shots), "the context may hold no more"
    case = cases.own_offline(30, 7, 5)
    work = case.make(0)
    assert ([len(prompt) for prompt in work.prompts], work.max_tokens) == ([30] * 5, [7] * 5)
    assert case.name == "5 of 30+7"
