"""What would have been: the requests of a trace in virtual time, under other limits."""

from __future__ import annotations

import asyncio
import random
from array import array
from pathlib import Path
from typing import Any

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.__main__ import main
from asyncllm.engine.recording.trace_file import Header, TraceWriter
from asyncllm.errors import BadRequest
from asyncllm.executor.sim import virtual_time
from asyncllm.lab.replay.acceptance import Acceptance, ChanceDraft, count_right
from asyncllm.lab.replay.figures import Figures, Record, percentile
from asyncllm.lab.replay.simulate import simulate
from asyncllm.lab.replay.variant import Variant
from asyncllm.lab.replay.verify import Replayed
from tests.support.engine.recording import TIGHT, record, replay
from tests.support.engine.scheduling import limits


async def mixed_load(path: Path, **options: Any) -> None:
    """Streams that decode all the time, and long prompts that come in between."""
    rng = random.Random(5)
    options = {
        "sim_profile": "h200-8b",
        "max_model_len": 16384,
        "max_num_batched_tokens": 8192,
        **options,
    }
    async with AsyncLLM(device="sim", trace=str(path), **options) as llm:

        async def one(at: float, num_prompt: int, num_output: int) -> None:
            await asyncio.sleep(at)
            prompt = [7] * 64 + [rng.randrange(5, 2000) for _ in range(num_prompt)]
            params = SamplingParams(max_tokens=num_output, ignore_eos=True)
            await llm.generate(prompt, params)

        streams = [one(rng.random() / 4, 40, 300) for _ in range(24)]
        await asyncio.gather(*streams, *(one(0.3 + i * 0.2, 8000, 4) for i in range(8)))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Replayed:
    path = tmp_path_factory.mktemp("traces") / "run.trace"
    virtual_time.run(mixed_load(path, itl_target_ms=1000.0))
    replayed = replay(path)
    assert replayed.mismatch is None
    return replayed


def ms(figures: Figures, name: str, percent: float) -> float:
    value = percentile(getattr(figures, name), percent)
    assert value is not None
    return value * 1e3


def test_the_baseline_is_like_what_was_recorded(loaded: Replayed) -> None:
    recorded, simulated = loaded.figures, simulate(loaded)
    assert simulated.num_tokens == recorded.num_tokens
    assert simulated.cached_tokens == recorded.cached_tokens > 0
    assert simulated.makespan == pytest.approx(recorded.makespan, rel=0.05)
    for name, percent in (("ttft", 50), ("ttft", 99), ("itl", 50), ("itl", 99)):
        assert ms(simulated, name, percent) == pytest.approx(ms(recorded, name, percent), rel=0.1)


def test_the_same_question_has_the_same_answer(loaded: Replayed) -> None:
    assert simulate(loaded).ttft == simulate(loaded).ttft


def test_a_smaller_budget_trades_first_tokens_for_steady_ones(loaded: Replayed) -> None:
    recorded = simulate(loaded)
    # Beside prompts, a step takes about as long with 32 tokens as with 256.
    smaller = simulate(loaded, Variant.parse("budget=64,max_num_seqs=40"))
    assert ms(smaller, "itl", 99) < 0.7 * ms(recorded, "itl", 99)
    assert ms(smaller, "ttft", 99) > 1.1 * ms(recorded, "ttft", 99)


@pytest.mark.parametrize(
    "text",
    [
        "budget=256,itl_target_ms=20",
        "policy=longest",
        "max_num_seqs=4",
        "prefill_chunk=100",
        "prefix_caching=false",
        "kv_cache_tokens=16384,host_kv_tokens=100000",
        "page_size=1",
        "page_size=64",
        "steps_in_flight=1",
    ],
)
def test_everything_is_generated_in_every_variant(loaded: Replayed, text: str) -> None:
    figures = simulate(loaded, Variant.parse(text))
    assert figures.num_tokens == loaded.figures.num_tokens
    assert figures.num_requests == len(figures.ttft) == 32
    hits = figures.cached_tokens
    assert (hits > 0) == (text != "prefix_caching=false")


