"""Non-negative least squares, and columns of curves to fit with it."""

from __future__ import annotations

import numpy as np

#: Keeps columns that depend on each other apart.
RIDGE = 1e-9


def solve(columns: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The coefficients >= 0 with which the columns come closest to ``wanted``.

    The active set method of Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23.

    Args:
        columns: float64 [n, k].
        wanted: float64 [n].
    """
    norms = np.sqrt((columns**2).sum(axis=0))
    norms[norms == 0.0] = 1.0
    scaled = columns / norms
    gram = scaled.T @ scaled
    target = scaled.T @ wanted
    gram[np.diag_indices_from(gram)] += RIDGE
    found = np.zeros(len(norms))
    active = np.zeros(len(norms), dtype=bool)
    enough = 10 * RIDGE * float(np.linalg.norm(wanted))
    for _ in range(3 * len(norms)):
        slope = np.where(active, -np.inf, target - gram @ found)
        best = int(slope.argmax())
        if slope[best] <= enough:
            break
        active[best] = True
        while True:
            free = np.flatnonzero(active)
            trial = np.zeros_like(found)
            trial[free] = np.linalg.solve(gram[np.ix_(free, free)], target[free])
            if (trial[free] > 0.0).all():
                found = trial
                break
            # As far towards the trial as no coefficient becomes negative.
            falling = free[trial[free] <= 0.0]
            step = found[falling] / (found[falling] - trial[falling])
            found = np.maximum(0.0, found + step.min() * (trial - found))
            active[falling[step.argmin()]] = False
            found[~active] = 0.0
    coefficients: np.ndarray = found / norms
    return coefficients


def rising(values: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Columns of a curve that never falls: its first value, and the rise to each further point."""
    columns = np.ones((len(values), len(points)))
    low, high = points[:-1], points[1:]
    columns[:, 1:] = np.clip((values[:, None] - low) / (high - low), 0.0, 1.0)
    return columns


def line(values: np.ndarray, wanted: np.ndarray, scale: np.ndarray) -> tuple[float, float]:
    """Start and slope of the line closest to ``wanted``; each error counts ``scale`` times."""
    columns = np.stack([np.ones(len(values)), values], axis=1)
    start, slope = solve(columns * scale[:, None], wanted * scale).tolist()
    return rounded(start), rounded(slope)


def rounded(value: float) -> float:
    """To four digits, so that a profile can be read."""
    return float(f"{value:.4g}")
