"""The clients of the Node world: the official openai package, and Vercel's ai with its provider."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.server.serving import ServerProcess

FOLDER = Path(__file__).parents[3] / "tests" / "node"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What ``clients.mjs`` prints of the demo model."""
    if shutil.which("npm") is None:
        pytest.skip("Node is not installed")
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "clients.mjs"):
        shutil.copy(FOLDER / name, folder)
    subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=folder, check=True, timeout=90)
    server = ServerProcess("--cpu-threads", "1")
    try:
        command = ["node", "clients.mjs", server.url]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    finally:
        assert server.stop() == 0
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_openai(found: Any) -> None:
    openai = found["openai"]
    assert "72" in openai["text"]
    assert "72" in openai["streamed"]
    assert openai["total"] > 10
    assert openai["finish"] == "tool_calls"
    assert openai["call"]["name"] == "weather"
    assert 3 <= json.loads(openai["call"]["arguments"])["days"] <= 40
    assert 3 <= openai["json"]["days"] <= 40
    assert "72" in openai["response"]
    assert openai["refused"] == {"status": 404, "code": "model_not_found", "param": "model"}


def test_ai(found: Any) -> None:
    ai = found["ai"]
    assert "72" in ai["text"]
    assert "72" in ai["streamed"]
    assert ai["tokens"] > 10
    assert ai["finish"] == "tool-calls"
    assert ai["call"]["name"] == "weather"
    assert 3 <= ai["call"]["input"]["days"] <= 40
    assert 3 <= ai["object"]["days"] <= 40
