"""The trace file: the inputs of a scheduler, and digests of its plans.

It starts with ``MAGIC``, the format's number, and a header. Events follow, each a msgpack array
after its length: one byte, or 255 and then four bytes, little-endian. A file that ends within an
event is valid up to there. It has no token ids, and no text except the tenants' names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

import msgspec

from asyncllm.config import EngineLimits
from asyncllm.errors import AsyncLLMError
from asyncllm.version import __version__

log = logging.getLogger(__name__)

MAGIC: Final = b"asyncllm trace\n"
FORMAT: Final = 1

#: Bytes that are buffered before they are written.
CHUNK: Final = 64 * 1024
#: Seconds after which an event writes a smaller buffer.
FLUSH_SECONDS: Final = 1.0
#: Size at which a recording ends.
MAX_BYTES: Final = 256 * 2**20
#: A longer event is damage.
LONGEST: Final = 64 * 2**20

#: ``Arrival.node`` of a new salt.
NEW_ROOT: Final = -1


class TraceError(AsyncLLMError, ValueError):
    """A trace cannot be written or read."""


class Header(msgspec.Struct, frozen=True):
    """``policy`` is one of ``EngineConfig``, or the module and class of a user's own."""

    asyncllm: str
    policy: str
    limits: EngineLimits


class PlanDigest(NamedTuple):
    """CRC-32 of a plan's parts; ``admits`` covers slots and lengths only."""

    rows: int
    new_pages: int
    copies: int
    admits: int


class Arrival(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=0):
    """``add()``.

    Nodes of the page tree are numbered from 0 as they appear. A salt is a root, a page a child of
    the page before it. The prompt's full pages are the path to ``node``, then ``new_pages`` nodes
    with the next numbers. With NEW_ROOT the salt takes the first of these numbers.

    Attributes:
        tenant: the name of a new tenant; else the number of tenants that were new before it.
        arrival: None if it is ``now``.
        scored: logprobs or hidden states of all its positions are wanted, so the prefix cache was
            not used.
        cache_ttl: seconds.
    """

    now: float
    id: int
    tenant: int | str
    node: int
    new_pages: int
    num_prompt: int
    max_length: int
    priority: int
    surely_full: bool
    arrival: float | None
    deadline: float | None
    scored: bool = False
    cache_ttl: float | None = None


class Pages(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=1):
    """The full pages of a request, generated ones included; see ``Arrival``."""

    id: int
    node: int
    new_pages: int


class Finish(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=2):
    """``finish()`` of a request that had not ended."""

    now: float
    id: int


class Plan(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=3):
    """``plan()``; ``digest`` is None if there was nothing to run."""

    number: int
    now: float
    digest: PlanDigest | None


class Result(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """``apply()``.

    Attributes:
        stopped: rows whose token was a stop token.
        bad: rows with BAD_TOKEN; ``unmet`` are those whose constraints left no token.
        copied: ``StepResult.copied``.
        failed: the step had an error.
    """

    now: float
    seconds: float
    stopped: tuple[int, ...]
    bad: tuple[int, ...]
    copied: tuple[tuple[int, float], ...]
    failed: bool
    unmet: tuple[int, ...] = ()


class End(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """Why the recording ended. A trace without it was cut off."""

    reason: str


Event: TypeAlias = Arrival | Pages | Finish | Plan | Result | End

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


class TraceWriter:
    """Appends events in chunks; stops for good when the disk fails or the file is full."""

    def __init__(self, path: str, header: Header, *, max_bytes: int = MAX_BYTES):
        """Create the file; an existing one becomes ``path.old``.

        Raises:
            TraceError: the file cannot be written.
        """
        self.recording = True
        self._path = path
        self._buffer = bytearray()
        self._room = max_bytes
        self._flushed = 0.0
        try:
            if Path(path).is_file():
                os.replace(path, path + ".old")
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise TraceError(f"cannot write the trace {path}: {reason}", param="trace") from None
        data = _encode(header)
        self._buffer += MAGIC + bytes([FORMAT]) + len(data).to_bytes(4, "little") + data
        self._room -= len(self._buffer)
        self._flush()

    def write(self, event: Event, now: float) -> None:
        """Append an event; does nothing after the recording has ended."""
        if not self.recording:
            return
        data = _encode(event)
        if len(data) + 5 > self._room:
            log.warning("the trace %s is full; recording ends, serving does not", self._path)
            self.close("the file is as large as it may get")
            return
        self._append(data)
        if len(self._buffer) >= CHUNK or now - self._flushed >= FLUSH_SECONDS:
            self._flush()
            self._flushed = now

    def close(self, reason: str) -> None:
        """End the recording. Idempotent."""
        if self.recording:
            self._append(_encode(End(reason)))
            self._flush()
        if self.recording:
            self.recording = False
            self._file.close()

    def _append(self, data: bytes) -> None:
        size = len(data)
        buffer = self._buffer
        if size < 255:
            buffer.append(size)
        else:
            buffer.append(255)
            buffer += size.to_bytes(4, "little")
            size += 4
        buffer += data
        self._room -= size + 1

    def _flush(self) -> None:
        data = memoryview(self._buffer)
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            log.error("cannot write the trace %s (%s); recording ends", self._path, error)
            self.recording = False
            self._file.close()
        self._buffer = bytearray()


class Trace:
    """A trace read from a file."""

    def __init__(self, path: str, header: Header, data: bytes, start: int):
        self.path = path
        self.header = header
        self._data = data
        self._start = start

    @classmethod
    def read(cls, path: str) -> Trace:
        """Read a whole file.

        Raises:
            TraceError: it is no trace, or this version cannot read it.
            OSError: the file cannot be read.
        """
        data = Path(path).read_bytes()
        start = len(MAGIC) + 5
        if not data.startswith(MAGIC) or len(data) < start:
            raise TraceError(f"{path} is not a trace of asyncllm")
        if data[len(MAGIC)] != FORMAT:
            raise TraceError(
                f"{path} has format {data[len(MAGIC)]}; asyncllm {__version__} reads {FORMAT}"
            )
        size = int.from_bytes(data[start - 4 : start], "little")
        if start + size > len(data):
            raise TraceError(f"{path} is cut off within its header")
        try:
            header = msgspec.msgpack.decode(data[start : start + size], type=Header)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(
                f"the header of {path} does not suit asyncllm {__version__}: {error}"
            ) from None
        return cls(path, header, data, start + size)

    def events(self) -> Iterator[Event]:
        """The complete events in order; the last is an End, unless the file was cut off.

        Raises:
            TraceError: the file is damaged.
        """
        data, at, end = memoryview(self._data), self._start, len(self._data)
        while at < end:
            size = data[at]
            body = at + 1
            if size == 255:
                size = int.from_bytes(data[body : body + 4], "little")
                body += 4
            # A crash of the machine may leave zeros at the end.
            if size == 0 or body + size > end:
                if size > LONGEST:
                    raise TraceError(f"{self.path} is damaged at byte {at}")
                return
            try:
                yield _decode(data[body : body + size])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(f"{self.path} is damaged at byte {at}: {error}") from None
            at = body + size
