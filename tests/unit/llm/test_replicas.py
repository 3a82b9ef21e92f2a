"""``dp=2`` in Python: how requests and replicas end, with simulated devices and without any."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncllm import AsyncLLM, QueueFull
from asyncllm.config import EngineConfig
from asyncllm.errors import (
    BadRequest,
    DeadlineExceeded,
    EngineDead,
    ModelError,
    NotReady,
    StepError,
)
from asyncllm.llm.replicas import engine as engine_module
from asyncllm.llm.replicas import process as process_module
from asyncllm.llm.replicas.engine import ReplicatedEngine
from asyncllm.llm.replicas.link import Link, pack_error
from asyncllm.llm.replicas.process import ReplicaProcess
from asyncllm.types import FinishReason, SamplingParams, SchedulingParams, TokenDelta
from asyncllm.types.beam_search import BeamSearchParams
from tests.support.engine.scheduling import limits

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from asyncllm.config import EngineLimits

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="replicas need Linux")

SHORT = SamplingParams(max_tokens=4, ignore_eos=True)
SIM: dict[str, Any] = {"device": "sim", "dp": 2}


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def pids(llm: AsyncLLM) -> list[int]:
    engine = llm._own.engine
    assert isinstance(engine, ReplicatedEngine)
    return [replica._process.pid for replica in engine._replicas if replica._process is not None]


async def last(stream: AsyncIterator[TokenDelta]) -> TokenDelta:
    *_, delta = [delta async for delta in stream]
    return delta


def kill_all(llm: AsyncLLM) -> None:
    for pid in pids(llm):
        os.kill(pid, signal.SIGKILL)


# -- with processes ------------------------------------------------------------------------------


async def test_a_list_waits_for_room_wherever_its_prompts_go() -> None:
    same = "All prompts begin alike, so that one replica is to answer most of them. " * 4
    async with AsyncLLM(**SIM, max_num_seqs=2, max_waiting=3) as llm:
        answers = await llm.generate([same] * 40, SHORT)
        assert [len(answer.token_ids) for answer in answers] == [4] * 40
        several = await asyncio.gather(
            *(llm.generate(same, SHORT) for _ in range(40)), return_exceptions=True
        )
        # Two replicas run two each, and let three wait.
        assert sum(not isinstance(answer, QueueFull) for answer in several) == 10


async def test_closing_goes_on_when_it_is_cancelled() -> None:
    async with AsyncLLM(**SIM) as llm:
        processes = pids(llm)
        closing = asyncio.ensure_future(llm.aclose())
        await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait([closing])
        assert closing.cancelled()
        await until(lambda: not any(map(is_running, processes)))


async def test_no_thread_of_the_program_is_needed() -> None:
    """All may be busy, for instance waiting for answers."""
    free = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        try:
            async with AsyncLLM(**SIM, max_num_seqs=1) as llm:
                busy = asyncio.get_running_loop().run_in_executor(None, free.wait)
                long = SamplingParams(max_tokens=2000, ignore_eos=True)
                streams = [llm.stream(f"{i}", long) for i in range(2)]
                for stream in streams:  # each replica has begun one, and gets one more
                    await anext(stream)
                asked = [asyncio.ensure_future(llm.generate(f"{i}", SHORT)) for i in range(2)]
                os.kill(pids(llm)[0], signal.SIGKILL)
                rest = [asyncio.ensure_future(last(stream)) for stream in streams]
                async with asyncio.timeout(60):
                    ends = await asyncio.gather(*rest, return_exceptions=True)
                    answers = await asyncio.gather(*asked)
                assert [type(end) for end in ends] == [EngineDead, TokenDelta]
                assert [len(answer.token_ids) for answer in answers] == [4, 4]
            assert not free.is_set()
        finally:
            free.set()
        await busy


async def test_a_replica_that_cannot_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("asyncllm.supervise.server.FAILED_STARTS", 1)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}")
    async with AsyncLLM(**SIM, chat_template=str(template)) as llm:
        kill_all(llm)
        await until(lambda: llm.healthy and not llm.ready)
        with pytest.raises(NotReady, match="started again"):
            await llm.generate("a", SHORT)
        await until(lambda: llm.ready)
        assert len((await llm.generate("a", SHORT)).token_ids) == 4
        engine = llm._own.engine
        assert isinstance(engine, ReplicatedEngine)
        await until(lambda: all(replica.is_ready for replica in engine._replicas))
        template.unlink()
        stopped = asyncio.ensure_future(llm.stopped())
        kill_all(llm)
        async with asyncio.timeout(60):
            cause = await stopped
        assert "replica" in cause
        assert "template.jinja" in cause
        assert not llm.healthy
        with pytest.raises(EngineDead, match=r"template\.jinja"):
            await llm.generate("a", SHORT)
    assert caplog.text.count("it is not started again") == 2


class Tenant(str):
    """A class that no replica knows."""

    __slots__ = ()


async def test_what_cannot_be_sent_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Local(SamplingParams, frozen=True, kw_only=True):
        pass

    monkeypatch.setattr(Tenant, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Tenant", Tenant, raising=False)
    async with AsyncLLM(**SIM) as llm, asyncio.timeout(60):
        with pytest.raises(BadRequest, match="cannot be sent to a replica"):
            await llm.generate("a", Local(max_tokens=1))
        with pytest.raises(BadRequest, match=r"cannot be read in a replica.*Tenant"):
            await llm.generate("a", SHORT, SchedulingParams(tenant=Tenant("a")))
        engine = llm._own.engine
        assert isinstance(engine, ReplicatedEngine)
        assert engine._router.work == [0.0, 0.0]
        assert len((await llm.generate("a", SHORT)).token_ids) == 4


# -- without -------------------------------------------------------------------------------------


class Fake:
    """In place of a ``ReplicaProcess``: remembers what it was sent."""

    def __init__(
        self,
        config: EngineConfig,
        index: int,
        on_deltas: Callable[[list[tuple[int, Any]]], None],
        on_lost: Callable[[int, str], None],
    ):
        self.is_ready, self.is_gone = True, False
        self.sent: list[tuple[Any, ...]] = []

    async def start(self) -> EngineLimits:
        return limits()

    def send(self, *message: Any) -> None:
        self.sent.append(message)

    def end(self) -> asyncio.Future[None]:
        return asyncio.ensure_future(asyncio.sleep(0))

    def numbers(self, kind: str) -> list[int]:
        return [number for sent, number, *_ in self.sent if sent == kind]


class Recorder:
    """A sink."""

    def __init__(self, *, raises: bool = False):
        self.raises = raises
        self.deltas: list[TokenDelta] = []
        self.errors: list[Exception] = []

    def emit(self, delta: TokenDelta) -> None:
        if self.raises:
            raise ValueError("of the caller")
        self.deltas.append(delta)

    def fail(self, error: Exception) -> None:
        self.errors.append(error)


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> ReplicatedEngine:
    monkeypatch.setattr(engine_module, "ReplicaProcess", Fake)
    made = ReplicatedEngine(EngineConfig(device="sim", dp=2))
    await made.start()
    return made


def add(engine: ReplicatedEngine, sink: Recorder, tenant: str = "") -> int:
    return engine.add([1, 2, 3], SHORT, sink, SchedulingParams(tenant=tenant))


def delta(*ids: int, finish: FinishReason | None = None) -> TokenDelta:
    return TokenDelta(token_ids=list(ids), finish_reason=finish)


async def test_a_sink_that_raises_loses_its_own_request_only(engine: ReplicatedEngine) -> None:
    bad, good = Recorder(raises=True), Recorder()
    first, second = add(engine, bad), add(engine, good)
    engine._on_deltas([(first, delta(7)), (second, delta(8, finish=FinishReason.STOP))])
    assert good.deltas[-1].token_ids == [8]
    assert [type(error) for error in bad.errors] == [StepError]
    replica: Any = engine._replicas[0]
    assert replica.numbers("abort") == [first]
    assert engine._requests.all() == []


async def test_what_a_dead_engine_had_not_begun_moves(engine: ReplicatedEngine) -> None:
    sinks = [Recorder() for _ in range(4)]
    numbers = [add(engine, sink) for sink in sinks]
    one, other = (replica for replica in engine._replicas)
    here = [i for i, number in enumerate(numbers) if number in one.numbers("add")]  # type: ignore[attr-defined]
    begun, waiting = here
    engine._on_deltas([(numbers[begun], delta(7))])
    dead = pack_error(EngineDead("rank 1 was killed"))
    engine._on_deltas([(numbers[begun], dead), (numbers[waiting], dead)])
    one.is_ready = False
    engine._on_lost(0, "has ended: rank 1 was killed")
    assert [str(error) for error in sinks[begun].errors] == ["rank 1 was killed"]
    assert sinks[waiting].errors == []
    assert numbers[waiting] in other.numbers("add")  # type: ignore[attr-defined]
    engine._on_lost(1, "was killed")
    assert [str(error) for error in sinks[waiting].errors] == ["replica 1 was killed"]


async def test_all_ends_are_counted_and_no_tenant_is_kept(engine: ReplicatedEngine) -> None:
    numbers = [add(engine, Recorder(), tenant=f"{i}") for i in range(6)]
    engine._on_deltas(
        [
            (numbers[0], delta(7, 8, finish=FinishReason.STOP)),
            (numbers[1], pack_error(BadRequest("bad words"))),
            (numbers[2], pack_error(DeadlineExceeded("late"))),
            (numbers[3], pack_error(StepError("failed"))),
        ]
    )
    engine.abort(numbers[4])
    stats = engine.stats
    assert (stats.running, stats.waiting) == (1, 0)
    await engine.aclose()
    assert stats.finished == {"stop": 1, "length": 0, "abort": 1, "deadline": 1, "error": 2}
    assert (stats.prompt_tokens, stats.generation_tokens) == (3, 2)  # of what was answered
    assert (stats.running, stats.waiting) == (0, 0)
    assert engine._requests._requests_of == {}


async def test_a_beam_search_is_checked_here(engine: ReplicatedEngine) -> None:
    params = BeamSearchParams(beam_width=2, max_tokens=2)
    for prompt in ([], [2**40], [-1], [10**6]):
        with pytest.raises(BadRequest, match="prompt"):
            await engine.search(prompt, params, None, None).run()
    assert engine._requests.all() == []


class Peer:
    """In place of a ``PeerProcess``."""

    def __init__(self, rank: int, module: str, settings: object, fds: list[int], *, name: str):
        self._end = os.dup(fds[0])

    def is_stopped(self) -> bool:
        return False

    def end(self, patience: float | None = None) -> str:
        return "ended with exit code 3"

    def close(self, timeout: float) -> None:
        os.close(self._end)


async def lost(monkeypatch: pytest.MonkeyPatch, start: Callable[..., Any]) -> tuple[Any, list[str]]:
    """A replica that was ready and has lost its process, which ``start`` then replaces."""
    monkeypatch.setattr(process_module, "start_peer", Peer)
    ends: list[str] = []
    replica = ReplicaProcess(
        EngineConfig(device="sim", dp=2), 1, lambda _: None, lambda _, how: ends.append(how)
    )
    starting = asyncio.ensure_future(replica.start())
    await until(lambda: replica._link is not None)
    assert isinstance(replica._link, Link)
    # Both come in one turn of the loop.
    replica._on_message("ready", limits())
    replica._link.close()
    monkeypatch.setattr(process_module, "start_peer", start)
    replica._on_end()
    assert await starting
    await until(lambda: bool(ends))
    return replica, ends


async def test_a_replica_that_ends_as_soon_as_it_is_ready_gets_no_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica, ends = await lost(monkeypatch, Peer)
    assert not replica.is_ready
    assert ends == ["ended with exit code 3"]
    await asyncio.wait([replica.end()])


async def test_a_restart_without_room_for_a_process_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> Peer:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    caplog.set_level(logging.ERROR)
    replica, ends = await lost(monkeypatch, full)
    await until(lambda: len(ends) == 2)
    assert "replica 1 cannot be started" in ends[1]
    assert not replica.is_gone
    assert "it is started again in 1 s" in caplog.text
    await asyncio.wait([replica.end()])
    with pytest.raises(ModelError, match="replica 1 cannot be started"):
        replica._start_process()
