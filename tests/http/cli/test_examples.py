"""Every script in ``examples/`` runs at its smallest size, and prints what it promises."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.warm_python import WarmPython

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
#: No script may need more, however busy the machine.
SECONDS = 100


class Run(NamedTuple):
    """How a script is run, and a pattern that its output has."""

    args: str
    output: str


#: One line for each script. ``{url}`` is where ``embed_in_aiohttp.py`` serves the demo model, and
#: ``{out}`` an empty folder.
RUNS = {
    "bench_attention.py": Run("--quick --device cpu", r"2 x 1 @ 30 \+ 1 x 20 @ 10 +\d+\.\d / \d"),
    "bench_connect.py": Run("--count 50 --rounds 1", r"TTFT p50 +\d(.|\n)*/health"),
    "bench_constraints.py": Run("--quick --device cpu", r"grammar: a JSON schema +\d+ +\d+ +\d"),
    "bench_cpu.py": Run("--quick", r"SSE frame +\d(.|\n)*\n +4 +\d+ +\d+ +\d+\.\d\d"),
    "bench_grammar.py": Run("--quick", r"vocabulary of 4000(.|\n)* a Python thread keeps \d+%"),
    "bench_lag.py": Run("--quick", r"loop lag p99 \d+\.\d ms(.|\n)*/health p99 \d+\.\d ms"),
    "bench_ray.py": Run(  # the others take as long as all tests of Ray
        "--ways alone --streams 2 --tokens 300", r"alone: \d+ us of CPU time .*server \d"
    ),
    "bench_replicas.py": Run(
        "hits --chats 6 --turns 2 --connections 3 --replicas 2",
        r"2 replicas: +\d.*of one replica's",
    ),
    "bench_restart.py": Run(
        "--runs 1 --device sim --standby",
        r"first token\n( +\d+\.\d\d){3}  by a standby, started now; KV cache \d+ tokens\n.*VmRSS",
    ),
    "bench_scheduler.py": Run(
        "--quick", r"longest +10000 +\d(.|\n)*cached: plan +\d(.|\n)*waiting: server +\d"
    ),
    "bench_soak.py": Run(
        "--quick --device sim",
        r"healed\n +50 (.|\n)*files [+-]\d(.|\n)*\n0 requests went otherwise",
    ),
    "embeddings.py": Run("", r"^ *0\.\d+  (What is 27 \+ 45|How much is)"),
    "openai_client.py": Run("{url}/llm/v1", "27 [+] 45 = 72"),
    "quickstart.py": Run("", "72(.|\n)*tenalp"),
    "race.py": Run("", "3 cancelled, 3 aborted in the engine"),
    "simulate.py": Run("--quick", r"first token +p50 \d+\.\d ms(.|\n)*simulated +\d+ s"),
    "stream.py": Run("", r"Momo.*\.\s"),
    "train_demo/evaluate.py": Run("--quick --device cpu", r"unseen additions +100\.0 %  of 2"),
    "train_demo/train.py": Run("--quick --out {out}", "transformers agrees with the training code"),
}
#: Servers, which fixtures below run and ask; with a pattern for their addresses in what they print.
SERVERS = {
    "embed_in_aiohttp.py": r"Running on (http://\S+:\d+)",
    "embed_in_fastapi.py": r"running on (http://\S+:\d+)",
}
#: They measure what only GPUs do; ``--help`` alone is tried.
FOR_GPUS = {"bench_all_reduce.py"}


def environment() -> dict[str, str]:
    """No GPU, as kernels would be compiled first; and this repository's package."""
    changed = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **changed}


def scripts() -> list[str]:
    """What can be run; the other files there are imported."""
    paths = (path for path in EXAMPLES.rglob("*.py") if "__main__" in path.read_text())
    return sorted(path.relative_to(EXAMPLES).as_posix() for path in paths)


@contextmanager
def serving(name: str) -> Iterator[str]:
    """An application with a model inside."""
    process = subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / name), "--port", "0"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = None
        for line in process.stdout:
            if found := re.search(SERVERS[name], line):
                break
        assert found, "it ended before it served"
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving("embed_in_aiohttp.py") as found:
        yield found


def test_every_script_is_run_here() -> None:
    assert scripts() == sorted({*RUNS, *SERVERS, *FOR_GPUS})


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    modules = "asyncllm.executor.build", "asyncllm.llm.async_llm", "asyncllm.server.app"
    with WarmPython(*modules, env=environment()) as warm:
        yield warm


@pytest.mark.parametrize("script", RUNS)
def test_a_script(
    script: str, python: WarmPython, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    run = RUNS[script]
    served = request.getfixturevalue("url") if "{url}" in run.args else ""
    args = run.args.format(url=served, out=tmp_path / "out").split()
    done = python.run(EXAMPLES / script, args, tmp_path, SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.search(run.output, done.stdout, re.MULTILINE), done.stdout[-2000:]


@pytest.mark.parametrize("script", [*RUNS, *SERVERS, *FOR_GPUS])
def test_help_of_a_script(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = EXAMPLES / script
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.syspath_prepend(path.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    said = capsys.readouterr()
    assert (ended.value.code, said.err) == (0, "")
    assert said.out.startswith("usage: ")


def fetch(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=20) as response:
        found: bytes = response.read()
    return found


def test_an_aiohttp_application_with_a_model_inside(url: str) -> None:
    assert fetch(f"{url}/reverse/planet") == b"tenalp\n"


def test_a_fastapi_application_with_a_model_inside() -> None:
    with serving("embed_in_fastapi.py") as url:
        assert fetch(f"{url}/reverse/planet") == b"tenalp\n"
        assert b'"asyncllm-demo"' in fetch(f"{url}/llm/v1/models")


def test_the_notebook(python: WarmPython, tmp_path: Path) -> None:
    """Its cells run one after the other beside an event loop, as in a notebook."""
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    script = tmp_path / "cells.py"
    script.write_text(f"import asyncio\n\nasync def main():\n    exec({code!r}, {{}})\n")
    with script.open("a") as file:
        file.write("\nasyncio.run(main())\n")
    done = python.run(script, [], tmp_path, SECONDS)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "tenalp" in done.stdout
    assert "27 + 45 = 72" in done.stdout


def test_a_client_without_a_server_says_so(python: WarmPython, tmp_path: Path) -> None:
    client = EXAMPLES / "openai_client.py"
    done = python.run(client, ["http://127.0.0.1:9/v1"], tmp_path, SECONDS)
    assert done.returncode == 1
    assert done.stderr == "no server at http://127.0.0.1:9/v1: start one with 'asyncllm serve'\n"
