"""README.md and docs/ as a stranger uses them: every code block is pasted, from top to bottom.

The blocks of a chapter run one after the other in one folder. Shell commands run in bash,
with the environment's programs on PATH. Five things differ from a stranger's machine. The server
listens on a free port and not on 8000. Those of docs/ serve the simulated device, unless they name
another: importing torch is most of what a short server takes. ``Qwen/Qwen3-0.6B`` and
``./my-checkpoint`` are folders with the demo model's weights, so nothing is downloaded. Benchmarks
send a few requests only. What NOT_RUN names is not run, and what stands in two documents is run
once.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.request import Request, urlopen

import pytest
from markdown_it import MarkdownIt

from tests.support.server.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.server.serving import Server

ROOT = Path(__file__).parents[3]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
DEMO = ROOT / "asyncllm" / "demo" / "model"

#: How a command begins that is not run here, and why.
NOT_RUN = {
    "make serve": "downloads PyTorch and serves until it is stopped",
    "make test": "runs these tests",
    "make check": "runs these tests",
    "python3 -m venv": "the tests run in an environment already",
    "source .venv/bin/activate": "the tests run in an environment already",
    "pip install": "downloads packages",
    "git clone": "needs the network",
    "docker": "needs Docker",
    "kubernetes-validate": "is not installed for the tests",
    "asyncllm serve --ray": "tests/ray runs it",
    "serve run": "serves on a cluster until it is stopped",
    "asyncllm doctor Qwen/Qwen3-8B": "reads the model's config.json from the hub",
    "asyncllm serve Qwen/Qwen3-8B --": "needs the checkpoint of a head",
    "asyncllm serve zai-org/GLM-4.5-Air": "has 200 GB of weights",
    "asyncllm bench offline FOLDER": "needs a model of one's own",
    "asyncllm bench serve FOLDER": "needs a model of one's own",
    "asyncllm bench serve --device cpu --cpu-threads 1 --clients 1": "needs prompts of one's own",
    "asyncllm kernels": "needs a compiler, and minutes",
    "python -m tools.tune_kernels": "needs a GPU",
    "python -m tools.bench_policies --hostile deadlines": "test_forecast.py serves these requests",
    "asyncllm serve Qwen/Qwen3-0.6B --device cuda": "needs a GPU",
    "ASYNCLLM_PRETEND_CAPABILITY=8.0 asyncllm serve": "needs a GPU",
}
if shutil.which("prometheus") is None:
    NOT_RUN["python -m tools.check_dashboard"] = "needs Prometheus"
#: What benchmarks are told at last: the figures in documents take longer than a test may.
FEW = "--clients 4 --num-prompts 8"
#: Languages of blocks that nobody pastes: drawings and formulas, and other programs' files.
NOT_CODE = {"text", "nginx"}
SHELLS = {"", "bash", "console", "sh", "shell"}


class Snippet(NamedTuple):
    """``place`` is the document and the line where it begins."""

    language: str
    text: str
    place: str

    @property
    def reason(self) -> str | None:
        """Why it is not run, if so."""
        return next((NOT_RUN[key] for key in NOT_RUN if self.text.startswith(key)), None)


def commands(block: str) -> Iterator[str]:
    """The block's shell commands, each with the lines on which it goes on."""
    command = ""
    for line in block.splitlines():
        command += line + "\n"
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a quote is still open
            continue
        if not line.endswith("\\"):
            if words:
                yield command.strip()
            command = ""
    assert not command, f"this command has no end: {command}"


def snippets(document: Path) -> Iterator[tuple[str, Snippet]]:
    """With the chapter: Python blocks as they are, shell blocks command by command."""
    chapter = name = str(document.relative_to(ROOT))
    tokens = MarkdownIt().parse(document.read_text(encoding="utf-8"))
    for token, following in zip(tokens, [*tokens[1:], None], strict=True):
        if token.type == "heading_open" and token.tag == "h2" and following is not None:
            chapter = f"{name}: {following.content}"
        elif token.type in {"fence", "code_block"}:
            assert token.map is not None
            block = Snippet(token.info.strip(), token.content, f"{name}:{token.map[0] + 1}")
            if block.language in NOT_CODE:
                continue
            if block.language in SHELLS:
                for command in commands(block.text):
                    yield chapter, block._replace(text=command)
            else:
                yield chapter, block


