"""FlashInfer's kernels for layers of one kind: planning the work on the host, and launching.

A plan divides the rows' work among thread blocks. FlashInfer writes it to pinned memory and queues
a copy to the GPU, where the kernels read it.

This is FlashInfer's interface below its wrapper classes, whose ``plan`` finds the longest row in a
Python loop, which takes 1 ms for 256 rows, and whose ``run`` allows no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from asyncllm.attention.flashinfer.library import Library, Template
from asyncllm.attention.flashinfer.rows import DeviceRows, HostRows, Staging
from asyncllm.kernels.types import AttentionSpec

#: FlashInfer's codes: of its mask, and of pages laid out as [page_size, heads, head_dim].
_CAUSAL, _NHD = 1, 0
#: FlashInfer splits rows for at most so many blocks on a multiprocessor.
_TILES_PER_MULTIPROCESSOR = 2
_CUDA_CORE_BLOCKS_PER_MULTIPROCESSOR = 32
#: Query rows of a tile; FA2 has tiles of 16, 64 or 128.
_SMALL_TILE, _MIDDLE_TILE, _LARGE_TILE = 16, 64, 128
#: Bytes of a plan besides those of its items.
_PLAN_BYTES = 1024


class Shape(NamedTuple):
    """What a plan has to be good for.

    Attributes:
        rows: with the first one, which is nobody's.
        tokens: of the step, padding included.
        captured: rows of later plans may be others, but not more, nor may their tokens be more.
        full: all rows but the first always have tokens.
    """

    rows: int
    tokens: int
    captured: bool = False
    full: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where all kernels of a model run.

    Attributes:
        dtype: of queries.
        page_size: tokens of a page.
        multiprocessors: of the GPU.
        overlaps: a kernel may start before the previous one has ended.
        partial: uint8, for the partial results of one launch after the other.
        staging: for plans.
        of_cache: the dtype of K and V, if another.
    """

    dtype: torch.dtype
    page_size: int
    multiprocessors: int
    overlaps: bool
    partial: Tensor
    staging: Staging
    of_cache: torch.dtype | None = None


