"""Where tensors live, and how they get there and back without stalling the device."""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.executor.pinned import PinnedRing
from asyncllm.kernels.upload import upload

log = logging.getLogger(__name__)


class DeviceLost(Exception):
    """The device can no longer be used, or what it holds can no longer be trusted."""


class Mark(Protocol):
    """A point in the device's stream of work."""

    def done(self) -> bool:
        """Whether everything launched before has run; never waits."""

    def wait(self) -> None:
        """Return once it has; waits with the GIL released."""


class Span(Mark, Protocol):
    """The end of a piece of work, and how long it took."""

    def seconds(self) -> float:
        """How long it ran, not counting what came before it; only once it is done."""

    def idle_seconds(self) -> float | None:
        """How long nothing ran before it, since the end of what ``Device.begin`` began before it.

        Only once it is done. None when nothing was begun before it, or was not ended.
        """


class Begun(Protocol):
    """The beginning of a piece of work."""

    def end(self) -> Span:
        """It is all launched now."""


class CopyStream(Protocol):
    """A queue of work that runs in order, beside the steps and in no order with them."""

    def run(self, work: Callable[[], None]) -> Span:
        """Queue what ``work`` launches; returns without waiting for it."""


class Device(Protocol):
    """A place to run models. Used from the executor thread only."""

    torch_device: torch.device

    def upload(self, array: np.ndarray) -> Tensor:
        """Copy to the device, ordered before kernels launched later."""

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        """Overwrite a contiguous tensor of the same shape and type, likewise ordered."""

    def download(self, tensor: Tensor) -> np.ndarray:
        """Copy to the host, ordered after kernels launched before; to be read after a mark."""

    def mark(self) -> Mark:
        """The end of all that was launched so far; copy streams are not part of it."""

    def begin(self) -> Begun:
        """What is launched from now on, for as long as it runs on the device."""

    def copy_stream(self) -> CopyStream:
        """A new one. Memory that its work uses must not be in use by earlier kernels."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] of zeros on the host, committed, that copies reach at full speed.

        To be used until ``release``, and no longer.

        Raises:
            RuntimeError: the system does not have it.
        """

    def check(self) -> None:
        """Wait for all that was launched, copies included.

        Raises:
            RuntimeError: the device can no longer be used.
        """

    def free_bytes(self) -> int:
        """Memory that weights and KV cache may still take."""

    def release(self) -> None:
        """Give cached and host memory back to the system, once all tensors are gone."""


class CpuDevice:
    """Kernels run in the calling thread, so every copy is done at once."""

    def __init__(self, num_threads: int | None = None):
        self.torch_device = torch.device("cpu")
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._latest: _Started | None = None

    def upload(self, array: np.ndarray) -> Tensor:
        # PyTorch has no tensors that are read-only, as what a plan holds is.
        return torch.from_numpy(array if array.flags.writeable else array.copy())

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        target.copy_(torch.from_numpy(array))

    def download(self, tensor: Tensor) -> np.ndarray:
        return tensor.numpy()

    def mark(self) -> Mark:
        return _Passed()

    def begin(self) -> Begun:
        self._latest = _Started(self._latest.ended if self._latest else None)
        return self._latest

    def copy_stream(self) -> CopyStream:
        return _CallingThread()

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def check(self) -> None:
        pass

    def free_bytes(self) -> int:
        return available_host_bytes()

    def release(self) -> None:
        pass


class _Passed:
    def __init__(self, seconds: float = 0.0, idle: float | None = None):
        self._seconds = seconds
        self._idle = idle

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def seconds(self) -> float:
        return self._seconds

    def idle_seconds(self) -> float | None:
        return self._idle


class _Started:
    """``before`` and ``ended`` are times: the end of what was begun before this, and its own."""

    def __init__(self, before: float | None = None) -> None:
        self._start = time.perf_counter()
        self._before = before
        self.ended: float | None = None

    def end(self) -> Span:
        self.ended = time.perf_counter()
        idle = None if self._before is None else self._start - self._before
        return _Passed(self.ended - self._start, idle)


class _CallingThread:
    def run(self, work: Callable[[], None]) -> Span:
        started = _Started()
        work()
        return started.end()


