"""``--config FILE``: options from a YAML, TOML or JSON file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.config.option_names import option_of
from asyncllm.config.ray_config import RayConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.system.suggest import did_you_mean
from asyncllm.types import SamplingParams
from asyncllm.vllm_options.table import options
from asyncllm.vllm_options.translate import translate
from asyncllm.vllm_options.values import own_word

_DECODERS: Final[dict[str, Callable[[bytes], Any]]] = {
    ".yaml": msgspec.yaml.decode,
    ".yml": msgspec.yaml.decode,
    ".toml": msgspec.toml.decode,
    ".json": msgspec.json.decode,
}
#: Those of the engine and the server, which any command's file may have.
_SHARED: Final = (EngineConfig, ServerConfig, RayConfig)
_STRUCTS: Final = (*_SHARED, SamplingParams)


def add_config_file(parser: argparse.ArgumentParser) -> None:
    """Add ``--config``."""
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="YAML, TOML or JSON file with options, such as 'max-num-seqs: 64'; the command line "
        "overrides it",
    )


def apply_file(parser: argparse.ArgumentParser, args: argparse.Namespace, path: Path) -> None:
    """Set options from the file of ``--config`` that are not on the command line.

    One file serves all commands, so options of the server and the engine that this command lacks
    are ignored. vLLM's names are taken as on the command line. Any other key is a usage error.
    """
    args.from_file = {}
    # Only options generated from structs have no default in the parser.
    own = {a.dest for a in parser._actions if a.default is argparse.SUPPRESS}
    fields = [field for struct in _STRUCTS for field in struct.__struct_fields__]
    shared = {name for struct in _SHARED for name in struct.__struct_fields__}
    known = {name.replace("_", "-"): name for name in fields if name in own | shared}
    found, vllm = {}, {}
    for key, value in _read(parser, path).items():
        if (name := known.get(key.replace("_", "-"))) is not None:
            found[name] = own_word(name, value)
        elif (name := key.replace("-", "_")) in options():
            vllm[name] = value
        else:
            parser.error(f"{path}: unknown key {key!r}{did_you_mean(key, known)}")
    try:
        translated = translate(vllm, option_of)
    except BadRequest as error:
        parser.error(f"{path}: {error.message}")
    args.notes = [*vars(args).get("notes", ()), *translated.notes]
    for name, value in (translated.fields | found).items():
        if name in own and name not in args:
            setattr(args, name, value)
            args.from_file[name] = path


def _read(parser: argparse.ArgumentParser, path: Path) -> dict[str, Any]:
    decode = _DECODERS.get(path.suffix.lower())
    if decode is None:
        parser.error(f"{path}: the name must end in {', '.join(_DECODERS)}")
    try:
        content = decode(path.read_bytes())
    except OSError as error:
        parser.error(f"cannot read --config {path}: {error.strerror}")
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        parser.error(f"{path}: {' '.join(str(error).split())}")
    if not isinstance(content, dict):
        parser.error(f"{path} must hold options, such as 'max-num-seqs: 64'")
    return {str(key): value for key, value in content.items()}
