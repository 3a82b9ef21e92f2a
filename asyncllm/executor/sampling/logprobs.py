"""Logprobs of sampled tokens: computed on the device, read on the host a step later."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from asyncllm.wire.messages import RowLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncllm.executor.device import Device

#: So many rows at a time.
_GROUP = 32


class Logprobs:
    """Logprobs of the rows of a batch that asked for them, before penalties and temperature.

    Args:
        logits: [m, vocab] of the batch.
        tokens: int64 [m], what was sampled; negative where the logits were not finite.
        rows: int64 [r] on the host, those of the batch that asked.
        wanted: int64 [r] on the host, how many of the likeliest tokens each of them wants.
        device: where the logits are.

    Attributes:
        packed: float64 [r, 1 + 2n] on the device, so that one copy brings everything over: the
            sampled token's logprob, the n largest, and their token ids.
    """

    def __init__(
        self,
        logits: Tensor,
        tokens: Tensor,
        rows: np.ndarray,
        wanted: np.ndarray,
        device: Device,
    ):
        self._rows = rows
        self._wanted = wanted
        # A group at a time: in float32, all rows would take a multiple of what the logits do.
        groups = device.upload(rows).split(_GROUP)
        depth = int(wanted.max())
        self.packed = torch.cat([_pack(logits, tokens, group, depth) for group in groups])

    def unpack(self, packed: np.ndarray | None = None) -> tuple[RowLogprobs, ...]:
        """The rows' logprobs as messages.

        Rows whose logits were not finite are left out, and so are tokens of probability 0.

        Args:
            packed: what was copied to the host of ``packed``; by default copy now, and wait.
        """
        if packed is None:
            packed = self.packed.cpu().numpy()
        return tuple(self._messages(packed))

    def _messages(self, packed: np.ndarray) -> Iterator[RowLogprobs]:
        depth = packed.shape[1] // 2
        sampled, values, ids = np.split(packed, [1, 1 + depth], axis=1)
        # topk leaves the order of ties open; the smaller id first, as greedy sampling has it.
        order = np.lexsort((ids, -values), axis=-1)
        values = np.take_along_axis(values, order, axis=1)
        ids = np.take_along_axis(ids, order, axis=1).astype(np.int64)
        counts = np.minimum(self._wanted, (values > -np.inf).sum(axis=1))
        for i in np.flatnonzero(np.isfinite(sampled[:, 0])):
            count = counts[i]
            yield RowLogprobs(
                row=int(self._rows[i]),
                sampled=float(sampled[i, 0]),
                top_ids=tuple(ids[i, :count].tolist()),
                top_logprobs=tuple(values[i, :count].tolist()),
            )


def _pack(logits: Tensor, tokens: Tensor, rows: Tensor, depth: int) -> Tensor:
    """``Logprobs.packed`` of some rows, int64 [r] on the device."""
    logits = logits.index_select(0, rows).float()
    sampled = logits.gather(1, tokens.index_select(0, rows).clamp(min=0).unsqueeze(1))
    top = logits.topk(depth, dim=-1)
    values = torch.cat([sampled, top.values], dim=1) - logits.logsumexp(-1, keepdim=True)
    return torch.cat([values.double(), top.indices.double()], dim=1)
