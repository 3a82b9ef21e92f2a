"""Copies of pages and states between the device and the host tier, concurrent with the steps.

Copies are not ordered with the steps' kernels. They need not be, because the scheduler promises
(``StepPlan.copies``) that

* the source of a copy is complete. Before a plan names a page as a source, the results of the steps
  that wrote the device page are in, or the copy that filled the host page has been reported. So
  this thread has seen the event behind that work completed, and work launched afterwards sees its
  effects on any stream. A failed step counts too: ``Device.check`` waits for what it launched.
* nobody uses the target of a copy until the copy is reported: no step in flight and no other copy.
  Steps that use the page are launched after this thread has seen the copy's own event.

The same goes for recurrent states, with one exception: the slot that a state is loaded into may
still be read by earlier steps and by the plan's own ``state_copies``, so the copy waits for these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.device import Device, DeviceLost, Event, Span
from asyncllm.executor.memory.kv_pool import HostPool, KVPool
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.wire.messages import STATE_TO_DEVICE, STATE_TO_HOST, TO_DEVICE, TO_HOST

#: Device memory in which pages are gathered, for each direction; larger batches move in pieces.
STAGING_BYTES = 64 << 20


class PageCopier:
    """Runs the copies of plans, and reports completed ones.

    The pool is layer-first, which suits attention; the host tier is page-first, which suits the
    bus. So a store gathers its pages in a staging buffer on the device, from where one transfer
    moves each run of consecutive host pages; a load does the reverse. Stores and loads have a
    stream and a buffer each: the bus carries both ways at once, and stream order protects a buffer.

    States are contiguous already, and move without a buffer.

    Args:
        states: of the models that have any.
        staging_bytes: of each buffer, which holds at least one page.

    Raises:
        DeviceLost: from any method, when copies cannot be launched or have failed. They will never
            be reported, so it must end the worker.
    """

    def __init__(
        self,
        pool: KVPool,
        host: HostPool,
        device: Device,
        staging_bytes: int = STAGING_BYTES,
        states: StatePool | None = None,
    ) -> None:
        self._num_pages = pool.num_pages, host.num_pages
        self._device = device
        self._states = states
        self._host = host.storage.view(torch.uint8)
        self._under_way: dict[int, list[Span]] = {}
        piece = min(max(staging_bytes // pool.page_bytes, 1), host.num_pages)
        self._stores = _Lane(pool, host, device, piece, _store)
        self._loads = _Lane(pool, host, device, piece, _load)
        # Earlier kernels may still use the buffers' memory, and the lanes do not wait for them.
        device.event().synchronize()

    def warm_up(self) -> None:
        """Copy page 0 out and back, which loads the kernels. Must come before the first step."""
        if self._num_pages[1] > 0:
            for lane in (self._stores, self._loads):
                lane.queue(np.zeros((1, 2), dtype=np.int32)).end.synchronize()

    def launch(self, step: int, copies: np.ndarray) -> None:
        """Queue the copies of plan ``step``: int32 [k, 3], see ``StepPlan.copies``.

        Does not wait, unless the device is the CPU itself.
        """
        if len(copies) == 0:
            return
        with _or_lost(f"launching the page copies of step {step}"):
            spans = self._under_way[step] = []
            for direction, lane in ((TO_HOST, self._stores), (TO_DEVICE, self._loads)):
                pages = copies[copies[:, 0] == direction, 1:]
                if (pages < 0).any() or (pages >= self._num_pages).any():
                    raise ValueError(f"not all of these pages exist: {pages.tolist()}")
                if len(pages):
                    spans.append(lane.queue(pages))
            of_states = copies[copies[:, 0] == STATE_TO_HOST, 1:]
            if len(of_states):
                spans.append(self._stores.run(partial(self._move_states, of_states, store=True)))
            of_states = copies[copies[:, 0] == STATE_TO_DEVICE, 1:]
            if len(of_states):
                load = partial(self._move_states, of_states, store=False)
                spans.append(self._loads.run(load, after=self._device.event()))

    def _move_states(self, copies: np.ndarray, *, store: bool) -> None:
        """Copy states: int32 [k, 2] of (state slot, host page); called by a stream.

        The bytes of a slot fill its host pages, in their order.
        """
        assert self._states is not None, "the model has states"
        page_bytes = self._host.shape[1]
        for slot in dict.fromkeys(copies[:, 0].tolist()):
            pages, start = copies[copies[:, 0] == slot, 1], 0
            parts = self._states.bytes_of(slot)
            if len(pages) * page_bytes < sum(map(len, parts)):
                raise ValueError(f"{len(pages)} host pages are too few for a state")
            for part in parts:
                stop = start + len(part)
                for first, behind, page in _runs(pages):
                    host = self._host[page : page + behind - first].view(-1)
                    low, high = max(start, first * page_bytes), min(stop, behind * page_bytes)
                    if low < high:
                        here = host[low - first * page_bytes : high - first * page_bytes]
                        there = part[low - start : high - start]
                        source, target = (there, here) if store else (here, there)
                        target.copy_(source, non_blocking=True)
                start = stop

    def completed(self, step: int) -> tuple[tuple[int, float], ...]:
        """Plans up to ``step`` whose copies are all done, each reported once. Never waits.

        Returns:
            (the plan's step, the sum of the seconds that its stores and its loads ran).
        """
        with _or_lost("polling page copies"):
            done = [
                number
                for number, spans in self._under_way.items()
                if number <= step and all(span.end.query() for span in spans)
            ]
            return tuple(
                (number, sum(span.seconds() for span in self._under_way.pop(number)))
                for number in done
            )

    def ends(self) -> list[Event]:
        """The ends of all copies that are not reported yet."""
        return [span.end for spans in self._under_way.values() for span in spans]


#: Moves one piece: (pool [units of all pages, words], indices of units [n], buffer [n, words],
#: runs). Each run is a stretch of the buffer and one of the host tier, both contiguous.
Move = Callable[[Tensor, Tensor, Tensor, list[tuple[Tensor, Tensor]]], None]


class _Lane:
    """One direction: a stream, and the buffer of ``piece`` pages that its copies share.

    A page has two parts in each layer, K and V. Parts of all sizes are whole numbers of one unit,
    and the pool is a table of units, those of a part side by side. Units are moved as the widest
    integers that they are a whole number of.
    """

    def __init__(
        self, pool: KVPool, host: HostPool, device: Device, piece: int, move: Move
    ) -> None:
        unit = math.gcd(*pool.parts)
        words = (torch.int64, torch.int32, torch.int16, torch.uint8)
        unit_bytes = unit * pool.storage.itemsize
        word = next(dtype for dtype in words if unit_bytes % dtype.itemsize == 0)
        self._pool = pool.storage.view(-1, unit).view(word)
        units = sum(pool.parts) // unit
        self._host = host.storage.view(host.num_pages, units, unit).view(word)
        on_device = device.torch_device
        self._buffer = torch.empty(piece, *self._host.shape[1:], dtype=word, device=on_device)
        # The unit of page p in each place of a page is first + p * step.
        counts = np.array(pool.parts) // unit
        before = counts.cumsum() - counts
        places = np.arange(counts.sum()) + (before * (pool.num_pages - 1)).repeat(counts)
        self._first = torch.from_numpy(places).to(on_device)
        self._step = torch.from_numpy(counts.repeat(counts)).to(on_device)
        self._device = device
        self._stream = device.copy_stream()
        self._move = move

    def run(self, work: Callable[[], None], after: Event | None = None) -> Span:
        """Queue something else; see ``CopyStream.run``."""
        return self._stream.run(work, after)

    def queue(self, pages: np.ndarray) -> Span:
        """Copy pages: int32 [k, 2] of (device page, host page)."""
        # In the order of host pages, which makes their runs as long as possible.
        return self._stream.run(partial(self._run, pages[pages[:, 1].argsort()].astype(np.int64)))

    def _run(self, pages: np.ndarray) -> None:
        """Called by the stream, which therefore owns all memory that is allocated here."""
        device_pages, host_pages = np.ascontiguousarray(pages.T)
        units = self._device.upload(device_pages)[:, None] * self._step + self._first
        size = len(self._buffer)
        for begin in range(0, len(pages), size):
            end = min(begin + size, len(pages))
            buffer = self._buffer[: end - begin]
            self._move(
                self._pool,
                units[begin:end].view(-1),
                buffer.view(-1, buffer.shape[-1]),
                [
                    (buffer[a:b], self._host[first : first + b - a])
                    for a, b, first in _runs(host_pages[begin:end])
                ],
            )


def _store(pool: Tensor, units: Tensor, buffer: Tensor, runs: list[tuple[Tensor, Tensor]]) -> None:
    torch.index_select(pool, 0, units, out=buffer)
    for staged, host in runs:
        host.copy_(staged, non_blocking=True)


def _load(pool: Tensor, units: Tensor, buffer: Tensor, runs: list[tuple[Tensor, Tensor]]) -> None:
    for staged, host in runs:
        staged.copy_(host, non_blocking=True)
    pool.index_copy_(0, units, buffer)


def _runs(pages: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive numbers: (begin, end, the number at begin)."""
    cuts = [0, *(np.flatnonzero(np.diff(pages) != 1) + 1).tolist(), len(pages)]
    for begin, end in pairwise(cuts):
        yield begin, end, int(pages[begin])


@contextmanager
def _or_lost(doing: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise DeviceLost(f"{doing}: {error!r}") from error
