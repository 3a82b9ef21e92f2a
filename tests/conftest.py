"""What every test shares: quiet CPU kernels, and GPU tests only where there is a GPU."""

from __future__ import annotations

import os

import pytest

# Before torch is imported: spinning at barriers costs a factor of 10 on busy machines.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA device")
        for item in gpu_items:
            item.add_marker(skip)