class Launch(NamedTuple):
    """Tensors of one layer.

    Attributes:
        q, out: [tokens, num_heads, head_dim]; ``out`` is contiguous.
        keys, values: pages.
        rows: those that were planned.
        lse: float32 [tokens, num_heads], contiguous, or None: where to write log2 of the sum of
            exp(score) over each query's keys. FlashInfer writes about -50,000 if there are none.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    rows: DeviceRows
    out: Tensor
    lse: Tensor | None = None


class Kernel(Protocol):
    """The kernels of one template for layers of one kind."""

    def plan_bytes(self, shape: Shape) -> int:
        """An upper bound of the size of a plan."""

    def plan(self, shape: Shape, rows: HostRows, memory: Tensor) -> Any:
        """Make a plan and queue its copy to ``memory``, uint8 [plan_bytes] on the device.

        Returns:
            What ``run`` takes beside ``memory``. It depends on the shape alone if that is captured.
        """

    def run(self, planned: Any, memory: Tensor, launch: Launch) -> None:
        """Write the attention of all rows, without sinks, to ``launch.out``."""


def make_kernel(template: Template, spec: AttentionSpec, place: Place) -> Kernel:
    """The kernels of that template for layers like this one; compiles them if need be."""
    functions = Library.of(template, spec, place.dtype, place.of_cache).load()
    if template == "decode":
        return DecodeKernel(spec, place, functions)
    return PrefillKernel(template, spec, place, functions)


def partial_bytes(spec: AttentionSpec, multiprocessors: int) -> int:
    """Upper bound of the partial results of a launch that is not captured."""
    tiles = _TILES_PER_MULTIPROCESSOR * multiprocessors // spec.num_kv_heads
    blocks = _CUDA_CORE_BLOCKS_PER_MULTIPROCESSOR * multiprocessors // spec.num_kv_heads
    return _partial_bytes(spec, max(tiles * _LARGE_TILE, blocks))


class DecodeKernel:
    """Rows of one query each, on CUDA cores; the step must have no other tokens.

    Args:
        functions: of ``Library.load``.
    """

    def __init__(self, spec: AttentionSpec, place: Place, functions: Any) -> None:
        self._spec = spec
        self._place = place
        self._functions = functions
        self._of_dtype = torch.empty(0, dtype=place.dtype)
        self._of_cache = torch.empty(0, dtype=place.of_cache or place.dtype)

    def plan_bytes(self, shape: Shape) -> int:
        """See ``Kernel``."""
        blocks = _CUDA_CORE_BLOCKS_PER_MULTIPROCESSOR * self._place.multiprocessors
        return 16 * max(shape.rows, blocks) + _PLAN_BYTES

    def plan(self, shape: Shape, rows: HostRows, memory: Tensor) -> Any:
        """See ``Kernel``."""
        spec, place = self._spec, self._place
        rows = rows.without_first()
        staged = place.staging.take(len(memory))
        planned = self._functions.plan(
            place.partial,
            memory,
            staged.memory,
            torch.from_numpy(rows.kv_indptr),
            len(rows.lengths),
            spec.num_heads,
            spec.num_kv_heads,
            place.page_size,
            shape.captured,
            _window_left(spec),
            spec.softcap or 0.0,
            spec.head_dim,
            spec.head_dim,
            self._of_dtype,
            self._of_cache,
        )
        staged.record()
        return planned

    def run(self, planned: Any, memory: Tensor, launch: Launch) -> None:
        """See ``Kernel``."""
        spec, rows = self._spec, launch.rows.without_first()
        self._functions.run(
            float_workspace_buffer=self._place.partial,
            int_workspace_buffer=memory,
            plan_info_vec=planned,
            q=launch.q,
            paged_k_cache=launch.keys,
            paged_v_cache=launch.values,
            paged_kv_indptr=rows.kv_indptr,
            paged_kv_indices=rows.pages,
            paged_kv_last_page_len=rows.last_page_len,
            o=launch.out,
            maybe_lse=launch.lse,
            kv_layout_code=_NHD,
            window_left=_window_left(spec),
            enable_pdl=self._place.overlaps,
            alibi_slopes=None,
            logits_soft_cap=spec.softcap or 0.0,
            sm_scale=spec.scale,
            rope_scale=1.0,
            rope_theta=1.0,
        )


class PrefillKernel:
    """Rows of any number of queries, on tensor cores.

    FA2 can split the keys of a row among blocks, and then adds up their results. If that is
    captured, there are partial results for as many tiles as there may ever be.

    Args:
        template: "fa2" or "fa3".
        functions: of ``Library.load``.
    """

    def __init__(
        self, template: Template, spec: AttentionSpec, place: Place, functions: Any
    ) -> None:
        self._is_fa3 = template == "fa3"
        self._spec = spec
        self._place = place
        self._functions = functions

    def plan_bytes(self, shape: Shape) -> int:
        """See ``Kernel``."""
        spec, multiprocessors = self._spec, self._place.multiprocessors
        if self._is_fa3:
            tiles = -(-shape.tokens // _LARGE_TILE) + shape.rows
            return 28 * tiles * spec.num_heads + 4 * multiprocessors + _PLAN_BYTES
        tiles = max(self._tiles(shape, _SMALL_TILE), self._split_tiles)
        return 16 * tiles + 4 * (shape.rows + shape.tokens) + _PLAN_BYTES

    def plan(self, shape: Shape, rows: HostRows, memory: Tensor) -> Any:
        """See ``Kernel``."""
        spec, place = self._spec, self._place
        staged = place.staging.take(len(memory))
        options: tuple[int, ...] = ()
        if self._is_fa3:
            rows = rows.without_first()
        else:
            flashinfer_chooses, no_other_kernel = -1, 0
            options = (flashinfer_chooses, not self.splits(shape), no_other_kernel)
            if shape.captured:
                # Work up to the captured number keeps what was here before: now that of row 0.
                staged.memory[: len(memory)].zero_()
        planned = self._functions.plan(
            place.partial,
            memory,
            staged.memory,
            torch.from_numpy(rows.q_indptr),
            torch.from_numpy(rows.kv_indptr),
            torch.from_numpy(rows.lengths),
            shape.tokens,
            len(rows.lengths),
            spec.num_heads,
            spec.num_kv_heads,
            place.page_size,
            shape.captured,
            spec.head_dim,
            spec.head_dim,
            True,  # causal
            _window_left(spec),
            *options,
        )
        staged.record()
        return planned

    def run(self, planned: Any, memory: Tensor, launch: Launch) -> None:
        """See ``Kernel``."""
        spec, partial = self._spec, self._place.partial
        q, keys, values, rows, out, lse = launch
        self._functions.paged_run(
            float_workspace_buffer=partial,
            int_workspace_buffer=memory,
            plan_info_vec=planned,
            q=q,
            paged_k_cache=keys,
            paged_v_cache=values,
            qo_indptr=rows.q_indptr,
            paged_kv_indptr=rows.kv_indptr,
            paged_kv_indices=rows.pages,
            paged_kv_last_page_len=rows.last_page_len,
            o=out,
            maybe_lse=lse,
            mask_mode=_CAUSAL,
            layout=_NHD,
            window_left=_window_left(spec),
            enable_pdl=self._place.overlaps,
            maybe_custom_mask=None,
            maybe_mask_indptr=None,
            maybe_alibi_slopes=None,
            maybe_prefix_len_ptr=None,
            maybe_token_pos_in_items_ptr=None,
            maybe_max_item_len_ptr=None,
            logits_soft_cap=spec.softcap or 0.0,
            sm_scale=spec.scale,
            scale_q=None,
            scale_k=None,
            scale_v=None,
            rope_scale=1.0,
            rope_theta=1.0,
            token_pos_in_items_len=0,
            workspace_size=partial.nbytes,
        )

    def splits(self, shape: Shape) -> bool:
        """Whether FA2 may split rows: where it can help, and the partial results fit."""
        if not shape.captured:
            return True
        if shape.full and shape.rows - 1 >= self._split_tiles:
            return False
        tile = self._tile(shape)
        tiles = max(self._tiles(shape, tile), self._split_tiles)
        return _partial_bytes(self._spec, tiles * tile) <= self._place.partial.nbytes

    @property
    def _split_tiles(self) -> int:
        """The number of tiles up to which FA2 splits rows."""
        return _TILES_PER_MULTIPROCESSOR * self._place.multiprocessors // self._spec.num_kv_heads

    def _tile(self, shape: Shape) -> int:
        """The query rows of FA2's tiles in a captured launch; heads of a group are rows, too."""
        longest = (shape.tokens - shape.rows + 1) * self._spec.group
        if longest <= _SMALL_TILE:
            return _SMALL_TILE
        is_large = longest > _MIDDLE_TILE and self._spec.head_dim < 256
        return _LARGE_TILE if is_large else _MIDDLE_TILE

    def _tiles(self, shape: Shape, tile: int) -> int:
        """The most tiles that there can be."""
        return -(-shape.tokens * self._spec.group // tile) + shape.rows


def _window_left(spec: AttentionSpec) -> int:
    """FlashInfer's window, which does not count the query's own position; -1 is none."""
    return -1 if spec.window is None else spec.window - 1


def _partial_bytes(spec: AttentionSpec, query_rows: int) -> int:
    """Of float32 values and their sum for each row, in each head."""
    return 4 * spec.num_heads * query_rows * (spec.head_dim + 1) + _PLAN_BYTES
