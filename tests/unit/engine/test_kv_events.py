"""KV events, as a router reads them: with a subscriber of its own over ZMQ."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from asyncllm import AsyncLLM, BadRequest, SamplingParams, SchedulingParams
from asyncllm.config import EngineConfig
from asyncllm.engine import kv_events
from asyncllm.engine.cache.changes import NOT_YET, Changes
from asyncllm.engine.cache.node import NO_PAGE, Node
from asyncllm.engine.engine import Engine
from asyncllm.engine.kv_events import KVEventPublisher
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.errors import ModelError
from asyncllm.executor.startup.replica_config import replica_config
from tests.support.server.ports import free_port

#: No wait of a test that passes takes this long.
LONG = 60.0


@pytest.fixture
def endpoint() -> str:
    """Two free ports, one after the other."""
    return f"tcp://127.0.0.1:{free_port(count=2)}"


class Router:
    """Knows the pages of a server from its events alone; reads as msgpack, without our types.

    Attributes:
        pages: the hash of the page above and the tokens, by each page's hash.
        numbers: of the batches, in order.
    """

    def __init__(self, endpoint: str, topic: str = ""):
        self.pages: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.numbers: list[int] = []
        self.kinds: list[str] = []
        self._context = zmq.asyncio.Context()
        self._events = self._context.socket(zmq.SUB)
        self._events.connect(endpoint)
        self._events.subscribe(topic.encode())
        address, _, port = endpoint.rpartition(":")
        self._replays = self._context.socket(zmq.DEALER)
        self._replays.connect(f"{address}:{int(port) + 1}")

    async def catch_up(self, first: int = 0) -> None:
        """Ask for what was missed."""
        await self._replays.send_multipart((b"", first.to_bytes(8, "big")))
        while True:
            _, number, data = await asyncio.wait_for(self._replays.recv_multipart(), LONG)
            if number == b"\xff" * 8:
                assert data == b""
                return
            self._read(int.from_bytes(number, "big"), data)

    async def read(self) -> bytes:
        """The next batch; returns its topic."""
        frames = await asyncio.wait_for(self._events.recv_multipart(), LONG)
        topic, number, data = frames
        self._read(int.from_bytes(number, "big"), data)
        return bytes(topic)

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _read(self, number: int, data: bytes) -> None:
        if self.numbers and number <= self.numbers[-1]:
            return  # it came twice, live and replayed
        self.numbers.append(number)
        time, events = msgspec.msgpack.decode(data)
        assert time > 1e9
        for kind, *fields in events:
            self.kinds.append(kind)
            if kind == "AllBlocksCleared":
                self.pages.clear()
            elif kind == "BlockRemoved":
                hashes, medium = fields
                assert medium == "GPU"
                for each in hashes:
                    del self.pages[each]
            else:
                hashes, parent, tokens, size, lora, medium, lora_name = fields
                assert (kind, lora, medium, lora_name) == ("BlockStored", None, "GPU", None)
                assert len(tokens) == size * len(hashes)
                assert parent is None or parent in self.pages
                for i, each in enumerate(hashes):
                    self.pages[each] = parent, tuple(tokens[i * size : (i + 1) * size])
                    parent = each


def scheduler_of(llm: AsyncLLM) -> Scheduler:
    engine = llm._started.engine
    assert isinstance(engine, Engine)
    return engine._scheduler


def cached(llm: AsyncLLM) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """What a router should know: the pages that requests without a salt would find."""
    tree = scheduler_of(llm).cache._tree
    found = {}

    def walk(node: Node, above: int | None) -> None:
        for child in node.children.values():
            if child.ready or child.host >= 0:
                assert child.digest > NOT_YET
                tokens = tuple(memoryview(child.key).cast("i"))
                found[child.digest] = above, tokens
                walk(child, child.digest)

    if b"" in tree._roots:
        walk(tree._roots[b""], None)
    return found


@pytest.fixture
async def router(endpoint: str) -> AsyncIterator[Router]:
    made = Router(endpoint)
    yield made
    made.close()


@pytest.mark.parametrize("options", [{}, {"host_kv_gib": 0.003, "prefill_chunk": 64}])
async def test_a_router_knows_what_is_cached(
    options: dict[str, Any], endpoint: str, router: Router
) -> None:
    """While prompts come, share prefixes, are evicted, saved, loaded, cancelled and salted."""
    small: dict[str, Any] = {"kv_cache_tokens": 2048, "max_model_len": 512, "page_size": 4}
    rng = random.Random(0)
    prefixes = [[rng.randrange(500) for _ in range(rng.randrange(8, 300))] for _ in range(24)]
    async with AsyncLLM(device="sim", kv_events=endpoint, **small, **options) as llm:

        async def ask(i: int) -> None:
            prompt = rng.choice(prefixes) + [i] * rng.randrange(1, 60)
            salt = SchedulingParams(cache_salt="secret" if i % 7 == 0 else "")
            params = SamplingParams(max_tokens=rng.randrange(1, 40), ignore_eos=True)
            task = asyncio.ensure_future(llm.generate(prompt, params, salt))
            if i % 11 == 0:
                await asyncio.sleep(0.02)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for start in range(0, 120, 12):
            await asyncio.gather(*map(ask, range(start, start + 12)))
        while llm.stats.pages_held:  # noqa: ASYNC110 (a row is in flight behind an end)
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # the turn of the loop in which changes are published
        await router.catch_up()
        assert router.numbers == list(range(len(router.numbers)))
        assert set(router.kinds) == {"AllBlocksCleared", "BlockStored", "BlockRemoved"}
        assert router.pages == cached(llm)
        assert llm.stats.pages_evicted > 100
        assert (llm.stats.host_pages_used > 0) == ("host_kv_gib" in options)
        tree = scheduler_of(llm).cache._tree
        assert len(tree._roots) == 2, "a salted prefix is cached, too"
        scheduler_of(llm).leak_check.heal()
        await asyncio.sleep(0.05)
        await router.catch_up(router.numbers[-1] + 1)
        assert router.pages == {}


async def test_hashes_say_what_pages_hold_on_any_server(endpoint: str, router: Router) -> None:
    prompt = list(range(100, 180))
    found = []
    for _ in range(2):
        async with AsyncLLM(device="sim", kv_events=endpoint) as llm:
            await llm.generate(prompt, SamplingParams(max_tokens=1))
            await asyncio.sleep(0.05)
            router.numbers.clear()  # a server that starts again counts from 0 again
            await router.catch_up()
            assert [tokens for _, tokens in router.pages.values()] == [
                tuple(prompt[start : start + 16]) for start in range(0, 80, 16)
            ]
            found.append(list(router.pages))
    assert found[0] == found[1]


@pytest.fixture
def publisher(endpoint: str) -> Iterator[KVEventPublisher]:
    made = KVEventPublisher(endpoint, "kv@pod@model", 2)
    yield made
    made.close()


def stored(number: int) -> Changes:
    root = Node(None, b"", NO_PAGE, ready=True)
    return Changes(False, [], [Node(root, number.to_bytes(8, "little"), 0, True, 1)])


def numbers_of(router: Router) -> list[int]:
    return [tokens[0] for _, tokens in router.pages.values()]


async def test_a_subscriber_gets_batches_as_they_come_by_topic(
    publisher: KVEventPublisher, endpoint: str
) -> None:
    router, other = Router(endpoint, "kv@"), Router(endpoint, "other")
    try:
        for number in range(1, 10_000):
            publisher.publish(stored(number))
            try:
                async with asyncio.timeout(0.05):
                    topic = await router.read()
                break
            except TimeoutError:
                pass  # it has not subscribed yet
        assert topic == b"kv@pod@model"
        publisher.publish(Changes(False, [], []))  # nothing to say
        publisher.publish(stored(0))
        last = router.numbers[-1]
        while 0 not in numbers_of(router):
            await router.read()
        assert router.numbers[-1] > last
        assert router.numbers == list(range(router.numbers[0], router.numbers[-1] + 1))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await other.read()
    finally:
        router.close()
        other.close()


async def test_nothing_piles_up_and_what_is_lost_shows(
    publisher: KVEventPublisher, router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_events, "MOST_WAITING", 5)
    monkeypatch.setattr(kv_events, "REPLAY_BATCHES", 8)
    going, send = threading.Event(), publisher._send
    monkeypatch.setattr(publisher, "_send", lambda *batch: (going.wait(LONG), send(*batch)))
    for number in range(1, 100):  # 0 is taken
        publisher.publish(stored(number))
    assert len(publisher._waiting) == 5
    going.set()
    await router.catch_up()
    while publisher._waiting:  # noqa: ASYNC110 (nobody tells when)
        await asyncio.sleep(0.001)
    publisher.publish(stored(100))
    while 100 not in numbers_of(router):
        await router.catch_up()
    assert router.numbers[-1] == 100
    assert len(router.numbers) < 9
    for number in range(20):
        publisher.publish(stored(number))
        while publisher._waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    late = len(publisher._kept)
    assert late == 8


@pytest.mark.parametrize("given", ["5557", "tcp://*", "tcp://*:0", "tcp://*:65535", "ipc://x:1"])
def test_bad_endpoints_are_refused(given: str) -> None:
    with pytest.raises(BadRequest, match="kv_events must be tcp://HOST:PORT") as refused:
        EngineConfig(kv_events=given)
    assert refused.value.param == "kv_events"


def test_events_need_a_prefix_cache_and_each_replica_has_its_ports() -> None:
    with pytest.raises(BadRequest, match="kv_events needs prefix_caching"):
        EngineConfig(kv_events="tcp://*:5557", prefix_caching=False)
    config = EngineConfig(kv_events="tcp://*:5557", dp=3, device="sim")
    ports = [replica_config(config, replica).kv_events for replica in range(3)]
    assert ports == ["tcp://*:5557", "tcp://*:5559", "tcp://*:5561"]


async def test_a_port_in_use_is_said_before_anything_is_loaded(
    endpoint: str, publisher: KVEventPublisher
) -> None:
    with pytest.raises(ModelError, match=r"cannot bind tcp://127.0.0.1:.*in use") as refused:
        await AsyncLLM(device="sim", kv_events=endpoint).start()
    assert refused.value.param == "kv_events"


async def test_without_the_extra_it_is_named(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "asyncllm.engine.kv_events")
    monkeypatch.delattr("asyncllm.engine.kv_events")
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(ModelError, match=r"pip install 'asyncllm-server\[kv-events\]'"):
        await AsyncLLM(device="sim", kv_events=endpoint).start()
