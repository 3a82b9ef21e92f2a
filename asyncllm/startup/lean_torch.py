"""Import torch without its operators in Python for the meta device.

Importing torch imports these for its compiler, which takes a quarter of the time; using one of them
imports sympy and the compiler itself, which takes another second. Serving needs none of them, and
finding kernels only the two that are written here. Only for processes that run nothing but ours.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

_NAME: Final = "torch._meta_registrations"

#: What torch finds in their place.
_PLACEHOLDER: Final = ModuleType(_NAME)

#: Those of ``add_native_meta``, which last as long as they are here.
_libraries: list[Any] = []


def leave_out_meta() -> None:
    """The first import of torch after this is shorter; call ``end_leaving_out`` once it is done."""
    if "torch" not in sys.modules:
        sys.modules[_NAME] = _PLACEHOLDER


def end_leaving_out() -> None:
    """From now on, importing these operators imports them; without ``leave_out_meta``, nothing."""
    if sys.modules.get(_NAME) is _PLACEHOLDER:
        del sys.modules[_NAME]
        vars(sys.modules.get("torch", _PLACEHOLDER)).pop("_meta_registrations", None)


def add_native_meta() -> None:
    """Have the meta device compute what finding kernels needs, unless torch's operators do."""
    import torch

    if _NAME not in sys.modules:
        library = torch.library.Library("aten", "IMPL", "Meta")
        library.impl("index_select", _index_select)
        library.impl("logsumexp", _logsumexp)
        _libraries.append(library)


def add_missing_meta() -> bool:
    """Import torch's operators after all; returns whether they had been left out."""
    end_leaving_out()
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


def _logsumexp(x: Tensor, dim: list[int], keepdim: bool = False) -> Tensor:
    return x.sum(dim, keepdim)
