"""What users are promised about memory and prefixes, on a simulated H200 with an 8B model."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from asyncllm.engine.policy import LongestFirst, Policy
from asyncllm.engine.scheduling.timeline import Event
from tests.support.engine.sim_clients import Clients, Sent, simulate

pytestmark = pytest.mark.slow

PAGE = 16


# -- over capacity ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "known"),
    [({}, False), ({}, True), ({"host_kv_gib": 4.0}, False), ({"prefix_caching": False}, False)],
    ids=["plain", "known", "host", "bare"],
)
def test_everything_finishes_with_pages_for_a_tenth_of_the_load(
    options: dict[str, Any], known: bool
) -> None:
    stops = () if known else (3,)

    async def scenario(clients: Clients) -> tuple[list[Sent], int]:
        """Answers turn out to be sixty times as long as those before had made believe."""
        rng = clients.rng
        for _ in range(100):
            clients.send(50, 8, stop_token_ids=stops)
        await clients.over()
        del clients.sent[:]
        for _ in range(220):
            clients.send(rng.choice([50, 300, 1200]), 500, stop_token_ids=stops)
        await clients.over()
        return clients.sent, clients.llm.stats.preemptions

    sent, preemptions = simulate(
        scenario, kv_cache_tokens=20_000, max_model_len=4096, max_num_seqs=256, **options
    )
    assert sum(request.max_length for request in sent) > 10 * 20_000
    assert all(len(request.tokens) == 500 for request in sent)
    if known:
        assert preemptions == 0
        return
    assert 10 < preemptions <= len(sent)
    happened = [Counter(event.kind for event in events(request)) for request in sent]
    assert sum(kinds["preempted"] for kinds in happened) == preemptions
    assert max(kinds["preempted"] for kinds in happened) <= 10
    assert happened[0]["preempted"] == 0, "the oldest is never a victim"
    assert any(kinds["loading"] for kinds in happened) == ("host_kv_gib" in options)
    chunks = [event.b for request in sent for event in events(request) if event.kind == "chunk"]
    prompts = sum(request.num_prompt for request in sent)
    assert prompts < sum(chunks) < 1.5 * prompts, "little is computed again"


def events(request: Sent) -> list[Event]:
    assert request.trace is not None
    assert request.trace.num_events_dropped == 0
    return request.trace.events


# -- shared prefixes -------------------------------------------------------------------------------


def test_chats_compute_only_tokens_that_are_not_cached() -> None:
    async def scenario(clients: Clients) -> list[list[Sent]]:
        system = clients.prompt(2000)

        async def chat(seed: int) -> list[Sent]:
            rng, history, turns = random.Random(seed), list(system), []
            await asyncio.sleep(5 * rng.random())
            for _ in range(4):
                said = rng.choices(range(5, 2000), k=rng.choice([30, 100, 400]))
                history += said
                turns.append(clients.send(list(history), rng.choice([50, 150])))
                await turns[-1].over()
                history += turns[-1].tokens
                await asyncio.sleep(2 + 3 * rng.random())
            return turns

        return await asyncio.gather(*(chat(seed) for seed in range(24)))

    chats = simulate(scenario)
    first = min((chat[0] for chat in chats), key=lambda request: request.arrival)
    shareable = shared = 0
    for chat in chats:
        for before, turn in zip([None, *chat], chat):  # noqa: B905 - the last has no next
            if turn is not first:
                # The last token of an answer has never been computed.
                known = 2000 if before is None else before.max_length - 1
                shareable += known // PAGE * PAGE
                shared += turn.cached
    assert first.cached == 0
    assert 0.9 * shareable <= shared <= shareable
    later = [turn for chat in chats for turn in chat if turn is not first]
    assert sum(turn.num_prompt for turn in later) > 200_000
    # A step with any prompt tokens takes 5 ms and more; that with the first prompt takes 56.
    assert max(turn.wait for turn in later) < 0.65 * first.wait


@pytest.mark.parametrize("own", [0, 50])
def test_prompts_that_arrive_together_compute_a_shared_prefix_once(own: int) -> None:
    async def scenario(clients: Clients) -> list[Sent]:
        shared = clients.prompt(3000)
        for _ in range(64):
            clients.send([*shared, *clients.prompt(own)], 4)
        await clients.over()
        return clients.sent

    sent = simulate(scenario)
    shared = (3000 - (own == 0)) // PAGE * PAGE  # of a full hit the last token is still computed
    computed = sum(request.num_prompt - request.cached for request in sent)
    assert computed == shared + 64 * (3000 + own - shared)
    alone = min(request.wait for request in sent)
    assert max(request.wait for request in sent) < 4 * alone


# -- the host tier ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "count"),
    [(100, 20), (3700, 20), (3800, 20), (4000, 20), (7900, 20), (25_000, 6), (39_000, 4)],
)
def test_documents_in_turn_are_found_as_far_as_device_and_host_hold_them(
    length: int, count: int
) -> None:
    """However much of the device one of them takes: the last pages of 39,000 tokens are all."""
    found = in_turn(length, count, kv_cache_tokens=60_000 if length < 8000 else 40_000)
    assert found > 0.98 * ((length - 1) // PAGE * PAGE / length)


@pytest.mark.parametrize("host_kv_gib", [0.5, 2.0, 10.0])
@pytest.mark.parametrize("length", [4000, 15_000])
def test_hits_follow_the_size_of_both_tiers(length: int, host_kv_gib: float) -> None:
    """However small the host's is."""
    host = int(host_kv_gib * 2**30 / 147_456)
    count = int(0.8 * (40_000 + host) / length)
    options = {"kv_cache_tokens": 40_000, "host_kv_gib": host_kv_gib}
    assert in_turn(length, count, **options) > 0.95


