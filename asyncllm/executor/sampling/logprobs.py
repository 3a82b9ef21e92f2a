"""Logprobs of sampled tokens, computed on the device and read on the host later."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.kernels.scores import best_scores, log_sums
from asyncllm.wire.messages import RowLogprobs

#: Rows at a time: in float32, all rows together would take a multiple of the logits' memory.
_GROUP = 32


class Logprobs:
    """Logprobs of the rows that asked for them, from unchanged logits.

    Args:
        logits: [m, vocab] of the batch.
        tokens: int64 [m], sampled; negative where the logits were not finite.
        rows: int64 [r] on the host, the rows that asked.
        wanted: int64 [r] on the host, the number of likely alternatives that each of them wants.

    Attributes:
        packed: float64 [r, 1 + 2n] on the device, one tensor so that it is one copy: the sampled
            token's logprob, the n largest, and their token ids.
    """

    def __init__(
        self, logits: Tensor, tokens: Tensor, rows: np.ndarray, wanted: np.ndarray, device: Device
    ):
        self._rows = rows
        self._wanted = wanted
        groups = device.upload(rows).split(_GROUP)
        depth = int(wanted.max())
        self.packed = torch.cat([_pack(logits, tokens, group, depth) for group in groups])

    def unpack(self, packed: np.ndarray) -> Iterator[RowLogprobs]:
        """The rows' logprobs as messages, from a copy of ``packed`` on the host.

        Leaves out rows of non-finite logits and tokens of probability 0.
        """
        depth = packed.shape[1] // 2
        sampled, values, ids = np.split(packed, [1, 1 + depth], axis=1)
        ids = ids.astype(np.int64)
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
    best, ids = best_scores(logits, depth)
    values = torch.cat([sampled, best], dim=1) - log_sums(logits)
    return torch.cat([values.double(), ids.double()], dim=1)
