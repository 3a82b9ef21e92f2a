"""A server on a GPU where Triton does not work: absent, of another version, or without a compiler.

It says so on one line, and answers as it would with Triton.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.server.serving import ServerProcess

openai = pytest.importorskip("openai")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

MODEL = "asyncllm-demo"
SUM: Any = [{"role": "user", "content": "What is 27 + 45?"}]
SIZES = ("--max-num-seqs", "8", "--max-num-batched-tokens", "512", "--max-model-len", "512")
REASON = "Triton's do not run here: "

#: What Python runs first, and what the log then says. None: there is no C compiler.
BROKEN: dict[str, tuple[str | None, str]] = {
    "no compiler": (None, "RuntimeError"),
    "absent": ("import sys; sys.modules['triton'] = None", "Triton is not installed"),
    "a name moved": (
        "import triton.experimental.gluon.nvidia.hopper as hopper; del hopper.TensorDescriptor",
        "ImportError",
    ),
    "another launcher": (
        "import triton.backends.nvidia.driver as driver\n"
        "def call(self, one, two): pass\n"
        "driver.CudaLauncher.__call__ = call",
        "TypeError",
    ),
}


def environment(how: str, folder: Path) -> dict[str, str]:
    """Of a server with a Triton that is broken in this way, and an empty kernel cache."""
    env = dict(os.environ, TRITON_CACHE_DIR=str(folder / "cache"))
    first, _ = BROKEN[how]
    if first is None:
        env.pop("CC", None)
        return env | {"PATH": str(folder)}
    (folder / "sitecustomize.py").write_text(first)
    root = Path(__file__).parents[2]
    paths = str(folder), str(root), *filter(None, [env.get("PYTHONPATH")])
    return env | {"PYTHONPATH": os.pathsep.join(paths)}


def answers(server: ServerProcess) -> list[str]:
    """To greedy requests with all that kernels do to logits, and to one that draws."""
    wishes: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "logprobs": True, "top_logprobs": 3},
        {"temperature": 0, "frequency_penalty": 0.1, "logit_bias": {"5": -1}},
        {"temperature": 0, "extra_body": {"structured_outputs": {"regex": r"27 \+ 45 = [0-9]{2}"}}},
        {"temperature": 0.8, "seed": 3, "top_p": 0.2, "extra_body": {"top_k": 20}},
    ]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        return [
            client.chat.completions.create(model=MODEL, messages=SUM, **wish)
            .choices[0]
            .message.content
            or ""
            for wish in wishes
        ]


@pytest.mark.parametrize("how", BROKEN)
def test_it_serves_in_plain_torch(how: str, tmp_path: Path) -> None:
    with open(tmp_path / "log", "w+") as log:
        env = environment(how, tmp_path)
        server = ServerProcess("--device", "cuda", *SIZES, env=env, log=log)
        try:
            got = answers(server)
        finally:
            assert server.stop() == 0
        log.seek(0)
        lines = log.read().splitlines()
    assert all("72" in answer for answer in got), got
    [said] = [line for line in lines if " WARNING asyncllm" in line]
    assert said.partition(REASON)[2].startswith(BROKEN[how][1]), said


@pytest.mark.parametrize("how", ["no compiler", "absent"])
def test_asking_for_triton_is_an_error(how: str, tmp_path: Path) -> None:
    command = ["-m", "asyncllm", "serve", "--device", "cuda", "--port", "0", "--attention"]
    run = subprocess.run(
        [sys.executable, *command, "triton"],
        env=environment(how, tmp_path),
        capture_output=True,
        text=True,
    )
    assert run.returncode not in (0, -9)
    assert f"attention triton: {BROKEN[how][1]}" in run.stderr
