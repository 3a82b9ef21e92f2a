"""Names of models become folders; no test here touches the network."""

from __future__ import annotations

import re
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from asyncllm import demo
from asyncllm.errors import ModelError
from asyncllm.models.loading.hub import resolve_folder


def test_a_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid_download(monkeypatch)
    assert resolve_folder(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("org/model") == Path("org/model")


@pytest.mark.parametrize("name", ["./model", "/nowhere/model", "~/no-such-model", "a/b/c"])
def test_a_path_that_does_not_exist(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid_download(monkeypatch)
    with pytest.raises(ModelError, match="there is no folder"):
        resolve_folder(name)


def test_the_demo_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _forbid_download(monkeypatch)
    assert resolve_folder(None) == resolve_folder(demo.NAME) == demo.path()
    for name in ("asyncllm-dmeo", "asyncllm_demo", "AsyncLLM-Demo"):
        with pytest.raises(ModelError, match="did you mean asyncllm-demo, the built-in demo"):
            resolve_folder(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / demo.NAME).mkdir()
    assert resolve_folder(demo.NAME) == Path(demo.NAME)  # a folder comes first


def test_the_nearest_folder_or_downloaded_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, **options: Any) -> str:
        raise errors.LocalEntryNotFoundError("unplugged")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/qwen-tuned", "cache/models--Qwen--Qwen3-0.6B"):
        (tmp_path / folder).mkdir(parents=True)
    for given, near in {
        "./runs/qwen-tund": "runs/qwen-tuned",
        "runs/qwentuned": "runs/qwen-tuned",
        "Qwen/Qwen3-06B": "Qwen/Qwen3-0.6B",
    }.items():
        with pytest.raises(ModelError, match=rf"; did you mean {re.escape(near)}\?$"):
            resolve_folder(given)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    with pytest.raises(ModelError, match=r"model\.gguf is a file"):
        resolve_folder(str(file))


def test_a_name_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(name=name, **options)
        (tmp_path / "model.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("org/model", "v2") == tmp_path
    assert (asked["name"], asked["revision"], asked["cache_dir"]) == ("org/model", "v2", None)
    assert resolve_folder("org/model", None, "~/models") == tmp_path
    assert asked["cache_dir"] == Path.home() / "models"
    assert {"*.safetensors", "*.json", "*.jinja"} <= set(asked["allow_patterns"])
    assert "consolidated*" in asked["ignore_patterns"]


@pytest.mark.parametrize("has_safetensors", [True, False])
def test_old_weights_are_downloaded_only_where_there_are_no_others(
    has_safetensors: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["config.json", "pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"]
    files += ["model.safetensors"] if has_safetensors else []

    def download(name: str, allow_patterns: list[str], **_: Any) -> str:
        for file in files:
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                (tmp_path / file).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    folder = resolve_folder("org/model")
    assert any(folder.glob("*.safetensors")) == has_safetensors
    assert any(folder.glob("*.bin")) != has_safetensors
    assert not any(resolve_folder("org/model", weights=False).glob("training*"))


def test_a_download_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: Any) -> str:
        raise ConnectionError("the network is down\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError) as caught:
        resolve_folder("org/model", "v2")
    for word in ("'org/model'", "'v2'", "the network is down", "no local folder"):
        assert word in str(caught.value)


def _response() -> Any:
    """As much of a response as the hub's errors look at."""
    return SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (lambda: errors.RepositoryNotFoundError("404", response=_response()), "no such model"),
        (lambda: errors.GatedRepoError("403", response=_response()), "accept its terms"),
        (lambda: errors.LocalEntryNotFoundError("unplugged"), r"no connection \(unplugged\)"),
    ],
)
def test_what_was_tried_and_what_helps(
    monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], advice: str
) -> None:
    def download(name: str, **options: Any) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelError, match=f"no local folder 'org/model'.*Hub.*{advice}"):
        resolve_folder("org/model")


def _forbid_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **options: Any) -> str:
        raise AssertionError(f"downloaded {name}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
