"""What ``serve`` begins before it imports torch: for whom, and for whom not."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm import demo
from asyncllm.__main__ import main
from asyncllm.executor.startup import preload
from asyncllm.llm import compile_ahead
from asyncllm.server import run as server

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
        (["--executor", "process"], [], 1, 1),  # another process owns the GPU
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
