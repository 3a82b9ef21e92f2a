"""``asyncllm batch``: OpenAI's batch files, with a fake model and with the demo."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncllm.cli.answer_file import keep_answered
from asyncllm.cli.batch_file import BadItem, Item, answered_id, read_items, run_batch
from asyncllm.config.server_config import ServerConfig
from asyncllm.engine.requests.reservations import Reservation
from asyncllm.errors import EngineDead, QueueFull
from tests.support.server.fake_llm import EMBEDDING_SIZE, FakeLLM

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "aé"}]}


def line(name: Any, url: str = CHAT, body: Any = HELLO, **more: Any) -> bytes:
    entry = {"custom_id": name, "method": "POST", "url": url, "body": body, **more}
    return json.dumps(entry).encode() + b"\n"


async def answers_of(
    items: list[Item | BadItem], llm: FakeLLM | None = None, **config: Any
) -> dict[str | None, Any]:
    llm = llm or FakeLLM()
    await llm.start()
    results: list[tuple[bytes, bool]] = []
    try:
        await run_batch(
            llm,  # type: ignore[arg-type]
            ServerConfig(**config),
            items,
            lambda line, failed: results.append((line, failed)),
        )
    finally:
        await llm.aclose()
    assert llm.stats.running == llm.stats.waiting == 0
    lines = [json.loads(text) for text, _ in results]
    for (text, failed), found in zip(results, lines, strict=True):
        assert text.endswith(b"\n")
        assert text.count(b"\n") == 1
        assert list(found) == ["id", "custom_id", "response", "error"]
        response = found["response"]
        assert failed == (response is None or response["status_code"] != 200)
        assert (response is None) == (found["error"] is not None)
    assert len({found["id"] for found in lines}) == len(lines) == len(items)
    return {found["custom_id"]: found for found in lines}


# -- the file --------------------------------------------------------------------------------------


def test_valid_lines() -> None:
    content = line("a") + b"\n  \n" + line("é", COMPLETIONS, {"prompt": "x"}).rstrip(b"\n")
    first, second = read_items(b"\xef\xbb\xbf" + content)
    assert first == Item("a", CHAT, json.dumps(HELLO).encode())
    assert second == Item("é", COMPLETIONS, b'{"prompt": "x"}')


@pytest.mark.parametrize(
    ("bad", "name", "part"),
    [
        (b"oops\n", None, "malformed"),
        (b"[1]\n", None, "object"),
        (b'{"custom_id": "\xff"}\n', None, "line 2"),
        (b'{"custom_id": "\\ud800", "body": {}}\n', None, "line 2"),
        (b"[" * 100_000 + b"\n", None, "line 2"),
        (line(None), None, "custom_id"),
        (line(7), None, "custom_id"),
        (line("a"), "a", "not unique"),
        (line("b", method="GET"), "b", "must be POST"),
        (line("b", "/v1/models"), "b", "url"),
        (line("b", body=[]), "b", "object"),
        (line("b", body=HELLO | {"stream": True}), "b", "not streamed"),
        (line("b", "/v1/responses", {"input": "a", "background": True}), "b", "background"),
        (b'{"custom_id": "b", "method": "POST", "url": "/v1/completions"}\n', "b", "body"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_an_invalid_line(bad: bytes, name: str | None, part: str) -> None:
    first, second, third = read_items(line("a") + bad + line("c"))
    assert isinstance(second, BadItem)
    assert second.custom_id == name
    assert second.message.startswith("line 2: ")
    assert part in second.message
    assert isinstance(first, Item)
    assert isinstance(third, Item)


def test_answered_requests_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    def kept(content: bytes) -> tuple[set[str], bytes]:
        path.write_bytes(content)
        return keep_answered(path, answered_id), path.read_bytes()

    fine = b'{"custom_id":"a","response":{"status_code":200},"error":null}\n'
    refused = b'{"custom_id":"b","response":{"status_code":400},"error":null}\n'
    bad = b'{"custom_id":null,"response":null,"error":{}}\n'
    assert kept(fine + refused + bad + b'{"custom_id":"c","resp') == ({"a"}, fine)
    assert kept(b"") == kept(b'{"half') == (set(), b"")
    with pytest.raises(ValueError, match="line 3"):
        kept(fine + refused + b"a\n")
    assert path.read_bytes() == fine + refused + b"a\n"


# -- answers ---------------------------------------------------------------------------------------


async def test_every_item_gets_the_servers_response() -> None:
    content = (
        line("chat")
        + line("text", COMPLETIONS, {"prompt": ["x", "yy"], "n": 2})
        + line("vector", "/v1/embeddings", {"input": ["x", "yy"]})
        + line("response", "/v1/responses", {"input": "aé"})
        + b"oops\n"
        + line("model", body=HELLO | {"model": "other"})
        + line("field", body={"messages": []})
        + line("twice", body=HELLO).replace(b'"body": {', b'"body": {"n": 1, "n": 2, ')
    )
    found = await answers_of(read_items(content))
    assert len(found) == 8
    response = found["response"]["response"]["body"]
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["output"][0]["content"][0]["text"] == "user: aé\nassistant: "
    chat = found["chat"]["response"]
    assert chat["status_code"] == 200
    message = chat["body"]["choices"][0]["message"]
    assert message["content"] == "user: aé\nassistant: "
    assert chat["body"]["id"] == f"chatcmpl-{chat['request_id']}"
    texts = [choice["text"] for choice in found["text"]["response"]["body"]["choices"]]
    assert texts == ["x", "x", "yy", "yy"]
    vectors = found["vector"]["response"]["body"]["data"]
    assert [len(entry["embedding"]) for entry in vectors] == [EMBEDDING_SIZE] * 2
    assert found[None]["error"]["code"] == "invalid_request"
    assert found["model"]["response"]["status_code"] == 404
    assert found["model"]["response"]["body"]["error"]["code"] == "model_not_found"
    assert found["field"]["response"]["body"]["error"]["param"] == "messages"
    assert found["twice"]["response"]["status_code"] == 400


async def test_more_than_the_queue_takes() -> None:
    """A full queue refuses; the batch waits for it, and nothing fails."""

    class Impatient(FakeLLM):
        refused = 0

        def reserve(
            self, num_tokens: int = 1, num_requests: int = 1, tenant: str = ""
        ) -> Reservation:
            try:
                return super().reserve(num_tokens, num_requests, tenant)
            except QueueFull as error:
                type(self).refused += 1
                error.retry_after = 0.01
                raise

    llm = Impatient(max_running=12)
    items = read_items(b"".join(line(str(i), body=HELLO | {"n": 2}) for i in range(60)))
    found = await answers_of(items, llm)
    assert {answer["response"]["status_code"] for answer in found.values()} == {200}
    assert Impatient.refused > 0


async def test_served_model_names() -> None:
    items = read_items(line("a", body=HELLO | {"model": "gpt-x"}))
    found = await answers_of(items, served_model_name=("gpt-x",))
    assert found["a"]["response"]["body"]["model"] == "gpt-x"


async def test_a_dead_engine_ends_it() -> None:
    llm = FakeLLM()
    await llm.start()
    llm.healthy = False
    items = read_items(line("a") + line("b"))
    results: list[bytes] = []
    with pytest.raises(EngineDead, match="the engine has stopped"):
        await run_batch(
            llm,  # type: ignore[arg-type]
            ServerConfig(),
            items,
            lambda line, failed: results.append(line),
        )
    assert results == []


# -- the command -----------------------------------------------------------------------------------


def batch(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncllm", "batch", *map(str, args)]
    options = ["--device", "cpu", "--cpu-threads", "1"]
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=100)


def test_the_command(tmp_path: Path) -> None:
    requests, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"messages": [{"role": "user", "content": "What is 27 + 45?"}]}
    requests.write_bytes(line("sum", body=body) + b"oops\n")
    first = batch(requests, out)
    assert first.returncode == 1
    assert "1 request answered, 1 failed" in first.stderr
    lines = {found["custom_id"]: found for found in map(json.loads, out.read_text().splitlines())}
    message = lines["sum"]["response"]["body"]["choices"][0]["message"]
    assert "72" in message["content"]
    assert lines[None]["error"]["message"].startswith("line 2: ")

    again = batch(requests, out)
    assert again.returncode == 1
    assert "--resume" in again.stderr

    # The line is mended, another is added, and the last run was cut off in mid-line.
    kept = next(text for text in out.read_bytes().splitlines(True) if b'"sum"' in text)
    with out.open("ab") as file:
        file.write(b'{"id":"batch_req_1","custom')
    text = {"prompt": "Once upon a time", "max_tokens": 4}
    requests.write_bytes(line("sum", body=body) + line("text", COMPLETIONS, text))
    resumed = batch(requests, out, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "1 of 2 requests are answered already" in resumed.stderr
    mended, added = out.read_bytes().splitlines(True)
    assert mended == kept
    assert json.loads(added)["response"]["body"]["usage"]["completion_tokens"] == 4

    done = batch(requests, out, "--resume")
    assert done.returncode == 0
    assert out.read_bytes() == mended + added


def test_wrong_files(tmp_path: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_bytes(line("a"))
    assert batch(requests, requests).returncode == 2
    assert batch(tmp_path / "none.jsonl", tmp_path / "out").returncode == 1
    other = tmp_path / "other.jsonl"
    other.write_text('{"index": 0}\n')
    refused = batch(requests, other, "--resume")
    assert refused.returncode == 1
    assert "line 1 is no answer of a batch" in refused.stderr
    assert other.read_text() == '{"index": 0}\n'
