"""One step through an attention backend, as a model would take it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import AttentionBackend, ForwardBatch
from asyncllm.kernels.tokens import locate_tokens
from asyncllm.kernels.types import AttentionSpec, HeadEncoding
from asyncllm.kernels.upload import upload

UNCHANGED = HeadEncoding(None, None, None)


def attend(
    backend: AttentionBackend,
    qkv: Tensor,
    spec: AttentionSpec,
    rows: np.ndarray,
    table: Tensor,
    page_size: int,
    *,
    encoding: HeadEncoding = UNCHANGED,
    plan: Any = None,
) -> Tensor:
    """The attention of a step's rows.

    Args:
        qkv: [tokens, heads, head_dim]; see ``AttentionSpec.split_heads``; stays as it is.
        rows: int32 [n, 3] of (slot, start, q_len).
        table: int32 [slots, max_pages], the block table.
        plan: of ``backend``; by default it is asked for one.

    Returns:
        [tokens, num_heads, head_dim].
    """
    batch = forward_batch(backend, rows, table, page_size, plan=plan)
    out = backend.forward(qkv.flatten(1).clone(), spec, encoding, batch)
    return out.view(-1, spec.num_heads, spec.head_dim)


def forward_batch(
    backend: AttentionBackend, rows: np.ndarray, table: Tensor, page_size: int, *, plan: Any = None
) -> ForwardBatch:
    """The step of these rows; ids are 0, and all tokens yield logits."""
    slots, starts, q_lens = rows.astype(np.int64).T
    positions = np.concatenate([np.arange(a, a + n) for a, n in zip(starts, q_lens, strict=True)])
    entries = np.stack([np.zeros_like(positions), slots.repeat(q_lens), positions])
    last_token = torch.zeros(len(table), dtype=torch.int64, device=table.device)
    on_device = upload(entries.astype(np.int32), table.device)
    tokens = locate_tokens(on_device, last_token, table, page_size)
    plan = backend.plan(rows, table) if plan is None else plan
    return ForwardBatch(*tokens, sample_rows=None, backend=backend, plan=plan)
