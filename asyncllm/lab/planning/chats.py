"""Chats of several turns, each with all that was said before: what a fleet of replicas serves."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from asyncllm.engine.recording.trace_file import NEW_ROOT
from asyncllm.lab.bench.cases import Range
from asyncllm.lab.replay.workload import Workload, plain_arrival

#: Bytes of text that a token stands for.
TOKEN_BYTES: Final = 4


class ChatLoad(msgspec.Struct, frozen=True, kw_only=True):
    """Chats that begin at random times.

    Attributes:
        rate: chats that begin, a second.
        seconds: for so long they begin.
        turns: of each chat.
        systems, system: different system prompts, and the tokens of each.
        user, answer: tokens of each message.
        think: mean seconds from an answer to the next turn.
    """

    rate: float
    seconds: float
    turns: Range = (2, 8)
    systems: int = 4
    system: int = 1000
    user: Range = (50, 400)
    answer: Range = (50, 200)
    think: float = 10.0
    seed: int = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest chat."""
        return self.system + self.turns[1] * (self.user[1] + self.answer[1])

    @property
    def num_turns(self) -> int:
        """How many turns are to be expected."""
        return round(max(1.0, self.rate * self.seconds) * sum(self.turns) / 2)

    def share(self, count: int) -> ChatLoad:
        """One of ``count`` equal parts."""
        return msgspec.structs.replace(self, rate=self.rate / count)


class Turn(NamedTuple):
    """One request.

    Attributes:
        id: of the request.
        num_cached: tokens of its prompt that a cache without end finds.
        think: seconds after the answer until the next turn.
    """

    id: int
    num_prompt: int
    num_answer: int
    num_cached: int
    think: float


class Chat(NamedTuple):
    """``text`` is of the last turn's prompt; earlier prompts are its beginnings."""

    begins: float
    turns: tuple[Turn, ...]
    text: bytes


def make_chats(load: ChatLoad, workload: Workload, page_size: int) -> list[Chat]:
    """Chats in order of their beginning; their requests are added to ``workload``."""
    draw = random.Random(load.seed)
    pages = workload.pages
    root = pages.add(NEW_ROOT, 0)
    systems = [
        (pages.add(root, load.system // page_size), draw.randbytes(TOKEN_BYTES * load.system))
        for _ in range(load.systems)
    ]
    seen: set[int] = set()
    chats: list[Chat] = []
    begins = 0.0
    while (begins := begins + draw.expovariate(load.rate)) < load.seconds or not chats:
        node, system = draw.choice(systems)
        shared = load.system // page_size if node in seen else 0
        seen.add(node)
        chats.append(_chat(begins, load, draw, workload, page_size, (node, system, shared)))
    workload.fill()
    return chats


def _chat(
    begins: float,
    load: ChatLoad,
    draw: random.Random,
    workload: Workload,
    page_size: int,
    system: tuple[int, bytes, int],
) -> Chat:
    node, text, cached = system
    count = draw.randint(*load.turns)
    sizes = [(draw.randint(*load.user), draw.randint(*load.answer)) for _ in range(count)]
    ends = list(accumulate((user + answer for user, answer in sizes), initial=load.system))
    # All pages of the chat, of which each turn has the first ones.
    before = load.system // page_size
    last = workload.pages.add(node, ends[-1] // page_size - before)
    turns: list[Turn] = []
    for (user, answer), start, end in zip(sizes, ends, ends[1:], strict=False):
        own = end // page_size - before
        place = last - (ends[-1] // page_size - end // page_size) if own else node
        num_prompt = start + user
        known = min(cached, (num_prompt - 1) // page_size) * page_size
        think = draw.expovariate(1 / load.think)
        turn = Turn(len(workload.requests), num_prompt, answer, known, think)
        workload.add(plain_arrival(turn.id, place, num_prompt, answer), "", place)
        turns.append(turn)
        # The last token of an answer is not computed.
        cached = (end - 1) // page_size
    own_bytes = TOKEN_BYTES * (turns[-1].num_prompt - load.system)
    return Chat(begins, tuple(turns), text + draw.randbytes(own_bytes))
