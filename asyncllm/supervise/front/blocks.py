"""What a request's prompt begins with, without reading it: hashes of its bytes, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

#: Bytes of a block, and how far blocks of this size go. Small ones first: most prompts are short,
#: and a conversation is recognised by its first blocks. Then larger ones, so that 1 MiB has 392.
_SIZES: Final = ((128, 4096), (512, 64 * 1024), (4096, 2**20))
#: Begins the line that Claude Code puts before its system prompt, and where that is, at most.
_BILLING: Final = b"x-anthropic-billing-header:"
_FIRST: Final = 512


class _Body(msgspec.Struct):
    """The fields that make a prompt, in the order in which chat templates write them."""

    tools: msgspec.Raw = msgspec.Raw()
    system: msgspec.Raw = msgspec.Raw()
    instructions: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    input: msgspec.Raw = msgspec.Raw()


_DECODER: Final = msgspec.json.Decoder(_Body)


def prompt_bytes(body: bytes) -> bytes:
    """What of a request's body becomes its prompt; the body as it is where that is not JSON."""
    try:
        fields = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body
    tools, system, *rest = map(bytes, msgspec.structs.astuple(fields))
    return b"".join((tools, _without_billing(system), *rest))


def _without_billing(system: bytes) -> bytes:
    """A system prompt without the line that Claude Code puts before it, which always changes.

    The line does not become a part of the prompt.
    """
    at = system.find(_BILLING, 0, _FIRST)
    if at < 0:
        return system
    ends = [end for mark in (b'"', b"\\") if (end := system.find(mark, at)) >= 0]
    return system[:at] + system[min(ends, default=at) :]


def blocks(prompt: bytes) -> list[int]:
    """A hash for each whole block, of all bytes up to its end; only this process knows them."""
    found, last = [], 0
    for start, end in _bounds(len(prompt)):
        last = hash((last, prompt[start:end]))
        found.append(last)
    return found


def _bounds(length: int) -> Iterator[tuple[int, int]]:
    start = 0
    for size, until in _SIZES:
        while start < until and start + size <= length:
            yield start, start + size
            start += size
