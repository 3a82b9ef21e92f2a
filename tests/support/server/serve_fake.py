"""A fake server: ``python -m tests.support.server.serve_fake PORT DRAIN_SECONDS FAKE_OPTIONS``.

FAKE_OPTIONS may have ``server``, further fields of the server's configuration, ``first``, those
that are others before the first restart, ``replicas``, how many servers there are, and
``restart_when``, the path of a file that a restarted server waits for before it starts, and
``fails_when``, that of one at which the first start of replica 1 fails, and ``dies_after``, a
method of ``Routed``: a replica dies by SIGKILL when it has called that for a client. One more
argument, ``supervised``, runs it under the parent process of ``asyncllm serve``. SIGUSR1 ends its
engine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncllm.config.server_config import ServerConfig
from asyncllm.supervise.door import SingleDoor
from asyncllm.supervise.front.front import Front
from asyncllm.supervise.front.hosts import hosts_of
from asyncllm.supervise.listening import listen
from asyncllm.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncllm.supervise.door import MakesDoor


def main(port: str, drain_seconds: str, options: str, supervised: str = "") -> int:
    fields: dict[str, Any] = json.loads(options)
    given = fields.pop("server", {})
    first = fields.pop("first", {})
    replicas = fields.pop("replicas", 1)
    restart_when = fields.pop("restart_when", None)
    fails_when = fields.pop("fails_when", None)
    config = ServerConfig(port=int(port), drain_seconds=float(drain_seconds), **given)
    parent = None
    if supervised:
        logging.basicConfig(format="%(message)s")
        sockets = listen(config.host, config.port)
        assert sockets is not None
        door: MakesDoor = SingleDoor
        if replicas > 1:
            seconds, hosts = config.request_seconds, hosts_of(config)
            door = partial(Front, num_replicas=replicas, request_seconds=seconds, hosts=hosts)
        supervisor = Supervisor(
            sockets, config.drain_seconds, config.tls, num_servers=replicas, make_door=door
        )
        outcome = supervisor.run()
        if isinstance(outcome, int):
            return outcome
        parent = outcome
        if not parent.restarts:
            fields |= first
        if parent.restarts and restart_when:
            wait_for(restart_when)
        if parent.replica == 1 and not parent.restarts and fails_when:
            wait_for(fails_when)
            return 1

    # The parent imports as little as that of ``asyncllm serve``.
    from asyncllm.errors import ModelError
    from asyncllm.server.run import run
    from tests.support.server.fake_llm import FakeLLM

    if dies_after := fields.pop("dies_after", None):
        plant_death(dies_after)
    errors = {"expected": ModelError("no such model"), "bug": KeyError("oops")}
    if "load_error" in fields:
        fields["load_error"] = errors[fields["load_error"]]

    def make() -> FakeLLM:
        llm, loop = FakeLLM(**fields), asyncio.get_running_loop()
        deaths.append(lambda: loop.call_soon_threadsafe(llm.death.set))
        return llm

    deaths: list[Callable[[], object]] = []  # the main thread, which is not the loop's, calls it
    signal.signal(signal.SIGUSR1, lambda *_: deaths[0]())
    return run(make, config, parent=parent)


def plant_death(name: str) -> None:
    from asyncllm.server.arrivals.routed import Routed

    method = getattr(Routed, name)

    def last(self: Routed, *args: Any, **options: Any) -> None:
        method(self, *args, **options)
        if not self.is_question:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(Routed, name, last)


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
