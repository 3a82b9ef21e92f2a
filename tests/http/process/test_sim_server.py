"""``asyncllm serve --device sim``: the real server in a process that never imports torch."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from asyncllm import AsyncLLM
from asyncllm.executor.sim import virtual_time

# Runs the command line, and says at its end which heavy packages it has loaded.
PROGRAM = """\
import sys
from asyncllm.__main__ import main
code = main(sys.argv[1:])
print("loaded:", *sorted({"torch", "transformers", "msgspec"} & sys.modules.keys()))
sys.exit(code)
"""


class Server:
    def __init__(self, process: subprocess.Popen[str], port: int):
        self.process = process
        self.port = port

    def post(self, path: str, body: Any) -> bytes:
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            connection.request("POST", path, json.dumps(body))
            with connection.getresponse() as response:
                assert response.status == 200
                return response.read()

    def stop(self) -> str:
        """What it prints at its end."""
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0
        return rest


@contextmanager
def serving(*options: str) -> Iterator[Server]:
    command = [sys.executable, "-c", PROGRAM, "serve", "--device", "sim", "--port", "0"]
    command += ["--no-supervise", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = re.search(r"ready on http://\S+:(\d+) .*\bsim, bfloat16\b", line)
            assert match, f"the server said {line!r}"
            yield Server(process, int(match[1]))
        finally:
            process.kill()


def test_it_serves_chats_without_torch() -> None:
    with serving("--sim-profile", "h200-0.6b") as server:
        body = {
            "messages": [{"role": "user", "content": "Hello!"}],
            "max_tokens": 20,
            "seed": 1,
            "ignore_eos": True,
        }
        streaming = {"stream": True, "stream_options": {"include_usage": True}}
        answer = server.post("/v1/chat/completions", {**body, **streaming})
        *frames, done, rest = answer.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames]
        text = "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1])
        assert chunks[-1]["usage"]["completion_tokens"] == 20

        again = json.loads(server.post("/v1/chat/completions", body))
        assert again["choices"][0]["message"]["content"] == text
        assert again["choices"][0]["finish_reason"] == "length"
        assert server.stop() == "loaded: msgspec\n"


def test_outputs_end_by_themselves_with_logprobs_if_wanted() -> None:
    with serving("--sim-profile", "h200-0.6b") as server:
        body = {"prompt": "Once", "max_tokens": 4000, "seed": 3, "logprobs": 2}
        [choice] = json.loads(server.post("/v1/completions", body))["choices"]
        assert choice["finish_reason"] == "stop"
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) > 0
        assert len(set(logprobs["token_logprobs"])) == 1, "all tokens are equally likely"


def test_an_hour_of_http_load_on_a_virtual_clock() -> None:
    async def one(session: aiohttp.ClientSession, url: str, n: int) -> tuple[int, float]:
        """Tokens of a stream that begins after n minutes, and the seconds it took."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(60 * n)
        began = loop.time()
        body = {
            "prompt": [5] * 1000 + [n],
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with session.post(url, json=body) as response:
            assert response.status == 200
            frames = [line async for line in response.content if line.startswith(b"data: {")]
        usage = json.loads(frames[-1].removeprefix(b"data: "))["usage"]
        return usage["completion_tokens"], loop.time() - began

    async def main() -> list[tuple[int, float]]:
        async with AsyncLLM(device="sim", sim_profile="h200-8b") as llm:
            runner = web.AppRunner(llm.aiohttp_app(), shutdown_timeout=1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/completions"
            async with aiohttp.ClientSession() as session:
                answers = await asyncio.gather(*(one(session, url, n) for n in range(60)))
            await runner.cleanup()
        return answers

    answers = virtual_time.run(main())
    assert {tokens for tokens, _ in answers} == {200}
    # 200 steps of 3.9 ms, and a prompt; the others find most of it in the cache.
    assert answers[0][1] == pytest.approx(0.803, rel=0.03)
    assert all(taken < answers[0][1] for _, taken in answers[1:])
