"""How files of weights are cut into blocks, and that reading those gives the tensors."""

from __future__ import annotations

import json
import os
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncllm.models.loading import copy_files, loader
from asyncllm.models.loading.checkpoint import Header
from asyncllm.models.loading.weight_stream import (
    ALIGNMENT,
    Block,
    BlockFile,
    Reading,
    WeightStream,
    blocks_of,
)
from asyncllm.models.quant.place import Slice, Sliced
from asyncllm.models.spec import read_spec
from asyncllm.parallel.ranks import Apart
from tests.support.models import quantized, tiny_models

CPU = torch.device("cpu")
BLOCK = 2 * ALIGNMENT


@pytest.fixture(params=[False, True], ids=["cached", "direct"])
def stream(request: pytest.FixtureRequest) -> WeightStream:
    return WeightStream(CPU, Reading(2, BLOCK, direct=request.param))


def tensors_of_all_sorts() -> dict[str, Tensor]:
    return {
        "wide": torch.randn(50, 70),
        "half": torch.randn(300, 31).to(torch.bfloat16),
        "small": torch.randn(1),
        "none": torch.randn(0, 4),
        "unwanted": torch.randn(100, 100),
        "quantised": torch.randn(99, 99).to(torch.float8_e4m3fn),
        "double": torch.randn(1000).double(),
        **{f"many{i}": torch.randn(i + 1) for i in range(50)},
    }


def test_tensors_get_to_their_places(tmp_path: Path, stream: WeightStream) -> None:
    file = tmp_path / "model.safetensors"
    tensors = tensors_of_all_sorts()
    save_file(tensors, file)
    wanted = [name for name in tensors if name != "unwanted"]
    places = {name: torch.full_like(tensors[name].float(), torch.nan) for name in wanted}
    places["half"] = places["half"].to(torch.bfloat16)
    with stream:
        for _ in range(2):
            assert sum(stream.copy(file, places)) == sum(tensors[name].nbytes for name in wanted)
            for name in wanted:
                assert torch.equal(places[name], tensors[name].to(places[name].dtype)), name
                places[name].fill_(torch.nan)


@pytest.mark.parametrize("shift", range(1, 8))
def test_tensors_may_begin_anywhere(shift: int, tmp_path: Path, stream: WeightStream) -> None:
    """The format asks for no alignment; writers of headers pad them, or do not."""
    file = tmp_path / "model.safetensors"
    tensor = torch.randn(5000)
    entry = {"dtype": "F32", "shape": [5000], "data_offsets": [0, 20_000]}
    header = json.dumps({"x": entry}).encode()
    header += b" " * (-len(header) % 8 + shift)
    file.write_bytes(len(header).to_bytes(8, "little") + header + tensor.numpy().tobytes())
    with stream:
        for dtype in (torch.float32, torch.bfloat16):
            place = torch.zeros(5000, dtype=dtype)
            assert sum(stream.copy(file, {"x": place})) == 20_000
            assert torch.equal(place, tensor.to(dtype))


