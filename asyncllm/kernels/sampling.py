"""Sampling: from logits to tokens by temperature, top-k, top-p and min-p.

*Weights* are probabilities that are not divided by their sum: exp((score - best) / temperature), so
the likeliest token of a row weighs exactly 1. Filters are cut-offs on weights, so that tokens that
tie are kept or dropped together.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from asyncllm.kernels.random_streams import uniforms
from asyncllm.kernels.support import in_triton
from asyncllm.wire.messages import BAD_TOKEN

#: The parameters of a row. Temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.
#: On the device, a record is a row of int64 [slots, 3].
RECORD = np.dtype(
    [
        ("stream", "<i8"),
        ("temperature", "<f4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("top_k", "<i4"),
    ]
)

#: A draw first adds up the weights of tiles of this many tokens, then walks through one tile.
TILE = 256
#: Up to this many largest weights are selected; for more, sorting all is faster (measured).
MAX_SELECT = 128


@in_triton("sampling.sampling")
def sample_tokens(
    logits: Tensor,
    table: Tensor,
    slots: Tensor,
    positions: Tensor,
    *,
    draws: bool,
    filters: bool,
    relay: Tensor | None = None,
) -> Tensor:
    """Sample one token for each row, without waiting for the device.

    The token of a row depends on its own logits, record and position alone. GPUs and CPUs round
    sums differently, so a draw at the border of two tokens may differ.

    Args:
        logits: [m, vocab], any floating dtype, the last dimension contiguous; -inf bans a token.
        table: int64 [slots, 3] of ``RECORD``.
        slots: int [m]; each row's record.
        positions: int [m]; the position in its stream of each row's random number.
        draws: False if the temperature of all rows is 0.
        filters: False if no row with a temperature above 0 has filters.
        relay: int64 [slots]; the row's token is also written there, 0 for BAD_TOKEN.

    Returns:
        int64 [m]; BAD_TOKEN where the best score is NaN or infinite. Of equal scores, the first
        token is the best.
    """
    # NaN counts as the largest; of equal scores the first is taken.
    best, tokens = logits.max(dim=-1)
    if draws:
        records = table.index_select(0, slots)
        rows = (_temperature(records) > 0).nonzero().squeeze(1)
        if len(rows):
            part = (t.index_select(0, rows) for t in (logits, records, positions, best, tokens))
            tokens = tokens.index_copy(0, rows, _draw(*part, filters=filters))
    tokens = tokens.masked_fill(~best.isfinite(), BAD_TOKEN)
    if relay is not None:
        relay.index_copy_(0, slots.long(), tokens.clamp(min=0))
    return tokens


def _temperature(records: Tensor) -> Tensor:
    return records.view(torch.float32)[:, 2]


def _draw(
    logits: Tensor,
    records: Tensor,
    positions: Tensor,
    best: Tensor,
    tokens: Tensor,
    *,
    filters: bool,
) -> Tensor:
    """A random token of each row; ``tokens`` are the best."""
    weights = weigh(logits, best, _temperature(records))
    if filters:
        top_p, least = records.view(torch.float32)[:, 3:5].unbind(1)
        top_k = records.view(torch.int32)[:, 5].long()
        top_k = torch.where(top_k > 0, top_k, logits.shape[1]).clamp_(max=logits.shape[1])
        # The likeliest token weighs 1, so min_p is a weight as it stands.
        least = least.clone()
        selected = top_k <= MAX_SELECT
        for rows in (selected, ~selected & ((top_k < logits.shape[1]) | (top_p < 1))):
            if rows.any():
                depth = int(top_k[rows].max())
                cuts = cut_offs(weights[rows], top_k[rows], top_p[rows], depth)
                least[rows] = torch.maximum(least[rows], cuts)
        weights = keep_from(weights, least)
    return pick(weights, uniforms(records[:, 0], positions.long()), tokens)


def weigh(scores: Tensor, best: Tensor, temperature: Tensor) -> Tensor:
    """Turn scores into weights.

    Args:
        scores: [m, vocab], any floating dtype; best: [m], the largest of each row.
        temperature: float32 [m], greater than 0.

    Returns:
        float32 [m, n * TILE]; tokens that do not exist weigh 0.
    """
    num_rows, vocab = scores.shape
    padded = -(-vocab // TILE) * TILE
    weights = torch.empty(num_rows, padded, dtype=torch.float32, device=scores.device)
    if padded > vocab:
        weights[:, vocab:] = -torch.inf
    # Subtracting first: no temperature, however small, can make the result overflow.
    torch.sub(scores, best.float().unsqueeze(1), out=weights[:, :vocab])
    return weights.div_(temperature.unsqueeze(1)).exp_()


def cut_offs(weights: Tensor, top_k: Tensor, top_p: Tensor, depth: int) -> Tensor:
    """The smallest weight that top-k and then top-p keep, so that tokens that tie are kept alike.

    Top-p keeps the fewest tokens whose share of what top-k kept reaches ``top_p``; at least one.

    Args:
        weights: float32 [m, n], none negative.
        top_k: int64 [m], at least 1; ``depth`` or more is off. top_p: float32 [m]; 1 is off.
        depth: how many of the largest weights are looked at.

    Returns:
        float32 [m].
    """
    largest = _largest(weights, depth)
    upto = largest.cumsum(-1)
    last = (top_k.clamp(max=depth) - 1).unsqueeze(1)
    total = upto.gather(1, last)
    enough = torch.where(top_p < 1, top_p, torch.inf).unsqueeze(1) * total
    rank = torch.minimum(torch.searchsorted(upto, enough), last)
    return largest.gather(1, rank).squeeze(1)


def keep_from(weights: Tensor, least: Tensor) -> Tensor:
    """Set weights below a row's ``least``, float32 [m], to 0, in place."""
    # Vectorised on CPUs only where the result of the comparison has the type of its operands.
    kept = torch.ge(weights, least.unsqueeze(1), out=torch.empty_like(weights))
    return weights.mul_(kept)