def chapters() -> dict[str, list[Snippet]]:
    """What is to be run, by chapter; those in which nothing is are left out."""
    found: dict[str, list[Snippet]] = {}
    seen: set[str] = set()
    for document in DOCUMENTS:
        for chapter, snippet in snippets(document):
            if snippet.reason is None and snippet.text not in seen:
                found.setdefault(chapter, []).append(snippet)
            seen.add(snippet.text)
    return found


class Desk:
    """A folder, a terminal for commands, and another one in which the latest server runs.

    Before a chapter has started a server, the one at ``demo_port`` stands for it.
    """

    def __init__(self, folder: Path, demo_port: int):
        for name in ("Qwen/Qwen3-0.6B", "my-checkpoint"):
            _copy_model(folder / name)
        (folder / "home").mkdir()
        (folder / "home" / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
        self.port = free_port()
        self.folder = folder
        self.demo_port = demo_port
        self._server: subprocess.Popen[str] | None = None
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "CURL_HOME": str(folder / "home"),
            "OMP_NUM_THREADS": "1",
        }

    def run(self, snippet: Snippet) -> None:
        uses_server = "localhost:8000" in snippet.text
        port = self.demo_port if self._server is None else self.port
        text = snippet.text.replace("localhost:8000", f"localhost:{port}")
        if snippet.language in SHELLS and text.startswith("asyncllm serve"):
            self.serve(text, snippet.place.startswith("docs/") and "--device" not in text)
            return
        if not uses_server:
            self.stop()
        if text.startswith("asyncllm bench serve"):
            text = f"{text} {FEW}"
        if snippet.language in SHELLS:
            self._shell(text)
        elif snippet.language == "python":
            exec(compile(text, snippet.place, "exec"), {"__name__": "__main__"})
        else:
            pytest.fail(f"{snippet.place}: nobody knows how to run {snippet.language!r}")

    def _shell(self, command: str) -> None:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=self._environment,
            input="What is 27 + 45?\n",
            capture_output=True,
            text=True,
            timeout=240,
        )
        print(done.stdout)
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"

    def serve(self, command: str, simulated: bool) -> None:
        """Start what ``command`` says in place of the server before, and ask it for an answer."""
        self.stop()
        command = " ".join(map(shlex.quote, shlex.split(command, comments=True)))
        self._server = subprocess.Popen(
            ["bash", "-c", f"exec {command} --port {self.port}{' --device sim' * simulated}"],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        line = self._server.stdout.readline()
        assert re.search(rf"ready on http://\S+:{self.port}", line), f"{command} said {line!r}"
        key = re.search(r"--api-key (\S+)", command)
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {key[1]}"} if key else {}
        body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8}).encode()
        url = f"http://localhost:{self.port}/v1/completions"
        with urlopen(Request(url, body, headers), timeout=30) as answer:
            assert json.loads(answer.read())["usage"]["completion_tokens"] > 0

    def stop(self) -> None:
        """End the server as Ctrl-C does."""
        server, self._server = self._server, None
        if server is not None:
            server.send_signal(signal.SIGINT)
            server.communicate(timeout=30)
            assert server.returncode == 0


def _copy_model(folder: Path) -> None:
    """The demo model, with as many positions as Qwen3-0.6B has."""
    folder.mkdir(parents=True)
    for path in DEMO.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 40_960}))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo: Server) -> Iterator[Desk]:
    monkeypatch.chdir(tmp_path)
    made = Desk(tmp_path, demo.port)
    yield made
    made.stop()


CHAPTERS = chapters()


@pytest.mark.timeout(300)  # several processes that import torch
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_everything_that_can_be_pasted_runs(chapter: str, desk: Desk) -> None:
    for snippet in CHAPTERS[chapter]:
        print(f"-- {snippet.place}: {snippet.text}")
        desk.run(snippet)


def test_most_of_it_is_run() -> None:
    run = [snippet.text for chapter in CHAPTERS.values() for snippet in chapter]
    for part in ("openai", "AsyncLLM", "LLM(", "asyncllm serve", "asyncllm generate", "curl"):
        assert any(part in text for text in run), part


def test_every_example_that_is_named_exists() -> None:
    texts = [document.read_text(encoding="utf-8") for document in DOCUMENTS]
    named = re.findall(r"`python (examples/[\w/.]+)", "\n".join(texts))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_commands_are_cut_out_of_blocks() -> None:
    block = "# first\na 'b\nc'   # why\n\nd \\\n  e\n"
    assert list(commands(block)) == ["a 'b\nc'   # why", "d \\\n  e"]
