"""What a process that stands by has imported: all that a server needs, and without a device."""

from __future__ import annotations

import socket
import subprocess
import sys

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
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    *_, late = run(LATE, str(port)).splitlines()
    codecs = {name for name in late.split() if name.startswith("encodings.")}
    assert set(late.split()) - codecs == set()


def test_kernels_are_imported_and_no_device_is_opened() -> None:
    assert run(OPENED).split() == ["False", "None", "True"]


def test_other_processes_steps_are_not_imported() -> None:
    code = (
        "import sys\nfrom asyncllm.cli.commands.serve import import_ahead\n"
        "from asyncllm.config import EngineConfig\n"
        "import_ahead(EngineConfig(executor='process'))\nprint('torch' in sys.modules)"
    )
    assert run(code) == "False\n"
