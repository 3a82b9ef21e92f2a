"""``asyncllm serve --ray --tp 2 --machines 2`` on a Ray of two machines, which are one here.

One test: starting Ray takes longer than all the rest.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import openai
import psutil  # type: ignore[import-untyped]
import pytest
from ray.cluster_utils import Cluster

from asyncllm import AsyncLLM, SamplingParams
from tests.support.server.serving import ServerProcess
from tests.support.team.ranks import peers

MODEL = "asyncllm-demo"
CHAT: Any = [{"role": "user", "content": "What is 27 + 45?"}]
#: Rank 0, and what starts the other rank.
NAMES = "Replica:asyncllm:Replica", "Station"
#: What two busy cores may take to notice a loss, and to end everything.
SECONDS = 60

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture
def address(ray_env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a Ray that two nodes have joined, with room for one replica and its front."""
    for name, value in ray_env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
    )
    try:
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


async def test_a_replica_on_two_machines(address: str, ray_env: dict[str, str]) -> None:
    async with AsyncLLM(device="cpu", dtype="float32", cpu_threads=1) as llm:
        expected = await llm.generate(CHAT, SamplingParams(temperature=0.0))
    options = "--tp", "2", "--machines", "2", "--dtype", "float32", "--cpu-threads", "1"
    running = ServerProcess("--ray", *options, env={**ray_env, "RAY_ADDRESS": address})
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=CHAT, stream=True, temperature=0.0
        )
        chunks = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(chunks) == expected.text
        assert len(chunks) > 3

        first = [*ray_processes(*NAMES), *peers()]
        assert [each.ppid() for each in first[2:]] == [first[1].pid]
        stream = client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            stream=True,
            max_tokens=1500,
            extra_body={"ignore_eos": True},
        )
        next(iter(stream))
        first[0].send_signal(signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the replica that was answering has died"):
            for _ in stream:
                pass
        expect_ended(first)
        answer = client.chat.completions.create(model=MODEL, messages=CHAT, temperature=0.0)
        assert answer.choices[0].message.content == expected.text  # by a new replica
    second = [*ray_processes(*NAMES), *peers()]
    assert len(second) == 3
    assert running.stop() == 0
    expect_ended(second)


def ray_processes(*names: str) -> list[psutil.Process]:
    """Actors of the Ray that this process has started, one of each name."""
    found = psutil.Process().children(recursive=True)
    return [each for name in names for each in found if name in "".join(each.cmdline())]


def expect_ended(processes: list[psutil.Process]) -> None:
    _, left = psutil.wait_procs(processes, timeout=SECONDS)
    assert left == []
