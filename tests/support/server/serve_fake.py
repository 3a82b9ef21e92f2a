"""``python -m tests.support.server.serve_fake PORT DRAIN_SECONDS FAKE_OPTIONS``: a fake server."""

from __future__ import annotations

import json
import sys
from typing import Any

from asyncllm.errors import ModelError
from asyncllm.server.run import run
from asyncllm.server_config import ServerConfig
from tests.support.server.fake_llm import FakeLLM


def main(port: str, drain_seconds: str, options: str) -> int:
    fields: dict[str, Any] = json.loads(options)
    errors = {"expected": ModelError("no such model"), "bug": KeyError("oops")}
    if "load_error" in fields:
        fields["load_error"] = errors[fields["load_error"]]
    config = ServerConfig(port=int(port), drain_seconds=float(drain_seconds))
    return run(lambda: FakeLLM(**fields), config)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
