"""Attention on FlashInfer's kernels, for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import ForwardBatch, GraphRows, KVPages, count_decode_rows
from asyncllm.attention.flashinfer.kernels import (
    Kernel,
    Launch,
    Place,
    Shape,
    make_kernel,
    partial_bytes,
)
from asyncllm.attention.flashinfer.library import (
    HOPPER,
    Capability,
    decode_template,
    prompt_template,
)
from asyncllm.attention.flashinfer.rows import DeviceRows, HostRows, Staging
from asyncllm.kernels.attention import apply_sinks, encode_heads
from asyncllm.kernels.tokens import list_pages
from asyncllm.kernels.types import AttentionSpec, HeadEncoding
from asyncllm.kernels.upload import Upload, pack_aligned

#: For partial results: twice what FlashInfer advises. Captured steps whose partial results do not
#: fit are attended without any.
PARTIAL_BYTES = 256 << 20


@dataclass(slots=True)
class Planned:
    """A kernel and its plan: ``memory`` on the device, and what else ``run`` takes."""

    kernel: Kernel
    memory: Tensor
    info: Any = None


@dataclass(slots=True)
class Part:
    """The rows of a step that one kernel attends in each layer.

    Attributes:
        prompts: these rows are not decode rows, which come before them.
        planned: for each kind of layer.
        rows: q_indptr, kv_indptr, last_page_len and slots on the device; see ``DeviceRows``.
        num_pages: of all rows; None if captured.
    """

    shape: Shape
    prompts: bool
    planned: list[Planned]
    rows: Sequence[Tensor] = ()
    num_pages: int | None = None

    def on_host(self, rows: np.ndarray, decodes: int, page_size: int) -> HostRows:
        """The part's rows among all of a step, of which the first ones are decode rows."""
        part = rows[decodes:] if self.prompts else rows[:decodes]
        before = decodes if self.prompts else 0
        padding = self.shape.rows - 1, int(self.shape.full)
        return HostRows.of(part, page_size, before, *padding)

    def on_device(self, block_table: Tensor) -> DeviceRows:
        """The rows for the kernels of one step, with their pages as they are now."""
        q_indptr, kv_indptr, last_page_len, slots = self.rows
        pages = list_pages(block_table, slots, kv_indptr, self.num_pages)
        return DeviceRows(q_indptr, kv_indptr, last_page_len, slots, pages)


@dataclass(slots=True)
class FlashInferPlan:
    """A step, or all steps of one size that are captured.

    Attributes:
        parts: attended in this order; a part may write to the tokens of later ones.
        packed: int32, the memory of all parts' rows on the device.
    """

    block_table: Tensor
    parts: list[Part]
    packed: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Running:
    """A plan from the first layer of a step to the last; the rows of each of its parts."""

    parts: list[Part]
    rows: list[DeviceRows]


