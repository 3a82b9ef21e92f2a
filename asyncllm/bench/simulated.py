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
from asyncllm.types import SamplingParams

if TYPE_CHECKING:
    from asyncllm.config import SimProfile
    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.types import TokenDelta


def offline_rows(profile: SimProfile, cases: Sequence[OfflineCase]) -> list[OfflineRow]:
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


def online_rows(profile: SimProfile, cases: Sequence[OnlineCase]) -> list[OnlineRow]:
    """The rows of ``asyncllm bench serve``, simulated."""

    async def main() -> list[OnlineRow]:
        from asyncllm.llm.async_llm import AsyncLLM

        async with AsyncLLM(device="sim", sim_profile=profile, max_model_len=10_000) as llm:
            await _load(llm, warm_up(cases))
            return [await _load(llm, case) for case in cases]

    return virtual_time.run(main())


async def _load(llm: AsyncLLM, case: OnlineCase) -> OnlineRow:
    loop = asyncio.get_running_loop()
    start = loop.time()
    queue = deque(case.shots)
    answered: list[Answered] = []

    async def ask(shot: Shot) -> None:
        sent = loop.time()
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
