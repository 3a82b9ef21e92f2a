"""Attention of prompts on FlashInfer's paged prefill kernels, for NVIDIA GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.kernels.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.attention.base import KVPages
    from asyncllm.kernels.types import AttentionSpec

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)

#: Plans in use at once: one step runs while the next is prepared.
PLANS_IN_FLIGHT = 2
#: The size that FlashInfer advises for the buffer of partial results, and the bound on their
#: number: two tiles of TILE_ROWS query rows per multiprocessor.
MIN_WORKSPACE = 128 << 20
TILES_PER_MULTIPROCESSOR = 2
TILE_ROWS = 128


def unsupported(specs: Sequence[AttentionSpec], dtype: torch.dtype) -> str | None:
    """Why FlashInfer cannot attend in these layers in this dtype; None if it can."""
    if dtype not in DTYPES:
        return f"it computes in bfloat16 or float16, not {str(dtype).removeprefix('torch.')}"
    for spec in specs:
        if spec.head_dim not in HEAD_DIMS:
            return f"it has kernels for a head_dim of 64, 128 or 256, not {spec.head_dim}"
    return None


class FlashInferPrompts:
    """``attention.paged.PromptKernels`` on FlashInfer's FA2 kernels.

    All steps run on the current stream. No call waits for the GPU, except that ``plan`` waits for
    the uploads of the plan before the last.

    Args:
        kv: the pages, in ``dtype``, on ``device``.
        specs: of all layers; ``unsupported(specs, dtype)`` is None.
        device: the CUDA device that holds everything.
    """

    def __init__(
        self,
        kv: KVPages,
        specs: Sequence[AttentionSpec],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._kv = kv
        # Layers that differ only in their pages share a plan.
        alike = {spec.layer: replace(spec, layer=0) for spec in specs}
        kinds = list(dict.fromkeys(alike.values()))
        kind_of_layer = {layer: kinds.index(kind) for layer, kind in alike.items()}
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        size = max(MIN_WORKSPACE, *(_partial_results(kind, multiprocessors) for kind in kinds))
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._turns = [
            _Turn(
                kv, kind_of_layer, [_Kernel(kind, dtype, kv.page_size, workspace) for kind in kinds]
            )
            for _ in range(PLANS_IN_FLIGHT)
        ]
        self._step = 0

    def plan(self, rows: np.ndarray, block_table: Tensor) -> _Turn:
        """See ``PromptKernels.plan``; valid until ``PLANS_IN_FLIGHT`` more plans are made."""
        slots, starts, q_lens = rows.astype(np.int64).T
        lengths = starts + q_lens
        page_size, max_pages = self._kv.page_size, block_table.shape[1]
        num_pages = -(-lengths // page_size)
        # A row's pages are its share of an arange over all rows, shifted.
        shifts = slots * max_pages - (np.cumsum(num_pages) - num_pages)
        on_device = upload(np.stack([shifts, num_pages]), block_table.device)
        entries = on_device[0].repeat_interleave(on_device[1], output_size=int(num_pages.sum()))
        entries += torch.arange(len(entries), device=entries.device)
        turn = self._turns[self._step % PLANS_IN_FLIGHT]
        self._step += 1
        turn.plan(
            _Rows(
                q_indptr=_indptr(q_lens),
                kv_indptr=_indptr(num_pages),
                last_page_len=torch.from_numpy(((lengths - 1) % page_size + 1).astype(np.int32)),
                pages=block_table.reshape(-1).index_select(0, entries),
            )
        )
        return turn


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows as FlashInfer's planners take them.

    On the host, int32: ``q_indptr`` and ``kv_indptr`` [n + 1], first token and first page of each
    row; ``last_page_len`` [n]. On the device: ``pages``, int32 [pages of all rows].
    """

    q_indptr: Tensor
    kv_indptr: Tensor
    last_page_len: Tensor
    pages: Tensor


class _Turn:
    """One of the sets of kernels that plans alternate between; ``attention.paged.PlannedPrompts``.

    A planner writes to its own pinned buffer, queues a copy to the GPU and returns. So it must not
    plan again before that copy is done.
    """

    def __init__(self, kv: KVPages, kind_of_layer: dict[int, int], kernels: list[_Kernel]) -> None:
        self._kv = kv
        self._kind_of_layer = kind_of_layer
        self._kernels = kernels
        self._copied = torch.cuda.Event()

    def plan(self, rows: _Rows) -> None:
        self._copied.synchronize()
        for kernel in self._kernels:
            kernel.plan(rows)
        self._copied.record()

    def run(self, q: Tensor, spec: AttentionSpec, out: Tensor) -> None:
        """See ``PlannedPrompts.run``."""
        kernel = self._kernels[self._kind_of_layer[spec.layer]]
        kernel.run(q, self._kv.layer(spec.layer), out)


class _Kernel:
    """FlashInfer's prefill for all layers of one kind."""

    def __init__(
        self, spec: AttentionSpec, dtype: torch.dtype, page_size: int, workspace: Tensor
    ) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._options: dict[str, Any] = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "head_dim_qk": spec.head_dim,
            "page_size": page_size,
            "causal": True,
            # FlashInfer does not count the query's own position.
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.softcap,
            "sm_scale": spec.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def plan(self, rows: _Rows) -> None:
        """Divide the rows' work among multiprocessors."""
        self._wrapper.plan(
            rows.q_indptr, rows.kv_indptr, rows.pages, rows.last_page_len, **self._options
        )

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], out: Tensor) -> None:
        """Attend for the rows of the last plan."""
        self._wrapper.run(q, pages, out=out)


def _partial_results(spec: AttentionSpec, multiprocessors: int) -> int:
    """Upper bound of the bytes of partial results, when K and V of a row are split into blocks."""
    tiles = TILES_PER_MULTIPROCESSOR * multiprocessors // spec.num_kv_heads
    values_and_sum = spec.head_dim + 1
    return spec.num_heads * tiles * TILE_ROWS * values_and_sum * 4  # float32


def _indptr(counts: np.ndarray) -> Tensor:
    """int32 [n + 1]: 0 and the cumulative sums of n counts."""
    return torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32))
