"""What users are promised about waiting, on a simulated H200 with an 8B model."""

from __future__ import annotations

import asyncio
import random

import pytest

from asyncllm.engine.policy import Aged, Fair, Policy, Ranked
from asyncllm.errors import QueueFull
from tests.support.engine.sim_clients import Clients, Sent, simulate, work

pytestmark = pytest.mark.slow

PROMPTS = (100, 400, 1500)
OUTPUTS = (16, 64, 200)
MEAN_WORK = sum(work(prompt, output) for prompt in PROMPTS for output in OUTPUTS) / 9
#: A step of so many tokens is the longest, and what is under way when a request arrives.
LONGEST_STEP = work(8192, 1)

#: Seconds by which ranks are off: the device's rate, which they depend on, is measured meanwhile.
DRIFT = 0.1
#: Two steps are under way when a request arrives, each at most five thirds of the ITL target.
UNDER_WAY = 2 * 5 / 3 * 0.027


def rank(request: Sent) -> float:
    return Aged().rank(request, request.num_prompt)


def overtaken(sent: list[Sent]) -> list[tuple[int, int]]:
    """Pairs of requests of which the second started while the first waited and had its turn."""
    pairs = []
    for late in sent:
        pairs += [
            (early.id, late.id)
            for early in sent
            if early.arrival < late.started < early.started and rank(early) + DRIFT < rank(late)
        ]
    return pairs


# -- the order of service --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "outputs", "what"),
    [((50, 200, 800, 3000), (8, 32, 128), "budget"), ((20, 60, 300), (32, 128, 256), "slots")],
)
def test_a_burst_is_served_in_order_and_requests_only_wait_for_earlier_ones(
    prompts: tuple[int, ...], outputs: tuple[int, ...], what: str
) -> None:
    async def burst(clients: Clients) -> list[Sent]:
        rng = clients.rng
        for _ in range(800):
            priority = rng.choice([-1, 0, 0, 1])
            clients.send(rng.choice(prompts), rng.choice(outputs), priority=priority)
        await clients.over()
        return clients.sent

    sent = simulate(burst, max_num_seqs=256)
    waited = [request.trace.waited for request in sent if request.trace is not None]
    total = {reason: sum(seconds[reason] for seconds in waited) for reason in waited[0]}
    assert max(total, key=lambda reason: total[reason]) == what
    assert not overtaken(sent)
    ahead = 0.0
    for request in sorted(sent, key=rank):
        ahead += request.work
        assert request.wait <= 1.25 * ahead + LONGEST_STEP


class Strict(Policy):
    """The most urgent first, for ever."""

    def rank(self, request: Ranked, remaining: int) -> float:
        return request.priority


def test_a_stream_of_urgent_requests_overtakes_for_the_handicap_and_no_longer() -> None:
    lasts = 12.0

    async def overload(clients: Clients) -> tuple[Sent, list[Sent]]:
        """More short requests than the machine can serve, from before the long one on."""
        for _ in range(60):
            clients.send(1000, 8)
        long = clients.send(8000, 8, priority=1)
        while clients.now < lasts:
            await asyncio.sleep(work(1000, 8) / 1.25)
            clients.send(1000, 8)
        await clients.over()
        return long, clients.sent

    for policy in (Aged(), Fair()):
        long, sent = simulate(overload, policy)
        assert not overtaken([one for one in sent if one is not long])
        until = rank(long)
        ahead = [s for s in sent if s is not long and rank(s) <= until]
        assert sum(s.arrival > long.arrival for s in ahead) > 100
        assert long.started - long.arrival <= 1.25 * sum(s.work for s in ahead)
        assert long.wait < lasts
    starved, _ = simulate(overload, Strict())
    assert starved.wait > lasts


# -- tenants ---------------------------------------------------------------------------------------

Arrivals = list[tuple[float, str, int, int]]


def arrivals(tenant: str, load: float, since: float, until: float) -> Arrivals:
    """A Poisson process of requests that are ``load`` times what the machine can serve."""
    rng = random.Random(tenant)
    time, found = since, []
    while (time := time + rng.expovariate(load / MEAN_WORK)) < until:
        found.append((time, tenant, rng.choice(PROMPTS), rng.choice(OUTPUTS)))
    return found


def play(arriving: Arrivals, policy: Policy | None = None) -> list[Sent]:
    """Until the last has arrived, and ten seconds more."""

    async def scenario(clients: Clients) -> list[Sent]:
        for time, tenant, prompt, output in sorted(arriving):
            await clients.sleep_until(time)
            clients.send(prompt, output, tenant=tenant)
        await asyncio.sleep(10)
        clients.abort_all()
        return clients.sent

    return simulate(scenario, policy)


def shares(sent: list[Sent], since: float, until: float) -> dict[str, float]:
    served: dict[str, float] = {}
    began = sent[0].arrival
    for request in sent:
        cost = request.served(began + since, began + until)
        served[request.tenant] = served.get(request.tenant, 0.0) + cost
    total = sum(served.values())
    return {tenant: cost / total for tenant, cost in served.items()}


def waits(sent: list[Sent], tenant: str) -> list[float]:
    return sorted(request.wait for request in sent if request.tenant == tenant and request.times)


