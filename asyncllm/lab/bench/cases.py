"""The cases: prompts, numbers of tokens to generate, and times to send them.

Prompts are random token ids, the same in every run, so that figures of different days and engines
can be compared.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

#: The largest id in prompts.
LARGEST_ID = 10_000

Range = tuple[int, int]

PROMPT_TOKENS: Range = (100, 1024)
OUTPUT_TOKENS: Range = (100, 400)


def within(ids: list[int], vocab_size: int) -> list[int]:
    """The ids, wrapped around if the vocabulary is too small for them."""
    return ids if vocab_size > LARGEST_ID else [token % vocab_size for token in ids]


# -- offline ---------------------------------------------------------------------------------------


class Work(NamedTuple):
    """Prompts that are there at once, and the tokens to generate for each.

    Without ``ignore_eos`` the model may end its answers before.
    """

    prompts: list[list[int]]
    max_tokens: list[int]
    ignore_eos: bool = True

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(len(p) + n for p, n in zip(self.prompts, self.max_tokens, strict=True))


class OfflineCase(msgspec.Struct, frozen=True):
    """``make(repetition)`` returns its work."""

    name: str
    make: Callable[[int], Work]
    temperature: float = 0.0


def fixed(count: int, num_in: int, num_out: int, first_seed: int) -> Callable[[int], Work]:
    """``count`` prompts of one length, different ones in each repetition."""

    def make(repetition: int) -> Work:
        draw = random.Random(first_seed + repetition)
        prompts = [[draw.randint(0, LARGEST_ID) for _ in range(num_in)] for _ in range(count)]
        return Work(prompts, [num_out] * count)

    return make


def uneven(count: int, lengths: Range, seed: int) -> Callable[[int], Work]:
    """Prompts and outputs of ``lengths``, the same in each repetition."""

    def make(_repetition: int) -> Work:
        draw = random.Random(seed)
        prompts = [
            [draw.randint(0, LARGEST_ID) for _ in range(draw.randint(*lengths))]
            for _ in range(count)
        ]
        return Work(prompts, [draw.randint(*lengths) for _ in range(count)])

    return make


def own_offline(num_in: int, num_out: int, count: int) -> OfflineCase:
    """A case with given lengths."""
    return OfflineCase(f"{count} of {num_in}+{num_out}", fixed(count, num_in, num_out, 700))


#: offline256 is the benchmark of nano-vllm and mini-sglang.
OFFLINE: tuple[OfflineCase, ...] = (
    OfflineCase("bs1", fixed(1, 128, 512, 100)),
    OfflineCase("bs8", fixed(8, 128, 256, 200)),
    OfflineCase("bs32", fixed(32, 512, 256, 300)),
    OfflineCase("bs64", fixed(64, 512, 256, 350)),
    OfflineCase("bs128", fixed(128, 512, 256, 400)),
    OfflineCase("prefill8k", fixed(1, 8000, 1, 500)),
    OfflineCase("prefill16x2k", fixed(16, 2000, 1, 600)),
    OfflineCase("offline256", uneven(256, (100, 1024), 0), temperature=0.6),
)
#: The default on a CPU, where the others take many minutes.
OFFLINE_CPU: tuple[OfflineCase, ...] = (own_offline(64, 32, 1), own_offline(64, 32, 8))


# -- online ----------------------------------------------------------------------------------------


class Shot(NamedTuple):
    """One request of an online case.

    Attributes:
        at: seconds from the start at which it is sent; None: as soon as a client is free.
        num_in, num_out: tokens of the prompt, and tokens to generate.
        seed: of the prompt.
        long: it is there to disturb the others, and is counted apart from them.
        given: a user's own prompt, as text, token ids or chat messages; None: random ids. The model
            may end its answer before ``num_out`` tokens.
    """

    at: float | None
    num_in: int
    num_out: int
    seed: int
    long: bool = False
    given: str | list[Any] | None = None

    def prompt(self, vocab_size: int) -> list[int]:
        draw = random.Random(self.seed)
        ids = [draw.randint(0, LARGEST_ID) for _ in range(self.num_in)]
        return within(ids, vocab_size)


class OnlineCase(msgspec.Struct, frozen=True):
    """Requests over HTTP.

    Attributes:
        clients: number of clients that send one request after the other; 0: requests are sent at
            their times.
        rate: requests per second, if they arrive at random.
    """

    name: str
    shots: tuple[Shot, ...]
    clients: int = 0
    rate: float | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and output."""
        return max(shot.num_in + shot.num_out for shot in self.shots)

    @property
    def most_at_once(self) -> int:
        """The most requests in flight together, if the server is slow."""
        return self.clients or len(self.shots)


