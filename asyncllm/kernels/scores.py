"""Scores: logits after penalties on tokens that have occurred, and under masks.

A mask has a bit for each token, whether a sequence may have it next.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from asyncllm.kernels.support import in_triton


@in_triton("sampling.scores")
def penalise(
    logits: Tensor,
    rows: Tensor,
    slots: Tensor,
    penalties: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
) -> Tensor:
    """Scores of some rows of a batch after their penalties.

    Repetition comes first: scores of tokens that occur are divided by it where positive, else
    multiplied (Keskar et al. 2019, CTRL, in Hugging Face's form). Then OpenAI's two:
    count * frequency and (count > 0) * presence are subtracted.

    Args:
        logits: [m, vocab], any floating dtype, the last dimension contiguous; not modified.
        rows: int64 [r], which rows of the logits. slots: int64 [r], whose penalties they get.
        penalties: float32 [slots, 3]: repetition, presence, frequency.
        counts: int32 [slots, vocab], how often each token was generated.
        in_prompt: uint8 [slots, vocab], 1 for tokens that occur in the prompt, else 0.

    Returns:
        float32 [r, vocab].
    """
    scores = logits.index_select(0, rows).float()
    repetition, presence, frequency = penalties.index_select(0, slots).split(1, dim=1)
    # Sums and products of floats throughout: on CPUs masks take three times as long.
    times = counts.index_select(0, slots).float()
    prompt = in_prompt.index_select(0, slots).float()
    factor = torch.maximum(times, prompt).clamp_(max=1).mul_(repetition - 1).add_(1)
    negative = scores.clamp(max=0).mul_(factor)
    scores.clamp_(min=0).div_(factor).add_(negative)
    scores.addcmul_(times, frequency, value=-1)
    return scores.addcmul_(times.clamp_(max=1), presence, value=-1)


def mask_width(vocab: int) -> int:
    """int32 words of the mask of one row."""
    return -(-vocab // 32)


@in_triton("sampling.scores")
def mask_scores(logits: Tensor, rows: Tensor, slots: Tensor, masks: Tensor) -> Tensor:
    """Scores of some rows of a batch, with -inf for the tokens that their masks ban.

    A banned token whose score is NaN or infinite becomes NaN, so that the row still counts as bad.

    Args:
        logits: [m, vocab], any floating dtype, the last dimension contiguous; not modified.
        rows: int64 [r], which rows of the logits. slots: int64 [r], whose masks they get.
        masks: int32 [slots, mask_width(vocab)]: bit i % 32 of word i // 32 is 1 if token i may be
            sampled. Bits beyond the vocabulary mean nothing.

    Returns:
        float32 [r, vocab].
    """
    scores = logits.index_select(0, rows).float()
    octets = masks.index_select(0, slots).view(torch.uint8).view(-1).int()
    terms = _terms_of_octets(scores.device).index_select(0, octets).view(len(rows), -1)
    return scores.add_(terms[:, : scores.shape[1]])


@in_triton("sampling.scores")
def log_sums(scores: Tensor) -> Tensor:
    """The log of the sum of exp of each row: float32 [n, vocab], contiguous -> [n, 1].

    On a GPU, a row has the same bits whatever the other rows are.
    """
    return scores.logsumexp(-1, keepdim=True)


def best_scores(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The best scores of each row, float32 [n, vocab] -> [n, count], and their tokens.

    Of tokens with the same score the first ones, in order; ``topk`` takes any.
    """
    bits = (scores + 0.0).view(torch.int32)  # 0.0 for -0.0
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    last = scores.shape[1] - 1
    ids = torch.arange(last, -1, -1, device=scores.device)
    keys = torch.add(ids, rank, alpha=2**32)
    ids = last - (keys.topk(count, dim=-1).values & (2**32 - 1))
    return scores.gather(1, ids), ids


@cache
def _terms_of_octets(device: torch.device) -> Tensor:
    """float32 [256, 8]: for each value of eight bits, 0 where they are 1, else -inf.

    Looking up eight tokens at a time takes half as long as shifting bits apart.
    """
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    return torch.zeros(256, 8, device=device).masked_fill_(bits == 0, -torch.inf)