def _largest(weights: Tensor, depth: int) -> Tensor:
    """The ``depth`` largest weights of each row, falling."""
    if depth <= MAX_SELECT:
        return weights.topk(depth, dim=-1).values
    if weights.device.type == "cpu":
        # numpy sorts values alone, with vector instructions: 20 times faster than torch.
        rising = torch.from_numpy(np.sort(weights.numpy(), axis=-1))
        return rising[:, -depth:].flip(-1)
    return weights.sort(dim=-1, descending=True).values[:, :depth]


def pick(weights: Tensor, uniform: Tensor, best: Tensor) -> Tensor:
    """Draw a token of each row: the first at which the running sum exceeds uniform * total.

    Sums over tiles come first: they are few, so that their running sum is cheap in float64.

    Args:
        weights: float32 [m, n * TILE]. uniform: float64 [m], from 0 to 1, both excluded.
        best: int64 [m], tokens that do not weigh 0.

    Returns:
        int64 [m].
    """
    tiles = weights.view(len(weights), -1, TILE)
    sums = tiles.sum(-1).double()
    upto = sums.cumsum(-1)
    target = uniform.unsqueeze(1) * upto[:, -1:]
    tile = torch.searchsorted(upto, target, right=True).clamp_(max=sums.shape[1] - 1)
    target -= upto.gather(1, tile) - sums.gather(1, tile)
    inside = tiles.gather(1, tile.unsqueeze(2).expand(-1, -1, TILE)).squeeze(1)
    upto = inside.cumsum(-1, dtype=torch.float64)
    offset = torch.searchsorted(upto, target, right=True).clamp_(max=TILE - 1)
    # Where rounding carries the target past the end, the token found may be one that weighs 0.
    real = inside.gather(1, offset) > 0
    return torch.where(real, tile * TILE + offset, best.unsqueeze(1)).squeeze(1)
