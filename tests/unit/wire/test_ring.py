"""The ring in shared memory: every reader gets every message, whatever the order of things."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import Empty

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.wire.ring import LENGTH, ReaderBehind, RingClosed, RingReader, RingWriter

#: No wait of a test that passes takes this long.
LONG = 60.0


@contextmanager
def ring(num_readers: int, capacity: int) -> Iterator[tuple[RingWriter, list[RingReader]]]:
    """A writer and its readers in one process: the readers have copies of the descriptors."""
    writer = RingWriter(num_readers, capacity)
    readers = [RingReader(*map(os.dup, writer.fds_of(i))) for i in range(num_readers)]
    try:
        yield writer, readers
    finally:
        writer.close()
        for reader in readers:
            reader.close()


def message_of(number: int, size: int) -> bytes:
    """Different bytes at each place and in each message."""
    return bytes((number * 31 + i) % 251 for i in range(size))


def drain(reader: RingReader) -> list[bytes]:
    received = []
    while (message := reader.receive(LONG)) is not None:
        received.append(message)
    return received


def in_thread(function: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@given(st.data())
@settings(max_examples=200)
def test_any_order_of_sends_and_receives(data: st.DataObject) -> None:
    """One thread, and a model: what is received, and when there is no room."""
    capacity = data.draw(st.integers(LENGTH.size + 1, 100), "capacity")
    num_readers = data.draw(st.integers(1, 3), "readers")
    sent: list[bytes] = []
    received = [0] * num_readers
    actors = st.integers(-1, num_readers - 1)
    with ring(num_readers, capacity) as (writer, readers):
        for actor in data.draw(st.lists(actors, max_size=60), "actors"):
            if actor >= 0:
                if received[actor] == len(sent):
                    with pytest.raises(Empty):
                        readers[actor].receive(timeout=0)
                else:
                    assert readers[actor].receive(timeout=0) == sent[received[actor]]
                    received[actor] += 1
                continue
            message = message_of(len(sent), data.draw(st.integers(0, capacity), "size"))
            unread = [sum(LENGTH.size + len(m) for m in sent[count:]) for count in received]
            if max(unread) + LENGTH.size + len(message) > capacity:
                with pytest.raises(ReaderBehind) as caught:
                    writer.send(message, timeout=0)
                assert unread[caught.value.reader] == max(unread)
                break
            writer.send(message, timeout=0)
            sent.append(message)
        writer.close()
        for reader, count in zip(readers, received, strict=True):
            assert drain(reader) == sent[count:]
            assert reader.receive() is None


@given(st.data())
@settings(max_examples=40)
def test_writer_and_readers_at_once(data: st.DataObject) -> None:
    """Messages up to five times the ring; a reader may lag or leave; close may find it full."""
    capacity = data.draw(st.integers(LENGTH.size + 1, 300), "capacity")
    sizes = data.draw(st.lists(st.integers(0, 5 * capacity), max_size=20), "sizes")
    num_readers = data.draw(st.integers(1, 3), "readers")
    pauses = data.draw(st.lists(st.sampled_from([0, 0, 0.001]), min_size=3, max_size=3), "pauses")
    leaves_after = data.draw(st.none() | st.integers(0, len(sizes)), "leaves after")
    messages = [message_of(number, size) for number, size in enumerate(sizes)]
    received: list[list[bytes]] = [[] for _ in range(num_readers)]
    with ring(num_readers, capacity) as (writer, readers):

        def read(number: int) -> None:
            reader = readers[number]
            while number or len(received[0]) != leaves_after:
                time.sleep(pauses[number])
                if (message := reader.receive(LONG)) is None:
                    return
                received[number].append(message)
            reader.close()

        threads = [in_thread(partial(read, number)) for number in range(num_readers)]
        sent, error = 0, ""
        try:
            for message in messages:
                writer.send(message, LONG)
                sent += 1
        except RingClosed as closed:
            error = str(closed)
        writer.close()
        for thread in threads:
            thread.join(LONG)
            assert not thread.is_alive()
    for number, got in enumerate(received):
        assert got == messages[: len(got)]
        if number or leaves_after is None:
            assert len(got) >= sent
    if sent < len(messages):
        assert leaves_after is not None
        assert error == "reader 0 has left the ring"


def test_the_reader_that_is_behind_is_named() -> None:
    with ring(3, 64) as (writer, readers):
        writer.send(bytes(50))
        for reader in (readers[0], readers[2]):
            assert reader.receive() == bytes(50)
        with pytest.raises(ReaderBehind, match=r"reader 1 of the ring is behind.* 58 bytes"):
            writer.send(bytes(10), timeout=0.01)
        with pytest.raises(RingClosed):
            writer.send(b"")
        assert drain(readers[0]) == []
        assert drain(readers[1]) == [bytes(50)]


def test_a_writer_that_waits_goes_on_when_there_is_room() -> None:
    with ring(1, 64) as (writer, [reader]):
        writer.send(bytes(50))
        thread = in_thread(lambda: writer.send(b"next"))
        assert reader.receive() == bytes(50)
        assert reader.receive(LONG) == b"next"
        thread.join(LONG)


def test_closing_ends_a_send_that_waits() -> None:
    with ring(1, 64) as (writer, [reader]):
        writer.send(b"first")
        errors: list[RingClosed] = []

        def send() -> None:
            try:
                writer.send(bytes(1000))
            except RingClosed as error:
                errors.append(error)

        thread = in_thread(send)
        time.sleep(0.05)  # so that a part of it is sent
        writer.close()
        thread.join(LONG)
        assert [str(error) for error in errors] == ["the ring is closed"]
        assert drain(reader) == [b"first"]


def test_a_reader_that_leaves_ends_a_send_that_waits() -> None:
    with ring(2, 64) as (writer, readers):
        writer.send(bytes(56))
        assert readers[0].receive() == bytes(56)
        readers[1].close()
        with pytest.raises(RingClosed, match="reader 1 has left"):
            writer.send(b"x", LONG)


def test_empty_messages_are_no_end() -> None:
    with ring(1, 64) as (writer, [reader]):
        writer.send(b"")
        writer.send(b"x")
        writer.send(b"")
        writer.close()
        assert drain(reader) == [b"", b"x", b""]


def test_receiving_in_time() -> None:
    with ring(1, 64) as (writer, [reader]):
        with pytest.raises(Empty):
            reader.receive(timeout=0.01)
        writer.send(b"x")
        assert reader.receive(timeout=0) == b"x"


def test_a_ring_has_room_for_something() -> None:
    with pytest.raises(ValueError, match="too small"):
        RingWriter(1, LENGTH.size)
    with pytest.raises(ValueError, match="0 readers"):
        RingWriter(0)


def test_nothing_stays_open() -> None:
    before = open_fds()
    with ring(3, 64) as (writer, readers):
        assert open_fds() - before
        readers[0].close()
        writer.close()
    assert open_fds() <= before  # others' may have been closed meanwhile


READER = """
import hashlib, sys
from asyncllm.wire.ring import RingReader
reader = RingReader(*map(int, sys.argv[1:]))
sums = hashlib.sha256()
while (message := reader.receive()) is not None:
    sums.update(message)
print(sums.hexdigest())
"""


def test_readers_in_other_processes() -> None:
    writer = RingWriter(2, 10_000)
    readers = []
    for number in range(2):
        fds = writer.fds_of(number)
        command = [sys.executable, "-c", READER, *map(str, fds)]
        readers.append(subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True))
    sums = hashlib.sha256()
    for number in range(300):
        message = message_of(number, number**2 % 30_011)
        sums.update(message)
        writer.send(message, LONG)
    writer.close()
    assert [reader.communicate()[0].strip() for reader in readers] == [sums.hexdigest()] * 2
