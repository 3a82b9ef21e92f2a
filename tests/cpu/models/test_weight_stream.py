"""How files of weights are cut into pieces, and that reading those gives the tensors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from asyncllm.models.loading import weight_stream
from asyncllm.models.loading.weight_stream import _pieces, _read


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_stream, "BLOCK_BYTES", 64)


def copied(file: Path, places: dict[str, Tensor]) -> int:
    """What ``WeightStream.copy`` does, one piece after the other; the number of pieces."""
    descriptor = os.open(file, os.O_RDONLY)
    pieces = list(_pieces(file, places))
    for piece in pieces:
        block = torch.empty(piece.num_bytes, dtype=torch.uint8)
        _read(descriptor, piece, block)
        piece.place.copy_(block.view(piece.dtype))
    os.close(descriptor)
    return len(pieces)


@pytest.mark.usefixtures("small_blocks")
def test_pieces_cover_the_tensors_that_are_wanted(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    tensors = {
        "wide": torch.randn(5, 7),
        "half": torch.randn(3, 31).to(torch.bfloat16),
        "small": torch.randn(1),
        "unwanted": torch.randn(100),
        "quantised": torch.randn(9, 9).to(torch.float8_e4m3fn),
    }
    save_file(tensors, file)
    wanted = [name for name in tensors if name != "unwanted"]
    places = {name: torch.full_like(tensors[name].float(), torch.nan) for name in wanted}
    assert copied(file, places) == 3 + 3 + 1 + 2
    for name in wanted:
        assert torch.equal(places[name], tensors[name].float()), name


@pytest.mark.usefixtures("small_blocks")
def test_the_file_is_read_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({str(i): torch.randn(20) for i in range(10)}, file)
    places = {str(i): torch.empty(20) for i in reversed(range(10))}
    offsets = [piece.offset for piece in _pieces(file, places)]
    assert offsets == sorted(offsets)


def test_a_file_that_ends_early_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"weight": torch.randn(100)}, file)
    pieces = list(_pieces(file, {"weight": torch.empty(100)}))
    os.truncate(file, file.stat().st_size - 1)
    descriptor = os.open(file, os.O_RDONLY)
    with pytest.raises(OSError, match="ends before"):
        _read(descriptor, pieces[0], torch.empty(400, dtype=torch.uint8))
    os.close(descriptor)
