"""Calibrate: a profile of the simulated device from the measured steps of traces.

Every table of ``asyncllm.executor.sim.profile`` is a linear function of its points, so all of
them are fitted at once: least squares of relative errors, with points that do not fall where time
cannot.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from asyncllm.config import EngineLimits
from asyncllm.errors import BadRequest
from asyncllm.executor.sim.profile import (
    Curve,
    HostTimes,
    Kind,
    Profile,
    StepShape,
    StepTimes,
    round_up,
)
from asyncllm.lab.replay.calibrate_host import idle_curve, least_gaps, rising, rounded, solve
from asyncllm.lab.replay.steps import RecordedStep

#: Points of the tables by rows and by tokens; as far as they are padded sizes, those of
#: ``executor/step/padded_steps.py``.
ROWS: Final = (1, 2, 4, 8, *range(16, 64, 8), *range(64, 257, 16))
TOKENS: Final = (8, 32, 64, 128, 192, 256)
LARGE: Final = (320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, *range(2048, 8193, 512))
#: Fewer rows wait for the longest one, however little the others read.
KV_ROWS: Final = (8, 32, 64, 128, 256)
LENGTHS: Final = (1, 16, 64, 128, 192, 256, 320, 384, 512, 768, 1024, 2048, 4096, 8192)
#: A step with more rows than this is padded to the most.
WIDE_ROWS: Final = 32
#: Fewer steps of decode rows, or of prompts, are no measurement.
MIN_STEPS: Final = 16
#: Steps whose error is this many times the median one count less in the second fit.
HUBER: Final = 3.0
#: The smallest steps beyond the largest captured size are measured up to this multiple of it.
NEAR: Final = 1.5
#: Points of a spread.
QUANTILES: Final = 40


class Error(NamedTuple):
    """How well the tables fit the steps of one class; ``median`` and ``p90`` of |error|, shares."""

    kind: str
    steps: int
    bias: float
    median: float
    p90: float


class Calibrated(NamedTuple):
    profile: Profile
    errors: list[Error]


class _Measured(NamedTuple):
    shape: StepShape
    decode_steps: int
    seconds: float


def calibrate(
    traces: Sequence[Sequence[RecordedStep]],
    limits: EngineLimits,
    source: str,
    host: HostTimes | None = None,
    measured: Sequence[dict[str, Any]] = (),
) -> Calibrated:
    """Fit a profile.

    Args:
        traces: the steps of any number of traces, of one model, device and version.
        limits: of the recorded engine.
        source: what was measured, in words.
        host: what steps do not tell; ``idle`` is fitted here.
        measured: see ``Profile``.

    Raises:
        BadRequest: there are too few steps with prompts, or without.
    """
    shapes = [
        _Measured(StepShape.of(s.starts, s.lengths, s.num_samples), s.decode_steps, s.seconds)
        for steps in traces
        for s in steps
        if s.seconds > 0.0
    ]
    decode = [m for m in shapes if m.shape.decode]
    mixed = [m for m in shapes if not m.shape.decode]
    for name, some in (("without prompts", decode), ("with prompts", mixed)):
        if len(some) < MIN_STEPS:
            raise BadRequest(
                f"a profile needs {MIN_STEPS} steps {name}, and the traces have {len(some)}"
            )
    times = _fit(decode, mixed, limits.step_sizes)
    ratios: dict[str, list[float]] = defaultdict(list)
    for shape, decode_steps, seconds in shapes:
        ratios[shape.kind].append(seconds / times.seconds(shape, decode_steps))
    gaps = least_gaps(traces)
    profile = Profile(
        source=source,
        step_sizes=limits.step_sizes,
        max_decode_steps=limits.max_decode_steps,
        steps=times,
        kinds=tuple(
            Kind(name, _quantiles(ratios[name]), rounded(gaps.get(name, 0.0)))
            for name in sorted(ratios, key=_order)
        ),
        host=msgspec.structs.replace(host or HostTimes(), idle=idle_curve(traces)),
        measured=tuple(measured),
    )
    return Calibrated(profile, [_error(kind, ratios[kind]) for kind in sorted(ratios, key=_order)])


def _fit(decode: list[_Measured], mixed: list[_Measured], step_sizes: tuple[int, ...]) -> StepTimes:
    padded_rows = ROWS if step_sizes else ()
    padded_tokens = (*TOKENS[1:], *step_sizes) if step_sizes else ()
    # -- decode
    rows = np.array([round_up(m.shape.rows, padded_rows) for m in decode], dtype=float)
    kv = np.array([m.shape.kv_tokens + m.shape.rows * (m.decode_steps - 1) / 2 for m in decode])
    once = np.array([m.decode_steps == 1 for m in decode], dtype=float)
    seconds = np.array([m.seconds / m.decode_steps for m in decode])
    row_points = _used(ROWS, rows)
    kv_points = _used(KV_ROWS, np.array([m.shape.rows for m in decode], dtype=float))
    several = not once.all()
    parts = _solve(
        [
            rising(rows, row_points),
            _falling(np.array([m.shape.rows for m in decode]), kv_points) * kv[:, None],
            once[:, None] * several,
        ],
        seconds,
        [m.shape.kind for m in decode],
    )
    decode_rows, decode_kv, launch = np.cumsum(parts[0]), _fall(parts[1]), parts[2]
    # -- others
    tokens = np.array([round_up(m.shape.tokens, padded_tokens) for m in mixed], dtype=float)
    sizes = sorted({*TOKENS, *LARGE, *padded_tokens, *(s + 1 for s in step_sizes[-1:])})
    token_points = _used(sizes, tokens)
    beyond = tokens[tokens > step_sizes[-1]] if step_sizes else tokens[:0]
    # Steps take longer at once where padding ends, so no line crosses that point.
    end = step_sizes[-1] + 1.0 if step_sizes else 0.0
    end_is_measured = len(beyond) > 0 and beyond.min() <= NEAR * end
    if end_is_measured:
        token_points = np.union1d(token_points, end)
    length_points = _used(LENGTHS, np.concatenate([m.shape.chunk_lengths for m in mixed]))
    counts = np.array(
        [
            (
                m.shape.tokens,
                m.shape.kv_tokens,
                m.shape.rows - len(m.shape.chunk_lengths),
                m.shape.rows > WIDE_ROWS,
                len(m.shape.chunk_lengths),
                (m.shape.chunk_starts + m.shape.chunk_lengths).sum(),
            )
            for m in mixed
        ],
        dtype=float,
    )
    attention = np.array(
        [m.shape.seen @ rising(m.shape.chunk_lengths, length_points) for m in mixed]
    )
    seconds = np.array([m.seconds for m in mixed])
    parts = _solve(
        [rising(tokens, token_points), counts, attention], seconds, [m.shape.kind for m in mixed]
    )
    mixed_token, mixed_kv, mixed_row, wide, chunk, chunk_key = parts[1]
    mixed_tokens = np.cumsum(parts[0])
    if len(beyond) and not end_is_measured:  # in proportion to the next that was
        place = int(np.searchsorted(token_points, end))
        value = mixed_tokens[place] * end / token_points[place]
        mixed_tokens = np.insert(mixed_tokens, place, max(value, mixed_tokens[place - 1]))
        token_points = np.insert(token_points, place, end)
    return StepTimes(
        decode_rows=_curve(ROWS, row_points, decode_rows),
        padded_rows=padded_rows,
        decode_kv=_curve(KV_ROWS, kv_points, decode_kv),
        launch=rounded(launch[0]),
        mixed_tokens=_curve(sizes, token_points, mixed_tokens),
        padded_tokens=padded_tokens,
        mixed_token=rounded(mixed_token),
        mixed_kv=rounded(mixed_kv),
        mixed_row=rounded(mixed_row),
        wide_rows=WIDE_ROWS,
        wide=rounded(wide),
        chunk=rounded(chunk),
        chunk_key=rounded(chunk_key),
        chunk_attention=_curve(LENGTHS, length_points, np.cumsum(parts[2])),
    )


def _solve(blocks: list[np.ndarray], seconds: np.ndarray, kinds: list[str]) -> list[np.ndarray]:
    """The coefficients of each block's columns, for the smallest relative errors.

    The classes of shapes weigh by the root of their steps, and outliers little.
    """
    columns = np.hstack(blocks) / seconds[:, None]
    count: dict[str, int] = defaultdict(int)
    for kind in kinds:
        count[kind] += 1
    weights = np.array([count[kind] ** -0.25 for kind in kinds])
    scale = weights
    for _ in range(3):
        found = solve(columns * scale[:, None], scale)
        errors = np.abs(columns @ found - 1.0)
        limit = HUBER * float(np.median(errors))
        scale = weights * np.sqrt(np.minimum(1.0, limit / np.maximum(errors, 1e-9)))
    return np.split(found, np.cumsum([block.shape[1] for block in blocks])[:-1])


def _used(points: Sequence[int], values: np.ndarray) -> np.ndarray:
    """The points between which, and the one before, there are values."""
    index = np.minimum(np.searchsorted(points, values), len(points) - 1)
    used: np.ndarray = np.array(points, dtype=float)[np.unique(index)]
    return used


def _falling(values: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Columns of a curve that never rises; ``_fall`` turns their coefficients into its values."""
    return rising(-values, -points[::-1])


def _fall(coefficients: np.ndarray) -> np.ndarray:
    values: np.ndarray = np.cumsum(coefficients)[::-1]
    return values


def _curve(all_points: Sequence[int], points: np.ndarray, values: np.ndarray) -> Curve:
    """The curve, up to the last point that was measured."""
    at = [point for point in all_points if point <= points[-1]]
    return Curve(tuple(at), tuple(map(rounded, np.interp(at, points, values).tolist())))


def _quantiles(ratios: list[float]) -> tuple[float, ...]:
    """The middles of equal shares."""
    shares = (np.arange(QUANTILES) + 0.5) / QUANTILES
    return tuple(map(rounded, np.quantile(ratios, shares).tolist()))


def _error(kind: str, ratios: list[float]) -> Error:
    errors = 1.0 / np.array(ratios) - 1.0
    median, p90 = np.quantile(np.abs(errors), [0.5, 0.9]).tolist()
    return Error(kind, len(ratios), float(np.median(errors)), median, p90)


def _order(kind: str) -> tuple[str, int]:
    name, _, size = kind.partition(", ")
    return name, int(size.split(" ")[0].split("-")[0])
