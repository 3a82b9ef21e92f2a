"""What a standby imports: all that a server imports from its start to its first token."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from importlib import import_module
from pkgutil import walk_packages
from typing import TYPE_CHECKING, Final

from asyncllm.kernels.cuda_driver import load_driver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.config import EngineConfig

log = logging.getLogger(__name__)

#: The server.
SERVER: Final = (
    "asyncllm.llm.async_llm",
    "asyncllm.server.reload",
    "asyncllm.server.run",
    "asyncllm.executor.startup.preload",
    "asyncllm.executor.startup.read_ahead",
)
#: What libraries import where they first need it.
LATE: Final = ("encodings.idna", "rich.live", "rich.progress", "uvloop")


def import_ahead(config: EngineConfig) -> None:
    """Import it, and log how long that took and how much memory.

    The driver of a GPU is initialised; no memory of the GPU is taken.
    """
    begun = time.perf_counter()
    _import((*SERVER, *LATE))
    if config.executor == "thread" and config.device != "sim":
        _import(["asyncllm.executor.leader"])
        _import_all("asyncllm.models.families")
        if config.gpu is not None:
            _import_kernels()
            load_driver()
    log.info("standing by after %.1f s: %s", time.perf_counter() - begun, _memory())


def _import_kernels() -> None:
    with suppress(ImportError):  # without Triton; the server says so
        _import_all("asyncllm.kernels.triton")
        from triton.runtime.cache import triton_key

        triton_key()  # a hash of half a gigabyte, which the first kernel would wait for


def _import(names: Sequence[str]) -> None:
    for name in names:
        import_module(name)


def _import_all(package: str) -> None:
    _import([found.name for found in walk_packages(import_module(package).__path__, f"{package}.")])


def _memory() -> str:
    """What this process takes of the host's memory."""
    sizes: dict[str, int] = {}
    with suppress(OSError), open("/proc/self/smaps_rollup", encoding="utf-8") as rollup:
        for line in rollup:
            name, *rest = line.split()
            if rest[-1] == "kB":
                sizes[name] = int(rest[0])
    own = sizes.get("Private_Clean:", 0) + sizes.get("Private_Dirty:", 0)
    return f"{sizes.get('Rss:', 0) >> 10} MiB, {own >> 10} of them not shared"
