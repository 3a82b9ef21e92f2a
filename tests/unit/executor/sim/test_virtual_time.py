"""The virtual clock: waiting costs nothing, and everything else is as on a real one."""

from __future__ import annotations

import asyncio
import threading
import time

import aiohttp
import pytest
from aiohttp import web

from asyncllm.executor.sim import virtual_time
from asyncllm.executor.sim.virtual_time import Deadlock, VirtualTimeLoop


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_year_of_sleep_takes_no_time() -> None:
    async def main() -> float:
        began = now()
        await asyncio.sleep(365 * 86400)
        return now() - began

    assert virtual_time.run(main()) == pytest.approx(365 * 86400)


def test_timers_fire_in_order_and_at_their_time() -> None:
    fired: list[tuple[str, float]] = []

    async def sleeper(name: str, pause: float, times: int) -> None:
        began = now()
        for _ in range(times):
            await asyncio.sleep(pause)
            fired.append((name, round(now() - began, 6)))

    async def main() -> None:
        cancelled = asyncio.get_running_loop().call_later(0.5, fired.append, ("never", 0.5))
        cancelled.cancel()
        await asyncio.gather(sleeper("a", 2.0, 3), sleeper("b", 3.0, 2))

    virtual_time.run(main())
    assert fired == [("a", 2.0), ("b", 3.0), ("a", 4.0), ("b", 6.0), ("a", 6.0)]


def test_timeouts_hold() -> None:
    async def main() -> None:
        async with asyncio.timeout(10):
            await asyncio.sleep(9.999)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(10.001), 10)

    virtual_time.run(main())


def test_a_busy_loop_is_late() -> None:
    fired: list[float] = []

    async def main() -> None:
        began = now()
        loop = asyncio.get_running_loop()
        for delay in (1.0, 2.0, 5.0):
            loop.call_later(delay, lambda: fired.append(round(now() - began, 6)))
        virtual_time.spend(3.0)
        assert now() - began == 3.0
        await asyncio.sleep(3.0)

    virtual_time.run(main())
    assert fired == [3.0, 3.0, 5.0]


def test_a_real_loop_takes_its_time_by_itself() -> None:
    async def main() -> float:
        began = time.perf_counter()
        virtual_time.spend(3.0)
        return time.perf_counter() - began

    assert asyncio.run(main()) < 1.0


def test_callbacks_that_are_ready_run_before_time_passes() -> None:
    async def main() -> None:
        began = now()
        sleeping = asyncio.ensure_future(asyncio.sleep(0.001))
        for _ in range(1000):
            await asyncio.sleep(0)
        assert now() == began
        assert not sleeping.done()
        await sleeping

    virtual_time.run(main())


def test_time_stands_still_while_a_thread_works() -> None:
    async def main() -> None:
        may_end = threading.Event()
        began = now()
        work = asyncio.ensure_future(asyncio.to_thread(may_end.wait, 10))
        hour = asyncio.ensure_future(asyncio.sleep(3600))
        # Nothing of this loop can end the work: a timer would fire only after it.
        threading.Timer(0.05, may_end.set).start()
        assert await work
        assert now() == began
        assert not hour.done()
        await hour
        assert now() == pytest.approx(began + 3600)

    virtual_time.run(main())


def test_an_exception_in_a_thread_arrives_and_time_goes_on() -> None:
    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 / 0)
        await asyncio.sleep(5)

    virtual_time.run(main())


def test_a_thread_may_call_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "STUCK_SECONDS", 30)

    async def main() -> int:
        loop = asyncio.get_running_loop()
        called: asyncio.Future[int] = loop.create_future()
        threading.Timer(0.05, loop.call_soon_threadsafe, (called.set_result, 7)).start()
        return await called

    assert virtual_time.run(main()) == 7


async def http_hour() -> list[tuple[str, float]]:
    """A server that answers after an hour, and clients that come every ten minutes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for part in range(3):
            await asyncio.sleep(1200)
            await response.write(f"{request.query['n']}{part} ".encode())
        return response

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}/"
    began = now()

    async def client(session: aiohttp.ClientSession, n: int) -> tuple[str, float]:
        await asyncio.sleep(600 * n)
        async with session.get(url, params={"n": n}) as response:
            return await response.text(), now() - began

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3700)) as session:
        answers = await asyncio.gather(*(client(session, n) for n in range(6)))
    await runner.cleanup()
    return [(text, round(at, 3)) for text, at in answers]


def test_sockets_of_the_same_loop_work() -> None:
    answers = virtual_time.run(http_hour())
    assert answers == [(f"{n}0 {n}1 {n}2 ", 3600.0 + 600 * n) for n in range(6)]


def test_a_client_times_out_in_virtual_time() -> None:
    async def main() -> None:
        async def silent(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(100)
            writer.close()

        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        began = now()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(), 60)
        assert now() - began == pytest.approx(60)
        assert await reader.read() == b""
        assert now() - began == pytest.approx(100)
        writer.close()
        server.close()
        await server.wait_closed()

    virtual_time.run(main())


def test_a_deadlock_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_time, "STUCK_SECONDS", 0.01)

    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="waits_for_ever"):
        virtual_time.run(waits_for_ever())


def test_other_clocks_are_left_alone() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert virtual_time.clock_of(loop)() == loop.time() == virtual_time.START

    virtual_time.run(main())
    loop = asyncio.new_event_loop()
    assert virtual_time.clock_of(loop) is time.perf_counter
    loop.close()


def test_the_loop_closes_cleanly() -> None:
    loop = VirtualTimeLoop()
    loop.run_until_complete(asyncio.sleep(1))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()
    assert loop.is_closed()
