"""Exact probabilities of sampled tokens, and whether draws follow them."""

from __future__ import annotations

import math

import numpy as np


def distribution(
    logits: np.ndarray,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> np.ndarray:
    """Probabilities after the filters, in float64; logits must not tie."""
    weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)
    keep = order[:top_k] if top_k > 0 else order
    share = weights[keep] / weights[keep].sum()
    before = np.cumsum(share) - share
    keep = keep[before < top_p]
    keep = keep[weights[keep] >= min_p]
    result: np.ndarray = np.zeros(len(logits))
    result[keep] = weights[keep] / weights[keep].sum()
    return result


def check_distribution(counts: np.ndarray, expected: np.ndarray) -> None:
    """Chi-square test at about four standard deviations; rare tokens count as one."""
    assert counts[expected == 0].sum() == 0
    want = expected * counts.sum()
    rare = want < 8
    want = np.append(want[~rare], want[rare].sum())
    seen = np.append(counts[~rare], counts[rare].sum())
    if want[-1] < 8:
        want, seen = want[:-1], seen[:-1]
    freedom = len(want) - 1
    if freedom == 0:
        return
    statistic = ((seen - want) ** 2 / want).sum()
    # Wilson and Hilferty: (chi2 / k) ** (1/3) is nearly normal.
    spread = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)
    assert z < 4, f"chi-square {statistic:.1f} at {freedom} degrees of freedom"
