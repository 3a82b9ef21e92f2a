"""The scales of an 8-bit KV cache.

They are those of the checkpoint where it has them. For other layers they are measured at start-up:
the model runs once on random tokens, with K and V in the dtype of the computation, and the largest
number of each head decides. Scales must be known before the first page is written, as pages of a
prefix, of the host tier or of a preempted sequence are read much later. Since the tokens are always
the same, so are the scales: after a restart, and in every replica.

e4m3 is a floating-point format: a number has the same four significant bits anywhere between 2^-6
and 448, so a scale has only to bring heads into that range. It leaves room for keys and values
``ROOM`` times as large as any that were measured, and those down to 1/3,500 of the largest keep all
bits. Scales are powers of two, so multiplying by them rounds nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from asyncllm.attention.base import ForwardBatch
from asyncllm.executor.device import Device
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.kernels.attention import encode_heads, prefill_attention
from asyncllm.kernels.types import FP8_MAX, AttentionSpec, HeadEncoding, PrefillRows
from asyncllm.models.base import CausalLM
from asyncllm.models.loading.kv_scales import read_kv_scales
from asyncllm.parallel.ranks import Ranks

#: How much larger keys and values may be than the measured ones.
ROOM: Final = 8.0
#: Tokens of the measured sequence.
TOKENS: Final = 256


def kv_scales(
    model: CausalLM,
    folder: Path | None,
    vocab_size: int,
    max_length: int,
    dtype: torch.dtype,
    device: Device,
    ranks: Ranks,
) -> dict[int, Tensor]:
    """``KVPool``'s scales. All ranks call this together.

    Args:
        folder: of the checkpoint; None: of a model with dummy weights.
        max_length: of a sequence.
        dtype: of the computation.

    Raises:
        ModelError: a scale of the checkpoint is broken.
    """
    on_device, specs = device.torch_device, model.attention_specs
    stored = {} if folder is None else read_kv_scales(folder, specs, ranks)
    found = {layer: torch.stack(pair).to(on_device) for layer, pair in stored.items()}
    if any(spec.shares is None and spec.layer not in found for spec in specs):
        tokens = min(TOKENS, max_length)
        found = {**_measured(model, vocab_size, tokens, dtype, device), **found}
    return found


class _Recorder:
    """``AttentionBackend`` of one new sequence, in plain torch.

    Attributes:
        pages: K and V of each layer, as one page of all tokens.
    """

    def __init__(self) -> None:
        self.pages: dict[int, tuple[Tensor, Tensor]] = {}

    def plan(self, rows: np.ndarray, block_table: Tensor) -> None:
        """There is nothing to plan."""

    def forward(
        self, qkv: Tensor, spec: AttentionSpec, encoding: HeadEncoding, batch: ForwardBatch
    ) -> Tensor:
        """See ``AttentionBackend.forward``."""
        tokens, first = len(qkv), batch.slot_mapping.new_zeros(1)
        if spec.shares is None:
            shape = 1, tokens, spec.num_kv_heads, spec.head_dim
            self.pages[spec.layer] = qkv.new_zeros(shape), qkv.new_zeros(shape)
        pages = self.pages[spec.kv_layer]
        at = batch.positions, *pages, batch.slot_mapping
        q = encode_heads.reference(qkv, spec, encoding, *at)
        row = PrefillRows(first, first, torch.tensor([0, tokens]))
        of_step = q, *pages, first.view(1, 1), row, spec
        return prefill_attention.reference(*of_step, sinks=encoding.sinks).flatten(1)


def _measured(
    model: CausalLM, vocab_size: int, tokens: int, dtype: torch.dtype, device: Device
) -> dict[int, Tensor]:
    """Scales of all layers, from one sequence of random tokens."""
    on_device, recorder = device.torch_device, _Recorder()
    positions = torch.arange(tokens, device=on_device)
    states, rows = StatePool(model.states, 1, dtype, on_device), np.array([[0, 0, tokens]])
    batch = ForwardBatch(
        device.upload(np.random.default_rng(0).integers(vocab_size, size=tokens)),
        positions,
        slot_mapping=positions,
        sample_rows=positions[-1:],
        backend=recorder,
        plan=None,
        states=states.of_step(rows, np.ones(1, dtype=np.int32), device.upload),
    )
    with device.exclusive():
        model(batch)
    return {
        layer: torch.stack([scale_of(part) for part in pages])
        for layer, pages in recorder.pages.items()
    }


def scale_of(heads: Tensor) -> Tensor:
    """The scales of heads, [pages, page_size, heads, head_dim]: float32 [heads]."""
    largest = heads.abs().amax(dim=(0, 1, 3)).float()
    exponents = torch.log2(largest * (ROOM / FP8_MAX)).ceil()
    # A head without numbers, or with infinite ones, cannot tell.
    return torch.where(exponents.isfinite(), torch.exp2(exponents), 1.0)
