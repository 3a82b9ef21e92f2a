"""Attention of a step's rows over the paged KV cache, on kernels that need no plan.

Rows of one new token (decode rows) and longer ones have kernels of their own. Both find out on the
device what their rows are, so that a plan is no more than a few small tensors: sent there by the
host for a step that is launched kernel by kernel, or tensors that a CUDA graph reads anew each time
it is launched.

In a step of both they run beside each other: reading keys and values of decode rows keeps memory
busy and longer rows the tensor cores, of as many multiprocessors as they have tiles. Microseconds
of a layer's attention in a graph of 36 layers, on one H200, with 32 heads, 8 K/V heads of 128:

| decode rows x length + tokens @ start | decode rows | longer rows | in turn | beside | floor |
|---------------------------------------|-------------|-------------|---------|--------|-------|
| 130 x 650 + 155 @ 500                 | 100         | 21          | 132     | 105    | 78    |
| 130 x 650 + 155 @ 1,000               | 100         | 24          | 132     | 109    | 78    |
| 130 x 650 + 250 @ 300                 | 100         | 21          | 128     | 110    | 77    |
| 16 x 650 + 155 @ 500                  | 18          | 22          | 50      | 31     | 10    |
| 64 x 1,000 + 400 @ 4,000              | 81          | 66          | 154     | 121    | 62    |
| none + 155 @ 500                      | 3           | 22          | 26      | 19     | 2     |

A stream beside, in the graph, takes the same. At the GPU's power limit, a whole layer of Qwen3-8B
of the first kind takes 343 us instead of 358.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import ForwardBatch
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
    """Rows of one token each, which are the step's first tokens.

    Attributes:
        slots: integers [rows].
        lengths: integers [rows]: positions to attend to, the row's own included. 0: this token is
            none of a decode row.
    """

    slots: Tensor
    lengths: Tensor


class PlannedPrompts(Protocol):
    """Attention of a step's longer rows by kernels that had to be told of them beforehand."""

    def run(self, q: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        """Attend the tokens of these rows; q and out: [tokens, num_heads, head_dim]."""


class PromptKernels(Protocol):
    """Kernels for longer rows that want a plan made on the host."""

    def plan(self, rows: np.ndarray, block_table: Tensor) -> PlannedPrompts:
        """See ``AttentionBackend.plan``; no row is a decode row."""


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """A step's rows, sorted by kernel.

    Attributes:
        block_table: int32 [slots, max_pages].
        decodes: None if there are none; ``extends`` likewise.
        prompts: what attends the rows of ``extends`` instead of their own kernel, or None.
    """

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
        prompts: kernels for the longer rows of steps that are launched kernel by kernel; by
            default they are our own too.
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

    def device_plan(self, slots: Tensor, lengths: Tensor, block_table: Tensor) -> PagedPlan:
        """A plan of decode rows, good for whatever these tensors hold when it is used.

        Args:
            slots: integers [rows].
            lengths: int32 [rows], the row's own token included; 0 is padding.
        """
        return PagedPlan(block_table, Decodes(slots, lengths), None)

    def mixed_plan(
        self,
        slots: Tensor,
        starts: Tensor,
        q_offsets: Tensor,
        lengths: Tensor,
        block_table: Tensor,
    ) -> PagedPlan:
        """A plan of rows of any number of tokens, likewise.

        Which of them are decode rows is not known until then: each kernel gets all rows, and takes
        the other's for padding.

        Args:
            slots, starts, lengths: int32 [rows]: row i brings positions starts[i] .. lengths[i]-1.
            q_offsets: int32 [rows + 1]; its tokens are q_offsets[i] .. q_offsets[i + 1] - 1.
                Padding rows have none, and length 0.
        """
        # One token, and one of each row before: no more tokens than rows up to here.
        numbers = torch.arange(len(q_offsets), dtype=q_offsets.dtype, device=q_offsets.device)
        alike = q_offsets == numbers
        decoding = alike[:-1] & alike[1:]
        count = decoding.sum(dtype=q_offsets.dtype)
        decodes = Decodes(slots, lengths * decoding)
        extends = PrefillRows(slots, starts, torch.maximum(q_offsets, count))
        return PagedPlan(block_table, decodes, extends)

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
            at = batch.positions, batch.written
            return decode_heads(qkv, encoding, *at, keys, values, table, slots, lengths, spec)
        q, _, _ = encode_heads(qkv, spec, encoding, batch.positions, keys, values, batch.written)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        count = 0 if decodes is None else min(len(decodes.slots), len(q))
        if plan.prompts is not None:
            plan.prompts.run(q[count:], spec, out[count:])
        else:
            prefill_attention(q, keys, values, table, extends, spec, out=out)
        if decodes is not None:
            slots, lengths = decodes.slots[:count], decodes.lengths[:count]
            decoding = q[:count], keys, values, table, slots, lengths, spec
            # FlashInfer's kernels and PyTorch's let none start before they have finished.
            beside = plan.prompts is None
            decode_attention(*decoding, out=out[:count], overlaps_previous=beside)
        return out.flatten(1)

    def forward_ends(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``EndsBackend.forward_ends``: tokens that end a row attend as decode rows do."""
        assert batch.ends is not None
        keys, values = self._kv.layer(spec.layer)
        q, _, _ = encode_heads(qkv, spec, encoding, batch.positions, keys, values, batch.written)
        table = batch.plan.block_table
        # Picking them is a kernel that waits for the one before it, as decode kernels do not before
        # they read K and V of earlier tokens.
        out = decode_attention(batch.sampling(q), keys, values, table, *batch.ends, spec)
        return out.flatten(1)

    def warm_up(
        self, specs: Sequence[AttentionSpec], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Run every kind of layer once, with a decode row and a longer one.

        Writes to page 0, so it must come before the first sequence does.

        Args:
            specs: of all layers; dtype: of queries, and of K and V.

        Raises:
            Exception: what the compiler, the loader or the driver raise if that does not work,
                for instance because kernels were built for another GPU.
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
            torch.cuda.synchronize(device)
