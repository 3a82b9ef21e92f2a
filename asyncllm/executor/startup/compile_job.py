"""What is to be compiled for a model on a GPU, and the note that all of it is in the cache.

A job's key is a hash of all that the set of kernels depends on. When a job is done, a manifest of
that name in the kernel cache lists its entries: a later start looks for them, which takes a
millisecond, instead of finding out again which kernels it needs.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.kernels.gpu import Gpu
from asyncllm.kernels.tuning import user_table
from asyncllm.version import __version__

#: The options that kernels depend on.
OPTIONS = (
    "hf_overrides",
    "quantization",
    "mamba_ssm_cache_dtype",
    "attention",
    "kv_cache_dtype",
    "deterministic",
    "max_model_len",
    "page_size",
    "max_num_seqs",
    "max_num_batched_tokens",
)
#: The folders of the package that decide which kernels are launched.
_SOURCES = ("attention", "executor", "kernels", "models")

#: These say where the cache is, which changes no kernel.
_PLACES = ("TRITON_CACHE_DIR", "TRITON_HOME")

_MANIFESTS = "asyncllm"


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """The kernels that one model launches on one GPU.

    Attributes:
        folder: of the model; only its configuration is read.
        dtype: of the computation, "bfloat16" or "float16".
        cache: Triton's cache folder, absolute.
        key: a hash of all that decides which kernels are compiled, and how.
    """

    config: EngineConfig
    folder: str
    dtype: str
    gpu: Gpu
    cache: str
    key: str

    @classmethod
    def of(
        cls, config: EngineConfig, folder: Path, gpu: Gpu, dtype: str | None = None
    ) -> CompileJob:
        """The job of serving, or of another dtype.

        Raises:
            OSError: the model's configuration cannot be read.
        """
        dtype = dtype or _serving_dtype(config)
        cache = str(cache_folder(config).absolute())
        key = f"{_common_key(config, folder, dtype)}-{_gpu_key(gpu)}"
        return cls(config=config, folder=str(folder), dtype=dtype, gpu=gpu, cache=cache, key=key)

    def is_done(self) -> bool:
        """Whether every kernel of this job is in the cache."""
        try:
            entries = json.loads(self._manifest().read_bytes())
        except (OSError, ValueError):
            return False
        return all(Path(self.cache, entry).is_dir() for entry in entries)

    def record(self, entries: Iterable[str]) -> None:
        """Note that the job is done, and the cache's entries that belong to it."""
        manifest = self._manifest()
        manifest.parent.mkdir(parents=True, exist_ok=True)
        # Another process must find a whole manifest or none.
        partial = manifest.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(sorted(entries)))
        partial.replace(manifest)

    def _manifest(self) -> Path:
        return Path(self.cache, _MANIFESTS, f"{self.key}.json")


class CompileReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """The progress of a job.

    Attributes:
        ready: kernels that are in the cache.
        done: whether they are all.
        error: why there will be no more.
    """

    ready: int = 0
    done: bool = False
    error: str | None = None


def cache_folder(config: EngineConfig) -> Path:
    """Where Triton keeps compiled kernels, without importing Triton."""
    if config.kernel_cache is not None:
        return Path(config.kernel_cache)
    named = os.environ.get("TRITON_CACHE_DIR")
    if named is not None:
        return Path(named)
    return Path(os.environ.get("TRITON_HOME", os.path.expanduser("~/")), ".triton", "cache")


def is_new(config: EngineConfig, folder: Path) -> bool:
    """Whether no job of serving was ever done, on whatever GPU.

    Raises:
        OSError: the model's configuration cannot be read.
    """
    key = _common_key(config, folder, _serving_dtype(config))
    return not any(Path(cache_folder(config), _MANIFESTS).glob(f"{key}-*.json"))


def _serving_dtype(config: EngineConfig) -> str:
    """As on a GPU."""
    return "bfloat16" if config.dtype == "auto" else config.dtype


def _common_key(config: EngineConfig, folder: Path, dtype: str) -> str:
    """The part of a job's key that does not depend on the GPU."""
    parts = (
        __version__,
        _digest_of_sources(),
        _versions(),
        sys.implementation.cache_tag,
        sorted(
            (k, v) for k, v in os.environ.items() if k.startswith("TRITON_") and k not in _PLACES
        ),
        hashlib.sha256(Path(folder, "config.json").read_bytes()).hexdigest(),
        dtype,
        [getattr(config, name) for name in OPTIONS],
    )
    return _hash_of(parts)


def _gpu_key(gpu: Gpu) -> str:
    return _hash_of((gpu, _text_of(user_table(gpu.name))))


def _hash_of(parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]


@cache
def _digest_of_sources() -> str:
    """A hash of the package's files that decide which kernels are launched."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[2]
    for folder in _SOURCES:
        for path in sorted(Path(root, folder).rglob("*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.read_bytes())
    return digest.hexdigest()


def _text_of(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


def _versions() -> list[str]:
    found = []
    for package in ("triton", "torch"):
        with suppress(PackageNotFoundError):
            found.append(f"{package} {version(package)}")
    return found
