"""Weights that are read into the page cache before they are loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncllm.executor.startup.preload import read_weights


@pytest.mark.parametrize("most", [1 << 30, 150_000])
def test_weights_are_read_up_to_a_limit(most: int, tmp_path: Path) -> None:
    for shard in (1, 2):
        (tmp_path / f"model-0000{shard}-of-00002.safetensors").write_bytes(bytes(100_000))
    (tmp_path / "consolidated.safetensors").write_bytes(bytes(100_000))  # a second copy
    assert read_weights(tmp_path, most) == min(most, 200_000)


def test_a_single_file_is_read_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(5000))
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(bytes(100_000))
    assert read_weights(tmp_path) == 5000


def test_nothing_happens_without_weights(tmp_path: Path) -> None:
    assert read_weights(tmp_path) == 0
    assert read_weights(tmp_path / "absent") == 0
    (tmp_path / "model-00001-of-00002.safetensors").mkdir()
    assert read_weights(tmp_path) == 0
