"""CUDA's driver without torch: which GPU there is, before anything large is imported."""

from __future__ import annotations

import ctypes

from asyncllm.kernels.gpu import Gpu

# CUdevice_attribute, cuda.h
_MULTIPROCESSORS = 16
_CAPABILITY_MAJOR = 75
_CAPABILITY_MINOR = 76

_MAX_NAME = 256


def is_installed() -> bool:
    """Whether CUDA's driver is here, which takes much less time than to initialise it."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def load_driver() -> ctypes.CDLL | None:
    """CUDA's driver, initialised; None if there is none, or no GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        return cuda if cuda.cuInit(0) == 0 else None
    except (OSError, AttributeError):
        return None


def count_gpus() -> int:
    """How many GPUs torch will see."""
    cuda, count = load_driver(), ctypes.c_int()
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def find_gpu(index: int) -> Gpu | None:
    """The GPU of that index, as torch counts them; None if there is none. Makes no context."""
    cuda = load_driver()
    device = ctypes.c_int()
    if cuda is None or cuda.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    name = ctypes.create_string_buffer(_MAX_NAME)
    if cuda.cuDeviceGetName(name, _MAX_NAME, device) != 0:
        return None
    numbers = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSORS):
        number = ctypes.c_int()
        if cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device) != 0:
            return None
        numbers.append(number.value)
    major, minor, multiprocessors = numbers
    return Gpu((major, minor), name.value.decode(), multiprocessors)
