"""Logprobs of prompt tokens, computed on the device and read on the host later."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.device import Device
from asyncllm.executor.step.inputs import ScoredRow
from asyncllm.wire.messages import ScoredPrompt

#: Positions whose logits are computed at once. A whole chunk's logits would take gigabytes, and
#: each group reads the output projection again.
_GROUP = 64


class PromptLogprobs:
    """Logprobs of the prompt tokens that a step's positions predict, from unchanged logits.

    Args:
        logits: from hidden states [m, hidden] to scores [m, vocab].
        hidden: [n, hidden] of the positions that predict, row after row.

    Attributes:
        packed: float64 [n, 2 + 2k] on the device, one tensor so that it is one copy: the token's
            logprob and rank, the k largest logprobs, and their token ids.
    """

    def __init__(
        self,
        device: Device,
        logits: Callable[[Tensor], Tensor],
        hidden: Tensor,
        rows: tuple[ScoredRow, ...],
    ):
        self._rows = rows
        depth = max(row.num_top for row in rows)
        self.packed = hidden.new_empty((0, 2 + 2 * depth), dtype=torch.float64)
        if len(hidden) == 0:
            return
        targets = device.upload(np.concatenate([row.targets for row in rows], dtype=np.int64))
        groups = zip(hidden.split(_GROUP), targets.split(_GROUP), strict=True)
        self.packed = torch.cat([_pack(logits(part), tokens, depth) for part, tokens in groups])

    def unpack(self, packed: np.ndarray) -> Iterator[ScoredPrompt]:
        """The rows' logprobs as messages, from a copy of ``packed`` on the host."""
        depth = packed.shape[1] // 2 - 1
        own, values, ids = np.split(packed, [2, 2 + depth], axis=1)
        # topk does not order ties: put the smaller id first, as greedy sampling does.
        order = np.lexsort((ids, -values), axis=-1)
        values = np.take_along_axis(values, order, axis=1)
        ids = np.take_along_axis(ids, order, axis=1)
        logprobs = np.concatenate([own[:, :1], values], axis=1, dtype="<f4", casting="same_kind")
        numbers = np.concatenate([own[:, 1:], ids], axis=1).astype("<i4")
        first = 0
        for row in self._rows:
            end = first + len(row.targets)
            columns = slice(1 + row.num_top)
            yield ScoredPrompt(
                row=row.row,
                start=row.start,
                end=row.start + len(row.targets),
                logprobs=logprobs[first:end, columns].tobytes(),
                ids=numbers[first:end, columns].tobytes(),
            )
            first = end


def _pack(logits: Tensor, tokens: Tensor, depth: int) -> Tensor:
    """``PromptLogprobs.packed`` of m positions, whose scored tokens are int64 [m]."""
    scores = logits.float()
    own = scores.gather(1, tokens.unsqueeze(1))
    rank = (scores > own).sum(dim=1, keepdim=True) + 1
    top = scores.topk(min(depth, scores.shape[1]), dim=-1)
    values = torch.cat([own, top.values], dim=1) - scores.logsumexp(-1, keepdim=True)
    parts = [values[:, :1].double(), rank.double(), values[:, 1:].double(), top.indices.double()]
    return torch.cat(parts, dim=1)
