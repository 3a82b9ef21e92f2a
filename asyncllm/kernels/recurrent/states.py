"""Copies of recurrent states between slots."""

from __future__ import annotations

from torch import Tensor

from asyncllm.kernels.support import in_triton


@in_triton("recurrent.states")
def copy_states(inputs: Tensor, matrices: Tensor, copies: Tensor) -> None:
    """Copy states in order: a slot may be the source of a copy after it was the target of one.

    Args:
        inputs, matrices: [slots, elements], contiguous; see ``StatePool``.
        copies: int32 [n, 2] of (source, target) slots; n > 0.
    """
    for source, target in copies.tolist():
        inputs[target] = inputs[source]
        matrices[target] = matrices[source]
