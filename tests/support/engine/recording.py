"""What tests of recording and replay share: a random workload on a recorded scheduler."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from asyncllm.engine.policy import POLICIES
from asyncllm.engine.pooling import PooledParams
from asyncllm.engine.recording.record import RecordedScheduler
from asyncllm.engine.recording.trace_file import MAGIC, MAX_BYTES, UNCHECKED_FORMAT, Trace
from asyncllm.engine.recording.trace_parts import find_parts
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.lab.replay.verify import Replayed, verify
from asyncllm.types import SamplingParams
from asyncllm.wire.messages import BAD_TOKEN, unpack
from tests.support.engine.drafting import draft_for, try_all
from tests.support.engine.scheduling import EOS, FakeDevice, limits, sequence

#: Sequences outgrow what is expected of them, and the pages that there are.
TIGHT = {"num_pages": 64, "page_size": 1, "max_model_len": 64, "max_num_seqs": 8}


class Driver:
    """Makes up events, in an order and with data that depend on the seed alone.

    What ``run`` begins, ``finish`` ends.
    """

    def __init__(
        self,
        path: str,
        seed: int,
        *,
        policy: str = "fair",
        max_bytes: int = MAX_BYTES,
        **changes: Any,
    ):
        self.sched = RecordedScheduler.create(limits(**changes), POLICIES[policy]())
        try_all(self.sched)
        self.sched.record_to(path, max_bytes=max_bytes)
        self.rng = random.Random(seed)
        self.device = FakeDevice(self.sched.limits)
        self.live: dict[int, Sequence] = {}
        self.ended: list[Sequence] = []
        self.plans = 0
        self.num_right = 0
        self.now = 100.0 + self.rng.random()
        self.errors = True

    def warm_up(self) -> None:
        """Short outputs, so that short ones are expected, and longer ones find too few pages."""
        for id in range(1, 121):
            seq = self.live[id] = sequence(id, 1, 1, arrival=self.now)
            self.sched.add(seq, self.now)
        while self.live:
            self.plan()
            self.land()

    def run(self, events: int) -> None:
        for _ in range(events):
            self.now += self.rng.choice([0.0, 1e-4, self.rng.random() / 50])
            kind = self.rng.choices(["add", "abort", "plan", "land"], [3, 0.5, 9, 9])[0]
            getattr(self, kind)()

    def finish(self) -> None:
        self.drain()
        self.sched.stop_recording("done")

    def drain(self) -> None:
        """Go on without new requests for a while, and abort what is left then."""
        self.errors = False
        for _ in range(100):
            self.plan()
            self.land()
        while self.live:
            self.abort()
        while self.device.steps:
            self.land()
        self.errors = True

    def add(self) -> None:
        rng, lim = self.rng, self.sched.limits
        if self.ended and rng.random() < 0.3:
            tokens = [*rng.choice(self.ended).tokens, *self.tokens(rng.randint(0, 3))]
        else:
            family = rng.randint(0, 2)
            tokens = [10 + (family * 7 + i * i) % 50 for i in range(rng.randint(1, 30))]
            tokens += self.tokens(rng.randint(0, 4))
        room = lim.max_model_len - len(tokens)
        if room < 1:
            return
        params: dict[str, Any] = rng.choice(
            [
                {},
                {},
                {},
                {"ignore_eos": True},
                {"stop": ("x",)},
                {"min_tokens": 1},
                {"prompt_logprobs": 0},
            ]
        )
        max_tokens = min(rng.choice([1, 1, 2, 40]), room)
        wanted = SamplingParams(max_tokens=max_tokens, **params)
        if "prompt_logprobs" in params and rng.random() < 0.5:
            max_tokens = 0
            wanted = rng.choice(
                [
                    SamplingParams(max_tokens=0, **params),
                    PooledParams(pooling="last"),
                    PooledParams(pooling="mean"),
                ]
            )
        seq = sequence(
            len(self.ended) + len(self.live) + 1,
            tokens,
            max_tokens,
            wanted,
            arrival=self.now - rng.choice([0.0, 0.25]),
            tenant=rng.choice(["", "key-1", "key-2"]),
            priority=rng.randint(-1, 1),
            cache_salt=rng.choice(["", "", "pepper"]),
            deadline_ms=rng.choice([None, None, 500.0]),
            cache_ttl_s=rng.choice([None, None, 0, 0.02, 0.5]),
        )
        if self.sched.limits.max_draft_tokens and seq.id % 3:
            draft_for(seq, random.Random(seq.id), [3, 3, 4, EOS])
        seq.kv.shared = rng.choice([0, 0, len(tokens) // 2])
        self.live[seq.id] = seq
        self.sched.add(seq, self.now)

    def tokens(self, count: int) -> list[int]:
        """Few different ones: what is generated is often what others have."""
        return [self.rng.choice([3, 4]) for _ in range(count)]

    def abort(self) -> None:
        if self.live:
            seq = self.live[self.rng.choice(sorted(self.live))]
            self.sched.finish(seq, self.now)
            self.sched.finish(seq, self.now)
            self.end(seq)

    def plan(self) -> None:
        if len(self.device.steps) >= self.sched.limits.steps_in_flight:
            return
        planned = self.sched.plan(self.plans, self.now)
        if planned is not None:
            self.plans += 1
            self.device.take(planned.message, self.sampled())

    def sampled(self) -> Iterator[int]:
        while True:
            bad = BAD_TOKEN if self.errors else 4
            yield self.rng.choices([3, 4, EOS, bad], [8, 3, 0.3, 0.1])[0]

    def land(self) -> None:
        if not self.device.steps:
            return
        error = "planted" if self.errors and self.rng.random() < 0.03 else None
        result = self.device.answer(all_copies=self.rng.random() < 0.6, error=error)
        seconds = 1e-3 * len(result.tokens) * (0.5 + self.rng.random())
        bad = (unpack(result.tokens) == BAD_TOKEN).nonzero()[0].tolist()
        unmet = tuple((row, "planted") for row in bad if self.rng.random() < 0.5)
        result = msgspec.structs.replace(result, seconds=seconds, failures=unmet)
        self.num_right += sum(self.sched.in_flight[0].num_right(result))
        emitted, failed, _ = self.sched.apply(result, self.now)
        for seq, _row, token, finish in emitted:
            if finish is not None or token == BAD_TOKEN:
                self.end(seq)
        for seq in failed:
            self.end(seq)

    def end(self, seq: Sequence) -> None:
        self.ended.append(self.live.pop(seq.id))


def record(path: Path, seed: int, *, events: int = 250, **options: Any) -> Driver:
    driver = Driver(str(path), seed, **options)
    driver.warm_up()
    driver.run(events)
    driver.finish()
    return driver


def replay(path: Path) -> Replayed:
    return verify(Trace.read(str(path)))


def unchecked(data: bytes) -> bytes:
    """A trace, rewritten in the format without checksums."""
    places = find_parts(data, len(MAGIC) + 1).places
    header, *events = (data[first:end] for first, end in places)
    begin = MAGIC + bytes([UNCHECKED_FORMAT]) + len(header).to_bytes(4, "little")
    return begin + header + b"".join(events)
