"""Masks in one kernel, which reads logits and bits once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv

_TILE = 2048
_WARPS = 8


def mask_scores(logits: Tensor, rows: Tensor, slots: Tensor, masks: Tensor) -> Tensor:
    """See ``kernels.masks.mask_scores``."""
    vocab = logits.shape[1]
    scores = torch.empty(len(rows), vocab, dtype=torch.float32, device=logits.device)
    args = (logits, logits.stride(0), vocab, rows, slots, masks, masks.shape[1], scores)
    _launch((cdiv(vocab, _TILE), len(rows), 1), args, (_TILE,), _WARPS)
    return scores


@triton.jit
def _mask(
    logits,
    stride,
    vocab,
    rows,
    slots,
    masks,
    width,
    scores,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    ids = tl.program_id(0) * TILE + tl.arange(0, TILE)
    here = ids < vocab
    slot = tl.load(slots + row)
    score = tl.load(logits + tl.load(rows + row) * stride + ids, mask=here).to(tl.float32)
    word = tl.load(masks + slot * width + ids // 32, mask=here, other=0)
    allowed = (word >> (ids % 32)) & 1
    without = tl.where(score < float("inf"), -float("inf"), float("nan"))
    score = tl.where(allowed != 0, score, without)
    tl.store(scores + row * vocab + ids, score, mask=here)


_launch = Launcher(_mask)
