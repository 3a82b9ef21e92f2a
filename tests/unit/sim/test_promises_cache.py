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


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"host_kv_gib": 4.0}, {"prefix_caching": False}], ids=["plain", "host", "bare"]
)
def test_everything_finishes_with_pages_for_a_tenth_of_the_load(
    known: bool, options: dict[str, Any]
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
