"""Which steps are captured as CUDA graphs, and in which order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asyncllm.executor.sampling.needs import Level
from asyncllm.executor.step.padded_steps import FREE_TOKENS, MIXED_ROWS, Size

#: The rows for which several decode steps in one graph are captured before serving starts. These
#: graphs take as long to capture as several others, and a single stream gains most from them.
FIRST_MULTI_STEP_ROWS = 1

#: Up to here, decode rows that are padding cost little: they have logits, but no K and V to read.
FEW_ROWS = 64

#: The most tokens of mixed steps that are captured first if drafts are to be verified.
VERIFYING_TOKENS = 128


class Kind(NamedTuple):
    """What a graph runs; only decode rows are captured for several decode steps."""

    size: Size
    level: Level
    decode_steps: int = 1


class GraphKinds:
    """All graphs of an engine, by the sizes of its steps.

    Args:
        decode_sizes, mixed_sizes: rising.
        max_decode_steps: decode steps of a graph for few rows.
        multi_step_rows: the most rows for which there is one.
        drafts: something is drafted for every request.
    """

    def __init__(
        self,
        decode_sizes: Sequence[Size],
        mixed_sizes: Sequence[Size],
        max_decode_steps: int,
        multi_step_rows: int,
        *,
        drafts: bool = False,
    ):
        self._decode_sizes = decode_sizes
        self._mixed_sizes = mixed_sizes
        self._max_decode_steps = max_decode_steps
        self._multi_step_rows = multi_step_rows
        self._drafts = drafts

    def level(self, level: Level, size: Size) -> Level:
        """The level of the graph that runs steps of this level; its logits serve ``EAGER``.

        A higher level costs a few microseconds a step, which matter for the smallest decode steps
        only; each graph less saves milliseconds of start-up.
        """
        is_small = size.rows <= self._multi_step_rows and not (size.mixed or size.apart)
        return level if level is Level.GREEDY and is_small else Level.FILTER

    def first(self) -> list[Kind]:
        """A graph for every step, if with more padding: the largest sizes, and some smaller ones.

        Powers of two, but where padding costs little: no mixed step of less than ``FREE_TOKENS``,
        and every other power of up to ``FEW_ROWS``. The largest come first: the others then reuse
        their memory. With drafts, also small steps that verify some.
        """
        mixed = [
            Kind(size, Level.FILTER)
            for size in reversed(self._mixed_sizes)
            if size == self._mixed_sizes[-1]
            or (
                size.rows == self._mixed_sizes[-1].rows
                and size.tokens >= FREE_TOKENS
                and _is_power(2, size.tokens)
            )
            or (self._drafts and self._verifies(size))
        ]
        decode = [
            kind
            for size in reversed(self._decode_sizes)
            if size == self._decode_sizes[-1]
            or _is_power(4 if size.rows <= FEW_ROWS else 2, size.rows)
            for kind in self._of_size(size)
            if kind.decode_steps == 1 or size.rows <= FIRST_MULTI_STEP_ROWS
        ]
        return mixed + decode

    def others(self) -> list[Kind]:
        """The graphs that ``first`` leaves out; few rows come first, as they gain most."""
        everything = (
            *(kind for size in self._decode_sizes for kind in self._of_size(size)),
            *(Kind(size, Level.FILTER) for size in self._mixed_sizes),
        )
        first = set(self.first())
        return [kind for kind in everything if kind not in first]

    def _verifies(self, size: Size) -> bool:
        """Whether steps with drafts for few sequences are padded to this size."""
        apart = max((each.tokens for each in self._mixed_sizes if each.apart), default=0)
        more = apart < size.tokens <= VERIFYING_TOKENS and size.rows == MIXED_ROWS[0]
        return (size.apart or more) and _is_power(2, size.tokens)

    def _of_size(self, size: Size) -> Iterator[Kind]:
        """The graphs of a decode size."""
        steps = {1}
        if size.rows <= self._multi_step_rows:
            steps.add(self._max_decode_steps)
        levels = dict.fromkeys(self.level(level, size) for level in (Level.GREEDY, Level.FILTER))
        for decode_steps in sorted(steps):
            for level in levels:
                yield Kind(size, level, decode_steps)


def _is_power(base: int, number: int) -> bool:
    """Whether it is a power of the base; number > 0."""
    while number % base == 0:
        number //= base
    return number == 1
