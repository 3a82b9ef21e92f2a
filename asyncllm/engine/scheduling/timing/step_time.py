"""How long a step takes, learned from the steps that ran, and what that leaves for prompts.

The model is the roofline of a transformer's step (Williams et al., CACM 2009), in which matrix
products hide behind the reading of the weights until there are enough tokens, and attention is
paid in full:

    seconds = base + per_token * max(0, tokens - knee) + per_kv * kv_tokens + per_pair * attention

It serves Sarathi-Serve's stall-free batching (Agrawal et al., OSDI 2024): prompt chunks fill a
step up to a time, not up to a fixed number of tokens.

Pure Python floats, and only operations that IEEE 754 rounds exactly (sums through ``math.fsum``,
because ``sum`` differs between versions of Python): the same observations give the same bits on
every machine, so a recorded run can be replayed anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from operator import mul

from asyncllm.engine.scheduling.timing.prefill_room import (
    MIN_CHUNK,
    UNKNOWN,
    PrefillRoom,
    StepCost,
    StepShape,
    num_pairs,
)
from asyncllm.engine.scheduling.timing.step_sizes import StepSizes

# Tokens from which a matmul may be bound by arithmetic: 128 to 320 on bf16 GPUs (their FLOP/s over
# bytes/s), fewer for fp8 weights and on CPUs. Cells' means blur the bend; no finer grid is needed.
KNEES = (0, 32, 64, 96, 128, 160, 192, 256, 320, 384, 512)
# Relative ridge of (base, per_token, per_kv, per_pair). Where the observed steps cannot separate
# two causes, it prefers base and token cost to attention.
RIDGE = (1e-6, 1e-6, 1e-4, 1e-4)
MAX_CELLS = 128
MEMORY = 16.0  # observations over which a cell's means forget
LEAST_WEIGHT = 1 / 32  # of a cell whose steps no longer occur
HICCUP = 3.0  # a step slower than similar ones by this factor is an outlier
TOLERANCE = 0.10  # smoothed relative error above which the machine is assumed to have changed
MIN_OBSERVATIONS = 8
REFIT_SOON, REFIT_LATE = 32, 512  # observations between two fits: at least, at most
UNEXPLORED_TOKENS = 512  # a step may always have this many tokens, whatever was measured
# Prompt chunks fill a step until what it costs beside them is this share of it. A longer step would
# hardly speed prompts up, and make the decode rows wait.
FIXED_SHARE = 1 / 11
# The share of the target that steps are planned to take; the rest is for errors of the prediction,
# which are smaller where the times of sizes are known.
TARGET_SHARE, SIZED_SHARE = 0.92, 0.93
# With many decode rows, a step may take this multiple of what they take alone. At 2.0, 256 clients
# of 8B on an H200 send prompts faster than they are computed.
DECODE_MULTIPLE = 2.2
# A step without decode rows takes at most this many seconds: whoever arrives waits for two of them.
# But at least until what any step costs is this share of it, so that no device loses more by it.
ALONE_SECONDS, ALONE_FIXED_SHARE = 0.1, 1 / 20


class _Cell:
    """Steps of similar shape: exponentially weighted means, so one row of the regression."""

    __slots__ = ("attention", "kv_tokens", "num_tokens", "seconds", "updated", "weight")

    def __init__(self) -> None:
        self.num_tokens = self.kv_tokens = self.attention = self.seconds = self.weight = 0.0
        self.updated = 0

    def add(self, shape: StepShape, seconds: float) -> None:
        """A step far slower than the others is clipped; after one far faster, they are dropped."""
        if seconds * HICCUP < self.seconds:
            self.weight = 0.0
        elif self.weight and seconds > HICCUP * self.seconds:
            seconds = HICCUP * self.seconds
        self.weight = min(self.weight + 1.0, MEMORY)
        share = 1.0 / self.weight
        self.num_tokens += share * (shape.num_tokens - self.num_tokens)
        self.kv_tokens += share * (shape.kv_tokens - self.kv_tokens)
        self.attention += share * (shape.attention - self.attention)
        self.seconds += share * (seconds - self.seconds)


class StepTimeModel:
    """Predicts a step's seconds from its shape, fitted to the steps observed so far.

    Args:
        page_copy_seconds: a first guess of moving one page between device and host (0: unknown).
        sizes: see ``StepSizes``.
    """

    def __init__(self, page_copy_seconds: float = 0.0, sizes: tuple[int, ...] = ()) -> None:
        self.cost = UNKNOWN
        self._sizes = StepSizes(sizes)
        self._cells: dict[tuple[int, int, int], _Cell] = {}
        self._observations = 0
        self._largest = 0  # most tokens that a measured step had
        self._deepest = 0.0  # most tokens that each of its tokens attended to, on average
        self._new_cell = False
        self._error = 0.0  # smoothed |predicted / measured - 1| of cells' means since the last fit
        self._last_fit = 0
        self._copied_pages = 1.0 if page_copy_seconds > 0.0 else 0.0
        self._copied_seconds = page_copy_seconds

    @property
    def fitted(self) -> bool:
        """False until enough different steps were seen; predictions are 0 until then."""
        return self.cost is not UNKNOWN

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took ``seconds`` of device time."""
        num_tokens, kv_tokens, attention = shape
        if num_tokens <= 0 or not 1e-9 < seconds < 1e9:  # squares would overflow
            return
        self._observations += 1
        # Attention has coarser cells (factors of four): it is linear, with a wide range.
        key = (num_tokens.bit_length(), kv_tokens.bit_length(), int(attention).bit_length() // 2)
        cell = self._cells.get(key) or self._add_cell(key)
        cell.add(shape, seconds)
        cell.updated = self._observations
        if num_tokens > self._largest:
            self._largest = num_tokens
        if attention > self._deepest * num_tokens:
            self._deepest = attention / num_tokens
        if self.cost is not UNKNOWN:
            if attention:
                self._sizes.observe(shape, seconds, self.cost)
            predicted = self.cost.seconds(cell.num_tokens, cell.kv_tokens, cell.attention)
            self._error += (abs(predicted / cell.seconds - 1.0) - self._error) / MEMORY
        since = self._observations - self._last_fit
        if since >= MIN_OBSERVATIONS and self._fit_is_due(since):
            self._fit()

    def seconds(self, shape: StepShape) -> float:
        """Predicted device time of a step; 0.0 while not fitted."""
        return self.cost.seconds(*shape)

    def prefill_seconds(self, num_tokens: int, start: int = 0) -> float:
        """Seconds that prompt tokens from position ``start`` add to steps beyond the knee.

        Of attention, only up to twice the positions that were measured: from steps with short
        prompts alone, that of a long one may come out a hundred times too long.
        """
        pairs = min(num_pairs(start, num_tokens), 2.0 * self._deepest * num_tokens)
        return self.cost.per_token * num_tokens + self.cost.per_pair * pairs

    def room(self, decodes: StepShape, target: float, ceiling: int) -> PrefillRoom:
        """What a step with these decode rows has left for prompts.

        Prompt chunks fill the step until the rest, decode rows and what every step costs, is a
        small share of it. No step is planned to exceed TARGET_SHARE of ``target`` seconds, or
        DECODE_MULTIPLE times its decode rows alone if that is longer: prompts always get half a
        step. ``size_room`` then fills a captured size.
        Without decode rows, nobody waits for a token, but others may arrive: ALONE_SECONDS.
        ``ceiling`` is what is left of the fixed token budget; without a target (0), it alone
        counts.

        The model is not trusted far beyond what was measured: a step with decode rows has at most
        twice the tokens of the largest one so far (or 512). While not fitted, prompts get 512, 256
        or 128 tokens of such a step: few, so that the first long prompt delays nobody much, and of
        different sizes, so that there is something to fit. For that, steps without decode rows are
        full, or half or a quarter full, but have at least 512 tokens.
        """
        alone = decodes.num_tokens == 0
        if target == 0.0:
            return PrefillRoom(ceiling, 0.0, UNKNOWN, 0)  # free, so only tokens count
        if not self.fitted:
            less = self._observations % 3
            most = max(UNEXPLORED_TOKENS, ceiling >> less) if alone else UNEXPLORED_TOKENS >> less
            return PrefillRoom(min(ceiling, most), 0.0, UNKNOWN, 0)
        # Of the base, prompt tokens hide as much as the tokens below the knee would cost.
        cost = self.cost
        fixed = max(0.0, cost.base - cost.per_token * cost.knee)
        if alone:
            longest = max(ALONE_SECONDS, TARGET_SHARE * target, fixed / ALONE_FIXED_SHARE)
            return PrefillRoom(ceiling, longest - cost.base, cost, 0)
        explored = max(UNEXPLORED_TOKENS, 2 * self._largest) - decodes.num_tokens
        most = min(ceiling, max(MIN_CHUNK, explored))
        without = self.seconds(decodes)
        fixed += cost.per_token * decodes.num_tokens + cost.per_kv * decodes.kv_tokens
        longest, least = fixed / FIXED_SHARE, DECODE_MULTIPLE * without
        seconds = max(min(TARGET_SHARE * target, longest), least) - without
        limit = max(min(SIZED_SHARE * target, longest), least)
        most = self._sizes.room(decodes, 0, limit, most, cost) or most
        return PrefillRoom(most, seconds, cost, decodes.num_tokens, limit)

    def size_room(self, room: PrefillRoom, shape: StepShape, start: int) -> bool:
        """End a room with the largest captured size within its limit; False if there is none.

        For the prompt that is cut: what attention takes is known then.

        Args:
            shape: of the step so far.
            start: the prompt's position.
        """
        if not room.limit:
            return False
        tokens = self._sizes.room(shape, start, room.limit, room.tokens, self.cost)
        if tokens < MIN_CHUNK:
            return False
        room.end_with(tokens)
        return True

    def copy_seconds(self, num_pages: int) -> float:
        """Expected seconds of moving pages between device and host; 0.0 while unknown."""
        if not self._copied_pages:
            return 0.0
        return num_pages * self._copied_seconds / self._copied_pages

    def observe_copy(self, num_pages: int, seconds: float) -> None:
        """A copy of pages took ``seconds``. Large copies weigh more than small ones."""
        if num_pages > 0 and 0.0 < seconds < math.inf:
            keep = 1.0 - 1.0 / MEMORY
            self._copied_pages = keep * self._copied_pages + num_pages
            self._copied_seconds = keep * self._copied_seconds + seconds

    def _add_cell(self, key: tuple[int, int, int]) -> _Cell:
        if len(self._cells) >= MAX_CELLS:
            del self._cells[min(self._cells, key=lambda key: self._cells[key].updated)]
        self._cells[key] = cell = _Cell()
        self._new_cell = True
        return cell

    def _fit_is_due(self, since: int) -> bool:
        if self._error > 3.0 * TOLERANCE or since >= REFIT_LATE:
            return True
        # Early each new shape improves the fit much; later a fit costs more, with a larger table.
        soon = min(REFIT_SOON, self._observations // 4)
        if self._new_cell and since >= max(soon, len(self._cells)):
            return True
        return self._error > TOLERANCE and since >= soon

    def _fit(self) -> None:
        cells = list(self._cells.values())
        if self._error > TOLERANCE:
            # Old cells describe a machine that has changed. Those still visited soon recover.
            for cell in cells:
                cell.weight = max(LEAST_WEIGHT, cell.weight / 2.0)
        self._last_fit, self._error, self._new_cell = self._observations, 0.0, False
        sizes = [cell.num_tokens for cell in cells]
        decode_only = sum(cell.attention == 0.0 for cell in cells)
        different = len(cells) >= 3 and max(sizes) >= 1.25 * min(sizes)
        if self.fitted or different or 0 < decode_only < len(cells):
            self.cost = _fit_cost(cells)


def _dot(a: Iterable[float], b: Iterable[float]) -> float:
    return math.fsum(map(mul, a, b))


def _fit_cost(cells: list[_Cell]) -> StepCost:
    """Weighted least squares on relative errors, for the smallest knee that fits about best."""
    scale = [math.sqrt(cell.weight) / cell.seconds for cell in cells]
    ones = [math.sqrt(cell.weight) for cell in cells]  # the measured times, scaled
    num_tokens = [cell.num_tokens for cell in cells]
    kv_tokens = [s * cell.kv_tokens for s, cell in zip(scale, cells, strict=True)]
    attention = [s * cell.attention for s, cell in zip(scale, cells, strict=True)]
    columns = [scale, scale, kv_tokens, attention, ones]  # column 1 depends on the knee
    gram = [[_dot(a, b) for b in columns] for a in columns]
    fits = []
    for knee in KNEES:
        columns[1] = [s * max(0.0, n - knee) for s, n in zip(scale, num_tokens, strict=True)]
        gram[1] = [_dot(columns[1], column) for column in columns]
        for row, value in zip(gram, gram[1], strict=True):
            row[1] = value
        fits.append((*_non_negative(gram), knee))
    # Below 1 % of error, only noise decides between knees; a small knee makes no token look free.
    enough = min(error for _, error, _ in fits) * 1.02 + 1e-4 * gram[4][4]
    (base, per_token, per_kv, per_pair), _, knee = next(fit for fit in fits if fit[1] <= enough)
    return StepCost(base, per_token, per_kv, per_pair, knee)


def _non_negative(gram: list[list[float]]) -> tuple[list[float], float]:
    """Coefficients >= 0 of the first four columns for the fifth, and the squared error.

    ``gram`` holds the dot products of the five columns. A feature that comes out negative is
    dropped, the worst first, and the rest is solved again.
    """
    norms = [math.sqrt(gram[i][i]) for i in range(4)]
    active = [i for i in range(4) if norms[i] > 0.0]
    found = [0.0] * 4
    while active:
        matrix = [
            [gram[i][j] / (norms[i] * norms[j]) + (RIDGE[i] if i == j else 0.0) for j in active]
            + [gram[i][4] / norms[i]]
            for i in active
        ]
        solution = _solve(matrix)
        lowest = min(solution)
        if lowest >= 0.0:
            for i, value in zip(active, solution, strict=True):
                found[i] = value / norms[i]
            break
        del active[solution.index(lowest)]
    error = gram[4][4] - 2.0 * _dot(found, gram[4])
    error += _dot(found, [_dot(found, gram[i]) for i in range(4)])
    return found, error


def _solve(matrix: list[list[float]]) -> list[float]:
    """Gauss-Jordan with partial pivoting; rows are [a_1 .. a_n | b]. Not singular: see RIDGE."""
    n = len(matrix)
    for i in range(n):
        pivot = max(range(i, n), key=lambda row: abs(matrix[row][i]))
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        top = [value / matrix[i][i] for value in matrix[i]]
        matrix[i] = top
        for row in range(n):
            if row != i:
                factor = matrix[row][i]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], top, strict=True)]
    return [row[n] for row in matrix]
