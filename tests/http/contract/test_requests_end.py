"""Every accepted request ends in exactly one way, and what ends one does not touch another.

A real process serves the demo model on a real socket.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.http.contract.conftest import PLACES, PROMPTS, SLOTS, Running
from tests.support.server.serve_faulty import FLAKY, POISON

if TYPE_CHECKING:
    from tests.http.contract.conftest import Ended

LONG = {"max_tokens": 1500, "ignore_eos": True}


async def survivors(server: Running, quiet: list[str]) -> None:
    """Ask as on a quiet server, half of it as streams; the answers are the same."""
    ends = await asyncio.gather(
        *(server.ask(prompt, stream=bool(i % 2)) for i, prompt in enumerate(PROMPTS))
    )
    assert [(end.how, end.text) for end in ends] == [("complete", text) for text in quiet]


async def send(server: Running, data: bytes) -> asyncio.StreamWriter:
    """Send bytes on a connection of its own."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(data)
    await writer.drain()
    return writer


def raw(body: dict[str, Any], length: int | None = None) -> bytes:
    data = json.dumps({"temperature": 0, **body}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length or len(data)}\r\n\r\n"
    )
    return head.encode() + data


async def test_a_step_that_raises_ends_only_its_own_request(
    server: Running, quiet: list[str]
) -> None:
    bad = [server.ask([7, POISON], stream=bool(i)) for i in range(2)]
    flaky = [server.ask([*PROMPTS[i], FLAKY[i]]) for i in range(2)]
    (*failed, first, second), _ = await asyncio.gather(
        asyncio.gather(*bad, *flaky), survivors(server, quiet)
    )
    assert [(end.how, end.code) for end in failed] == [("error", "step_failed")] * 2
    assert (first.how, second.how) == ("complete", "complete"), "their steps were tried again"
    assert any("planted" in line for line in server.log)
    await survivors(server, quiet)


STAGES: dict[str, tuple[bytes, dict[str, float]]] = {
    "header": (raw({})[:30], {}),
    "body": (raw({"prompt": "abc"}, length=1000), {}),
    "sent": (raw({"prompt": "abc" * 500, **LONG}), {}),
    "queued": (raw({"prompt": "abc", **LONG}), {"requests_waiting": 1}),
    "generating": (raw({"prompt": "abc", **LONG}), {"requests_running": 1}),
    "streaming": (raw({"prompt": "abc", "stream": True, **LONG}), {"requests_running": 1}),
}


@pytest.mark.parametrize("stage", STAGES)
async def test_a_client_that_leaves_frees_its_slot_and_pages(server: Running, stage: str) -> None:
    data, reached = STAGES[stage]
    others = []
    if stage == "queued":
        others = [await send(server, raw({"prompt": "x", **LONG})) for _ in range(SLOTS)]
        await server.until(requests_running=SLOTS)
    freed = (await server.metrics())["asyncllm_cancel_to_free_seconds_count"]
    client = await send(server, data)
    if reached:
        await server.until(**reached)
    client.close()
    if others:
        await server.until(requests_waiting=0, requests_running=SLOTS)
    for other in others:
        other.close()
    await server.until_idle()
    if reached and not others:
        found = (await server.metrics())["asyncllm_cancel_to_free_seconds_count"]
        assert found == freed + 1


async def test_a_full_queue_refuses_at_once_and_does_not_slow_the_accepted(
    server: Running, quiet: list[str]
) -> None:
    streams = [
        asyncio.ensure_future(server.ask(prompt, stream=True, max_tokens=150, ignore_eos=True))
        for prompt in PROMPTS[:SLOTS]
    ]
    await server.until(requests_running=SLOTS)
    waiting = [asyncio.ensure_future(server.ask(PROMPTS[i % 8])) for i in range(PLACES)]
    await server.until(requests_waiting=PLACES)
    refused: list[Ended] = []
    while not any(stream.done() for stream in streams) and len(refused) < 20:
        refused.append(await server.ask(PROMPTS[0]))
    # Not after the first stream has ended: a place may be free then.
    refused = [end for end in refused if end.how == "error"]
    assert len(refused) >= 5
    assert {(end.status, end.code) for end in refused} == {(429, "queue_full")}
    assert all(int(end.headers["Retry-After"]) >= 1 for end in refused)
    # The fastest: others may wait for a step, or for another program on this machine.
    assert min(end.seconds for end in refused) < 0.01
    assert [(await stream).how for stream in streams] == ["complete"] * SLOTS
    assert [(await end).text for end in waiting] == [quiet[i % 8] for i in range(PLACES)]