class FlashInferBackend:
    """``GraphBackend`` on FlashInfer's kernels. All steps run on one stream.

    Decode rows and the rows after them are attended by kernels of their own, in turn. Nothing here
    waits for the device.

    Args:
        kv: the pages, in ``dtype`` or in 8 bits, on ``device``.
        specs: of all layers; ``library.unsupported(specs, dtype)`` is None.
        capability: of the GPU.
        multiprocessors: of the GPU.
        upload: to the device.
    """

    plans_on_host = True

    def __init__(
        self,
        kv: KVPages,
        specs: Sequence[AttentionSpec],
        dtype: torch.dtype,
        device: torch.device,
        capability: Capability,
        multiprocessors: int,
        upload: Upload,
    ) -> None:
        self._kv = kv
        self._device = device
        self._upload = upload
        self._factors = {spec.layer: _of_heads(spec, kv.scales(spec.kv_layer)) for spec in specs}
        keys, _ = kv.layer(kv.first_layer)
        of_cache = None if keys.dtype == dtype else keys.dtype
        # Layers that differ only in their pages share plans.
        kinds = list(dict.fromkeys(spec.kind for spec in specs))
        self._kind_of_layer = {spec.layer: kinds.index(spec.kind) for spec in specs}
        size = max(PARTIAL_BYTES, *(partial_bytes(kind, multiprocessors) for kind in kinds))
        place = Place(
            dtype,
            kv.page_size,
            multiprocessors,
            overlaps=capability >= HOPPER,
            partial=torch.zeros(size, dtype=torch.uint8, device=device),
            staging=Staging(device),
            of_cache=of_cache,
        )
        self._decode = [make_kernel(decode_template(kind), kind, place) for kind in kinds]
        # Without rows, all blocks of a kernel return before they wait for the prompts' kernel. What
        # follows would then not wait for that one either, so this kernel must not overlap it.
        after_prompts = replace(place, overlaps=False)
        self._mixed_decode = [make_kernel("fa2", kind, after_prompts) for kind in kinds]
        self._prompts = [
            make_kernel(prompt_template(kind, capability, of_cache), kind, place) for kind in kinds
        ]

    def plan(self, rows: np.ndarray, block_table: Tensor) -> FlashInferPlan:
        """See ``AttentionBackend.plan``."""
        decodes = count_decode_rows(rows)
        plan = FlashInferPlan(
            block_table, self._parts(decodes, len(rows) - decodes, int(rows[:, 2].sum()))
        )
        self._fill(plan, rows)
        return plan

    def graph_plan(self, rows: GraphRows, block_table: Tensor) -> FlashInferPlan:
        """See ``GraphBackend.graph_plan``."""
        count = min(len(rows.slots), rows.num_tokens)
        prompts = 0 if rows.prefill is None else count
        return FlashInferPlan(
            block_table, self._parts(count, prompts, rows.num_tokens, captured=True)
        )

    def before_replay(self, plan: FlashInferPlan, rows: np.ndarray) -> None:
        """See ``GraphBackend.before_replay``."""
        self._fill(plan, rows)

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``AttentionBackend.forward``."""
        if isinstance(batch.plan, FlashInferPlan):
            # The lists of pages may be long. They live as long as the batch: a captured step's
            # memory then serves other graphs, too.
            table, parts = batch.plan.block_table, batch.plan.parts
            batch.plan = Running(parts, [part.on_device(table) for part in parts])
        running: Running = batch.plan
        pages = self._kv.layer(spec.kv_layer)
        scales = self._kv.scales(spec.kv_layer)
        at = batch.positions, *pages, batch.slot_mapping, scales
        q = encode_heads(qkv, spec, encoding, *at)
        of_queries, of_results = self._factors[spec.layer]
        if of_queries is not None:
            q.mul_(of_queries)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse: Tensor | None = None
        if spec.has_sinks:
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        kind = self._kind_of_layer[spec.layer]
        for part, rows in zip(running.parts, running.rows, strict=True):
            planned = part.planned[kind]
            planned.kernel.run(planned.info, planned.memory, Launch(q, *pages, rows, out, lse))
        if lse is not None:
            assert encoding.sinks is not None
            apply_sinks(out, lse, encoding.sinks)
        if of_results is not None:
            out.mul_(of_results)
        return out.flatten(1)

    def _parts(self, decodes: int, prompts: int, tokens: int, captured: bool = False) -> list[Part]:
        """Parts for so many rows, yet without rows.

        Args:
            tokens: of the step.
        """
        if prompts == 0:
            return [self._part(Shape(decodes + 1, tokens, captured, full=True), self._decode)]
        parts = [self._part(Shape(prompts + 1, tokens, captured), self._prompts, prompts=True)]
        if decodes:
            parts.append(self._part(Shape(decodes + 1, decodes, captured), self._mixed_decode))
        return parts

    def _part(self, shape: Shape, kernels: list[Kernel], prompts: bool = False) -> Part:
        planned = [
            Planned(
                kernel,
                torch.empty(kernel.plan_bytes(shape), dtype=torch.uint8, device=self._device),
            )
            for kernel in kernels
        ]
        return Part(shape, prompts, planned)

    def _fill(self, plan: FlashInferPlan, rows: np.ndarray) -> None:
        """Bring the rows of a step to the plan's place on the device, and plan its kernels."""
        decodes, page_size = count_decode_rows(rows), self._kv.page_size
        hosts = [part.on_host(rows, decodes, page_size) for part in plan.parts]
        arrays = [(h.q_indptr, h.kv_indptr, h.last_page_len, h.slots) for h in hosts]
        packed, places = pack_aligned([array for part in arrays for array in part], np.int32)
        uploaded = self._upload(packed)
        if plan.packed is None:
            plan.packed = uploaded
        else:
            plan.packed.copy_(uploaded)
        views = [plan.packed[place] for place in places]
        for i, (part, host) in enumerate(zip(plan.parts, hosts, strict=True)):
            part.rows = views[4 * i : 4 * i + 4]
            part.num_pages = None if part.shape.captured else int(host.kv_indptr[-1])
            for planned in part.planned:
                planned.info = planned.kernel.plan(part.shape, host, planned.memory)


def _of_heads(spec: AttentionSpec, scales: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """The factors of query heads and of results, [num_heads, 1] each, for pages in 8 bits.

    FlashInfer's kernels know one scale for all heads, at most.
    """
    if scales is None:
        return None, None
    of_queries, of_results = scales.repeat_interleave(spec.group, dim=1).unsqueeze(-1)
    return of_queries, of_results
