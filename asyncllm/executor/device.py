"""The device: copies to and from it without stalling, events, and its memory."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.pinned import PinnedRing
from asyncllm.kernels.upload import upload

log = logging.getLogger(__name__)

#: While a graph is captured, waiting for the whole device is an error in every thread, and can end
#: the capture. While one runs on its own stream before it is captured, its kernels must not run
#: beside those of another engine: programs that wait for each other need room for all.
_EXCLUSIVE: Final = Lock()

#: What that error means in kernels whose programs wait for each other: see ``fail_after``.
_WAITED_IN_VAIN = (
    "a kernel waited ten seconds for its own programs, which have to run at once: another process "
    "has multiprocessors of this GPU (is it shared by MPS or green contexts?)"
)


class DeviceLost(Exception):
    """The device can no longer be used, or its memory can no longer be trusted."""


class Event(Protocol):
    """A point in the device's stream of work; ``torch.cuda.Event`` is one."""

    def query(self) -> bool:
        """Whether all work launched before it is done; never waits."""

    def synchronize(self) -> None:
        """Wait until that work is done, with the GIL released."""

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds from this event to ``end``; both must be done."""


@dataclass(frozen=True, slots=True)
class Span:
    """Work between two events of one stream; ``previous`` is the end of the span before it."""

    begin: Event
    end: Event
    previous: Event | None = None

    def seconds(self) -> float:
        """How long the work ran, once ``end`` is done."""
        return self.begin.elapsed_time(self.end) / 1e3

    def idle_seconds(self) -> float | None:
        """How long the stream idled before this work; None if no span came before it."""
        return None if self.previous is None else self.previous.elapsed_time(self.begin) / 1e3


class CopyStream(Protocol):
    """A queue that runs in order, concurrently with the steps and not ordered with them."""

    def run(self, work: Callable[[], None], after: Event | None = None) -> Span:
        """Queue what ``work`` launches, to run after an event; returns without waiting for it."""


class Device(Protocol):
    """A place to run models. Used from the executor thread only."""

    torch_device: torch.device

    def upload(self, array: np.ndarray) -> Tensor:
        """Copy to the device, ordered before kernels launched later."""

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        """Overwrite a contiguous tensor of the same shape and type, likewise ordered."""

    def download(self, tensor: Tensor) -> np.ndarray:
        """Copy to the host after kernels launched before; valid once a later event is done."""

    def event(self) -> Event:
        """An event after everything launched so far, copy streams excepted."""

    def copy_stream(self) -> CopyStream:
        """A new one. Earlier kernels must not be using the memory that its work touches."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] zeros on the host, committed and page-locked, valid until ``release``.

        Raises:
            RuntimeError: the system does not have that much.
        """

    def exclusive(self) -> AbstractContextManager[object]:
        """While this is held, no other engine of the process launches a step or captures a graph.

        Held by whoever does either, or waits for the whole device.
        """

    def check(self) -> None:
        """Wait for everything launched, copies included.

        Raises:
            RuntimeError: the device can no longer be used.
        """

    def free_bytes(self) -> int:
        """Free memory."""

    def empty_cache(self) -> None:
        """Return the allocator's unused memory to the system."""

    def keep_block(self, num_bytes: int) -> None:
        """Have the allocator keep a block of memory, from which it takes what steps need.

        Tensors that grow from step to step do not fit where smaller ones were. Outside of one large
        block, they would leave ever more gaps, until they have filled the device.
        """

    def release(self) -> None:
        """Return cached and host memory to the system, once all tensors are gone."""


def host_zeros(num_bytes: int) -> Tensor:
    """Bytes of the host's memory, committed; in huge pages, which takes a tenth of the time.

    Raises:
        MemoryError: there are not as many.
    """
    if num_bytes < 1 << 21 or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    try:
        memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(str(error)) from None
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


