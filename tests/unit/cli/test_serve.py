"""``asyncllm serve``: what is served how; and the bar while it loads."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm import demo
from asyncllm.__main__ import main
from asyncllm.config import EngineConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.executor.startup import preload
from asyncllm.llm import compile_ahead
from asyncllm.llm.async_llm import AsyncLLM
from asyncllm.server import run as server
from asyncllm.system.terminal import LOGGED_BYTES, LoadingBar
from tests.support.server.ports import free_port


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What the server was asked to serve, instead of serving it."""
    served: list[Any] = []

    def run(make_llm: Callable[[], AsyncLLM], config: ServerConfig, **_: Any) -> int:
        served.extend((make_llm().config, config))
        return 3

    monkeypatch.setattr("asyncllm.server.run.run", run)
    yield served
    logging.getLogger("asyncllm").setLevel(logging.NOTSET)


def test_defaults_serve_the_demo(served: list[Any]) -> None:
    assert main(["serve"]) == 3
    assert served == [EngineConfig(), ServerConfig()]


def test_options_of_both_sides(served: list[Any]) -> None:
    line = (
        "serve some/model --host 0.0.0.0 --port 0 --dtype float16 --max-model-len 128 "
        "--kv-cache-tokens 1024 --max-num-seqs 8 --served-model-name a --served-model-name b "
        "--api-key k --load-format dummy --device cpu"
    )
    assert main(line.split()) == 3
    engine = EngineConfig(
        model="some/model",
        dtype="float16",
        max_model_len=128,
        kv_cache_tokens=1024,
        max_num_seqs=8,
        load_format="dummy",
        device="cpu",
    )
    server = ServerConfig(host="0.0.0.0", port=0, served_model_name=("a", "b"), api_key=("k",))
    assert served == [engine, server]


@pytest.mark.parametrize(("total", "drawn"), [(LOGGED_BYTES // 2, False), (LOGGED_BYTES * 2, True)])
def test_the_loading_bar_is_for_large_models(
    total: int, drawn: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = LoadingBar()
    bar(0, total)
    bar(total, total)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("loading 100%" in captured.err) is drawn


def test_a_standby_needs_a_parent(capsys: pytest.CaptureFixture[str], served: list[Any]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["serve", "--standby", "--no-supervise"])
    assert "--standby needs the parent process" in capsys.readouterr().err
    assert not served


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tls-cert a --tls-key b", "--tls-cert: with --dp above 1"),
        ("--no-supervise", "--no-supervise: replicas"),
        ("--standby", "--standby: only for a single server"),
    ],
)
def test_what_replicas_cannot_do(
    options: str, message: str, capsys: pytest.CaptureFixture[str], served: list[Any]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(f"serve --dp 2 {options}".split())
    assert message in capsys.readouterr().err
    assert not served


SIM = ["--device", "sim", "--sim-profile", "h200-0.6b"]


class Begun:
    """What was begun: contexts by GPU, and by folder, kernels and files of weights."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.contexts: list[int] = []
        self.kernels: list[Path] = []
        self.weights: list[Path] = []
        monkeypatch.setattr(preload, "preload_cuda", self.contexts.append)
        monkeypatch.setattr(preload, "read_ahead", self.weights.append)
        monkeypatch.setattr(
            compile_ahead, "CompileAhead", lambda config, folder: self.kernels.append(folder)
        )
        monkeypatch.setattr(server, "run", lambda *parts, **named: 0)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Begun:
    return Begun(monkeypatch)


@pytest.mark.parametrize(
    ("options", "contexts", "kernels", "weights"),
    [
        ([], [0], 1, 1),
        (["--device", "cuda:1"], [1], 1, 1),
        (["--device", "cpu"], [], 0, 1),
        (SIM, [], 0, 0),
        (["--load-format", "dummy"], [0], 1, 0),
    ],
)
def test_each_kind_of_server_begins_what_it_needs(
    options: list[str], contexts: list[int], kernels: int, weights: int, begun: Begun
) -> None:
    assert main(["serve", "--no-supervise", *options]) == 0
    assert begun.contexts == contexts
    assert begun.kernels == [demo.path()] * kernels
    assert begun.weights == [demo.path()] * weights


def test_a_model_that_is_not_here_yet_waits(begun: Begun) -> None:
    assert main(["serve", "--no-supervise", "org/model"]) == 0
    assert (begun.contexts, begun.kernels, begun.weights) == ([0], [], [])


@pytest.mark.parametrize(
    "model", ["/no/such/folder", "~nobody-of-that-name/model", "asyncllm-dmeo", "."]
)
def test_for_what_is_no_model_nothing_begins(
    model: str,
    begun: Begun,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--no-supervise", model]) == 1
    assert (begun.contexts, begun.kernels, begun.weights) == ([], [], [])
    assert caplog.messages[-1].startswith("cannot load the model: ")


def test_a_model_that_is_here_does_not(tmp_path: Path, begun: Begun) -> None:
    (tmp_path / "config.json").touch()
    assert main(["serve", "--no-supervise", str(tmp_path)]) == 0
    assert begun.kernels == begun.weights == [tmp_path]


#: Serves a chat after ``import_ahead``, and prints what was imported meanwhile.
LATE = """
import http.client, json, os, signal, sys, threading, time
from asyncllm.__main__ import main
from asyncllm.cli.commands import serve
from asyncllm.cli.commands.serve import import_ahead
from asyncllm.config import EngineConfig

def chat(port):
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2, "stream": True}
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            answer = connection.getresponse()
            said = answer.read()
        except ConnectionError:
            continue
        if answer.status == 200:
            break
        time.sleep(0.01)
    assert said.endswith(b"[DONE]\\n\\n")
    print(*sorted(sys.modules.keys() - before))
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGTERM)

import_ahead(EngineConfig(device="cpu"))
before = set(sys.modules)
threading.Thread(target=chat, args=(int(sys.argv[1]),), daemon=True).start()
sys.exit(main(["serve", "--no-supervise", "--device", "cpu", "--port", sys.argv[1]]))
"""

#: Prints what is known of a GPU after ``import_ahead``.
OPENED = """
import sys
from asyncllm.cli.commands.serve import import_ahead
from asyncllm.config import EngineConfig
import_ahead(EngineConfig(device="cuda"))
import torch
from triton.runtime import driver
print(torch.cuda.is_initialized(), driver._active, "asyncllm.kernels.triton.probe" in sys.modules)
"""


def run(code: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code, *args], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_server_imports_nothing_more_until_its_first_token() -> None:
    *_, late = run(LATE, str(free_port())).splitlines()
    codecs = {name for name in late.split() if name.startswith("encodings.")}
    assert set(late.split()) - codecs == set()


def test_kernels_are_imported_and_no_device_is_opened() -> None:
    assert run(OPENED).split() == ["False", "None", "True"]