async def test_what_can_never_be_served_is_refused_at_once(
    server: Running, quiet: list[str]
) -> None:
    others = [await send(server, raw({"prompt": "x", **LONG})) for _ in range(SLOTS)]
    await server.until(requests_running=SLOTS)
    too_long = [
        server.ask([5] * 3000),
        server.ask("word " * 9000),
        server.ask([5], max_tokens=5000),
    ]
    async with asyncio.timeout(20):
        ends = await asyncio.gather(*too_long)
    assert {(end.status, end.code) for end in ends} == {(400, "context_length_exceeded")}
    await server.until(requests_running=SLOTS, requests_waiting=0)
    for other in others:
        other.close()
    await survivors(server, quiet)


async def test_everything_at_once(server: Running, quiet: list[str]) -> None:
    """Faults, deadlines, aborts, clients that leave, nonsense: each request ends in its own way."""

    async def leave(i: int) -> None:
        data = list(STAGES.values())[i % len(STAGES)][0]
        client = await send(server, data)
        await asyncio.sleep(0.01 * i)
        client.close()

    async def again(prompt: Any, **fields: Any) -> Ended:
        """As a good client does, wait when told to."""
        while (end := await server.ask(prompt, **fields)).status == 429:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        return end

    impossible = {"guided_choice": ["x" * 3000], "max_tokens": 5}
    async with asyncio.timeout(90):
        good, ends, _ = await asyncio.gather(
            asyncio.gather(
                *(again(prompt, stream=bool(i % 2)) for i, prompt in enumerate(PROMPTS))
            ),
            asyncio.gather(
                again([9, POISON]),
                again([9, POISON], stream=True),
                again([*PROMPTS[0], FLAKY[9]], stream=True),
                again(PROMPTS[1], deadline_ms=1),
                again(PROMPTS[1], stream=True, deadline_ms=1),
                again([5] * 3000),
                again(PROMPTS[2], **impossible),
                again("a", max_tokens="many"),
                again("\ud800", stream=True, n=10**9),
            ),
            asyncio.gather(*(leave(i) for i in range(24))),
        )
    assert [(end.how, end.text) for end in good] == [("complete", text) for text in quiet]
    codes = [end.code for end in ends]
    assert codes[:2] == ["step_failed"] * 2
    assert codes[2] is None
    assert codes[3:5] == ["deadline_exceeded"] * 2
    assert codes[5] == "context_length_exceeded"
    assert [end.how for end in ends[3:6]] == ["error"] * 3
    assert [end.status for end in ends[-2:]] == [400, 400]
    await server.until_idle()
    await survivors(server, quiet)


async def test_nothing_is_left_behind(server: Running) -> None:
    """File descriptors, memory and log lines after many requests that end badly."""

    async def churn(count: int) -> None:
        for i in range(count):
            client = await send(server, list(STAGES.values())[i % len(STAGES)][0])
            await server.post("/v1/completions", b"{" * (i % 7))
            client.close()
            if i % 10 == 0:
                await server.ask(PROMPTS[0], max_tokens=3)
        await server.until_idle()

    def held() -> tuple[int, int]:
        processes = server.processes()
        return sum(p.num_fds() for p in processes), sum(p.memory_info().rss for p in processes)

    await churn(60)
    (fds, memory), lines = held(), len(server.log)
    await churn(180)
    now_fds, now_memory = held()
    assert now_fds <= fds + 2, "as many connections of this client"
    assert now_memory < memory + 24 * 2**20
    assert len(server.log) - lines <= 2 * 180, "no more than a few lines for a request"
