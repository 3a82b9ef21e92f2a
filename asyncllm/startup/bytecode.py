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
    specs = [module.__spec__ for name in PACKAGES if (module := sys.modules.get(name))]
    return [
        spec.name
        for spec in specs
        if spec is not None and spec.cached is not None and not os.path.exists(spec.cached)
    ]
