"""Whether Python keeps the bytecode of what a server imports.

Without it, Python compiles more than a thousand modules at each start, which takes seconds. pip
makes it when it installs, uv does not; whatever is missing is written when it is imported, unless
the folder is read-only or PYTHONDONTWRITEBYTECODE is set.
"""

from __future__ import annotations

import os
import sys
from typing import Final

#: Most of the modules are theirs.
PACKAGES: Final = ("asyncllm", "torch")


def compiled_each_time() -> list[str]:
    """Those of PACKAGES that were imported and have no bytecode, also now."""
    return [name for name in PACKAGES if name in sys.modules and not _is_kept(name)]


def why_not_kept() -> str:
    """Why Python does not keep it."""
    if not sys.dont_write_bytecode:
        return "their folder cannot be written to"
    is_set = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    return "PYTHONDONTWRITEBYTECODE is set" if is_set else "Python runs with the option -B"


def _is_kept(name: str) -> bool:
    spec = getattr(sys.modules[name], "__spec__", None)
    source, cached = getattr(spec, "origin", None), getattr(spec, "cached", None)
    if source is None or cached is None or not os.path.exists(source):
        return True  # in no file of its own, so nothing can be said
    return os.path.exists(cached)
