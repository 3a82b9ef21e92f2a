"""Folders and files that people take for models, and what the error says about each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncllm.errors import ModelError
from asyncllm.models.loading.checkpoint import read_headers
from asyncllm.models.loading.hub import resolve_folder
from asyncllm.models.loading.weight_files import weight_files
from asyncllm.models.spec import read_spec

GGUF = b"GGUF" + bytes(60)
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 4976698672\n"


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        read_spec(folder)
    return str(caught.value)


@pytest.mark.parametrize(
    ("content", "base"),
    [
        (json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B"}), "Qwen/Qwen3-0.6B"),
        (json.dumps({"base_model_name_or_path": "a\x1b[31mb"}), "another model"),
        ("[]", "another model"),
        ("{", "another model"),
    ],
)
def test_an_adapter(content: str, base: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(content)
    said = refusal(tmp_path)
    assert f"is an adapter (LoRA) for {base}, and adapters are not served" in said
    assert "merge_and_unload()" in said


def test_gguf(tmp_path: Path) -> None:
    file = tmp_path / "model-q4.gguf"
    file.write_bytes(GGUF)
    with pytest.raises(ModelError, match=r"is a file; GGUF files .* are not served"):
        resolve_folder(str(file))
    assert "has no config.json; GGUF files" in refusal(tmp_path)
    with pytest.raises(ModelError, match=r"has no weights: .*\(GGUF files"):
        weight_files(tmp_path)


@pytest.mark.parametrize("inside", ["my-model", "snapshots/0a1b2c"])
def test_the_folder_above_a_model(inside: str, tmp_path: Path) -> None:
    """As a user has it who unpacked an archive, and as the hub's cache is."""
    model = tmp_path / inside
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    assert refusal(tmp_path) == f"{tmp_path} has no config.json, but {model} has one"


def test_any_other_folder(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path} is not a model's folder: it has no config.json"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (LFS, "only Git LFS's note about it is here; 'git lfs pull' gets the file itself"),
        (b"\n<!DOCTYPE html><html>Not found</html>" * 4, "it is a page of HTML"),
        (b"\x00" * 40, "header"),
        (b"", "header"),
    ],
)
def test_weights_that_are_something_else(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(ModelError, match="is damaged or incomplete") as caught:
        read_headers(weight_files(tmp_path))
    assert said in str(caught.value)
