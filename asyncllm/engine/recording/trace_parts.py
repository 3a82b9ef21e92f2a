"""The parts of a trace file, and the checksums that chain them.

A part is its length and a checksum, then that many bytes and a checksum; lengths and checksums are
uint32, little-endian. A checksum is the CRC-32 of everything before it in the file except other
checksums. So it also shows that a part is missing, repeated, or in another part's place; and that a
part is incomplete because the file was cut off, not because its length is wrong.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, NamedTuple
from zlib import crc32

#: Follows the last part. Without it, the file was cut off.
TRAILER: Final = b"the end\n"

_NUMBER: Final = Struct("<I")
_HEAD: Final = Struct("<II")
#: Bytes of a part beside its content.
OVERHEAD: Final = _HEAD.size + _NUMBER.size
#: What a disk writes at once, in bytes: after a crash of the machine, zeros begin at a multiple.
_SECTOR: Final = 512


def make_part(content: bytes | bytearray, checksum: int) -> tuple[bytes, int]:
    """A part, and its checksum.

    Args:
        checksum: of the part before; of the first part, the CRC-32 of what precedes it.
    """
    length = _NUMBER.pack(len(content))
    head = crc32(length, checksum)
    checksum = crc32(content, head)
    return b"".join((length, _NUMBER.pack(head), content, _NUMBER.pack(checksum))), checksum


class Parts(NamedTuple):
    """What was found in a file.

    Attributes:
        places: of each part's content, up to the first that is incomplete or damaged: its first
            byte, and the byte after it.
        end: the byte after these parts; of a whole file, after the trailer.
        damage: what is wrong at ``end``; None if nothing is, or the file was cut off there.
        lost: how many bytes of a part that is incomplete follow.
    """

    places: list[tuple[int, int]]
    end: int
    damage: str | None = None
    lost: int = 0


def find_parts(data: bytes, start: int) -> Parts:
    """Check all parts from ``start`` on."""
    places: list[tuple[int, int]] = []
    checksum, at = crc32(memoryview(data)[:start]), start
    written = len(data.rstrip(b"\0"))
    length = min(len(data), -(-written // _SECTOR) * _SECTOR)
    while at < written:
        if data.startswith(TRAILER, at):
            at += len(TRAILER)
            return Parts(places, at, "more follows after the end" if at < written else None)
        content = at + _HEAD.size
        if content > length:
            break
        size, head = _HEAD.unpack_from(data, at)
        if head != crc32(_NUMBER.pack(size), checksum):
            return Parts(places, at, "the checksum of its length does not match")
        end = content + size
        if end + _NUMBER.size > length:
            break
        checksum = crc32(memoryview(data)[content:end], head)
        if _NUMBER.unpack_from(data, end) != (checksum,):
            return Parts(places, at, f"the checksum of the next {size} bytes does not match")
        places.append((content, end))
        at = end + _NUMBER.size
    lost = length - at if at < written else 0
    if lost and data.endswith(TRAILER, at, written):
        return Parts(places, at, "bytes are missing in what follows")
    return Parts(places, at, None, lost)
