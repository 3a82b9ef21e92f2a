"""Measured step times of one model on one device: tables, fitted to recorded traces.

``asyncllm replay TRACE --calibrate FILE`` (``lab.replay.calibrate``) writes a profile; those
in ``executor/sim/profiles`` ship with the package. Unlike the scheduler's own model of step times
(``engine/scheduling/timing``), the tables know padded sizes, kernels that differ by shape, and that
two steps of the same shape differ.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeAlias

import msgspec
import numpy as np

from asyncllm.errors import ModelError
from asyncllm.executor.sim.timeline import StepTiming

FORMAT: Final = 1
#: The shares of consecutive steps are spread evenly, in any stretch of steps.
GOLDEN: Final = 0.6180339887498949


class Curve(msgspec.Struct, frozen=True):
    """A function that is linear between points, and constant before the first and after the last.

    ``at`` is rising.
    """

    at: tuple[float, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.at or len(self.at) != len(self.values):
            raise ValueError("a curve needs points, and a value at each")

    def __call__(self, x: float) -> float:
        return float(np.interp(x, self.at, self.values))

    def of(self, x: np.ndarray) -> np.ndarray:
        """Its values, float64 [n]."""
        values: np.ndarray = np.interp(x, self.at, self.values)
        return values

    def extended(self, like: Callable[[int], float]) -> Curve:
        """With points far beyond the last one, where it grows in proportion to ``like``."""
        last, value = int(self.at[-1]), self.values[-1]
        far = [last * 2**power for power in range(1, 7)]
        values = [value * like(n) / like(last) for n in far]
        return Curve((*self.at, *far), (*self.values, *values))


class StepShape(msgspec.Struct, frozen=True):
    """What the tables know of a step.

    Attributes:
        decode: every row has one token and samples.
        rows, tokens: the step's, not padded.
        samples: rows that sample.
        kv_tokens: positions that rows of one token read.
        chunk_starts, chunk_lengths: of the other rows.
    """

    decode: bool
    rows: int
    tokens: int
    samples: int
    kv_tokens: int
    chunk_starts: np.ndarray
    chunk_lengths: np.ndarray

    @classmethod
    def of(cls, starts: np.ndarray, lengths: np.ndarray, num_samples: int) -> StepShape:
        """Arguments as in ``SimCost.seconds``."""
        single = lengths == 1
        chunks = ~single
        return cls(
            decode=num_samples == len(lengths) and bool(single.all()),
            rows=len(lengths),
            tokens=int(lengths.sum()),
            samples=num_samples,
            kv_tokens=int((starts[single] + 1).sum()),
            chunk_starts=starts[chunks],
            chunk_lengths=lengths[chunks],
        )

    @property
    def seen(self) -> np.ndarray:
        """Positions that the middle token of each chunk sees, float64 [n]."""
        return self.chunk_starts + (self.chunk_lengths + 1) / 2

    @property
    def kind(self) -> str:
        """The class of shapes that it is reported with."""
        if self.decode:
            return f"decode, {_range(self.rows)} rows"
        kind = "prompts" if len(self.chunk_lengths) == self.rows else "mixed"
        return f"{kind}, {_range(self.tokens)} tokens"


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a step, as a sum of tables.

    Attributes:
        decode_rows: by the rows of a decode step.
        padded_rows: the numbers of rows that decode steps are padded to, rising.
        decode_kv: of one position read, by the rows of a decode step.
        launch: of a decode step that yields one token of each row, beyond each of several.
        mixed_tokens: by the tokens of another step.
        padded_tokens: the numbers of tokens that such steps are padded to; larger ones are not.
        mixed_token: of one token of such a step, beside padding.
        mixed_kv: of one position that a row of one token reads in such a step.
        mixed_row: of one such row.
        wide_rows, wide: a step with more rows than that takes ``wide`` longer.
        chunk: of one chunk.
        chunk_key: of one position that a chunk reads.
        chunk_attention: of each position that the middle token of a chunk sees, by its length.
    """

    decode_rows: Curve
    padded_rows: tuple[int, ...]
    decode_kv: Curve
    launch: float
    mixed_tokens: Curve
    padded_tokens: tuple[int, ...]
    mixed_token: float
    mixed_kv: float
    mixed_row: float
    wide_rows: int
    wide: float
    chunk: float
    chunk_key: float
    chunk_attention: Curve

    def seconds(self, shape: StepShape, decode_steps: int = 1) -> float:
        """The time of a step; of all its tokens, if it yields several of each row."""
        if shape.decode:
            # Round i reads i positions more of each row.
            kv_tokens = shape.kv_tokens + shape.rows * (decode_steps - 1) / 2
            once = self.decode_rows(round_up(shape.rows, self.padded_rows))
            once += kv_tokens * self.decode_kv(shape.rows)
            return decode_steps * once + (self.launch if decode_steps == 1 else 0.0)
        lengths = shape.chunk_lengths
        attention = self.chunk_attention.of(lengths)
        return (
            self.mixed_tokens(round_up(shape.tokens, self.padded_tokens))
            + shape.tokens * self.mixed_token
            + shape.kv_tokens * self.mixed_kv
            + (shape.rows - len(lengths)) * self.mixed_row
            + (self.wide if shape.rows > self.wide_rows else 0.0)
            + len(lengths) * self.chunk
            + float((shape.chunk_starts + lengths).sum()) * self.chunk_key
            + float(shape.seen @ attention)
        )

    def extended(
        self, rows: Callable[[int], float] = float, tokens: Callable[[int], float] = float
    ) -> StepTimes:
        """With larger steps than were measured, that grow in proportion to these functions."""
        return msgspec.structs.replace(
            self,
            decode_rows=self.decode_rows.extended(rows),
            mixed_tokens=self.mixed_tokens.extended(tokens),
            chunk_attention=self.chunk_attention.extended(float),
        )


