"""Ask a real Prometheus for every panel of the dashboard, while a real server answers requests.

    python -m tools.check_dashboard [OPTION OF asyncllm serve ...]
    python -m tools.check_dashboard --dp 2

Needs ``prometheus`` in the PATH (Debian's package has it). It starts the server with the demo model
and Prometheus, and sends requests of all kinds until every expression has data. It prints how many
series and which latest value each of them has. Exit status 1: after two minutes, one has no data.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp

from tests.support.server.ports import free_port

DASHBOARD: Final = Path(__file__).parents[1] / "docker" / "grafana" / "dashboards" / "asyncllm.json"
PATIENCE: Final = 120.0
#: What Grafana puts into expressions.
VARIABLES: Final = {"$instance": ".*", "$__rate_interval": "20s"}
#: Beginnings of the metrics that only servers with ``--dp`` have.
REPLICAS: Final = ("asyncllm_replica", "asyncllm_requests_moved")
#: Their front accepts the connections, and does not measure how long that takes.
WITHOUT_REPLICAS: Final = ("asyncllm_accept_wait",)


class Panel(NamedTuple):
    """One expression of a panel, and what Prometheus answered."""

    title: str
    expression: str
    values: list[str]


@asynccontextmanager
async def running(*command: str, url: str) -> AsyncIterator[None]:
    """The command, while ``url`` answers; it is ended afterwards."""
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(1200):
                if process.returncode is not None:
                    raise SystemExit(f"{command[0]} ended with status {process.returncode}")
                try:
                    async with session.get(url) as answer:
                        if answer.status == 200:
                            break
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.1)
            else:
                raise SystemExit(f"{command[0]} did not start within two minutes")
        yield
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def ask(session: aiohttp.ClientSession, number: int) -> None:
    """One request: some stream, some are cut off, some are refused."""
    body: dict[str, Any] = {
        "messages": [
            {"role": "system", "content": "Answer in one word. " * 20},
            {"role": "user", "content": f"What is {number % 7} + 45?"},
        ],
        "max_tokens": 400 if number % 5 == 0 else 40,
        "ignore_eos": number % 5 == 0,
        "stream": number % 3 != 0,
    }
    if number % 11 == 0:
        body["max_tokens"] = 1_000_000
    async with session.post("/v1/chat/completions", json=body) as answer:
        if number % 5 == 0 and answer.status == 200:
            await answer.content.readany()
            answer.close()  # the client goes away
        else:
            await answer.read()


@asynccontextmanager
async def load(url: str) -> AsyncIterator[None]:
    """Meanwhile, four clients send one request after the other."""

    async def client(number: int) -> None:
        async with aiohttp.ClientSession(url) as session:
            while True:
                await ask(session, number)
                number += 4

    async with asyncio.TaskGroup() as group:
        clients = [group.create_task(client(number)) for number in range(4)]
        yield
        for task in clients:
            task.cancel()


async def panels(prometheus: str) -> list[Panel]:
    found = []
    async with aiohttp.ClientSession(prometheus) as session:
        for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                for name, value in VARIABLES.items():
                    expression = expression.replace(name, value)
                async with session.get("/api/v1/query", params={"query": expression}) as answer:
                    said = await answer.json()
                if said["status"] != "success":
                    raise SystemExit(f"{panel['title']}: {said['error']}")
                values = [one["value"][1] for one in said["data"]["result"]]
                found.append(Panel(panel["title"], expression, values))
    return found


def is_missing(panel: Panel, replicas: bool) -> bool:
    """Whether it shows nothing although it should."""
    if any(name in panel.expression for name in (WITHOUT_REPLICAS if replicas else REPLICAS)):
        return False
    return not panel.values or "NaN" in panel.values


async def check(options: Sequence[str]) -> int:
    port, prometheus_port = free_port(), free_port()
    server, prometheus = (f"http://127.0.0.1:{one}" for one in (port, prometheus_port))
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "prometheus.yml"
        jobs = [{"job_name": "asyncllm", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}]
        config.write_text(json.dumps({"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}))
        serve = (sys.executable, "-m", "asyncllm", "serve", "--port", str(port), *options)
        scrape = (
            *("prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/data"),
            *(f"--web.listen-address=127.0.0.1:{prometheus_port}", "--log.level=warn"),
        )
        async with (
            running(*serve, url=f"{server}/ready"),
            running(*scrape, url=f"{prometheus}/-/ready"),
        ):
            end = time.monotonic() + PATIENCE
            async with load(server):
                while True:
                    found = await panels(prometheus)
                    missing = [panel for panel in found if is_missing(panel, "--dp" in options)]
                    if not missing or time.monotonic() > end:
                        break
                    await asyncio.sleep(1.0)
    for panel in found:
        mark = "MISSING" if panel in missing else f"{len(panel.values)} series"
        print(f"{mark:10} {panel.title}: {', '.join(panel.values[:4]) or '-'}")
    print(f"{len(found)} expressions, {len(missing)} without data")
    return 1 if missing else 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(check(sys.argv[1:])))