def in_turn(length: int, count: int, **options: Any) -> float:
    """The share of tokens found when documents are asked about again and again."""

    async def scenario(clients: Clients) -> float:
        documents = [clients.prompt(length - 1) for _ in range(count)]
        found = 0
        for question in range(3):
            for document in documents:
                request = clients.send([*document, question], 1)
                await request.over()
                found += request.cached if question else 0
        assert clients.llm.stats.pages_dropped == 0
        return found / (2 * count * length)

    tokens = options["kv_cache_tokens"]
    options = {"host_kv_gib": 20.0, "max_model_len": min(tokens, 40_960), **options}
    return simulate(scenario, **options)


def test_many_at_once_lose_no_page_that_could_be_saved() -> None:
    """Loads, long prompts and growing outputs take pages at the same time."""

    async def scenario(clients: Clients) -> tuple[float, int, int]:
        documents = [clients.prompt(clients.rng.choice([8000, 16_000])) for _ in range(20)]
        found = asked = 0

        async def client() -> None:
            nonlocal found, asked
            for question in range(6):
                prompt = [*clients.rng.choice(documents), question]
                request = clients.send(prompt, 100)
                await request.over()
                found, asked = found + request.cached, asked + len(prompt)

        await asyncio.gather(*(client() for _ in range(12)))
        return found / asked, clients.llm.stats.pages_dropped, clients.llm.stats.pages_evicted

    found, dropped, evicted = simulate(
        scenario, kv_cache_tokens=60_000, host_kv_gib=30.0, max_model_len=40_000
    )
    assert found > 0.65, "0.73 are asked about again"
    assert dropped < 0.002 * evicted


# -- prompts as long as the cache ------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.95, 0.98, 0.985, 0.99, 1.0])
def test_short_prompts_do_not_starve_one_that_takes_the_whole_cache(share: float) -> None:
    """They come for ever, and each of them takes a page that the long one needs."""

    async def scenario(clients: Clients) -> float:
        async def stream() -> None:
            while True:
                clients.send(100, 20)
                await asyncio.sleep(0.02)

        shorts = asyncio.ensure_future(stream())
        await asyncio.sleep(1.0)
        long = clients.send(int(20_000 * share) - 30, 20)
        await asyncio.wait_for(long.over(), 60)
        shorts.cancel()
        await clients.over()
        return long.ended - long.arrival

    assert simulate(scenario, kv_cache_tokens=20_000, max_model_len=20_000) < 20


# -- pinned prefixes -------------------------------------------------------------------------------


def test_an_agent_finds_its_prefix_when_its_tool_has_answered() -> None:
    """Twenty seconds and two caches of other prompts later, which never notice."""

    def play(ttl: float | None) -> tuple[Sent, list[list[float]]]:
        async def scenario(clients: Clients) -> tuple[Sent, list[list[float]]]:
            said = clients.prompt(4000)
            first = clients.send(said, 100, cache_ttl_s=ttl)
            await first.over()
            flood = []
            for _ in range(80):
                flood.append(clients.send(600, 20))
                await asyncio.sleep(0.25)
            await clients.over(flood)
            turn = clients.send([*said, *first.tokens, *clients.prompt(200)], 100)
            await turn.over()
            assert clients.llm.stats.preemptions == 0
            assert clients.llm.stats.pins == (ttl is not None)
            return turn, [request.times for request in flood]

        return simulate(scenario, kv_cache_tokens=20_000, max_model_len=8192)

    turn, flood = play(60.0)
    cold, flood_without_pins = play(None)
    assert (turn.cached, cold.cached) == (4099 // PAGE * PAGE, 0)
    assert turn.wait < cold.wait / 3
    assert flood == flood_without_pins


# -- batches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outputs", "gain"),
    [([100], 1.0), ([16, 64, 128, 256], 1.0), ([20] * 19 + [1000], 1.1)],
    ids=["alike", "mixed", "skewed"],
)
def test_longest_first_ends_a_batch_of_known_lengths_sooner(
    outputs: list[int], gain: float
) -> None:
    async def batch(clients: Clients) -> float:
        rng = clients.rng
        for _ in range(600):
            clients.send(rng.choice([100, 300, 600]), rng.choice(outputs))
        await clients.over()
        return clients.now

    longest, fcfs = (
        simulate(batch, policy, max_num_seqs=64) for policy in (LongestFirst(), Policy())
    )
    assert longest * gain <= fcfs * (1 + 1e-9)
