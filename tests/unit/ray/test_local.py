"""``asyncllm serve --ray``: the port between its check and Ray Serve's own bind."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import nullcontext

import pytest

from asyncllm.errors import BadRequest
from asyncllm.ray import local
from asyncllm.ray.local import hold_port
from asyncllm.supervise.listening import bind

IN_USE = os.strerror(errno.EADDRINUSE)


def as_ray_serve_binds(host: str, port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    made.bind((host, port))
    made.listen()
    return made


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_held_port_is_ray_serves_alone(host: str) -> None:
    with hold_port(bind(host, 0)) as port:
        # As the system does for whoever takes any port.
        with socket.socket() as other, pytest.raises(OSError, match=IN_USE):
            other.bind(("127.0.0.1", port))
        with as_ray_serve_binds("127.0.0.1", port) as server:
            for _ in range(20):  # all of them: the sockets that hold the port accept nothing
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    server.accept()[0].close()


def test_the_port_is_free_afterwards() -> None:
    with hold_port(bind("127.0.0.1", 0)) as port:
        pass
    for listening in bind("127.0.0.1", port):
        listening.close()


@pytest.mark.parametrize("machines", [1, 2, 3])
def test_machines_that_cannot_come_are_refused(
    machines: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = [{"Alive": True}, {"Alive": False}, {"Alive": True}]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    local._check_machines(machines, ends_with_us=False)
    assert ("wait until Ray has 3 machines; it has 2" in caplog.text) == (machines == 3)
    refused = pytest.raises(BadRequest, match=r"^machines \(3\): no Ray runs here that has others")
    with refused if machines == 3 else nullcontext():
        local._check_machines(machines, ends_with_us=True)
