"""``asyncllm serve --ray`` as a user meets it: two replicas, clients on a socket, a replica killed.

One server for all tests: starting Ray takes longer than all of them.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import psutil  # type: ignore[import-untyped]
import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.support.server.serving import ServerProcess

MODEL = "asyncllm-demo"
KEY = {"Authorization": "Bearer secret"}
SUM: Any = [{"role": "user", "content": "What is 27 + 45?"}]
#: What two busy cores may take to start another replica.
SECONDS = 60

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(ray_env: dict[str, str]) -> Iterator[ServerProcess]:
    env = {**ray_env, "RAY_ADDRESS": "local"}
    running = ServerProcess("--ray", "--replicas", "2", "--api-key", "secret", env=env)
    yield running
    processes = psutil.Process(running.process.pid).children(recursive=True)
    assert running.stop() == 0
    _, left = psutil.wait_procs(processes, timeout=10)
    assert left == []


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as made:
        yield made


def get(server: ServerProcess, path: str, auth: str = "Bearer secret") -> requests.Response:
    headers = {"Authorization": auth} if auth else {}
    return requests.get(server.url + path, headers=headers, timeout=10)


def replicas(server: ServerProcess) -> list[psutil.Process]:
    found = psutil.Process(server.process.pid).children(recursive=True)
    return [
        process for process in found if "Replica:asyncllm:Replica" in " ".join(process.cmdline())
    ]


def test_a_chat_streams(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model=MODEL, messages=SUM, stream=True)
    chunks = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "72" in "".join(chunks)
    assert len(chunks) > 3


def test_other_routes_are_passed_on(server: ServerProcess, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.completions.create(model=MODEL, prompt="One", max_tokens=3).usage is not None
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as other:
        message = other.messages.create(model=MODEL, messages=SUM, max_tokens=20)
        assert message.content
    assert get(server, "/health", auth="").status_code == 200
    assert get(server, "/nowhere").json()["error"]["message"] == "unknown route: GET /nowhere"


def test_keys_and_bodies_are_checked_by_the_replica(server: ServerProcess) -> None:
    assert get(server, "/v1/models", auth="Bearer wrong").status_code == 401
    assert get(server, "/v1/models", auth="Bearer ").text == "Illegal header value b'Bearer '"
    headers = {"Authorization": "Bearer secret", "X-Request-Id": "mine"}
    url = f"{server.url}/v1/chat/completions"
    answer = requests.post(url, b"{", headers=headers, timeout=10)
    assert answer.status_code == 400
    assert answer.headers["X-Request-Id"] == "mine"
    assert answer.json()["error"]["type"] == "invalid_request_error"


def test_a_conversation_stays_where_its_prefix_is_cached(client: openai.OpenAI) -> None:
    for i in range(6):
        first = {"role": "user", "content": f"{i}: count from 1 to 50. " * 20}
        turns: Any = [
            first,
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "?"},
        ]
        client.chat.completions.create(model=MODEL, messages=turns[:1], max_tokens=2)
        answer = client.chat.completions.create(model=MODEL, messages=turns, max_tokens=2)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached = answer.usage.prompt_tokens_details.cached_tokens
        assert cached is not None
        assert cached > answer.usage.prompt_tokens // 3


def test_all_replicas_answer_what_concerns_all(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    end = time.monotonic() + SECONDS
    while {row["replica"] for row in get(server, "/live").json()["ended"]} != {0, 1}:
        assert time.monotonic() < end, "all requests go to one replica"
        with ThreadPoolExecutor(2) as pool:
            for i in range(2):
                prompt = f"{i}: {time.monotonic()}"
                pool.submit(client.completions.create, model=MODEL, prompt=prompt, max_tokens=20)
    health = get(server, "/health", auth="").json()
    assert (health["status"], len(health["replicas"])) == ("idle", 2)
    assert get(server, "/ready").json() == {"status": "ready", "replicas": 2, "replicas_ready": 2}
    families = list(text_string_to_metric_families(get(server, "/metrics").text))
    assert len({family.name for family in families}) == len(families)
    finished = [s for f in families if f.name == "asyncllm_requests_finished" for s in f.samples]
    assert len({sample.labels["replica"] for sample in finished}) == 2
    live = get(server, "/live").json()
    assert (sorted(live["replicas"]), live["missing"]) == ([0, 1], [])
    ended = {row["replica"]: row for row in live["ended"]}
    assert ended.keys() == {0, 1}
    for row in ended.values():
        assert get(server, f"/live/{row['id']}/trace").json()["id"] == row["name"]
    head = requests.head(f"{server.url}/health", timeout=10)
    assert (head.status_code, head.content) == (200, b"")


def test_a_response_is_continued_where_it_is(client: openai.OpenAI) -> None:
    for i in range(4):
        first = client.responses.create(
            model=MODEL, input=f"Reverse the word planet{i}.", max_output_tokens=8
        )
        second = client.responses.create(
            model=MODEL, input="Once more.", previous_response_id=first.id, max_output_tokens=8
        )
        assert client.responses.retrieve(second.id).output_text == second.output_text
        for item in (client.responses.input_items.list(first.id).data[0], first.output[0]):
            referred: Any = [{"type": "item_reference", "id": item.id}]
            again = client.responses.create(model=MODEL, input=referred, max_output_tokens=8)
            assert again.status in ("completed", "incomplete")
        client.responses.delete(first.id)


def test_a_request_ends_when_its_client_leaves(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=SUM, stream=True, max_tokens=2000, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    end = time.monotonic() + SECONDS
    while get(server, "/load").json()["server_load"]:
        assert time.monotonic() < end, "the request still runs"


def test_a_name_that_was_used_twice_is_the_latest_requests(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    """On another replica than the first one, which goes on."""
    streams = []
    for i in range(2):
        stream = client.completions.create(
            model=MODEL,
            prompt=f"Twice {i}",
            stream=True,
            max_tokens=600,
            extra_body={"ignore_eos": True},
            extra_headers={"X-Request-Id": "a/b+c"},
        )
        next(iter(stream))
        streams.append(stream)
    assert {row["replica"] for row in get(server, "/live").json()["running"]} == {0, 1}
    url = f"{server.url}/v1/requests/a%2Fb+c/abort"
    answers = [requests.post(url, headers=KEY, timeout=10) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 404]
    ends = [[chunk.choices[0].finish_reason for chunk in stream][-1] for stream in streams[::-1]]
    assert ends == ["abort", "length"]
    assert get(server, "/v1/requests/a%2Fb+c/trace").status_code == 200


def test_a_replica_dies_under_load_and_comes_back(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    before = replicas(server)
    assert len(before) == 2

    def story(i: int) -> str:
        stream = client.completions.create(
            model=MODEL,
            prompt=f"Story {i}",
            stream=True,
            max_tokens=300,
            extra_body={"ignore_eos": True},
        )
        last = ""
        try:
            for chunk in stream:
                last = str(chunk.choices[0].finish_reason)
                started.add(i)
        except openai.APIError as error:
            return str(error)
        return last

    started: set[int] = set()
    with ThreadPoolExecutor(8) as pool:
        stories = [pool.submit(story, i) for i in range(8)]
        end = time.monotonic() + SECONDS
        while len(started) < 8:
            assert time.monotonic() < end
            time.sleep(0.01)
        before[0].send_signal(signal.SIGKILL)
        ends = [future.result() for future in stories]
    assert set(ends) == {"length", "the replica that was answering has died"}
    # The other one serves alone, until there are two again.
    while len(replicas(server)) < 2:
        assert client.completions.create(model=MODEL, prompt="One", max_tokens=2).choices
        assert time.monotonic() < end + SECONDS
    assert before[1] in replicas(server)
