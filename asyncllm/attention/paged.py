"""Attention of a step's rows over the paged KV cache, on kernels that need no plan.

Decode rows (one new token) and longer rows have kernels of their own. Both read on the device what
their rows are, so a plan is a few small tensors: uploaded for a step that is launched kernel by
kernel, or read anew by each launch of a CUDA graph.

In a mixed step the two kernels overlap: decode rows keep memory busy, longer rows the tensor cores
of as many multiprocessors as they have tiles. Microseconds of a layer's attention in a graph of 36
layers, on one H200, with 32 heads, 8 K/V heads of 128:

| decode rows x length + tokens @ start | decode rows | longer rows | in turn | both   | floor |
|---------------------------------------|-------------|-------------|---------|--------|-------|
| 130 x 650 + 155 @ 500                 | 100         | 21          | 132     | 105    | 78    |
| 130 x 650 + 155 @ 1,000               | 100         | 24          | 132     | 109    | 78    |
| 130 x 650 + 250 @ 300                 | 100         | 21          | 128     | 110    | 77    |
| 16 x 650 + 155 @ 500                  | 18          | 22          | 50      | 31     | 10    |
| 64 x 1,000 + 400 @ 4,000              | 81          | 66          | 154     | 121    | 62    |
| none + 155 @ 500                      | 3           | 22          | 26      | 19     | 2     |

A second stream in the graph takes the same time. At the GPU's power limit, a whole layer of
Qwen3-8B in the first case takes 343 us instead of 358.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import ForwardBatch, GraphRows
from asyncllm.kernels.attention import (
    decode_attention,
    decode_heads,
    encode_heads,
    prefill_attention,
)
from asyncllm.kernels.types import HeadEncoding, PrefillRows
from asyncllm.kernels.upload import upload_aligned

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.attention.base import KVPages
    from asyncllm.kernels.types import AttentionSpec
    from asyncllm.kernels.upload import Upload


@dataclass(frozen=True, slots=True)
class Decodes:
    """Rows of one token each, which come first in the step.

    Attributes:
        slots, lengths: integers [rows]; positions to attend to, the row's own included. Length 0:
            this token does not belong to a decode row.
    """

    slots: Tensor
    lengths: Tensor


class PlannedPrompts(Protocol):
    """Attention of a step's longer rows by kernels that need a plan made on the host."""

    def run(self, q: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        """Attend the tokens of these rows; q and out: [tokens, num_heads, head_dim]."""


class PromptKernels(Protocol):
    """Kernels for longer rows that need a plan made on the host."""

    def plan(self, rows: np.ndarray, block_table: Tensor) -> PlannedPrompts:
        """See ``AttentionBackend.plan``; no row is a decode row."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step's rows by kernel; ``prompts`` attends the longer rows instead of our own kernel."""

    block_table: Tensor
    decodes: Decodes | None
    extends: PrefillRows | None
    prompts: PlannedPrompts | None = None


class PagedBackend:
    """``AttentionBackend``, and the one for CUDA graphs, on the kernels of ``asyncllm.kernels``.

    Nothing here waits for the device.

    Args:
        kv: the pages, in the dtype that queries come in.
        upload: to where the pages are.
        prompts: kernels for the longer rows of steps launched kernel by kernel; by default, our
            own.
    """

    def __init__(self, kv: KVPages, upload: Upload, prompts: PromptKernels | None = None) -> None:
        self._kv = kv
        self._upload = upload
        self._prompts = prompts

    def plan(self, rows: np.ndarray, block_table: Tensor) -> PagedPlan:
        """See ``AttentionBackend.plan``; ``rows`` must not be empty."""
        slots, starts, q_lens = rows.T
        longer = np.flatnonzero(q_lens != 1)
        count = int(longer[0]) if longer.size else len(rows)
        offsets = np.concatenate([[0], q_lens.cumsum()])
        parts = (slots[:count], starts[:count] + 1, slots[count:], starts[count:], offsets[count:])
        on_device = upload_aligned(parts, np.int32, self._upload)
        decodes = Decodes(*on_device[:2]) if count else None
        if count == len(rows):
            return PagedPlan(block_table, decodes, None)
        extends = PrefillRows(*on_device[2:])
        if self._prompts is None:
            return PagedPlan(block_table, decodes, extends)
        return PagedPlan(
            block_table, decodes, extends, self._prompts.plan(rows[count:], block_table)
        )

    def graph_plan(self, rows: GraphRows, block_table: Tensor) -> PagedPlan:
        """See ``GraphBackend.graph_plan``.

        Which rows are decode rows differs from replay to replay, so each kernel gets all rows, with
        the other kernel's rows as padding.
        """
        return PagedPlan(block_table, Decodes(rows.slots, rows.decode_lengths), rows.prefill)

    def before_replay(self, plan: PagedPlan, rows: np.ndarray) -> None:
        """See ``GraphBackend.before_replay``: the kernels read all they need on the device."""

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``AttentionBackend.forward``."""
        plan: PagedPlan = batch.plan
        keys, values = self._kv.layer(spec.layer)
        table, decodes, extends = plan.block_table, plan.decodes, plan.extends
        if extends is None:
            assert decodes is not None
            slots, lengths = decodes.slots, decodes.lengths
            at = batch.positions, batch.slot_mapping
            return decode_heads(qkv, encoding, *at, keys, values, table, slots, lengths, spec)
        q, _, _ = encode_heads(
            qkv, spec, encoding, batch.positions, keys, values, batch.slot_mapping
        )
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        count = 0 if decodes is None else min(len(decodes.slots), len(q))
        if plan.prompts is not None:
            plan.prompts.run(q[count:], spec, out[count:])
        else:
            prefill_attention(q, keys, values, table, extends, spec, out=out)
        if decodes is not None:
            slots, lengths = decodes.slots[:count], decodes.lengths[:count]
            decoding = q[:count], keys, values, table, slots, lengths, spec
            # No kernel can start before FlashInfer's or PyTorch's kernels have finished.
            overlaps = plan.prompts is None
            decode_attention(*decoding, out=out[:count], overlaps_previous=overlaps)
        return out.flatten(1)

    def forward_logit_rows(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``LogitRowsBackend``: the last tokens of rows attend as decode rows do."""
        assert batch.logit_rows is not None
        keys, values = self._kv.layer(spec.layer)
        q, _, _ = encode_heads(
            qkv, spec, encoding, batch.positions, keys, values, batch.slot_mapping
        )
        table = batch.plan.block_table
        # The decode kernel reads K and V of earlier tokens without waiting for the previous kernel.
        # Here that is the selection of rows, which has waited itself.
        out = decode_attention(batch.sampling(q), keys, values, table, *batch.logit_rows, spec)
        return out.flatten(1)

    def warm_up(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Run every kind of layer once, with a decode row and a longer one.

        Writes to page 0, so it must come before the first sequence.

        Raises:
            Exception: from compiler, loader or driver, for instance because kernels were built for
                another GPU.
        """
        rows = np.array([[0, 0, 1], [0, 0, 2]], dtype=np.int32)
        plan = self.plan(rows, torch.zeros(1, 2, dtype=torch.int32, device=device))
        zeros = torch.zeros(3, dtype=torch.int64, device=device)
        batch = ForwardBatch(zeros, zeros, zeros, sample_rows=None, backend=self, plan=plan)
        kinds = {replace(spec, layer=0): spec for spec in specs}
        for spec in kinds.values():
            width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
            qkv = torch.zeros(3, width, dtype=dtype, device=device)
            self.forward(qkv, spec, HeadEncoding(None, None, None), batch)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
