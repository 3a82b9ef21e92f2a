"""What a folder or a file is that is no model, or no weights, for the error that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

#: What to do with a GGUF file.
GGUF: Final = "GGUF files (of llama.cpp) are not served; take the model's safetensors"
_LFS: Final = b"version https://git-lfs"


def about_file(file: Path) -> str:
    """Why a file is no model."""
    what_to_do = GGUF if file.suffix == ".gguf" else "give the folder that holds config.json"
    return f"{file} is a file; {what_to_do}"


def about_folder(folder: Path) -> str:
    """Why a folder without config.json is no model."""
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if (adapter := folder / "adapter_config.json").is_file():
        return (
            f"{folder} is an adapter (LoRA) for {_base_of(adapter)}, and adapters are not served: "
            "merge it into its model with peft's merge_and_unload(), save that and serve it"
        )
    if any(folder.glob("*.gguf")):
        return f"{folder} has no config.json; {GGUF}"
    inside = sorted(file.parent for file in (*folder.glob("*/config.json"), *_snapshots(folder)))
    if inside:
        return f"{folder} has no config.json, but {inside[0]} has one"
    return f"{folder} is not a model's folder: it has no config.json"


def about_weights(folder: Path) -> str:
    """What to do if a folder has none that are served; "" if nothing is known."""
    return f" ({GGUF})" if any(folder.glob("*.gguf")) else ""


def about_safetensors(file: Path) -> str | None:
    """Why a file is no safetensors, beyond what its reader says."""
    with file.open("rb") as opened:
        start = opened.read(64).lstrip()
    if start.startswith(_LFS):
        return "only Git LFS's note about it is here; 'git lfs pull' gets the file itself"
    if start[:1] == b"<":
        return "it is a page of HTML: the download went wrong"
    return None


def _snapshots(folder: Path) -> list[Path]:
    """Of a model's folder in the hub's cache."""
    return list(folder.glob("snapshots/*/config.json"))


def _base_of(adapter: Path) -> str:
    try:
        base = json.loads(adapter.read_bytes())["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        base = None
    return base if isinstance(base, str) and base.isprintable() else "another model"
