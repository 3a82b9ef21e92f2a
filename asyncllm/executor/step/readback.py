"""What a step brings to the host, while it is on its way."""

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
    """Messages as one tensor on the device.

    Attributes:
        packed: it.
    """

    packed: Tensor

    def unpack(self, packed: np.ndarray) -> Iterable[T_co]:
        """The messages, from ``packed`` on the host."""


@dataclass(frozen=True, slots=True)
class Copied(Generic[T]):
    """Messages, and where on the host their tensor lands."""

    messages: Packed[T]
    packed: np.ndarray


def copy(messages: Packed[T] | None, download: Download) -> Copied[T] | None:
    """Begin to copy messages, if there are any, to the host."""
    return None if messages is None else Copied(messages, download(messages.packed))


def read(copied: Copied[T] | None) -> tuple[T, ...]:
    """Messages that have landed."""
    return () if copied is None else tuple(copied.messages.unpack(copied.packed))


@dataclass(frozen=True, slots=True)
class Landing:
    """Sampled tokens, and what there is beside them, on their way to the host.

    Attributes:
        rows: int64 [samples]; the rows of the plan they belong to.
        tokens, columns: as in ``Samples``, landing.
        logprobs: of each decode step; None when no row asked.
        prompts: of the prompts that are scored; None without any.
        pooled: of those that are pooled, likewise.
        failures: as in ``StepResult``.
    """

    rows: np.ndarray
    tokens: np.ndarray
    columns: np.ndarray | None
    logprobs: tuple[Copied[RowLogprobs] | None, ...]
    prompts: Copied[ScoredPrompt] | None
    pooled: Copied[PooledPrompt] | None
    failures: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, step: StepRows, samples: Samples, download: Download) -> Landing:
        """What was sampled in a step, whose kernels may still run."""
        failures = tuple(
            (after * len(step.rows) + int(step.sampling[row]), reason)
            for after, row, reason in samples.failures
        )
        return cls(
            rows=step.sampling,
            tokens=download(samples.tokens),
            columns=samples.columns,
            logprobs=tuple(copy(logprobs, download) for logprobs in samples.logprobs),
            prompts=copy(samples.prompts, download),
            pooled=copy(samples.pooled, download),
            failures=failures,
        )

    def sampled(self) -> np.ndarray:
        """int64 [decode_steps, samples], once they have landed."""
        return self.tokens if self.columns is None else self.tokens[:, self.columns]

    def row_logprobs(self, num_rows: int) -> Iterator[RowLogprobs]:
        """By place in ``StepResult.tokens``; they have landed."""
        for after, part in enumerate(self.logprobs):
            for entry in read(part):
                row = after * num_rows + int(self.rows[entry.row])
                yield msgspec.structs.replace(entry, row=row)
