"""A fake server: ``python -m tests.support.server.serve_fake PORT DRAIN_SECONDS FAKE_OPTIONS``.

FAKE_OPTIONS may have ``server``, further fields of the server's configuration, and ``first_life``,
the life_seconds of the first server. One more argument, ``supervised``, runs it under the parent
process of ``asyncllm serve``.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

from asyncllm.server_config import ServerConfig
from asyncllm.supervise.listening import listen
from asyncllm.supervise.supervisor import Supervisor


def main(port: str, drain_seconds: str, options: str, supervised: str = "") -> int:
    fields: dict[str, Any] = json.loads(options)
    given = fields.pop("server", {})
    first_life = fields.pop("first_life", None)
    config = ServerConfig(port=int(port), drain_seconds=float(drain_seconds), **given)
    parent = None
    if supervised:
        logging.basicConfig(format="%(message)s")
        sockets = listen(config.host, config.port)
        assert sockets is not None
        outcome = Supervisor(sockets, config.drain_seconds, config.tls).run()
        if isinstance(outcome, int):
            return outcome
        parent = outcome
        if first_life is not None and not parent.restarts:
            fields["life_seconds"] = first_life

    # The parent imports as little as that of ``asyncllm serve``.
    from asyncllm.errors import ModelError
    from asyncllm.server.run import run
    from tests.support.server.fake_llm import FakeLLM

    errors = {"expected": ModelError("no such model"), "bug": KeyError("oops")}
    if "load_error" in fields:
        fields["load_error"] = errors[fields["load_error"]]
    return run(lambda: FakeLLM(**fields), config, parent=parent)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
