"""Importing torch without its operators in Python for the meta device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_LEAVE_OUT = """
import sys
from asyncllm.startup.lean_torch import (
    add_missing_meta, add_native_meta, end_leaving_out, leave_out_meta
)
leave_out_meta()
import torch
end_leaving_out()
assert not {"torch._meta_registrations", "torch._refs", "sympy"} & set(sys.modules)
"""


def run(program: str) -> None:
    """In a process of its own, as torch is imported once."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", program], check=True, env=environment)


def test_it_can_be_imported_later() -> None:
    run(
        _LEAVE_OUT
        + """
from torch import _meta_registrations
assert "torch._refs" in sys.modules
assert _meta_registrations.__file__
assert not add_missing_meta()
"""
    )


def test_what_finding_kernels_needs_is_there() -> None:
    run(
        _LEAVE_OUT
        + """
add_native_meta()
x = torch.empty(4, 6, device="meta")
index = torch.zeros(3, dtype=torch.int64, device="meta")
assert x.index_select(0, index).shape == (3, 6)
assert torch.nn.functional.embedding(index, x).shape == (3, 6)
assert x.logsumexp(-1).shape == (4,)
assert x.logsumexp(-1, keepdim=True).shape == (4, 1)
assert "torch._refs" not in sys.modules
"""
    )


def test_what_is_missing_comes_from_torch() -> None:
    run(
        _LEAVE_OUT
        + """
add_native_meta()
x = torch.empty(4, 6, device="meta")
try:
    x.abs()
except NotImplementedError:
    assert add_missing_meta()
assert x.abs().shape == (4, 6)
assert x.logsumexp(-1).shape == (4,)
assert not add_missing_meta()
"""
    )


@pytest.mark.parametrize("call", ["leave_out_meta", "end_leaving_out", "add_missing_meta"])
def test_nothing_happens_to_a_torch_that_was_imported_before(call: str) -> None:
    run(
        f"""
import sys, torch
from asyncllm.startup import lean_torch
before = sys.modules["torch._meta_registrations"]
assert not lean_torch.{call}()
assert sys.modules["torch._meta_registrations"] is before is torch._meta_registrations
"""
    )
