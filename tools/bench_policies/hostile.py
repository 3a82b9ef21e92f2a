"""Loads that are hard for a scheduler: each tempts it to treat somebody badly. Made from seeds."""

from __future__ import annotations

import random
from typing import Final

import msgspec

from tools.bench_policies.load import Load, LoadRequest

#: Tokens of a block of a shared prefix.
_BLOCK: Final = 2000
#: Seconds from arrival to the last token, and the outputs' lengths, by class.
DEADLINES: Final[dict[str, tuple[float, range]]] = {
    "1 s": (1.0, range(8, 33)),
    "5 s": (5.0, range(32, 129)),
    "30 s": (30.0, range(32, 129)),
}


class Hostile(msgspec.Struct, frozen=True):
    """A load, and the KV cache that it is meant for; None: the device's."""

    load: Load
    kv_cache_tokens: int | None = None


def cached_turns(seconds: float = 120.0) -> Hostile:
    """A conversation of 20,050 tokens, 20,000 of them cached, beside fresh prompts near capacity.

    Every 5 s comes a turn; before them, the group "first" fills the cache.
    """
    rng = random.Random(1)
    fresh = [LoadRequest(at, 2000, 8, group="fresh") for at in _spread(rng, 20.0, seconds)]
    history = tuple(range(10))
    turns = [
        LoadRequest(at, 20_050, 50, history, "turn" if at else "first")
        for at in _every(5.0, seconds)
    ]
    return Hostile(_load("cached-turns", [*fresh, *turns]))


def wall(num_long: int = 1000) -> Hostile:
    """Prompts of 30,000 tokens that all come at once, and then a short one each second."""
    long = [LoadRequest(0.0, 30_000, 1, group="long") for _ in range(num_long)]
    short = [LoadRequest(1.0 + at, 200, 16, group="short") for at in range(num_long)]
    return Hostile(_load("wall", [*long, *short]))


def preempt(seconds: float = 120.0, num_long: int = 24) -> Hostile:
    """Short answers, and then some that are far longer than expected: a small cache overflows.

    New short ones keep coming, and would fit in the pages that a preempted one has left.
    """
    rng = random.Random(2)
    short = [
        LoadRequest(at, 500, rng.randrange(20, 80), group="short")
        for at in _spread(rng, 8.0, seconds)
    ]
    long = [LoadRequest(20.0 + at / 10, 500, 3000, group="long") for at in range(num_long)]
    return Hostile(_load("preempt", [*short, *long]), kv_cache_tokens=40_960)


def grow(num_streams: int = 120) -> Hostile:
    """Streams that all come at once, in a cache that holds the whole of one in eight."""
    streams = [LoadRequest(0.0, 100, 2000) for _ in range(num_streams)]
    return Hostile(_load("grow", streams), kv_cache_tokens=30_000)


def interfere(num_prompts: int = 40) -> Hostile:
    """32 streams, and a prompt of 8,000 tokens every 0.3 s that wants one token."""
    streams = [LoadRequest(0.0, 128, 1000, group="streams") for _ in range(32)]
    prompts = [LoadRequest(0.5 + 0.3 * at, 8000, 1, group="prompts") for at in range(num_prompts)]
    return Hostile(_load("interfere", [*streams, *prompts]))


def deadlines(rate: float, count: int = 6000) -> Hostile:
    """Requests with deadlines of 1, 5 and 30 s, ``rate`` of them a second: more than can be met."""
    rng = random.Random(3)
    requests, at = [], 0.0
    for _ in range(count):
        at += rng.expovariate(1.0) / rate
        group, (deadline, outputs) = rng.choice(list(DEADLINES.items()))
        num_prompt, num_output = int(500 * 8 ** rng.random()), rng.choice(outputs)
        requests.append(LoadRequest(at, num_prompt, num_output, group=group, deadline=deadline))
    return Hostile(_load("deadlines", requests))


#: By the name that the benchmark takes; ``deadlines``, which needs a rate, comes besides.
HOSTILE: Final = {
    "cached-turns": cached_turns,
    "wall": wall,
    "preempt": preempt,
    "grow": grow,
    "interfere": interfere,
}


def _load(name: str, requests: list[LoadRequest]) -> Load:
    return Load(name, sorted(requests, key=lambda request: request.arrival), _BLOCK)


def _every(interval: float, seconds: float) -> list[float]:
    return [number * interval for number in range(int(seconds / interval))]


def _spread(rng: random.Random, rate: float, seconds: float) -> list[float]:
    """Times at an even rate, each moved by chance within its interval."""
    return [(number + rng.random()) / rate for number in range(int(seconds * rate))]
