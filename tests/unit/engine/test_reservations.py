"""Places in the queue that are held for requests whose prompts are still being made."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from asyncllm import AsyncLLM, SamplingParams
from asyncllm.engine.requests.reservations import TENANT_SHARE, Reservations
from asyncllm.errors import BadRequest, QueueFull
from asyncllm.types import Completion
from tests.support.engine.scheduling import limits


@dataclass
class FakeQueue:
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_free_slots: int = 0
    tenants: dict[str, tuple[int, int]] = field(default_factory=dict)

    def waiting_for(self, tenant: str) -> tuple[int, int]:
        return self.tenants.get(tenant, (0, 0))

    def expected_wait(self) -> float:
        return 50.0


def reservations(
    queue: FakeQueue | None = None, requests: int = 4, tokens: int = 100
) -> Reservations:
    return Reservations(
        queue or FakeQueue(), limits(max_waiting=requests, max_waiting_tokens=tokens)
    )


def test_places_are_counted_until_they_are_given_back() -> None:
    made = reservations()
    held = [made.make(1, 1, "") for _ in range(4)]
    with pytest.raises(QueueFull, match="4 requests with 4 prompt tokens") as caught:
        made.make(1, 1, "")
    assert caught.value.retry_after == 5.0
    assert made.num_requests == 4
    held[0].release()
    held[0].release()
    with made.make(1, 1, ""):
        assert made.num_requests == 4
    for each in held:
        each.release()
    assert made.num_requests == 0


def test_free_slots_are_places_too() -> None:
    made = reservations(FakeQueue(num_waiting=3, num_free_slots=2))
    made.make(1, 3, "")
    with pytest.raises(QueueFull):
        made.make(1, 1, "")


def test_expecting_more_is_refused_where_it_does_not_fit() -> None:
    made = reservations()
    other, mine = made.make(40, 1, ""), made.make(1, 1, "")
    mine.expect(60)
    mine.expect(50, 3)
    with pytest.raises(QueueFull):
        mine.expect(61)
    assert (mine.num_requests, mine.num_tokens, made.num_requests) == (0, 0, 1)
    other.release()
    mine.expect(1000, 1)  # alone, a prompt of any length may wait


def test_expecting_what_is_held_already_asks_nobody() -> None:
    queue = FakeQueue(num_free_slots=1)
    made = reservations(queue, requests=0)
    mine = made.make(1, 1, "")
    queue.num_free_slots = 0
    mine.expect(1, 1)
    assert made.num_requests == 1
    with pytest.raises(QueueFull):
        mine.expect(2, 1)


def test_places_become_those_of_requests_in_the_queue() -> None:
    queue = FakeQueue()
    made = reservations(queue)
    mine = made.make(60, 3, "")
    for length in (20, 30, 25):  # 75: more than was expected, and there is room for it
        mine.take(length)
        queue.num_waiting, queue.num_waiting_tokens = (
            queue.num_waiting + 1,
            queue.num_waiting_tokens + length,
        )
    assert (mine.num_requests, mine.num_tokens, made.num_requests) == (0, 0, 0)
    last = made.make(1, 1, "")
    with pytest.raises(QueueFull):
        last.take(26)
    assert made.num_requests == 0
    made.make(25, 1, "").take(25)


def test_one_tenant_cannot_reserve_what_is_left_for_others() -> None:
    made = reservations(requests=90, tokens=9000)
    made.make(1, 1, "other")
    greedy = made.make(1, 1, "greedy")
    most = 89 * TENANT_SHARE // (TENANT_SHARE + 1)
    greedy.expect(1, most)
    with pytest.raises(QueueFull):
        made.make(1, 2, "greedy")
    made.make(1, 2, "other").release()
    greedy.release()
    made.make(1, 2, "greedy").release()
    assert made.num_requests == 1


async def test_the_library_refuses_before_it_tokenizes(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 1, "max_waiting": 3}
    async with AsyncLLM(device="sim", **options) as llm:
        encoded: list[str] = []
        encode = llm.tokenizer.encode_async

        async def counting(texts: Sequence[str], special: bool = True) -> list[list[int]]:
            encoded.extend(texts)
            await asyncio.sleep(0.01)
            return await encode(texts, special)

        monkeypatch.setattr(llm.tokenizer, "encode_async", counting)
        params = SamplingParams(max_tokens=1)
        asked = (llm.generate(f"text {i}", params) for i in range(50))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        # Three that wait, and one that takes the free slot.
        assert len(encoded) == sum(isinstance(answer, Completion) for answer in answers) == 4
        assert sum(isinstance(answer, QueueFull) for answer in answers) == 46
        # Whoever gives up while tokenizing, gives up the place too.
        tasks = [asyncio.create_task(llm.generate("text", params)) for _ in range(4)]
        await asyncio.sleep(0)
        assert llm.num_reserved == 4
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with pytest.raises(BadRequest):
            await llm.generate([2**31], params)
        assert llm.num_reserved == 0


@pytest.mark.parametrize(
    ("queue", "tokens", "cause"),
    [
        (FakeQueue(num_waiting=4), 1, "requests"),
        (FakeQueue(num_waiting=1, num_waiting_tokens=90), 11, "tokens"),
        (FakeQueue(num_waiting=3, tenants={"a": (TENANT_SHARE, 0)}), 1, "share"),
        (FakeQueue(1, 90, tenants={"a": (1, 10 * TENANT_SHARE)}), 1, "share"),
    ],
)
def test_the_error_says_what_is_full(queue: FakeQueue, tokens: int, cause: str) -> None:
    with pytest.raises(QueueFull) as caught:
        reservations(queue).make(tokens, 1, "a")
    assert caught.value.cause == cause
