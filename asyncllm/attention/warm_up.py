"""The first run of an attention backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncllm.attention.base import ForwardBatch
from asyncllm.kernels.types import HeadEncoding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.attention.base import AttentionBackend
    from asyncllm.kernels.types import AttentionSpec

#: (slot, start, q_len) of each row: a decode row and a longer one, and a decode row alone.
_STEPS = ([[0, 0, 1], [0, 0, 2]], [[0, 0, 1]])


def warm_up(
    backend: AttentionBackend,
    specs: Sequence[AttentionSpec],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run every kind of layer, in a step of decode rows and in a mixed one.

    Writes to page 0, so it must come before the first sequence.

    Args:
        specs: of all layers.
        dtype: of the computation.

    Raises:
        Exception: from compiler, loader or driver, for instance because kernels were built for
            another GPU.
    """
    kinds = {spec.kind: spec for spec in specs}
    table = torch.zeros(1, 2, dtype=torch.int32, device=device)
    for step in _STEPS:
        rows = np.array(step, dtype=np.int32)
        tokens = int(rows[:, 2].sum())
        zeros = torch.zeros(tokens, dtype=torch.int64, device=device)
        plan = backend.plan(rows, table)
        batch = ForwardBatch(zeros, zeros, zeros, sample_rows=None, backend=backend, plan=plan)
        for spec in kinds.values():
            qkv = torch.zeros(tokens, spec.projected_size, dtype=dtype, device=device)
            sinks = qkv.new_zeros(spec.num_heads) if spec.has_sinks else None
            backend.forward(qkv, spec, HeadEncoding(None, None, None, sinks), batch)
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
