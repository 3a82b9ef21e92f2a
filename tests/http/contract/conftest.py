from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import aiohttp
import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.server.serving import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Sequence

SLOTS, PLACES = 4, 12
#: No fault is planted in these; each makes the model say something else.
PROMPTS = [[5 + i, 40 + 3 * i, 300 + i] for i in range(8)]
LENGTH = 24


@dataclass
class Ended:
    """How a request ended: "complete", "error", or "cut" where neither came.

    Attributes:
        code: of the error.
        seconds: from the request to its end.
    """

    how: str
    text: str = ""
    status: int = 0
    code: str | None = None
    headers: Any = None
    seconds: float = 0.0


class Running:
    """A server process and a client of it."""

    def __init__(self, process: ServerProcess, log: IO[str], session: aiohttp.ClientSession):
        self.port = process.port
        self.url = process.url
        self.process = process.process
        self._log = log
        self._session = session

    @property
    def log(self) -> list[str]:
        """What it has written to stderr."""
        self._log.seek(0)
        return self._log.read().splitlines()

    def processes(self) -> list[psutil.Process]:
        """The server's own process, and those that it has started."""
        parent = psutil.Process(self.process.pid)
        return [parent, *parent.children(recursive=True)]

    async def ask(self, prompt: Any, **fields: Any) -> Ended:
        """Ask for a completion, and insist that it ends in exactly one way."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": LENGTH, **fields}
        return await self.post("/v1/completions", json.dumps(body).encode())

    async def post(self, path: str, body: bytes) -> Ended:
        loop = asyncio.get_running_loop()
        begun = loop.time()
        async with self._session.post(self.url + path, data=body) as answer:
            data = await answer.read()
        ended = read_end(answer.status, answer.headers, data)
        ended.seconds = loop.time() - begun
        return ended

    async def get(self, path: str) -> tuple[int, bytes]:
        async with self._session.get(self.url + path) as answer:
            return answer.status, await answer.read()

    async def metrics(self) -> dict[str, float]:
        _, data = await self.get("/metrics")
        lines = [line for line in data.decode().splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}

    async def until(self, **wanted: float) -> None:
        """Wait until metrics have these values."""
        found: dict[str, float] = {}
        async with asyncio.timeout(20):
            while found != wanted:
                values = await self.metrics()
                found = {name: values[f"asyncllm_{name}"] for name in wanted}

    async def until_idle(self) -> None:
        """Wait until no request has a slot, a place in the queue, or a page."""
        await self.until(
            requests_running=0,
            requests_waiting=0,
            requests_reserved=0,
            kv_pages_held=0,
            http_requests_live=0,
        )


def read_end(status: int, headers: Any, data: bytes) -> Ended:
    """What an answer says; it must be exactly one of an answer and an error."""
    if not headers.get("Content-Type", "").startswith("text/event-stream"):
        body = json.loads(data)
        if status >= 400:
            return Ended("error", "", status, body["error"]["code"], headers)
        [choice] = body["choices"]
        assert choice["finish_reason"] is not None
        return Ended("complete", choice["text"], status, None, headers)
    *frames, done, rest = data.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b""), "a stream without an end"
    events = [json.loads(frame.removeprefix(b"data: ")) for frame in frames]
    errors = [event["error"] for event in events if "error" in event]
    choices = [event["choices"][0] for event in events if event.get("choices")]
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert len(errors) + len(reasons) == 1, (errors, reasons)
    text = "".join(choice["text"] for choice in choices)
    if errors:
        assert "error" in events[-1], "nothing follows an error"
        return Ended("error", text, status, errors[0]["code"], headers)
    return Ended("complete", text, status, None, headers)


@pytest.fixture(scope="module")
def options() -> Sequence[str]:
    return (
        *("--max-num-seqs", str(SLOTS), "--max-waiting", str(PLACES)),
        *("--cpu-threads", "1", "--drain-seconds", "5"),
    )


@pytest.fixture(scope="module")
def process(options: Sequence[str]) -> Iterator[tuple[ServerProcess, IO[str]]]:
    """A real server process, with planted faults."""
    with tempfile.TemporaryFile("w+") as log:
        server = ServerProcess(*options, log=log, program=("tests.support.server.serve_faulty",))
        try:
            yield server, log
        finally:
            server.stop()


@pytest.fixture
async def server(process: tuple[ServerProcess, IO[str]]) -> AsyncIterator[Running]:
    """It is idle before each test, and after each that has not ended it."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        running = Running(*process, session)
        await running.until_idle()
        yield running
        if running.process.poll() is None:
            await running.until_idle()
            assert (await running.metrics())["asyncllm_kv_books_healed_total"] == 0


@pytest.fixture(scope="module")
def answers() -> list[str]:
    """Filled by ``quiet`` when it is first wanted."""
    return []


@pytest.fixture
async def quiet(server: Running, answers: list[str]) -> list[str]:
    """The answers to ``PROMPTS``, each asked when nothing else runs."""
    if not answers:
        ends = [await server.ask(prompt) for prompt in PROMPTS]
        assert {end.how for end in ends} == {"complete"}
        answers += [end.text for end in ends]
    return answers
