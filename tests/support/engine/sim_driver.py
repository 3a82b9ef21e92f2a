"""Plans by hand for the simulated device, on a virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from asyncllm.config import EngineLimits
from asyncllm.errors import EngineDead
from asyncllm.executor.sim import virtual_time
from asyncllm.executor.sim.cost import H200, SimCost
from asyncllm.executor.sim.executor import SimExecutor
from asyncllm.executor.sim.shape import SHAPES
from asyncllm.wire.messages import (
    Admit,
    RowParams,
    StepPlan,
    StepResult,
    decode_result,
    encode,
    pack,
    unpack,
)

EOS = 7
PAGE = 4
VOCAB = 1000

LIMITS = EngineLimits(
    device="sim",
    dtype="bfloat16",
    num_pages=64,
    page_size=PAGE,
    max_model_len=64,
    max_num_seqs=8,
    max_num_batched_tokens=128,
    prefill_chunk=128,
    itl_target=0.01,
    prefix_caching=True,
    host_pages=16,
    page_copy_seconds=1e-5,
    max_waiting=100,
    max_waiting_tokens=10_000,
    steps_in_flight=2,
    vocab_size=VOCAB,
    eos_token_ids=(EOS,),
)
COST = SimCost(SHAPES["h200-8b"], H200, itemsize=2)

Row = tuple[int, int, int]


def row_params(**changes: Any) -> RowParams:
    plain = RowParams(seed=1)
    return msgspec.structs.replace(plain, **changes)


def admit(slot: int, tokens: list[int], **params: Any) -> Admit:
    return Admit(slot, pack(tokens), len(tokens), row_params(**params))


def pages_of(slot: int, pages: list[int], first: int = 0) -> list[Row]:
    return [(slot, first + i, page) for i, page in enumerate(pages)]


def flat(rows: list[Row]) -> bytes:
    return pack([number for row in rows for number in row])


class Driver:
    """Submits plans, numbered as they come."""

    def __init__(self, limits: EngineLimits, cost: SimCost):
        self.executor = SimExecutor(limits, cost)
        self.next_step = 0

    def send(
        self,
        rows: list[Row],
        pages: list[Row] | None = None,
        admits: tuple[Admit, ...] = (),
        copies: list[Row] | None = None,
    ) -> asyncio.Future[bytes]:
        plan = StepPlan(self.next_step, flat(rows), flat(pages or []), admits, flat(copies or []))
        self.next_step += 1
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        def resolve(outcome: bytes | EngineDead) -> None:
            if isinstance(outcome, EngineDead):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

        self.executor.submit(encode(plan), resolve)
        return future

    async def step(self, *args: Any, **kwargs: Any) -> StepResult:
        return decode_result(await self.send(*args, **kwargs))

    async def tokens(self, *args: Any, **kwargs: Any) -> list[int]:
        result = await self.step(*args, **kwargs)
        assert result.error is None
        listed: list[int] = unpack(result.tokens).tolist()
        return listed

    async def generate(self, prompt: list[int], count: int, **params: Any) -> list[int]:
        """Tokens of one sequence alone in slot 0."""
        num_pages = -(-(len(prompt) + count) // PAGE)
        pages = pages_of(0, list(range(num_pages)))
        whole = (0, 0, len(prompt))
        out = await self.tokens([whole], pages, (admit(0, prompt, **params),))
        while len(out) < count:
            out += await self.tokens([(0, len(prompt) + len(out) - 1, 1)])
        return out


def simulate(
    test: Callable[[Driver], Awaitable[None]],
    limits: EngineLimits = LIMITS,
    *,
    copy_bandwidth: float = 50e9,
) -> None:
    """Run a test on a virtual clock, with a new executor."""

    async def main() -> None:
        gpu = msgspec.structs.replace(H200, copy_bandwidth=copy_bandwidth)
        cost = SimCost(SHAPES["h200-8b"], gpu, itemsize=2)
        await test(Driver(limits, cost))

    virtual_time.run(main())


async def two_full_pages(driver: Driver) -> None:
    """Slot 0 has computed 8 tokens in pages 0 and 1, and goes on in page 2."""
    await driver.step([(0, 0, 8)], pages_of(0, [0, 1, 2]), (admit(0, [5] * 8),))
