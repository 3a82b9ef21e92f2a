"""Importing torch without its operators in Python for the meta device."""

from __future__ import annotations

import os
import subprocess
import sys

_LEAN = """
import sys
from asyncllm.executor.startup.lean_torch import add_missing_meta, import_lean_torch
import_lean_torch()
import torch
assert not {"torch._meta_registrations", "torch._refs", "sympy"} & set(sys.modules)
x = torch.empty(4, 6, device="meta")
"""


def run(program: str) -> None:
    """In a process of its own, as torch is imported once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_what_finding_kernels_needs_is_there() -> None:
    run(
        _LEAN
        + """
index = torch.zeros(3, dtype=torch.int64, device="meta")
assert x.index_select(0, index).shape == (3, 6)
assert torch.nn.functional.embedding(index, x).shape == (3, 6)
assert "torch._refs" not in sys.modules
"""
    )


def test_what_is_missing_comes_from_torch() -> None:
    run(
        _LEAN
        + """
try:
    x.abs()
except NotImplementedError:
    assert add_missing_meta()
assert x.abs().shape == (4, 6)
assert x.logsumexp(-1).shape == (4,)
assert not add_missing_meta()
import torch._dynamo
"""
    )


def test_nothing_happens_to_a_torch_that_was_imported_before() -> None:
    run(
        """
import sys, torch
from asyncllm.executor.startup.lean_torch import add_missing_meta, import_lean_torch
before = sys.modules["torch._meta_registrations"]
import_lean_torch()
assert not add_missing_meta()
assert sys.modules["torch._meta_registrations"] is before is torch._meta_registrations
"""
    )