def test_ten_times_the_load_gets_no_more_than_a_share() -> None:
    light = [*arrivals("a", 0.4, 0, 15), *arrivals("b", 0.4, 0, 15)]
    mixed = [*light, *arrivals("heavy", 4.0, 0, 15)]
    sent = play(mixed, Fair())
    thirds = dict.fromkeys(("a", "b", "heavy"), 1 / 3)
    for since in (3, 9):
        assert shares(sent, since, 15) == pytest.approx(thirds, rel=0.1)
    unfair = play(mixed, Policy())
    assert shares(unfair, 3, 15)["heavy"] > 0.75


def test_who_asks_for_less_than_a_share_waits_as_if_alone_on_a_third_of_the_machine() -> None:
    light = {tenant: arrivals(tenant, 0.2, 0, 15) for tenant in ("a", "b")}
    mixed = [*light["a"], *light["b"], *arrivals("heavy", 2.0, 0, 15)]
    fair, unfair = play(mixed, Fair()), play(mixed, Policy())
    for tenant, arriving in light.items():
        # A third of the machine with these requests is the machine with three times as many in the
        # same time, at a third of the speed.
        faster = [(at / 3, tenant, prompt, output) for at, _, prompt, output in arriving]
        alone = [3 * wait for wait in waits(play(faster, Fair()), tenant)]
        mine = waits(fair, tenant)
        assert len(mine) == len(alone) == len(arriving), "all are served"
        for share in (0.5, 0.9, 0.99):
            at = int(share * len(alone))
            # Besides, whatever has been begun for another is completed.
            assert mine[at] <= 1.2 * alone[at] + UNDER_WAY
        suffered = waits(unfair, tenant)
        assert sum(suffered) / len(suffered) > 20 * sum(mine) / len(mine)


def test_long_prompts_of_one_tenant_do_not_hold_up_another() -> None:
    long = work(30_000, 20)

    async def scenario(clients: Clients) -> list[Sent]:
        """Twice what the machine can serve, of prompts that take a second each, and a few short."""
        mixed = arrivals("light", 0.2, 0, 8)
        mixed += [(i * long / 2, "heavy", 30_000, 20) for i in range(int(16 / long))]
        for time, tenant, prompt, output in sorted(mixed):
            await clients.sleep_until(time)
            clients.send(prompt, output, tenant=tenant)
        await asyncio.sleep(2)
        clients.abort_all()
        return clients.sent

    sent = simulate(scenario, Fair())
    mine = waits(sent, "light")
    assert len(mine) == sum(request.tenant == "light" for request in sent)
    assert mine[len(mine) // 2] < 0.1 * long
    assert mine[int(0.9 * len(mine))] < 0.25 * long
    assert shares(sent, 2, 8)["heavy"] > 0.6, "who asks for more gets what is left"


def test_idle_time_is_no_credit() -> None:
    busy = [*arrivals("a", 0.8, 0, 20), *arrivals("b", 0.8, 0, 20)]
    sent = play([*busy, *arrivals("late", 1.5, 10, 20)], Fair())
    assert shares(sent, 3, 10) == pytest.approx({"a": 0.5, "b": 0.5, "late": 0.0}, abs=0.05)
    thirds = dict.fromkeys(("a", "b", "late"), 1 / 3)
    # At once, and not more; but the answers of those before are under way already.
    assert 0.25 < shares(sent, 10, 13)["late"] < 0.36
    assert shares(sent, 13, 20) == pytest.approx(thirds, rel=0.1)


def test_answers_of_unknown_length_are_charged_as_they_grow() -> None:
    async def scenario(clients: Clients) -> list[Sent]:
        """Everybody asks for more than there is; nothing tells that one's answers are long."""
        for _ in range(600):
            for tenant, prompt, output in (("a", 100, 300), ("b", 400, 50), ("heavy", 100, 900)):
                clients.send(prompt, output, tenant=tenant, stop_token_ids=(3,))
        await clients.sleep_until(15)
        clients.abort_all()
        return clients.sent

    sent = simulate(scenario, Fair(), max_num_seqs=32)
    thirds = dict.fromkeys(("a", "b", "heavy"), 1 / 3)
    for since in (5, 10):
        assert shares(sent, since, since + 5) == pytest.approx(thirds, rel=0.25)


def test_who_asks_for_less_than_a_share_is_not_refused_while_others_fill_the_queue() -> None:
    async def scenario(clients: Clients) -> dict[str, list[bool]]:
        refused: dict[str, list[bool]] = {"light": [], "heavy": []}
        mixed = arrivals("light", 0.2, 0, 12) + arrivals("heavy", 4.0, 0, 12)
        for time, tenant, prompt, output in sorted(mixed):
            await clients.sleep_until(time)
            try:
                clients.send(prompt, output, tenant=tenant)
            except QueueFull:
                refused[tenant].append(True)
            else:
                refused[tenant].append(False)
        clients.abort_all()
        return refused

    refused = simulate(scenario, Fair(), max_waiting=200, max_num_seqs=64)
    assert sum(refused["heavy"]) > len(refused["heavy"]) / 3
    assert not any(refused["light"])
