"""Count the kernels that Triton compiles, and warn when one is compiled during serving."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

from asyncllm.wire.heartbeat import Heartbeat, Operation

log = logging.getLogger(__name__)


class CompileWatch:
    """Listens to Triton's compiler.

    Attributes:
        compiled: the name of each compiled variant.
        loaded: the number of variants found in Triton's cache.
    """

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.loaded = 0
        self._serving = False
        self._heartbeat = Heartbeat()
        self._before: Operation | None = None  # what a compilation interrupts
        self._thread = 0

    def install(self, folder: str | None = None) -> None:
        """Watch until another one is installed; ``folder`` changes Triton's cache folder.

        Without Triton, or with one that cannot be watched, nothing happens.
        """
        try:
            from triton import knobs
            from triton.runtime.cache import triton_key
        except ImportError:  # ``kernels.support`` finds out what it means, and says so
            return
        if folder is not None:
            knobs.cache.dir = str(Path(folder).absolute())
        knobs.compilation.listener = self._on_kernel
        # A hash of Triton itself, half a gigabyte, which the first kernel would wait for.
        threading.Thread(target=triton_key, name="asyncllm-triton-key", daemon=True).start()

    def start_serving(self) -> None:
        """Log what start-up compiled; from now on, warn about every compiled kernel."""
        self._serving = True
        names = ", ".join(f"{count} {name}" for name, count in Counter(self.compiled).items())
        if names:
            log.info(
                "%s compiled and %d found ('asyncllm kernels build' compiles ahead of time)",
                names,
                self.loaded,
            )

    def report_to(self, heartbeat: Heartbeat) -> None:
        """Enter "compile" while this thread compiles, or loads, a kernel."""
        if "triton" not in sys.modules:  # on a CPU; the first step would wait for the import
            return
        try:
            from triton import knobs
        except ImportError:
            return
        self._heartbeat = heartbeat
        self._thread = threading.get_ident()
        knobs.runtime.jit_cache_hook = self._before_kernel
        knobs.runtime.jit_post_compile_hook = self._after_kernel

    def _before_kernel(self, **_: Any) -> bool:
        if threading.get_ident() == self._thread:
            self._before = self._heartbeat.operation
            self._heartbeat.enter("compile", self._before.step)
        return False  # True would leave the kernel out

    def _after_kernel(self, **_: Any) -> None:
        if threading.get_ident() == self._thread and self._before is not None:
            self._heartbeat.enter(self._before.name, self._before.step)
            self._before = None

    def _on_kernel(
        self, *, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any
    ) -> None:
        if cache_hit:
            self.loaded += 1
            return
        self.compiled.append(metadata["name"])
        if self._serving:
            log.warning(
                "kernel %s was compiled in %.2f s while serving ('asyncllm kernels build' does so "
                "ahead of time)",
                metadata["name"],
                times.total / 1e6,
            )
