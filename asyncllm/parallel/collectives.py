"""What ranks do with tensors on their devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

#: How long ``close`` waits until a group has ended.
CLOSE_SECONDS: Final = 10.0


class Collectives(Protocol):
    """Each is called by all ranks, in the same order.

    Raises:
        RuntimeError: another rank is lost.
    """

    def sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """See ``Ranks.sum``."""

    def gather(self, x: Tensor) -> Tensor:
        """See ``Ranks.gather``."""

    def broadcast(self, x: Tensor) -> None:
        """See ``Ranks.broadcast``."""

    def abort(self) -> None:
        """End those that wait for other ranks, from any thread; there can be no others."""

    def close(self) -> None:
        """Leave the others, once nothing is under way."""


class GroupCollectives:
    """By one of PyTorch's process groups: gloo on CPUs, NCCL on GPUs.

    Args:
        group: PyTorch's stubs leave out the collectives of backends.
        end: ends what the group does on the device at once, and returns once the group's memory is
            free, which is after all CUDA graphs that it is in. Those of gloo end by themselves when
            the processes of other ranks do.
    """

    def __init__(self, size: int, group: Any, end: Callable[[], None] | None = None):
        self._size = size
        self._group = group
        self._lock = threading.Lock()
        self._ending: threading.Thread | None = None
        if end is not None:
            self._ending = threading.Thread(target=end, name="asyncllm-nccl", daemon=True)

    def sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        options = AllreduceOptions()
        options.asyncOp = False  # on the current stream
        _wait(self._group.allreduce([x], options))
        return x if residual is None else residual.add_(x)

    def gather(self, x: Tensor) -> Tensor:
        rows, columns = x.shape
        parts = x.new_empty(self._size * rows, columns)
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self._group._allgather_base(parts, x.contiguous(), options))
        return parts.view(self._size, rows, columns).transpose(0, 1).reshape(rows, -1)

    def broadcast(self, x: Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = 0
        options.asyncOp = False
        _wait(self._group.broadcast([x], options))

    def abort(self) -> None:
        with self._lock:
            if self._ending is not None and self._ending.ident is None:
                self._ending.start()

    def close(self) -> None:
        self.abort()
        if self._ending is not None:
            # An interpreter that exits meanwhile would abort: threads end there amid C++.
            self._ending.join(CLOSE_SECONDS)
        self._group = None


class OrderedSums:
    """The collectives of others, but sums in the order of the ranks, whatever the size.

    They have the bits of ``kernels.triton.collectives.all_reduce``: float32, the residual last.
    """

    def __init__(self, size: int, others: Collectives):
        self._size = size
        self._others = others
        self.gather, self.broadcast = others.gather, others.broadcast
        self.abort, self.close = others.abort, others.close

    def sum(self, x: Tensor, residual: Tensor | None) -> Tensor:
        parts = self.gather(x).view(*x.shape[:-1], self._size, -1)
        total = parts.select(-2, 0).float()
        for rank in range(1, self._size):
            total += parts.select(-2, rank)
        if residual is not None:
            total += residual
        return (x if residual is None else residual).copy_(total)


def _wait(work: Any) -> None:
    """NCCL gives nothing to wait for where it runs on the current stream."""
    if work is not None:
        work.wait()