def test_tensors_that_share_memory(tmp_path: Path, stream: WeightStream) -> None:
    file = tmp_path / "model.safetensors"
    values = torch.randn(8000)
    entries = {"a": [0, 32_000], "b": [0, 32_000], "c": [16_000, 32_000]}
    described = {
        name: {"dtype": "F32", "shape": [(end - begin) // 4], "data_offsets": [begin, end]}
        for name, (begin, end) in entries.items()
    }
    header = json.dumps(described).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + values.numpy().tobytes())
    places = {name: torch.zeros((end - begin) // 4) for name, (begin, end) in entries.items()}
    with stream:
        assert sum(stream.copy(file, places)) == 80_000
    for name, (begin, _) in entries.items():
        assert torch.equal(places[name], values[begin // 4 :]), name


def test_blocks_are_aligned_and_cover_no_gaps(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {str(i): torch.randn(20_000 if i == 5 else 700) for i in range(30)}
    save_file(tensors, file)
    places = {name: torch.empty_like(t) for name, t in tensors.items() if name != "5"}
    blocks = list(blocks_of(file, places, BLOCK))
    assert all(block.offset % ALIGNMENT == 0 for block in blocks)
    assert all(0 < block.num_bytes <= BLOCK for block in blocks)
    wanted = sum(place.nbytes for place in places.values())
    assert sum(part.num_bytes for block in blocks for part in block.parts) == wanted
    assert sum(block.num_bytes for block in blocks) < wanted + len(blocks) * ALIGNMENT
    assert [b.offset for b in blocks] == sorted(b.offset for b in blocks)
    assert all(_ends(a) <= _ends(b) for a, b in pairwise(blocks))


def _ends(block: Block) -> int:
    return block.offset + block.num_bytes


def test_tensors_in_memory(stream: WeightStream) -> None:
    tensors = {name: t for name, t in tensors_of_all_sorts().items() if name != "quantised"}
    places = {name: torch.full_like(t.float(), torch.nan) for name, t in tensors.items()}
    with stream:
        assert sum(stream.copy_mapped(tensors, places)) == sum(t.nbytes for t in tensors.values())
    for name, place in places.items():
        assert torch.equal(place, tensors[name].float()), name


def test_a_file_that_ends_early_is_an_error(tmp_path: Path, stream: WeightStream) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.randn(10_000)}, file)
    place = torch.empty(10_000)
    os.truncate(file, file.stat().st_size - 1)
    with stream, pytest.raises(OSError, match="ends before"):
        list(stream.copy(file, {"weight": place}))


def test_where_reading_past_the_page_cache_fails_it_is_read_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "data"
    file.write_bytes(bytes(range(256)) * 64)
    with BlockFile(file, direct=True) as source:
        assert source._direct is not None
        plain = os.preadv

        def refuse(descriptor: int, *rest: object) -> int:
            if descriptor == source._direct or len(rest) > 2:
                raise OSError(22, "Invalid argument")
            return plain(descriptor, *rest)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", refuse)
        memory = torch.zeros(BLOCK, dtype=torch.uint8)
        source.read(ALIGNMENT, 5000, memory)
    assert memory[:5000].numpy().tobytes() == (bytes(range(256)) * 64)[ALIGNMENT:][:5000]


def test_reading_past_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "data"
    content = os.urandom(3 * BLOCK + 100)
    file.write_bytes(content)
    room = torch.zeros(BLOCK + ALIGNMENT, dtype=torch.uint8)
    memory = room[-room.data_ptr() % ALIGNMENT :]
    with open(file, "rb") as opened, BlockFile(file, direct=True) as source:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in range(0, len(content), BLOCK):
            count = min(BLOCK, len(content) - offset)
            source.read(offset, count, memory)
            assert memory[:count].numpy().tobytes() == content[offset : offset + count]


@pytest.mark.parametrize("staged_bytes", [1, 1 << 30])
def test_what_is_streamed_is_what_is_read(
    staged_bytes: int, tmp_path: Path, stream: WeightStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into contiguous places, and into others by way of the device."""
    monkeypatch.setattr(copy_files, "STAGED_BYTES", staged_bytes)
    shape = (40, 60)
    files = [tmp_path / f"{i}.safetensors" for i in range(2)]
    tensors = [{f"{i}.{name}": torch.randn(shape) for name in "abcde"} for i in range(2)]
    found = torch.zeros(2, 5, *shape[::-1])
    plans: dict[Path, list[copy_files.Source]] = {}
    for i, file in enumerate(files):
        save_file(tensors[i], file)
        headers = [Header(file, name, "F32", list(shape)) for name in tensors[i]]
        places = [found[i, k].view(shape) if k < 2 else found[i, k].t() for k in range(5)]
        plans[file] = [copy_files.Source(*pair) for pair in zip(headers, places, strict=True)]
    seen: list[tuple[int, int]] = []
    with stream:
        copy_files.copy_files(files, plans, CPU, stream, lambda *done: seen.append(done))
    for sources in plans.values():
        for stored, place in sources:
            assert isinstance(stored, Header)
            assert isinstance(place, Tensor)
            assert torch.equal(place, tensors[files.index(stored.file)][stored.name])
    total = sum(file.stat().st_size for file in files)
    assert seen == sorted(seen)
    assert seen[-1] == (total, total)


@pytest.mark.parametrize("name", [*tiny_models.FAMILIES, *quantized.FORMATS])
def test_models_are_the_same_with_a_stream(
    name: str, tmp_path: Path, stream: WeightStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in tiny_models.FAMILIES:
        folder = tiny_models.make(name, tmp_path)
    else:
        folder, _ = quantized.make(name, tmp_path)
    spec = read_spec(folder)
    expected = loader.load_model(folder, spec, torch.bfloat16, "cpu").state_dict()
    monkeypatch.setattr(loader, "nullcontext", lambda: stream)  # what a CPU has in its place
    with torch.inference_mode():
        found = loader.load_model(folder, spec, torch.bfloat16, "cpu").state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key]), key


@pytest.mark.parametrize("name", ["glm", "qwen3_moe", "phi3", "awq"])
def test_each_rank_streams_its_share(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name in tiny_models.FAMILIES:
        folder = tiny_models.make(name, tmp_path)
    else:
        folder, _ = quantized.make(name, tmp_path)
    spec = read_spec(folder)
    for rank in range(2):
        load = partial(loader.load_model, folder, spec, torch.float32, "cpu", ranks=Apart(rank, 2))
        expected = load().state_dict()
        with monkeypatch.context() as patch, torch.inference_mode():
            patch.setattr(loader, "nullcontext", lambda: WeightStream(CPU, Reading(2, BLOCK)))
            found = load().state_dict()
        for key, tensor in found.items():
            assert torch.equal(tensor, expected[key]), (rank, key)


def test_only_rows_with_a_place_are_read(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    save_file({"a": torch.arange(4096.0 * 6).view(6, 4096)}, file)
    place = torch.empty(2, 4096)
    target = Sliced(torch.Size((6, 4096)), (Slice(0, 3, place),))
    blocks = list(blocks_of(file, {"a": target}, 1 << 20))
    assert sum(part.num_bytes for block in blocks for part in block.parts) == place.nbytes
    assert sum(block.num_bytes for block in blocks) < 1.2 * place.nbytes