def closed_loop(
    clients: int,
    count: int,
    num_in: Range = PROMPT_TOKENS,
    num_out: Range = OUTPUT_TOKENS,
    name: str | None = None,
    seed: int = 0,
) -> OnlineCase:
    """``count`` requests; a client sends its next one when the last is answered."""
    name = name or f"c{clients}"
    sizes = _sizes(count, num_in, num_out, 7)
    shots = [Shot(None, *size, _prompt_seed(name, i, seed)) for i, size in enumerate(sizes)]
    return OnlineCase(name, tuple(reversed(shots)), clients=clients)


def poisson(
    rate: float,
    count: int,
    name: str | None = None,
    seed: int = 0,
    num_in: Range = PROMPT_TOKENS,
    num_out: Range = OUTPUT_TOKENS,
) -> OnlineCase:
    """``count`` requests that arrive independently of each other, ``rate`` per second."""
    name = name or f"poisson{rate:g}"
    draw = random.Random(9)
    at, shots = 0.0, []
    for i, size in enumerate(_sizes(count, num_in, num_out, 9)):
        shots.append(Shot(at, *size, _prompt_seed(name, i, seed)))
        at += draw.expovariate(rate)
    return OnlineCase(name, tuple(shots), rate=rate)


def interference(decoding: int, num_long: int, gap: float, seed: int = 0) -> OnlineCase:
    """Steady streams, and from 0.5 s on a long prompt every ``gap`` seconds."""
    shots = [Shot(0.0, 128, 1000, _own_seed(50 + i, seed)) for i in range(decoding)]
    shots += [
        Shot(0.5 + gap * i, 8000, 1, _own_seed(9000 + i, seed), long=True) for i in range(num_long)
    ]
    return OnlineCase(f"interfere{decoding}", tuple(shots))


def online(seed: int = 0) -> tuple[OnlineCase, ...]:
    """The cases of ``asyncllm bench serve``.

    Args:
        seed: another one makes other prompts, for a server that may have cached these.
    """
    return (
        closed_loop(1, 4, (128, 128), (256, 256), seed=seed),
        closed_loop(32, 128, seed=seed),
        closed_loop(256, 768, seed=seed),
        poisson(20, 200, seed=seed),
        interference(32, 8, 0.3, seed=seed),
    )


def warm_up(cases: Sequence[OnlineCase], seed: int = 0) -> OnlineCase:
    """Short answers before the measurement, which compile and allocate everything once."""
    clients = min(64, max(case.most_at_once for case in cases))
    # Not longer than the prompts of the cases, which may just fit the context.
    shots = (shot for case in cases for shot in case.shots if not shot.long)
    num_in = max((shot.num_in for shot in shots), default=0)
    lengths = (min(100, num_in), min(1024, num_in)) if num_in else (16, 64)
    return closed_loop(clients, 2 * clients, lengths, (50, 60), name="warm", seed=seed)


def sweep(
    clients: list[int],
    rates: list[float],
    seed: int = 0,
    num_in: Range = PROMPT_TOKENS,
    num_out: Range = OUTPUT_TOKENS,
    count: int | None = None,
) -> tuple[OnlineCase, ...]:
    """A case for each number of clients, and for each rate; ``count`` requests in each."""
    closed = (
        closed_loop(n, count or max(8, 4 * n), num_in, num_out, f"{n} clients", seed)
        for n in clients
    )
    opened = (
        poisson(rate, count or max(16, round(10 * rate)), f"{rate:g}/s", seed, num_in, num_out)
        for rate in rates
    )
    return (*closed, *opened)


def _sizes(count: int, num_in: Range, num_out: Range, seed: int) -> list[Range]:
    draw = random.Random(seed)
    return [(draw.randint(*num_in), draw.randint(*num_out)) for _ in range(count)]


def _prompt_seed(name: str, index: int, seed: int) -> int:
    return _own_seed(zlib.crc32(f"{name}{index}".encode()), seed)


def _own_seed(number: int, seed: int) -> int:
    """Seed 0 leaves the number as it is."""
    return number + (seed << 32)
