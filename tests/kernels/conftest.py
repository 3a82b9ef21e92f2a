"""Kernel tests run natively where there is a GPU, and elsewhere in Triton's interpreter."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.kernels.device import DEVICE


def patch_once() -> None:
    """Have Triton's interpreter replace the functions of its language here, once for all kernels.

    It would do so at each launch, and at each call of a function by a kernel, which is up to half
    of the time that kernels take in it.
    """
    from triton import language
    from triton.runtime import interpreter

    modules = {"tl": language, "core": language.core}
    interpreter._patch_lang(SimpleNamespace(__globals__=modules))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


if DEVICE == "cpu" and find_spec("triton") is not None:
    patch_once()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if DEVICE == "cpu":
        return
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Fresh inputs in each test, the same ones in each run."""
    torch.manual_seed(0)


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of the interpreter do not depend on the shape, as those of numpy do: sums are in
    float64, whose rounding is far below that of float32."""
    if DEVICE == "cuda":
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def dot(_: object, a: Any, b: Any, acc: Any, *_options: Any) -> Any:
        product = np.matmul(a.data, b.data, dtype=np.float64)
        return TensorHandle(product.astype(np.float32) + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)