async def drafted_load(path: Path, mean: float) -> None:
    """A few clients, whose drafts are as good as that (see ``synthetic_acceptance``)."""
    rng = random.Random(3)
    speculation = {"num_speculative_tokens": 4, "synthetic_acceptance": mean}
    options: dict[str, Any] = {"sim_profile": "h200-8b", "max_model_len": 2048}
    async with AsyncLLM(
        device="sim", trace=str(path), speculative_config=speculation, **options
    ) as llm:

        async def client(number: int) -> None:
            for turn in range(5):
                await asyncio.sleep(rng.random() / 10)
                prompt = [rng.randrange(5, 2000) for _ in range(rng.randrange(20, 300))]
                count = rng.randrange(50, 300)
                seed = 10 * number + turn
                params = SamplingParams(max_tokens=count, ignore_eos=True, seed=seed)
                await llm.generate(prompt, params)

        await asyncio.gather(*map(client, range(2)))


def test_drafts_are_as_good_as_recorded_or_as_asked(tmp_path: Path) -> None:
    virtual_time.run(drafted_load(tmp_path / "a", 3.5))
    replayed = replay(tmp_path / "a")
    assert replayed.mismatch is None
    recorded, simulated = replayed.figures, simulate(replayed)
    assert recorded.tokens_per_draft is not None
    assert recorded.tokens_per_draft == pytest.approx(3.5, abs=0.3)
    assert simulated.tokens_per_draft == pytest.approx(recorded.tokens_per_draft, abs=0.3)
    assert simulated.makespan == pytest.approx(recorded.makespan, rel=0.05)
    texts = ("draft_tokens=0", "draft_acceptance=1", "draft_acceptance=1,draft_tokens=2")
    none, all_right, two = (simulate(replayed, Variant.parse(text)) for text in texts)
    assert none.tokens_per_draft is None
    assert all_right.tokens_per_draft == pytest.approx(5.0, abs=0.2)
    assert two.tokens_per_draft == pytest.approx(3.0, abs=0.1)
    assert none.num_tokens == all_right.num_tokens == two.num_tokens == recorded.num_tokens
    assert all_right.num_steps < simulated.num_steps < none.num_steps
    assert all_right.makespan < simulated.makespan < none.makespan


