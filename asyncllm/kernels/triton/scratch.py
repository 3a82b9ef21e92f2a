"""Device memory that a kernel's launches share."""

from __future__ import annotations

import threading

import torch
from torch import Tensor


class Scratch(threading.local):
    """Memory of one kernel, by thread and device; kept until the thread ends.

    Launches of one thread follow each other on a stream. Those of another engine may come between
    them. A kernel that overlaps the previous one (see ``decode_attention``) must not share memory
    with it, whichever that is; memory allocated for its launch could be what the previous kernel of
    another thread still uses.
    """

    def __init__(self) -> None:
        # Smaller ones stay, because CUDA graphs may use them.
        self._floats: dict[torch.device, list[Tensor]] = {}
        self._counters: dict[torch.device, Tensor] = {}

    def floats(self, count: int, device: torch.device) -> Tensor:
        """float32, at least ``count`` of them, of any values."""
        kept = self._floats.setdefault(device, [])
        if not kept or len(kept[-1]) < count:
            size = max(count, 2 * len(kept[-1]) if kept else 0)
            kept.append(_lasting_zeros(size, torch.float32, device))
        return kept[-1]

    def counters(self, count: int, device: torch.device) -> Tensor:
        """int32 [count] zeros; launches must leave them so. ``count`` is the same in all calls."""
        if device not in self._counters:
            self._counters[device] = _lasting_zeros(count, torch.int32, device)
        return self._counters[device]


def _lasting_zeros(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that may be made while a CUDA graph is captured.

    They are made on the default stream, which is never captured, and on which steps run. Otherwise
    the capture would record the initialisation instead of running it. Launches on another stream
    have to wait for it, and for whatever on the default stream still uses that memory.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=dtype, device=device)
    default = torch.cuda.default_stream(device)
    with torch.cuda.stream(default):
        zeros = torch.zeros(count, dtype=dtype, device=device)
    current = torch.cuda.current_stream(device)
    if current != default and not torch.cuda.is_current_stream_capturing():
        current.wait_stream(default)
    return zeros
