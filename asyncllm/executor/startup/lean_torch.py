"""Import torch without its operators in Python for the meta device.

Importing torch imports these for its compiler, which takes a quarter of the time; using one of them
imports sympy and the compiler itself, which takes another second. Finding kernels needs only the
two that are written here.

Only for a process that runs nothing else: most modules of torch's compiler cannot be imported
before ``add_missing_meta``, as they import each other in circles.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

_NAME: Final = "torch._meta_registrations"

#: Registrations of our operators, which last as long as they are here.
_libraries: list[Any] = []


def import_lean_torch() -> None:
    """Import torch like this, unless it was imported before."""
    if "torch" in sys.modules:
        return
    sys.modules[_NAME] = ModuleType(_NAME)  # which torch finds in their place
    import torch

    del sys.modules[_NAME]
    vars(torch).pop("_meta_registrations", None)
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("index_select", _index_select)
    _libraries.append(library)


def add_missing_meta() -> bool:
    """Import torch's operators after all; returns whether they had been left out."""
    if _NAME in sys.modules:
        return False
    while _libraries:
        _libraries.pop()._destroy()
    import_module(_NAME)
    return True


def _index_select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    shape = list(x.shape)
    shape[dim] = index.numel()
    return x.new_empty(shape)
