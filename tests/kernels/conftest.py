"""Kernel tests run natively where there is a GPU, and elsewhere in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.kernels.device import DEVICE


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