def test_drafts_of_chance() -> None:
    draft = ChanceDraft(7, Acceptance(0.5, 0.8))
    found = [draft.propose(array("i", [0] * length), 4) for length in range(4000)]
    assert found == [
        ChanceDraft(7, draft._acceptance).propose(array("i", [0] * n), 4) for n in range(4000)
    ]
    some = [(length, tokens) for length, tokens in enumerate(found) if tokens]
    assert 0.4 < len(some) / 4000 < 0.6
    right = [count_right(length, tokens) for length, tokens in some]
    assert sum(right) / len(right) == pytest.approx(0.8 + 0.8**2 + 0.8**3 + 0.8**4, abs=0.2)
    assert count_right(some[0][0] - 1, some[0][1]) == 0, "it is meant for another position"
    record = Record(7, "", 0.0, 0.0, 10, num_rows=200)
    assert Acceptance.of(record) is None
    for count in right[:100]:
        record.verified(4, count)
    assert Acceptance.of(record) == pytest.approx((0.5, 0.8), abs=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_stops_aborts_and_failures_end_in_the_simulation_too(tmp_path: Path, seed: int) -> None:
    record(tmp_path / "a", seed, events=600, **TIGHT)
    replayed = replay(tmp_path / "a")
    for variant in ("policy=aged", "kv_cache_tokens=400,host_kv_tokens=80", "max_num_seqs=1"):
        figures = simulate(replayed, Variant.parse(variant))
        assert figures.num_requests == replayed.figures.num_requests
        for outcome in replayed.outcomes.values():
            assert outcome.aborted <= replayed.workload.end
    by_itself = [id for id, o in replayed.outcomes.items() if o.length is not None]
    assert 100 < len(by_itself) < len(replayed.outcomes)


def test_recurrent_states_follow_the_sequences_and_the_memory(tmp_path: Path) -> None:
    """Each sequence has one, and the prefix cache four more for each, or 64, if they fit."""
    record(tmp_path / "all", 1, events=300, **TIGHT, num_states=72)
    record(tmp_path / "few", 1, events=300, **TIGHT, num_states=12)
    for name, most in (("all", 200), ("few", 12)):
        replayed = replay(tmp_path / name)
        recorded = replayed.trace.header.limits
        for seqs, states in ((1, 65), (8, 72), (12, 76), (40, 200)):
            variant = Variant.parse(f"budget=64,max_num_seqs={seqs}")
            if seqs > most:
                with pytest.raises(BadRequest, match=r"each of 40 sequences .* memory held 12"):
                    simulate(replayed, variant)
            else:
                assert variant.limits(recorded, replayed.workload).num_states == min(states, most)
                assert simulate(replayed, variant).num_requests == replayed.figures.num_requests
        with pytest.raises(BadRequest, match="older version"):
            simulate(replayed, Variant.parse("host_kv_tokens=80"))


def test_states_in_the_hosts_memory_find_more(tmp_path: Path) -> None:
    record(tmp_path / "trace", 1, events=300, **TIGHT, num_states=9, state_pages=3)
    replayed = replay(tmp_path / "trace")
    found = [
        simulate(replayed, Variant.parse(f"host_kv_tokens={tokens}")).cached_tokens
        for tokens in (0, 4000)
    ]
    assert found[0] < found[1]
    other = Variant.parse("page_size=2").limits(replayed.trace.header.limits, replayed.workload)
    assert other.state_pages == 2, "of three pages of one token"


def test_the_table_has_a_column_for_each_variant(
    loaded: Replayed, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["replay", loaded.trace.path, "--what-if", "budget=256", "--what-if", "policy=fcfs"]
    assert main(line) == 0
    summary, _, table = capsys.readouterr().out.partition("\n\n")
    assert "32 requests" in summary
    assert "all plans are the same" in summary
    head, *rows = table.splitlines()
    assert head.split() == ["recorded", "simulated", "budget=256", "policy=fcfs"]
    cells = {row[:21].strip(): row[21:].split() for row in rows}
    assert [name for name in cells if name.startswith(("TTFT", "ITL"))] == [
        "TTFT p50, ms",
        "TTFT p90, ms",
        "TTFT p99, ms",
        "ITL p50, ms",
        "ITL p99, ms",
    ]
    assert cells["preemptions"] == ["0"] * 4
    assert float(cells["ITL p99, ms"][2]) < float(cells["ITL p99, ms"][1])


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("bugdet=3", "unknown key 'bugdet': known are budget, "),
        ("budget=0", "budget=0: Expected `int` >= 1"),
        ("budget=many", "budget=many: "),
        ("policy=best", "policy=best: Invalid enum value 'best': it is one of fair, "),
        ("prefix_caching=2", "prefix_caching=2: Expected `bool`"),
        ("", "unknown key ''"),
    ],
)
def test_a_bad_variant_is_a_usage_error(
    variant: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["replay", "file", "--what-if", variant])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("budget=8", "the budget of 8 tokens must leave every one of 256 sequences"),
        ("kv_cache_tokens=512", "a request may come to 8068 tokens, and the KV cache would hold"),
    ],
)
def test_an_impossible_variant_is_one_line(
    loaded: Replayed, variant: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", loaded.trace.path, "--what-if", variant]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_trace_without_steps_has_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    TraceWriter(str(tmp_path / "a"), Header("0.1.0", "fair", limits())).close("done")
    assert main(["replay", str(tmp_path / "a"), "--what-if", "budget=9"]) == 1
    assert "too few steps" in capsys.readouterr().err
