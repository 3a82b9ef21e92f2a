"""An executor without a model: answers plans on the event loop, a little later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from asyncllm.config import EngineLimits
from asyncllm.errors import EngineDead
from asyncllm.types import TokenDelta
from asyncllm.wire.executor import ResultHandler
from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import NO_TOKEN, StepPlan, StepResult, decode_plan, encode, pack, unpack


class FakeExecutor:
    """Samples ``script(position)`` for the token at each position of any sequence.

    Attributes:
        plans: every plan submitted.
        most_in_flight: of steps, at any time.
        fail_steps: numbers of steps that are answered with an error.
        poison: tokens; a step fails if it has a row of a sequence admitted with one of them.
        failed: numbers of the steps that failed.
    """

    def __init__(self, script: Callable[[int], int], step_seconds: float = 0.0):
        self.script = script
        self.heartbeat = Heartbeat()
        self.step_seconds = step_seconds
        self.plans: list[StepPlan] = []
        self.fail_steps: set[int] = set()
        self.poison: set[int] = set()
        self.failed: list[int] = []
        self.has_failed = asyncio.Event()
        self.most_in_flight = 0
        self.in_flight = 0
        self.flushes = 0
        self.dead = False
        self._known: dict[int, int] = {}
        self._poisoned: set[int] = set()

    async def start(self) -> EngineLimits:
        raise AssertionError("tests give the engine its limits")

    def submit(self, plan: bytes, on_result: ResultHandler) -> None:
        loop = asyncio.get_running_loop()
        if self.dead:
            loop.call_soon(on_result, EngineDead("the executor stopped"))
            return
        decoded = decode_plan(plan)
        self.plans.append(decoded)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        loop.call_later(self.step_seconds, self._answer, decoded, on_result)

    def on_death(self, tell: Callable[[str], None]) -> None: ...
    def flush(self) -> None:
        self.flushes += 1

    def abandon(self) -> None:
        self.dead = True

    async def close(self) -> None:
        self.dead = True

    def _answer(self, plan: StepPlan, on_result: ResultHandler) -> None:
        self.in_flight -= 1
        for admit in plan.admits:
            known = unpack(admit.tokens).tolist()
            self._known[admit.slot] = len(known)
            self._poisoned.discard(admit.slot)
            if self.poison.intersection(known):
                self._poisoned.add(admit.slot)
        tokens = []
        fails = plan.step in self.fail_steps
        for slot, start, q_len in unpack(plan.rows, 3).tolist():
            end = start + q_len
            fails |= slot in self._poisoned
            tokens.append(self.script(end) if end >= self._known[slot] else NO_TOKEN)
        now = time.perf_counter()
        error = "planted" if fails else None
        if fails:
            self.failed.append(plan.step)
            self.has_failed.set()
        data = b"" if error else pack(tokens)
        result = StepResult(plan.step, data, (), error, now, now, (), self.step_seconds)
        on_result(encode(result))


class CharDetokenizer:
    """Token 97 is "a", and so on."""

    def push(self, token_id: int) -> str:
        return chr(token_id)

    def finish(self) -> str:
        return ""


class ListSink:
    """Keeps everything, and says when it is over."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self.error: Exception | None = None
        self.over = asyncio.Event()

    def emit(self, delta: TokenDelta) -> None:
        assert not self.over.is_set(), "nothing comes after the end"
        self.deltas.append(delta)
        if delta.finish_reason is not None:
            self.over.set()

    def fail(self, error: Exception) -> None:
        assert not self.over.is_set(), "nothing comes after the end"
        self.error = error
        self.over.set()

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]
