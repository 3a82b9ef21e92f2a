"""Penalties, masks and sums: a kernel each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from asyncllm.kernels.triton.launch import Launcher, cdiv

_TILE = 2048
_WARPS = 8


def penalise(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    penalties: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
) -> Tensor:
    """See ``kernels.scores.penalise``."""
    return _scores(_launch_penalties, logits, rows, slots, penalties, counts, in_prompt)


def mask_scores(logits: Tensor, rows: Tensor, slots: Tensor, masks: Tensor) -> Tensor:
    """See ``kernels.scores.mask_scores``."""
    return _scores(_launch_masks, logits, rows, slots, masks, masks.shape[1])


def _scores(launch: Launcher, logits: Tensor, rows: Tensor, *args: Tensor | int) -> Tensor:
    """What a kernel makes of these rows, float32 [rows, vocab]."""
    vocab = logits.shape[1]
    scores = torch.empty(len(rows), vocab, dtype=torch.float32, device=logits.device)
    grid = (cdiv(vocab, _TILE), len(rows), 1)
    launch(grid, (logits, logits.stride(0), vocab, rows, *args, scores), (_TILE,), _WARPS)
    return scores


@triton.jit
def _penalise(
    logits,
    stride,
    vocab,
    rows,
    slots,
    penalties,
    counts,
    in_prompt,
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
    count = tl.load(counts + slot * vocab + ids, mask=here, other=0)
    prompt = tl.load(in_prompt + slot * vocab + ids, mask=here, other=0)
    repetition = tl.load(penalties + slot * 3)
    presence = tl.load(penalties + slot * 3 + 1)
    frequency = tl.load(penalties + slot * 3 + 2)
    factor = tl.where((count > 0) | (prompt > 0), repetition, 1.0)
    score = tl.where(score > 0, score / factor, score * factor)
    score -= count.to(tl.float32) * frequency + tl.where(count > 0, presence, 0.0)
    tl.store(scores + row * vocab + ids, score, mask=here)


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


@triton.jit
def _log_sums(scores, sums, vocab, TILE: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    scores += row * vocab
    ids = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    for start in range(0, vocab, TILE):
        here = start + ids < vocab
        best = tl.maximum(best, tl.load(scores + start + ids, here, other=float("-inf")))
    peak = tl.max(best, 0)
    total = tl.zeros([TILE], tl.float32)
    for start in range(0, vocab, TILE):
        here = start + ids < vocab
        total += tl.exp(tl.load(scores + start + ids, here, other=float("-inf")) - peak)
    tl.store(sums + row, peak + tl.log(tl.sum(total, 0)))


_launch_sums = Launcher(_log_sums)


def log_sums(scores: Tensor) -> Tensor:
    """See ``kernels.scores.log_sums``."""
    rows, vocab = scores.shape
    sums = torch.empty(rows, 1, dtype=torch.float32, device=scores.device)
    if rows > 0:
        _launch_sums((rows, 1, 1), (scores, sums, vocab), (_TILE,), _WARPS)
    return sums


_launch_penalties = Launcher(_penalise)
_launch_masks = Launcher(_mask)
