"""From the name of a model to its folder, by download if needed."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Final

from asyncllm import demo
from asyncllm.errors import ModelError
from asyncllm.models.wrong_files import GGUF, about_file
from asyncllm.system.suggest import did_you_mean

_WEIGHTS = "*.safetensors"
_OLD_WEIGHTS = "pytorch_model*.bin"  # only if there are no others
_WANTED = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.*")
_UNWANTED = ("consolidated*", "original/*")  # second copies of the weights
#: As similar as one or two wrong letters leave a name.
_MISSPELT: Final = 0.8


def find_folder(name_or_path: str | None) -> Path | None:
    """The folder of that name, the demo model's by default; None for a model of the hub.

    Raises:
        ModelError: it can be neither.
    """
    if name_or_path is None:
        return demo.path()
    if not name_or_path.strip():
        raise ModelError("the name of a model is empty; give a folder or hub id")
    try:
        folder = Path(name_or_path).expanduser()
    except RuntimeError:  # "~" of nobody
        raise ModelError(f"there is no folder {name_or_path}") from None
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ModelError(about_file(folder))
    if name_or_path == demo.NAME:
        return demo.path()
    if name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        near = did_you_mean(name_or_path, _siblings(folder))
        raise ModelError(f"there is no folder {name_or_path}{near}")
    if SequenceMatcher(None, name_or_path.lower(), demo.NAME).ratio() > _MISSPELT:
        raise ModelError(
            f"there is no model {name_or_path!r}; did you mean {demo.NAME}, the built-in demo "
            "model, which also runs when no model is named?"
        )
    if name_or_path.lower().endswith("gguf"):
        raise ModelError(f"{name_or_path}: {GGUF}")
    return None


def resolve_folder(
    name_or_path: str | None,
    revision: str | None = None,
    download_dir: str | None = None,
    *,
    weights: bool = True,
) -> Path:
    """The folder of that name, or of the model of that name, downloaded from the Hugging Face Hub.

    Args:
        name_or_path: the demo model by default.
        revision: branch, tag or commit on the hub; ignored for folders.
        download_dir: where models of the hub are kept; the hub's own cache by default.
        weights: False downloads all files but the weights.

    Raises:
        ModelError: there is no such folder, and the hub has no such model or cannot be reached.
    """
    found = find_folder(name_or_path)
    if found is not None:
        return found
    assert name_or_path is not None
    source = name_or_path, revision, download_dir
    if not weights:
        return _download(*source, _WANTED)
    folder = _download(*source, (*_WANTED, _WEIGHTS))
    if any(folder.glob(_WEIGHTS)):
        return folder
    return _download(*source, (*_WANTED, _OLD_WEIGHTS))


def _download(
    name: str, revision: str | None, download_dir: str | None, wanted: tuple[str, ...]
) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                name,
                revision=revision,
                cache_dir=None if download_dir is None else Path(download_dir).expanduser(),
                allow_patterns=list(wanted),
                ignore_patterns=list(_UNWANTED),
            )
        )
    except Exception as error:  # the hub's client raises many types: HTTP, disk, cache
        at = f" at revision {revision!r}" if revision else ""
        near = did_you_mean(name, [*_siblings(Path(name)), *_downloaded()])
        raise ModelError(
            f"there is no local folder {name!r}, and the Hugging Face Hub did not give the model "
            f"{name!r}{at}: {_reason(error, name)}{near}"
        ) from None


def _reason(error: Exception, name: str) -> str:
    """Why a download failed, and what the user can do."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"accept its terms at https://huggingface.co/{name} and run 'hf auth login'"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "it has no such model, or a private one, which needs 'hf auth login'"
    lines = str(error).strip().splitlines() or ["no reason given"]
    if isinstance(error, errors.LocalEntryNotFoundError):
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"no connection ({lines[0]})"
        return f"{why}, and the model was not downloaded before"
    return f"{type(error).__name__}: {lines[0]}"


def _siblings(folder: Path) -> Iterable[str]:
    """The folders beside one that does not exist."""
    try:
        return [str(other) for other in folder.parent.iterdir() if other.is_dir()]
    except OSError:
        return []


def _downloaded() -> Iterable[str]:
    """The hub ids of models in the hub's cache."""
    from huggingface_hub import constants

    found = Path(constants.HF_HUB_CACHE).glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/") for folder in found]
