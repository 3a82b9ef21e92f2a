"""A damaged trace is refused by name; one that was cut off is replayed up to there, and says so."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from zlib import crc32

import msgspec
import pytest

from asyncllm.__main__ import main
from asyncllm.engine.recording import trace_file
from asyncllm.engine.recording.trace_file import FORMAT, MAGIC, End, Header, Trace, TraceError
from asyncllm.engine.recording.trace_parts import TRAILER, find_parts, make_part
from tests.support.engine.recording import record, unchecked
from tests.support.engine.scheduling import limits

START = len(MAGIC) + 1
#: Of each kind.
DAMAGES = 40


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A trace of some parts: some end after a few hundred bytes."""
    path = tmp_path_factory.mktemp("traces") / "a"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_file, "CHUNK", 300)
        record(path, 1, events=60)
    return path.read_bytes()


def bounds(data: bytes) -> list[int]:
    """The first byte of each part, and the trailer's."""
    places = find_parts(data, START).places
    return [START] + [end + 4 for _, end in places]


def span(rng: random.Random, data: bytes, most: int = 700) -> tuple[int, int]:
    start = rng.randrange(len(data))
    return start, min(len(data), start + rng.randint(1, most))


def trace_of(data: bytes, tmp_path: Path) -> Trace:
    (tmp_path / "part").write_bytes(data)
    return Trace.read(str(tmp_path / "part"))


def num_same(a: bytes, b: bytes) -> int:
    """How many bytes at the beginning are the same."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def flipped(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 9])):
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def deleted(rng: random.Random, data: bytes) -> bytes:
    start, end = span(rng, data)
    return data[:start] + data[end:]


def repeated(rng: random.Random, data: bytes) -> bytes:
    start, end = span(rng, data)
    return data[:end] + data[start:end] + data[end:]


def zeroed(rng: random.Random, data: bytes) -> bytes:
    start, end = span(rng, data)
    return data[:start] + bytes(end - start) + data[end:]


def swapped(rng: random.Random, data: bytes) -> bytes:
    """Two whole parts, one part that comes twice or not at all, or any two ranges."""
    parts = bounds(data)
    a, b = sorted(rng.sample(range(len(parts) - 1), 2))
    first, second = data[parts[a] : parts[a + 1]], data[parts[b] : parts[b + 1]]
    between = data[parts[a + 1] : parts[b]]
    before, after = data[: parts[a]], data[parts[b + 1] :]
    return rng.choice(
        [
            before + second + between + first + after,
            before + first + between + first + second + after,
            before + between + second + after,
        ]
    )


def garbled(rng: random.Random, data: bytes) -> bytes:
    start, end = span(rng, data, 20)
    return data[:start] + rng.randbytes(rng.randint(0, 20)) + data[end:]


def header_garbled(rng: random.Random, data: bytes) -> bytes:
    start = rng.randrange(bounds(data)[1])
    return data[:start] + rng.randbytes(rng.randint(1, 5)) + data[start + rng.randint(0, 5) :]


def cut(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def cut_with_zeros(rng: random.Random, data: bytes) -> bytes:
    """As a crash of the machine may leave it."""
    return data[: rng.randrange(len(data)) // 512 * 512] + bytes(rng.randint(1, 3000))


@pytest.mark.parametrize(
    "damage",
    [
        *(flipped, deleted, repeated, zeroed, swapped, garbled),
        *(header_garbled, cut, cut_with_zeros),
    ],
)
def test_damage_is_named_and_a_cut_is_told(
    damage: Callable[[random.Random, bytes], bytes],
    whole: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "a"
    rng = random.Random(damage.__name__)
    parts, events = bounds(whole), 0
    for _ in range(DAMAGES):
        data = damage(rng, whole)
        if data == whole:
            continue
        path.write_bytes(data)
        same = num_same(whole, data)
        code = main(["replay", str(path)])
        said, error = capsys.readouterr()
        if code == 0:
            # Nothing that is left differs, up to zeros.
            assert not data[same:].strip(b"\0")
            complete = same >= parts[-1]
            assert ("all plans are the same" in said) == complete
            assert ("it was cut off" in said and "until then are the same" in said) != complete
            events += sum(1 for _ in Trace.read(str(path)).events())
        elif found := re.search(r"is damaged at byte (\d+): ", error):
            at = int(found[1])
            after = next((part for part in parts if part > at), len(whole))
            assert at in (*parts, len(whole)), "parts before are whole"
            assert at <= same < after or at == same == len(whole)
        else:
            assert same < parts[1], "the header is not whole"
    if damage in (cut, cut_with_zeros):
        assert events > 0


def test_every_changed_bit_is_found(whole: bytes) -> None:
    for at in range(START, len(whole)):
        data = bytearray(whole)
        data[at] ^= 1 << at % 8
        parts = find_parts(bytes(data), START)
        assert parts.damage is not None
        assert parts.end <= at


def test_a_cut_keeps_all_parts_before_it(whole: bytes, tmp_path: Path) -> None:
    events = list(trace_of(whole, tmp_path).events())
    assert isinstance(events[-1], End)
    parts = bounds(whole)
    kept = 0
    for size in range(parts[1], len(whole), 7):
        trace = trace_of(whole[:size], tmp_path)
        found = list(trace.events())
        assert found == events[: len(found)]
        assert len(found) >= kept
        kept = len(found)
        lost = size - max(part for part in parts if part <= size)
        zeros = size - len(whole[:size].rstrip(b"\0"))  # may be those of a disk
        assert lost - zeros <= trace.num_lost <= lost
    assert kept > 0


def test_another_format_number_is_damage_too(whole: bytes, tmp_path: Path) -> None:
    for number in range(256):
        if number != FORMAT:
            with pytest.raises(TraceError):
                trace_of(MAGIC + bytes([number]) + whole[START:], tmp_path)


def test_a_header_of_another_version_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    header = msgspec.to_builtins(Header("0.0.1", "fair", limits()))
    del header["limits"]["page_size"]
    begin = MAGIC + bytes([FORMAT])
    part, _ = make_part(msgspec.msgpack.encode(header), crc32(begin))
    (tmp_path / "a").write_bytes(begin + part + TRAILER)
    assert main(["replay", str(tmp_path / "a")]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert "does not suit asyncllm" in line
    assert "page-size" in line


# -- the format before -----------------------------------------------------------------------------


def test_a_trace_without_checksums_is_replayed_with_a_warning(
    whole: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = unchecked(whole)
    (tmp_path / "a").write_bytes(old)
    assert main(["replay", str(tmp_path / "a")]) == 0
    said, error = capsys.readouterr()
    assert "all plans are the same" in said
    assert "without checksums" in error
    assert list(trace_of(old, tmp_path).events()) == list(trace_of(whole, tmp_path).events())
    (tmp_path / "a").write_bytes(old[:-20])
    assert main(["replay", str(tmp_path / "a")]) == 0
    assert "it was cut off" in capsys.readouterr().out
    (tmp_path / "a").write_bytes(old[:100])
    assert main(["replay", str(tmp_path / "a")]) == 1
    assert "is cut off within its header" in capsys.readouterr().err
