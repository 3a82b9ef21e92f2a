"""Where tensors live, and how they get there and back without stalling the device."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from asyncllm.upload import upload


class Mark(Protocol):
    """A point in the device's stream of work."""

    def done(self) -> bool:
        """Whether everything launched before has run; never waits."""

    def wait(self) -> None:
        """Return once it has; waits with the GIL released."""


class Device(Protocol):
    """A place to run models. Used from the executor thread only."""

    torch_device: torch.device

    def upload(self, array: np.ndarray) -> Tensor:
        """Copy to the device, ordered before kernels launched later."""

    def download(self, tensor: Tensor) -> np.ndarray:
        """Copy to the host, ordered after kernels launched before; to be read after a mark."""

    def mark(self) -> Mark:
        """The end of all that was launched so far."""

    def check(self) -> None:
        """Raise if the device can no longer be used, after a step has failed."""

    def free_bytes(self) -> int:
        """Memory that weights and KV cache may still take."""

    def release(self) -> None:
        """Give cached memory back to the system, once all tensors are gone."""


class CpuDevice:
    """Kernels run in the calling thread, so every copy is done at once."""

    def __init__(self, num_threads: int | None = None):
        self.torch_device = torch.device("cpu")
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self.torch_device)

    def download(self, tensor: Tensor) -> np.ndarray:
        return tensor.numpy()

    def mark(self) -> Mark:
        return _Passed()

    def check(self) -> None:
        pass

    def free_bytes(self) -> int:
        return available_host_bytes()

    def release(self) -> None:
        pass


class _Passed:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class CudaDevice:
    """One GPU; copies go through pinned memory on the current stream."""

    def __init__(self, index: int = 0):
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)

    def upload(self, array: np.ndarray) -> Tensor:
        return upload(array, self.torch_device)

    def download(self, tensor: Tensor) -> np.ndarray:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True).numpy()

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record()
        return _CudaMark(event)

    def check(self) -> None:
        torch.cuda.synchronize(self.torch_device)  # raises for good once the context is lost

    def free_bytes(self) -> int:
        free, _total = torch.cuda.mem_get_info(self.torch_device)
        return free

    def release(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()


class _CudaMark:
    def __init__(self, event: torch.cuda.Event):
        self._event = event

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()


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