class Kind(msgspec.Struct, frozen=True):
    """What steps of one class have beside the tables.

    Attributes:
        ratios: quantiles of measured over fitted seconds.
        gap: mean seconds for which the device is idle before such a step, though the step was
            planned in time.
    """

    name: str
    ratios: tuple[float, ...]
    gap: float


Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0)]

#: Of any number of tokens.
NOTHING: Final = Curve((0.0,), (0.0,))


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the event loop, and of what is around it.

    Attributes:
        idle: from planning a step for an idle device to its result, beyond the step's own, by the
            step's tokens.
        launch: of the event loop, which waits while a step is launched.
        step, token: of the event loop, for each result and for each token that it delivers.
        request, prompt_token, begin, sent: of the event loop, for HTTP: to read one request, to
            begin an answer, and to send one token.
        client: of a request and its first token on their ways to the server and back.
    """

    idle: Curve = NOTHING
    launch: Seconds = 0.0
    step: Seconds = 0.0
    token: Seconds = 0.0
    request: Seconds = 0.0
    prompt_token: Seconds = 0.0
    begin: Seconds = 0.0
    sent: Seconds = 0.0
    client: Seconds = 0.0

    def reading(self, num_prompt: int) -> float:
        """What the event loop takes to read a request over HTTP."""
        return self.request + self.prompt_token * num_prompt

    def loop(self, tokens: int) -> float:
        """What the event loop takes for a step whose tokens it sends over HTTP."""
        return self.launch + self.step + (self.token + self.sent) * tokens


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one model on one device.

    Attributes:
        source: what was measured, in words.
        step_sizes, max_decode_steps: limits of the recorded engine.
        measured: rows of ``asyncllm bench`` from the same engine, as it writes them.
    """

    format: int = FORMAT
    source: str
    step_sizes: tuple[int, ...]
    max_decode_steps: int
    steps: StepTimes
    kinds: tuple[Kind, ...]
    host: HostTimes
    measured: tuple[dict[str, Any], ...] = ()

    def timing(
        self, step: int, shape: StepShape, seconds: float, decode_steps: int = 1
    ) -> StepTiming:
        """The times of step number ``step``, that takes ``seconds`` as a rule."""
        kind, host = shape.kind, self.host
        return StepTiming(
            seconds * self.ratio(kind, step),
            gap=self.gap(kind),
            idle=host.idle(shape.tokens),
            loop=host.loop(shape.samples * decode_steps),
        )

    def ratio(self, kind: str, step: int) -> float:
        """What to multiply the seconds of a step with: as much as that of a real one may differ.

        Equal for equal steps, so that a simulation can be repeated.
        """
        known = self._kind(kind)
        if known is None:
            return 1.0
        return known.ratios[int(step * GOLDEN % 1.0 * len(known.ratios))]

    def gap(self, kind: str) -> float:
        """``Kind.gap``; 0.0 of a kind that was not measured."""
        known = self._kind(kind)
        return 0.0 if known is None else known.gap

    def write(self, path: Path) -> None:
        """Write it with a line for each field.

        Raises:
            OSError: the file cannot be written.
        """
        path.write_bytes(msgspec.json.encode(self).replace(b',"', b',\n"') + b"\n")

    def _kind(self, name: str) -> Kind | None:
        return next((kind for kind in self.kinds if kind.name == name), None)


def load(path: Path) -> Profile:
    """Read a profile.

    Raises:
        ModelError: the file cannot be read, or is no profile of this version.
    """
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ModelError(f"cannot read the profile {path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} is not a profile of asyncllm: {error}") from None
    if profile.format != FORMAT:
        raise ModelError(f"the profile {path} has format {profile.format}, not {FORMAT}")
    return profile


def shipped(name: str) -> Profile:
    """The profile with that name that comes with asyncllm."""
    return load(Path(__file__).parent / "profiles" / f"{name}.json")


def find_profile(name: str) -> Profile | None:
    """The profile that ``EngineConfig.sim_profile`` names; None for "auto".

    Raises:
        ModelError: see ``load``.
    """
    if name == "auto":
        return None
    return load(Path(name)) if name.endswith(".json") else shipped(name)


def round_up(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds ``count``; ``count`` if none does."""
    index = int(np.searchsorted(sizes, count))
    return sizes[index] if index < len(sizes) else count


def _range(count: int) -> str:
    """The powers of two around it: 1, 2-8, 9-32, 33-128 and so on."""
    low, high = 1, 1
    while count > high:
        low, high = high + 1, 8 if high == 1 else 4 * high
    return str(low) if low == high else f"{low}-{high}"
