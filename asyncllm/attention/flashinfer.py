"""Paged attention on FlashInfer's kernels, for NVIDIA GPUs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.prebuild import decodes_on_tensor_cores
from asyncllm.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncllm.attention.base import AttentionSpec, KVPages

DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)

#: Plans that may be in use at once: one step runs while the next is prepared.
PLANS_IN_FLIGHT = 2
#: FlashInfer's advice for the buffer of partial results, and what bounds their number: at most
#: two tiles of so many query rows per multiprocessor.
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


@dataclass(frozen=True, slots=True)
class FlashInferPlan:
    """One step's rows, prepared for every layer.

    Attributes:
        written: int64 [tokens]; where each new token's K and V go in the flattened pages.
        num_decodes: how many rows, the first, are decode rows.
        kinds: planned kernels of each kind of layer.
    """

    written: Tensor
    num_decodes: int
    kinds: list[_Kernels]


class FlashInferBackend:
    """``AttentionBackend`` on FlashInfer's paged decode and FA2 prefill kernels.

    All steps run on one stream, the current one. No call waits for the GPU, except that ``plan``
    waits until the copies of the plan before the last have left the host.

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
        self._specs = specs
        self._dtype = dtype
        self._device = device
        # Layers that differ in nothing but their pages share a plan.
        alike = {spec.layer: replace(spec, layer=0) for spec in specs}
        kinds = list(dict.fromkeys(alike.values()))
        self._kind_of_layer = {layer: kinds.index(kind) for layer, kind in alike.items()}
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        size = max(MIN_WORKSPACE, *(_partial_results(kind, multiprocessors) for kind in kinds))
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        self._turns = [
            _Turn([_Kernels(kind, dtype, kv.page_size, workspace) for kind in kinds])
            for _ in range(PLANS_IN_FLIGHT)
        ]
        self._step = 0

    def plan(self, rows: np.ndarray, block_table: Tensor) -> FlashInferPlan:
        """See ``AttentionBackend.plan``; ``rows`` must not be empty.

        A plan is good until ``PLANS_IN_FLIGHT`` more are made.
        """
        slots, starts, q_lens = rows.astype(np.int64).T
        lengths = starts + q_lens
        page_size, max_pages = self._kv.page_size, block_table.shape[1]
        num_pages = -(-lengths // page_size)
        num_tokens, total_pages = int(q_lens.sum()), int(num_pages.sum())

        # A row's tokens, and its pages, are its share of an arange over all rows, shifted.
        positions = np.arange(num_tokens) + np.repeat(lengths - np.cumsum(q_lens), q_lens)
        token_entries = np.repeat(slots * max_pages, q_lens) + positions // page_size
        page_shifts = slots * max_pages - (np.cumsum(num_pages) - num_pages)
        parts = [token_entries, positions % page_size, page_shifts, num_pages]
        entries, offsets, shifts, counts = torch.split(
            upload(np.concatenate(parts), self._device), [len(part) for part in parts]
        )
        table = block_table.reshape(-1)
        written = table.index_select(0, entries).to(torch.int64).mul_(page_size).add_(offsets)
        page_entries = shifts.repeat_interleave(counts, output_size=total_pages)
        page_entries += torch.arange(total_pages, device=self._device)
        pages = table.index_select(0, page_entries)

        longer = np.flatnonzero(q_lens != 1)
        num_decodes = int(longer[0]) if longer.size else len(rows)
        decode_pages = int(num_pages[:num_decodes].sum())
        decodes = _Rows.of(q_lens[:num_decodes], lengths[:num_decodes], pages, page_size)
        prefills = _Rows.of(
            q_lens[num_decodes:], lengths[num_decodes:], pages[decode_pages:], page_size
        )
        turn = self._turns[self._step % PLANS_IN_FLIGHT]
        self._step += 1
        turn.plan(decodes, prefills)
        return FlashInferPlan(written, num_decodes, turn.kinds)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, plan: FlashInferPlan
    ) -> Tensor:
        """See ``AttentionBackend.forward``."""
        keys, values = self._kv.layer(spec.layer)
        keys.flatten(0, 1).index_copy_(0, plan.written, k)
        values.flatten(0, 1).index_copy_(0, plan.written, v)
        kernels = plan.kinds[self._kind_of_layer[spec.layer]]
        return kernels.run(q, (keys, values), plan.num_decodes)

    def warm_up(self) -> None:
        """Load every kernel, compiling those that are not built, and run each layer once.

        Writes to page 0, so it must come before the first sequence does.

        Raises:
            Exception: what the compiler, the loader or the driver raise if that does not work,
                for instance because the kernels were built for another GPU.
        """
        rows = np.array([[0, 0, 1], [0, 0, 2]], dtype=np.int32)  # a decode row and a prefill row
        plan = self.plan(rows, torch.zeros(1, 2, dtype=torch.int32, device=self._device))
        for spec in self._specs:
            shape = (3, spec.num_heads, spec.head_dim)
            q = torch.zeros(shape, dtype=self._dtype, device=self._device)
            k = q[:, : spec.num_kv_heads]
            self.forward(q, k, k, spec, plan)
        torch.cuda.synchronize(self._device)


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

    @classmethod
    def of(
        cls, q_lens: np.ndarray, lengths: np.ndarray, pages: Tensor, page_size: int
    ) -> _Rows | None:
        """Rows of so many new tokens and so many in all; ``pages`` may have more at its end."""
        if len(q_lens) == 0:
            return None
        kv_indptr = _indptr(-(-lengths // page_size))
        last_page_len = ((lengths - 1) % page_size + 1).astype(np.int32)
        return cls(
            torch.from_numpy(_indptr(q_lens)),
            torch.from_numpy(kv_indptr),
            torch.from_numpy(last_page_len),
            pages[: kv_indptr[-1]],
        )


class _Turn:
    """The kernels that plans take in turn.

    A planner writes to a pinned buffer of its own, queues a copy of it to the GPU and returns. So
    the buffer must not be written to again before that copy has run.
    """

    def __init__(self, kinds: list[_Kernels]) -> None:
        self.kinds = kinds
        self._copied = torch.cuda.Event()

    def plan(self, decodes: _Rows | None, prefills: _Rows | None) -> None:
        self._copied.synchronize()  # returns at once if it was never recorded
        for kernels in self.kinds:
            kernels.plan(decodes, prefills)
        self._copied.record()


class _Kernels:
    """FlashInfer's wrappers for layers of one kind.

    Args:
        spec: of such a layer; its ``layer`` does not matter.
        workspace: uint8 on the device, for partial results; kernels that run one after another
            may share it.
    """

    def __init__(
        self, spec: AttentionSpec, dtype: torch.dtype, page_size: int, workspace: Tensor
    ) -> None:
        from flashinfer import (
            BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithPagedKVCacheWrapper,
        )

        self._head_dim = spec.head_dim
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=decodes_on_tensor_cores(spec), backend="fa2"
        )
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
        self._options: dict[str, Any] = {
            "num_qo_heads": spec.num_heads,
            "num_kv_heads": spec.num_kv_heads,
            "page_size": page_size,
            # FlashInfer does not count the query's own position.
            "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.softcap,
            "sm_scale": spec.scale,
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }

    def plan(self, decodes: _Rows | None, prefills: _Rows | None) -> None:
        """Share the work of the rows out; None: there are none of that sort."""
        if decodes is not None:
            self._decode.plan(
                decodes.kv_indptr,
                decodes.pages,
                decodes.last_page_len,
                head_dim=self._head_dim,
                **self._options,
            )
        if prefills is not None:
            self._prefill.plan(
                prefills.q_indptr,
                prefills.kv_indptr,
                prefills.pages,
                prefills.last_page_len,
                head_dim_qk=self._head_dim,
                causal=True,
                **self._options,
            )

    def run(self, q: Tensor, pages: tuple[Tensor, Tensor], num_decodes: int) -> Tensor:
        """Attend in the rows last planned, ``num_decodes`` decode rows and then the others."""
        out = q.new_empty(q.shape)
        if num_decodes > 0:
            self._decode.run(q[:num_decodes], pages, out=out[:num_decodes])
        if num_decodes < len(q):
            self._prefill.run(q[num_decodes:], pages, out=out[num_decodes:])
        return out


def _partial_results(spec: AttentionSpec, multiprocessors: int) -> int:
    """Bytes of partial results, at most, when K and V of a row are split over several blocks."""
    tiles = TILES_PER_MULTIPROCESSOR * multiprocessors // spec.num_kv_heads
    values_and_sum = spec.head_dim + 1
    return spec.num_heads * tiles * TILE_ROWS * values_and_sum * 4  # float32


def _indptr(counts: np.ndarray) -> np.ndarray:
    """int32 [n + 1]: where each of n runs of so many items begins, and the last one's end."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


__all__ = ["FlashInferBackend", "FlashInferPlan", "unsupported"]
