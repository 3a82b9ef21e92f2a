"""The trace file: the inputs of a scheduler, and digests of its plans.

It starts with ``MAGIC`` and the format's number. Parts with checksums follow (``trace_parts.py``):
first the header, then events, each a msgpack array after its length: one byte, or 255 and then four
bytes, little-endian. A file that ends within a part is valid up to that part. It has no token ids,
and no text except the tenants' names.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias
from zlib import crc32

import msgspec

from asyncllm.config import EngineLimits
from asyncllm.engine.recording.trace_parts import OVERHEAD, TRAILER, Parts, find_parts, make_part
from asyncllm.errors import AsyncLLMError
from asyncllm.version import __version__

log = logging.getLogger(__name__)

MAGIC: Final = b"asyncllm trace\n"
FORMAT: Final = 2
#: Older: the header after its length, and events, without any checksum. It can still be read.
UNCHECKED_FORMAT: Final = 1

#: Bytes of events that are buffered before they are written, as one part.
CHUNK: Final = 64 * 1024
#: Seconds after which an event writes a smaller buffer.
FLUSH_SECONDS: Final = 1.0
#: Size at which a recording ends.
MAX_BYTES: Final = 256 * 2**20

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
        shared: see ``BlockTable``.
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
    shared: int = 0


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
    """``plan()``; ``digest`` is None if there was nothing to run.

    Attributes:
        held: the requests that skip the step, so that a draft can follow.
        drafts: id and number of drafted tokens, of each request for which some were chosen.
        ahead: how many tokens a head drafts after the step.
    """

    number: int
    now: float
    digest: PlanDigest | None
    held: tuple[int, ...] = ()
    drafts: tuple[tuple[int, int], ...] = ()
    ahead: int = 0


class Result(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=4):
    """``apply()``.

    Attributes:
        stopped: rows whose token was a stop token.
        bad: rows with BAD_TOKEN; ``unmet`` are those whose constraints left no token.
        copied: ``StepResult.copied``.
        failed: the step had an error.
        right: how many drafted tokens of each row with a draft were right.
    """

    now: float
    seconds: float
    stopped: tuple[int, ...]
    bad: tuple[int, ...]
    copied: tuple[tuple[int, float], ...]
    failed: bool
    unmet: tuple[int, ...] = ()
    right: tuple[int, ...] = ()


class End(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=5):
    """Why the recording ended. A trace without it was cut off."""

    reason: str


Event: TypeAlias = Arrival | Pages | Finish | Plan | Result | End

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Event).decode


class TraceWriter:
    """Appends events in parts; stops for good when the disk fails or the file is full."""

    def __init__(self, path: str, header: Header, *, max_bytes: int = MAX_BYTES):
        """Create the file; an existing one becomes ``path.old``.

        Raises:
            TraceError: the file cannot be written.
        """
        self.recording = True
        self._path = path
        self._buffer = bytearray()
        self._flushed = 0.0
        try:
            if Path(path).is_file():
                os.replace(path, path + ".old")
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as error:
            reason = error.strerror or str(error)
            raise TraceError(f"cannot write the trace {path}: {reason}", param="trace") from None
        start = MAGIC + bytes([FORMAT])
        part, self._checksum = make_part(_encode(header), crc32(start))
        self._room = max_bytes - len(start) - len(part)
        self._write(start + part)

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
            self._write(self._part())
            self._flushed = now

    def close(self, reason: str) -> None:
        """End the recording. Idempotent."""
        if self.recording:
            self._append(_encode(End(reason)))
            self._write(self._part() + TRAILER)
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

    def _part(self) -> bytes:
        """The buffered events."""
        part, self._checksum = make_part(self._buffer, self._checksum)
        self._buffer = bytearray()
        self._room -= OVERHEAD
        return part

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            log.error("cannot write the trace %s (%s); recording ends", self._path, error)
            self.recording = False
            self._file.close()


class Trace:
    """A trace read from a file.

    Attributes:
        has_checksums: damage would have been found; False of UNCHECKED_FORMAT.
        num_lost: bytes at the end that were left out, because the file was cut off within a part.
    """

    def __init__(
        self, path: str, header: Header, data: bytes, parts: Parts, *, has_checksums: bool = True
    ):
        self.path = path
        self.header = header
        self.has_checksums = has_checksums
        self.num_lost = parts.lost
        self._data = data
        self._parts = parts.places

    @classmethod
    def read(cls, path: str) -> Trace:
        """Read a whole file.

        Raises:
            TraceError: it is no trace, it is damaged, or this version cannot read it.
            OSError: the file cannot be read.
        """
        data = Path(path).read_bytes()
        start = len(MAGIC) + 1
        if not data.startswith(MAGIC) or len(data) < start:
            raise TraceError(f"{path} is not a trace of asyncllm")
        number = data[len(MAGIC)]
        if number not in (FORMAT, UNCHECKED_FORMAT):
            raise TraceError(f"{path} has format {number}; asyncllm {__version__} reads {FORMAT}")
        parts = find_parts(data, start) if number == FORMAT else _unchecked_parts(data, start)
        if parts.damage is not None:
            raise TraceError(f"{path} is damaged at byte {parts.end}: {parts.damage}")
        if not parts.places:
            raise TraceError(f"{path} is cut off within its header")
        first, after = parts.places.pop(0)
        try:
            header = msgspec.msgpack.decode(data[first:after], type=Header)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(
                f"the header of {path} does not suit asyncllm {__version__}: {error}"
            ) from None
        return cls(path, header, data, parts, has_checksums=number == FORMAT)

    def events(self) -> Iterator[Event]:
        """The events in order; the last is an End, unless the file was cut off.

        Raises:
            TraceError: the file is damaged.
        """
        for start, end in self._parts:
            yield from self._events(start, end)

    def _events(self, at: int, end: int) -> Iterator[Event]:
        data = memoryview(self._data)
        while at < end:
            size = data[at]
            body = at + 1
            if size == 255:
                size = int.from_bytes(data[body : body + 4], "little")
                body += 4
            # Without checksums, this is where the file was cut off: zeros may follow.
            if not self.has_checksums and (size == 0 or body + size > end):
                return
            try:
                yield _decode(data[body : min(body + size, end)])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceError(f"{self.path} is damaged at byte {at}: {error}") from None
            at = body + size


def _unchecked_parts(data: bytes, start: int) -> Parts:
    """The header of a file of UNCHECKED_FORMAT, and all its events."""
    header = start + 4
    events = header + int.from_bytes(data[start:header], "little")
    if len(data) < max(header, events):
        return Parts([], start)
    return Parts([(header, events), (events, len(data))], len(data))
