"""What every test shares: quiet CPU kernels, one hypothesis profile, GPU tests only on a GPU."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported: spinning at barriers costs a factor of 10 on busy machines.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

if not torch.cuda.is_available():
    # Kernels then run in Triton's interpreter, which must be said before anybody imports Triton.
    os.environ["TRITON_INTERPRET"] = "1"

# A full collection of a heap as large as the suite's takes a second, and would fall into any test.
gc.set_threshold(700, 10, 100)

# How long one example takes says more about the machine than about the code.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_finish() -> None:
    """Take all that imports and collecting made out of later collections, which then are quick."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in gpu_items:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a family, with a tokenizer beside it; made once."""
    from tests.support.models import tiny_models
    from tests.support.text import tokenizers as tokenizers_for_tests

    @lru_cache
    def make(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        tiny_models.make(family, folder)
        (folder / "tokenizer.json").write_text(tokenizers_for_tests.byte_level())
        return folder

    return make
