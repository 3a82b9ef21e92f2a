"""The tokenizer's files in a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from asyncllm.errors import ModelError

_CONVERTIBLE = ("vocab.json", "tokenizer.model", "vocab.txt", "spiece.model", "tekken.json")


def read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    """The JSON object in this file; empty if there is no such file, unless it is ``required``.

    Raises:
        ModelError: the file is not a JSON object.
    """
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not required:
            return {}
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    except RecursionError:
        raise ModelError(f"{path} is nested too deeply") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object")
    return value


def read_special_tokens(folder: Path) -> dict[str, str]:
    """The tokens that have a name, such as {"bos_token": "<s>", "eos_token": "</s>"}.

    Raises:
        ModelError: a file is not valid JSON.
    """
    named = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):  # the latter wins
        for name, token in read_json(folder / file).items():
            content = token.get("content") if isinstance(token, dict) else token
            if name.endswith("_token") and isinstance(content, str):
                named[name] = content
    return named


def check_tokenizer(folder: Path) -> None:
    """Check that there is one.

    Raises:
        ModelError: there is none.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", *_CONVERTIBLE)):
        raise ModelError(
            f"no tokenizer in {folder}: expected tokenizer.json, or vocab.json and merges.txt, or "
            "tokenizer.model"
        )


def load_backend(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizers library's tokenizer of this folder, and its named special tokens.

    Raises:
        ModelError: no tokenizer in the folder, or it cannot be read.
    """
    check_tokenizer(folder)
    return _load(folder) if (folder / "tokenizer.json").is_file() else _convert(folder)


def _load(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    named = read_special_tokens(folder)
    config = read_json(folder / "tokenizer_config.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        _add_configured_tokens(backend, config, named)
    except Exception as error:  # the library raises plain Exception
        raise ModelError(f"cannot read the tokenizer in {folder}: {error}") from error
    return backend, named


def _add_configured_tokens(
    backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]
) -> None:
    """Add the tokens that only tokenizer_config.json has, like transformers.

    Its ``add_bos_token`` is not read: the post-processor in tokenizer.json decides, in transformers
    5 as well.
    """
    listed = config.get("added_tokens_decoder") or {}
    for token_id in sorted(listed, key=int):
        options = {key: value for key, value in listed[token_id].items() if key != "__type"}
        backend.add_tokens([tokenizers.AddedToken(**options)])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    special = [*named.values(), *(extra.values() if isinstance(extra, dict) else extra)]
    contents = [token["content"] if isinstance(token, dict) else token for token in special]
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_special_tokens([content for content in contents if content not in added])


def _convert(folder: Path) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    try:
        from transformers import AutoTokenizer  # seconds to import, and rarely needed

        converted = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        return converted.backend_tokenizer, converted.special_tokens_map
    except Exception as error:
        raise ModelError(
            f"cannot convert the tokenizer in {folder}: {error}. A folder with a tokenizer.json "
            "needs no conversion."
        ) from error