class CpuDevice:
    """Kernels run in the calling thread, so all work is done when its launch returns."""

    def __init__(self, num_threads: int | None = None):
        self.torch_device = torch.device("cpu")
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def upload(self, array: np.ndarray) -> Tensor:
        # Arrays of a plan are read-only, which PyTorch's tensors cannot be.
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        target.copy_(torch.from_numpy(array))

    def download(self, tensor: Tensor) -> np.ndarray:
        return tensor.numpy()

    def event(self) -> Event:
        return _CpuEvent()

    def copy_stream(self) -> CopyStream:
        return _CpuCopyStream()

    def host_memory(self, num_bytes: int) -> Tensor:
        return host_zeros(num_bytes)

    def exclusive(self) -> AbstractContextManager[object]:
        return nullcontext()

    def check(self) -> None:
        pass

    def free_bytes(self) -> int:
        return available_host_bytes()

    def empty_cache(self) -> None:
        pass

    def keep_block(self, num_bytes: int) -> None:
        pass

    def release(self) -> None:
        pass


class _CpuEvent:
    """The time at which it was made."""

    def __init__(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: _CpuEvent) -> float:
        return 1e3 * (end.time - self.time)


class _CpuCopyStream:
    def run(self, work: Callable[[], None], after: Event | None = None) -> Span:
        begin = _CpuEvent()
        work()
        return Span(begin, _CpuEvent())


class CudaDevice:
    """One GPU; copies go through pinned memory on the current stream."""

    def __init__(self, index: int = 0):
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._locked: list[Tensor] = []
        self._ring = PinnedRing()
        self._stream = torch.cuda.current_stream(self.torch_device)

    def upload(self, array: np.ndarray) -> Tensor:
        if torch.cuda.current_stream(self.torch_device) != self._stream:
            # A copy stream may be far behind; a step must not wait for a buffer that it holds.
            return upload(array, self.torch_device)
        return self._ring.upload(array, self.torch_device)

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        self._ring.upload_into(target, array)

    def download(self, tensor: Tensor) -> np.ndarray:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True).numpy()

    def event(self) -> Event:
        return _recorded_event()

    def copy_stream(self) -> CopyStream:
        return _CudaCopyStream(self.torch_device)

    def host_memory(self, num_bytes: int) -> Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Locked in place, because PyTorch rounds its own pinned memory up to a power of two; in
        # whole pages, so that no two locked blocks share one. Zeroing commits the memory with all
        # threads; locking alone would use one.
        block = torch.zeros(num_bytes + 2 * mmap.PAGESIZE, dtype=torch.uint8)
        start = -block.data_ptr() % mmap.PAGESIZE
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        locked = block[start : start + length]
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(locked.data_ptr(), length, 0)
        if status != cudart.cudaError.success:
            with suppress(RuntimeError):
                # CUDA reports the error again at the next kernel: let it be this one.
                torch.zeros(1, device=self.torch_device)
            raise RuntimeError(f"locking host memory: {cudart.cudaGetErrorString(status)}")
        self._locked.append(locked)
        return locked[:num_bytes]

    def exclusive(self) -> AbstractContextManager[object]:
        return _EXCLUSIVE

    def check(self) -> None:
        try:
            with _EXCLUSIVE:
                # Raises for good once the context is lost.
                torch.cuda.synchronize(self.torch_device)
        except RuntimeError as error:
            if "misaligned address" in str(error):
                raise RuntimeError(_WAITED_IN_VAIN) from error
            raise

    def free_bytes(self) -> int:
        free, _total = torch.cuda.mem_get_info(self.torch_device)
        return free

    def empty_cache(self) -> None:
        with _EXCLUSIVE:
            torch.cuda.empty_cache()

    def keep_block(self, num_bytes: int) -> None:
        with suppress(torch.OutOfMemoryError):  # another process has it now, and may give it back
            torch.empty(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def release(self) -> None:
        try:
            self.check()  # copies may be under way
        finally:
            self._unlock()
        self.empty_cache()

    def _unlock(self) -> None:
        cudart = torch.cuda.cudart()
        while self._locked:
            status = cudart.cudaHostUnregister(self._locked.pop().data_ptr())
            if status != cudart.cudaError.success:
                log.warning("unlocking host memory: %s", cudart.cudaGetErrorString(status))


class _CudaCopyStream:
    def __init__(self, device: torch.device):
        # PyTorch's streams and the default stream, on which steps run, do not wait for each other.
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None], after: Event | None = None) -> Span:
        if after is not None:
            assert isinstance(after, torch.cuda.Event)
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            begin = _recorded_event()
            work()
            return Span(begin, _recorded_event())


def _recorded_event() -> Event:
    """An event of the current stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def available_host_bytes() -> int:
    """Memory that the system can hand out without swapping."""
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 2**30  # a guess, where the system does not say