class CudaDevice:
    """One GPU; copies go through pinned memory on the current stream."""

    def __init__(self, index: int = 0):
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._locked: list[Tensor] = []
        self._latest: _CudaBegun | None = None
        self._ring = PinnedRing()
        self._stream = torch.cuda.current_stream(self.torch_device)

    def upload(self, array: np.ndarray) -> Tensor:
        if torch.cuda.current_stream(self.torch_device) != self._stream:
            # A copy stream may be far behind, and no step shall wait for a buffer that it holds.
            return upload(array, self.torch_device)
        return self._ring.upload(array, self.torch_device)

    def upload_into(self, target: Tensor, array: np.ndarray) -> None:
        self._ring.upload_into(target, array)

    def download(self, tensor: Tensor) -> np.ndarray:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True).numpy()

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return _CudaMark(event)

    def begin(self) -> Begun:
        self._latest = _CudaBegun(self._latest.ended if self._latest else None)
        return self._latest

    def copy_stream(self) -> CopyStream:
        return _CudaCopyStream(self.torch_device)

    def host_memory(self, num_bytes: int) -> Tensor:
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Locked in place, as PyTorch's own pinned memory is rounded up to a power of two; from the
        # beginning of a page to the end of one, so that no other locked block shares a page with
        # it. Zeros commit the memory with all threads, locking alone would do so with one.
        block = torch.zeros(num_bytes + 2 * mmap.PAGESIZE, dtype=torch.uint8)
        start = -block.data_ptr() % mmap.PAGESIZE
        length = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        locked = block[start : start + length]
        cudart = torch.cuda.cudart()
        status = cudart.cudaHostRegister(locked.data_ptr(), length, 0)
        if status != cudart.cudaError.success:
            with suppress(RuntimeError):
                # CUDA keeps the error for the next kernel to report, so let that be this one.
                torch.zeros(1, device=self.torch_device)
            raise RuntimeError(f"locking host memory: {cudart.cudaGetErrorString(status)}")
        self._locked.append(locked)
        return locked[:num_bytes]

    def check(self) -> None:
        torch.cuda.synchronize(self.torch_device)  # raises for good once the context is lost

    def free_bytes(self) -> int:
        free, _total = torch.cuda.mem_get_info(self.torch_device)
        return free

    def release(self) -> None:
        try:
            torch.cuda.synchronize(self.torch_device)  # copies may be under way
        finally:
            self._unlock()
        torch.cuda.empty_cache()

    def _unlock(self) -> None:
        cudart = torch.cuda.cudart()
        while self._locked:
            status = cudart.cudaHostUnregister(self._locked.pop().data_ptr())
            if status != cudart.cudaError.success:
                log.warning("unlocking host memory: %s", cudart.cudaGetErrorString(status))


class _CudaMark:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


class _CudaCopyStream:
    def __init__(self, device: torch.device):
        # PyTorch's streams do not wait for the default stream, on which steps run, nor it for them.
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], None]) -> Span:
        with torch.cuda.stream(self._stream):
            begun = _CudaBegun()
            work()
            return begun.end()


class _CudaBegun:
    """Events on the current stream, so that what was queued before is not part of it.

    ``before`` and ``ended``: the end of what was begun before this, and its own.
    """

    def __init__(self, before: torch.cuda.Event | None = None) -> None:
        self._start = torch.cuda.Event(enable_timing=True)
        self._start.record()
        self._before = before
        self.ended: torch.cuda.Event | None = None

    def end(self) -> Span:
        self.ended = torch.cuda.Event(enable_timing=True)
        self.ended.record()
        return _CudaSpan(self._before, self._start, self.ended)


class _CudaSpan(_CudaMark):
    def __init__(
        self, before: torch.cuda.Event | None, start: torch.cuda.Event, end: torch.cuda.Event
    ):
        super().__init__(end)
        self._before = before
        self._start = start

    def seconds(self) -> float:
        return _seconds(self._start, self._event)

    def idle_seconds(self) -> float | None:
        return None if self._before is None else _seconds(self._before, self._start)


def _seconds(start: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(start.elapsed_time(end)) / 1e3  # it tells milliseconds


def available_host_bytes() -> int:
    """Memory the system can hand out without swapping."""
    try:
        with open("/proc/meminfo") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 4 * 2**30  # a guess, for systems that do not tell
