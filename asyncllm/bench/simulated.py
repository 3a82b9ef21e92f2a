"""The cases of ``asyncllm bench`` on the simulated device, beside what was measured on a real one.

The engine is the real one, on a virtual clock. Clients are in this process: what HTTP takes is one
of the measured times of the profile.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncllm.bench.cases import OfflineCase, OnlineCase, Shot, warm_up
from asyncllm.bench.load import Answered, Outcome
from asyncllm.bench.offline import run_case
from asyncllm.bench.online import summarize
from asyncllm.bench.report import OfflineRow, OnlineRow
from asyncllm.sim import virtual_time
from asyncllm.sim.profile import HostTimes, shipped
from asyncllm.types import SamplingParams

if TYPE_CHECKING:
    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.types import TokenDelta


def offline_rows(profile: str, cases: Sequence[OfflineCase]) -> list[OfflineRow]:
    """The rows of ``asyncllm bench offline``, simulated."""

    async def main() -> list[OfflineRow]:
        from asyncllm.llm.async_llm import AsyncLLM

        clock = asyncio.get_running_loop().time
        async with AsyncLLM(
            device="sim", sim_profile=profile, policy="longest", itl_target_ms=0.0
        ) as llm:
            rows = [await run_case(llm, case, 2, clock) for case in cases]
        return [row for row in rows if row is not None]

    return virtual_time.run(main())


def online_rows(profile: str, cases: Sequence[OnlineCase]) -> list[OnlineRow]:
    """The rows of ``asyncllm bench serve``, simulated."""
    host = shipped(profile).host

    async def main() -> list[OnlineRow]:
        from asyncllm.llm.async_llm import AsyncLLM

        async with AsyncLLM(device="sim", sim_profile=profile, max_model_len=10_000) as llm:
            await _load(llm, warm_up(cases), host)
            return [await _load(llm, case, host) for case in cases]

    return virtual_time.run(main())


class _Door:
    """Where requests come in: the event loop reads one after the other.

    The time that answers take to clients is spent here too: nobody can tell where.
    """

    def __init__(self, host: HostTimes):
        self._host = host
        self._free = 0.0

    async def enter(self, num_prompt: int) -> None:
        loop, host = asyncio.get_running_loop(), self._host
        now = loop.time()
        reading = host.request + host.prompt_token * num_prompt
        self._free = max(now, self._free) + reading
        await asyncio.sleep(self._free - now + max(0.0, host.client - reading))


async def _load(llm: AsyncLLM, case: OnlineCase, host: HostTimes) -> OnlineRow:
    loop = asyncio.get_running_loop()
    door = _Door(host)
    start = loop.time()
    queue = deque(case.shots)
    answered: list[Answered] = []

    async def ask(shot: Shot) -> None:
        sent = loop.time()
        await door.enter(shot.num_in)
        sink = _Events()
        params = SamplingParams(temperature=0.0, max_tokens=shot.num_out, ignore_eos=True)
        llm.submit(shot.prompt(llm.limits.vocab_size), params, sink)
        await sink.done
        answered.append(Answered(shot.long, sent, len(sink.times), sink.times.tobytes()))

    async def client() -> None:
        while queue:
            await ask(queue.popleft())

    async def once(shot: Shot) -> None:
        await asyncio.sleep(start + (shot.at or 0.0) - loop.time())
        await ask(shot)

    if case.clients:
        await asyncio.gather(*(client() for _ in range(case.clients)))
    else:
        await asyncio.gather(*map(once, case.shots))
    return summarize(case, [Outcome(answered, 0.0)], start)


class _Events:
    """A sink that notes when each token comes."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.times = array("d")
        self.done: asyncio.Future[None] = self._loop.create_future()

    def emit(self, delta: TokenDelta) -> None:
        self.times.extend([self._loop.time()] * len(delta.token_ids))
        if delta.finish_reason is not None and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
