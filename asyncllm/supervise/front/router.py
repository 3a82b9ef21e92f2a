"""Which replica gets a request: the one that has its prefix cached, unless that is too busy."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Final, NamedTuple

import msgspec

#: Bytes of a block, and how far blocks of this size go. Small ones first: most prompts are short,
#: and a conversation is recognised by its first blocks. Then larger ones, so that 1 MiB has 392.
_SIZES: Final = ((128, 4096), (512, 64 * 1024), (4096, 2**20))
#: Begins the line that Claude Code puts before its system prompt, and where that is, at most.
_BILLING: Final = b"x-anthropic-billing-header:"
_FIRST: Final = 512
#: A replica may have this much more work than the least busy one, and still get a request whose
#: prefix it has: so many requests, or this share of the other's work if that is more.
SLACK: Final = 8.0
SHARE: Final = 0.5
#: A prompt of so many bytes is as much work as one more request.
PROMPT_BYTES: Final = 16 * 1024
#: Blocks that are remembered of each replica, 8 MiB of hashes; then the oldest are forgotten.
MOST_BLOCKS: Final = 2**16


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


class Placed(NamedTuple):
    """Where a request went; ``work`` is what it adds there until it ends."""

    replica: int
    work: float


class Router:
    """Pure: it knows what it has placed, and what has ended.

    A request goes on where its conversation is, or where at least half of its prompt is cached.
    Any other, and any that would go to a replica with too much work, goes to the one with the least
    work; of those, to the one that remembers least, so that the caches fill evenly.

    After each call of ``place``, the replica that was chosen has at most ``max(SLACK, SHARE *
    least)`` more work than the least busy one had, besides the new request's own.
    """

    def __init__(self, num_replicas: int, most_blocks: int = MOST_BLOCKS):
        self.work = [0.0] * num_replicas
        self._most_blocks = most_blocks
        # Block to whether a prompt ended there; in the order of use.
        self._known: list[dict[int, bool]] = [{} for _ in range(num_replicas)]

    def place(self, blocks: Sequence[int], num_bytes: int, among: Collection[int]) -> Placed:
        """Choose one of the replicas ``among``, and remember the prompt there.

        Args:
            blocks: of the prompt, as the function ``blocks`` makes them.
            num_bytes: length of the prompt.
        """
        least = min(self.work[replica] for replica in among)
        allowed = least + max(SLACK, SHARE * least)
        matches = {replica: self._match(replica, blocks) for replica in among}
        best = min(among, key=lambda replica: (-matches[replica], self.work[replica]))
        if not self._is_worth(best, matches[best], blocks) or self.work[best] > allowed:
            best = min(
                among, key=lambda replica: (self.work[replica], len(self._known[replica]), replica)
            )
        self._remember(best, blocks)
        left = 1 - matches[best] / max(1, len(blocks))
        placed = Placed(best, 1.0 + left * num_bytes / PROMPT_BYTES)
        self.work[best] += placed.work
        return placed

    def ended(self, placed: Placed) -> None:
        """A request has been answered, or has failed, or has moved."""
        self.work[placed.replica] = max(0.0, self.work[placed.replica] - placed.work)

    def forget(self, replica: int) -> None:
        """It starts with an empty cache."""
        self._known[replica].clear()

    def _match(self, replica: int, blocks: Sequence[int]) -> int:
        """How many blocks of a prompt the replica has, from the first on."""
        known = self._known[replica]
        return next((i for i, block in enumerate(blocks) if block not in known), len(blocks))

    def _is_worth(self, replica: int, match: int, blocks: Sequence[int]) -> bool:
        if match == 0:
            return False
        return 2 * match >= len(blocks) or self._known[replica][blocks[match - 1]]

    def _remember(self, replica: int, blocks: Sequence[int]) -> None:
        known = self._known[replica]
        for i, block in enumerate(blocks, 1):
            known[block] = known.pop(block, False) or i == len(blocks)
        while len(known) > self._most_blocks:
            del known[next(iter(known))]
