"""Programs of one launch that wait for each other.

All of them must run at once, or none can end. The hardware promises that only of cooperative
launches, which cannot start before the previous kernel has ended, as our kernels do. Where the GPU
runs one process at a time, it is enough that there are no more programs than multiprocessors: the
programs of earlier kernels end by themselves. Under MPS, the programs of other processes may wait
too, and two launches that each have a part of the multiprocessors would wait for ever.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from asyncllm.kernels.gpu import gpu_of

#: Polls before a program gives up: some ten seconds, at 0.6 to 1 us each.
MAX_POLLS = gl.constexpr(1 << 24)

_MPS_ENABLED = 133  # CU_DEVICE_ATTRIBUTE_MPS_ENABLED


@gluon.jit
def fail_after(polls, counter):
    """End the launch with the error "misaligned address", which no other kernel of ours causes, if
    there were too many polls. A trap instead would cost the callers their registers.

    Args:
        counter: any address of an int32.
    """
    odd = (counter.to(gl.int64, bitcast=True) + 1).to(gl.pointer_type(gl.int32), bitcast=True)
    gl.store(odd, 0, mask=polls >= MAX_POLLS)


def max_waiting_programs(device: torch.device) -> int:
    """The most programs of a launch that may wait for each other, if each fills a multiprocessor:
    the number of multiprocessors, or 1 if processes share them under MPS."""
    return 1 if _is_shared(device) else gpu_of(device).multiprocessors


@cache
def _is_shared(device: torch.device) -> bool:
    """Whether kernels of other processes may run at the same time as ours."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:  # kernels are compiled for a GPU that is not here
        return False
    value = ctypes.c_int(0)
    # A driver that does not know the attribute leaves the value as it is.
    cuda.cuDeviceGetAttribute(ctypes.byref(value), _MPS_ENABLED, device.index or 0)
    return value.value != 0
