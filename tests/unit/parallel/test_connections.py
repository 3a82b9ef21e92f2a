"""Connections that a library opened, cut by another thread."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

from asyncllm.parallel.group import Connections


def test_what_was_connected_meanwhile_is_cut() -> None:
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as listening, closing(connections):
        address = listening.getsockname()
        before = socket.create_connection(address)
        with before, listening.accept()[0] as other:
            with connections.opening():
                ours = socket.create_connection(address)
                more = socket.create_server(("127.0.0.1", 0))
            with ours, more, listening.accept()[0] as theirs:
                received: list[bytes] = []
                waiting = threading.Thread(target=lambda: received.append(ours.recv(1)))
                waiting.start()
                connections.cut()
                waiting.join(20)
                assert received == [theirs.recv(1)] == [b""]
                before.sendall(b"a")
                assert other.recv(1) == b"a"
                socket.create_connection(more.getsockname()).close()


def test_what_is_closed_is_forgotten() -> None:
    connections = Connections()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        with connections.opening():
            ours = socket.create_connection(listening.getsockname())
        with listening.accept()[0] as theirs:
            connections.close()
            connections.cut()
            ours.sendall(b"a")
            assert theirs.recv(1) == b"a"
            ours.close()
            assert theirs.recv(1) == b""
