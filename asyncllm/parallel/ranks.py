"""The ranks of a tensor-parallel model: one process or thread each, with a share of every layer.

All ranks run the same steps, and so call the same collectives in the same order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol

from torch import Tensor

from asyncllm.errors import ModelError

#: Seconds that ranks wait for one that loads weights from a slow disk.
LOADING: Final = 3600.0


class Ranks(Protocol):
    """One rank, and what it does together with the others.

    Attributes:
        rank: 0 .. size-1.
        size: the number of ranks.
        calls: how many collectives of tensors this rank has begun.

    Raises:
        RanksBroken: from any collective, when another rank is lost. The ranks cannot go on.
    """

    rank: int
    size: int
    calls: int

    def sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Add up x over all ranks; every rank gets the same bits. May overwrite x.

        Args:
            x: contiguous.
            residual: of the same shape; the sum is added to it in place, and it is returned.
        """

    def gather(self, x: Tensor) -> Tensor:
        """Put [n, k] of all ranks side by side: [n, size * k]."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrite x on all ranks with that of rank 0."""

    def least(self, value: int, seconds: float = LOADING) -> int:
        """The least value of all ranks, after as many collectives; waits for them.

        Raises:
            RanksBroken: they take longer, or have begun more or fewer collectives.
        """

    def recording(self) -> AbstractContextManager[None]:
        """Meanwhile, collectives are not counted: they are recorded, and run later."""

    def agree(self, step: int) -> None:
        """Make sure that all ranks have failed the same step after as many collectives.

        Raises:
            RanksDisagree: they have not. This one waits for the others for a few seconds.
        """


class RanksBroken(Exception):
    """Another rank is lost, or does not do the same."""


class RanksDisagree(RanksBroken):
    """This rank has failed a step that others have not failed."""


class Alone:
    """The only rank."""

    rank = 0
    size = 1
    calls = 0

    def sum(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return x if residual is None else residual.add_(x)

    def gather(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor) -> None:
        pass

    def least(self, value: int, seconds: float = LOADING) -> int:
        return value

    def recording(self) -> AbstractContextManager[None]:
        return nullcontext()

    def agree(self, step: int) -> None:
        pass


class Apart(Alone):
    """One of several ranks, which does nothing together with the others.

    For models without values, and for parts of a layer whose sums are added up later.
    """

    def __init__(self, rank: int, size: int):
        self.rank = rank
        self.size = size

    def gather(self, x: Tensor) -> Tensor:
        return x.repeat(1, self.size)


def share(count: int, what: str, ranks: Ranks) -> slice:
    """This rank's part of ``count`` things; all ranks have as many.

    Args:
        what: their name in config.json, for the error.

    Raises:
        ModelError: they cannot be divided evenly.
    """
    if count % ranks.size:
        raise ModelError(f"tp {ranks.size} does not divide {what} {count}", param="tp")
    each = count // ranks.size
    return slice(ranks.rank * each, (ranks.rank + 1) * each)
