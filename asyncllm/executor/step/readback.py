"""A step's outcome on its way from the device to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec
import numpy as np

from asyncllm.executor.step.eager import Samples
from asyncllm.executor.step.inputs import StepRows
from asyncllm.wire.messages import PooledPrompt, RowLogprobs, ScoredPrompt

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

Download = Callable[["Tensor"], np.ndarray]


class Packed(Protocol[T_co]):
    """Messages as one tensor on the device, ``packed``."""

    packed: Tensor

    def unpack(self, packed: np.ndarray) -> Iterable[T_co]:
        """The messages, from a copy of ``packed`` on the host."""


class Readback(Generic[T]):
    """The copy of messages to the host, ``packed``; None if there are no messages."""

    def __init__(self, messages: Packed[T] | None, download: Download) -> None:
        self._messages = messages
        self.packed = None if messages is None else download(messages.packed)

    def read(self) -> tuple[T, ...]:
        """The messages, once the copy is done."""
        if self._messages is None or self.packed is None:
            return ()
        return tuple(self._messages.unpack(self.packed))


@dataclass(frozen=True, slots=True)
class StepReadback:
    """Copies to the host of sampled tokens and of everything else a step yields.

    Attributes:
        rows: int64 [samples]; the plan's rows that sampled.
        tokens, columns: see ``Samples``; the tokens' copy may still run.
        logprobs: one for each decode step, or none.
        prompts, pooled: of the prompts that are scored or pooled.
        failures: see ``StepResult``.
    """

    rows: np.ndarray
    tokens: np.ndarray
    columns: np.ndarray | None
    logprobs: tuple[Readback[RowLogprobs], ...]
    prompts: Readback[ScoredPrompt]
    pooled: Readback[PooledPrompt]
    failures: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, step: StepRows, samples: Samples, download: Download) -> StepReadback:
        """Begin the copies of a step whose kernels may still run."""
        return cls(
            rows=step.sampling,
            tokens=download(samples.tokens),
            columns=samples.columns,
            logprobs=tuple(Readback(logprobs, download) for logprobs in samples.logprobs),
            prompts=Readback(samples.prompts, download),
            pooled=Readback(samples.pooled, download),
            failures=tuple(
                (after * len(step.rows) + int(step.sampling[row]), reason)
                for after, row, reason in samples.failures
            ),
        )

    def sampled(self) -> np.ndarray:
        """int64 [decode_steps, samples], once the copies are done."""
        return self.tokens if self.columns is None else self.tokens[:, self.columns]

    def row_logprobs(self, num_rows: int) -> Iterator[RowLogprobs]:
        """Each with its index into ``StepResult.tokens``, once the copies are done."""
        for after, part in enumerate(self.logprobs):
            for entry in part.read():
                row = after * num_rows + int(self.rows[entry.row])
                yield msgspec.structs.replace(entry, row=row)
