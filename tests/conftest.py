"""What every test shares: quiet CPU kernels, one hypothesis profile, GPU tests only on a GPU."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
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

# What a shell runs in the background ignores Ctrl-C, which some tests press.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Else there would be full collections in any test.
gc.set_threshold(700, 10, 100)

# How long one example takes says more about the machine than about the code.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


class FrozenHeap:
    """Keeps what imports and collecting made out of collections, which then are quick.

    Engines freeze the heap when they have started, and thaw all of it when they close: each of them
    would then traverse the suite's heap twice, in half a second each time. So in tests they do
    neither, except where ``freezing`` is used.
    """

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._num_modules = 0

    def pytest_collection_finish(self) -> None:
        self._freeze()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self) -> None:
        """Freeze what the test has imported, if that is much; its own garbage is collected."""
        if len(sys.modules) > self._num_modules + 100:
            self._freeze()

    @pytest.fixture
    def freezing(self) -> Iterator[None]:
        """``gc.freeze`` and ``gc.unfreeze`` do what they do in Python."""
        self._patch.undo()
        yield
        self._freeze()

    def _freeze(self) -> None:
        self._patch.undo()
        gc.collect()
        gc.freeze()
        self._num_modules = len(sys.modules)
        for name in ("freeze", "unfreeze"):
            self._patch.setattr(gc, name, lambda: None)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FrozenHeap())


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
