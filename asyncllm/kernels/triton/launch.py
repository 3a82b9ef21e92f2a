"""Launching a compiled kernel with little Python.

``kernel[grid](...)`` of a small kernel takes 9.4 µs on the host of an H200, most of it to find the
compiled variant; a ``Launcher`` takes 4.5 µs, 3 of them in the driver.
"""

from __future__ import annotations

import dis
import sys
import threading
from collections.abc import Hashable
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from asyncllm.kernels.gpu import gpu_of

#: Whether kernels are compiled. Otherwise Triton interprets them, which lacks inline assembly and
#: products of bfloat16.
NATIVE = tl.constexpr(not knobs.runtime.interpret)


class Launcher:
    """Launches one kernel and caches its compiled variants.

    Args:
        kernel: a ``triton.jit`` or ``gluon.jit`` function: its arguments, then its
            ``tl.constexpr`` ones, of which the last is PDL: whether the launch is programmatic,
            which it is wherever the GPU allows it.
        max_registers: of a thread, if the kernel divides its warps among tasks.
        fuses: allow fused multiply-add. A sum of products over the lanes of a warp then differs
            between lanes, as each rounds all products but its own: a kernel that branches on such
            a sum would never end.
    """

    def __init__(self, kernel: Any, max_registers: int | None = None, fuses: bool = True):
        self._kernel = kernel
        self._options: dict[str, Any] = {"enable_fp_fusion": fuses}
        if max_registers is not None:
            self._options["maxnreg"] = max_registers
        self._variants: dict[Hashable, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int, int],
        args: tuple[Tensor | TensorDescriptor | int | float | None, ...],
        constants: tuple[Hashable, ...],
        num_warps: int,
        num_stages: int = 3,
    ) -> None:
        """Launch on the current stream, or run in the interpreter if the first argument, a tensor,
        is on the CPU. No hook of ``triton.knobs.runtime`` sees the launch."""
        device = args[0].get_device()  # type: ignore[union-attr]
        if device < 0:
            self._kernel[grid](*args, *constants, False)
            return
        # What Triton compiles for: constants, and types, alignment and being 1 of arguments.
        key: list[Any] = [device, num_warps, num_stages, constants]
        values: list[TensorDescriptor | int | float | None] = []
        for arg in args:
            if isinstance(arg, Tensor):
                pointer = arg.data_ptr()
                key += (arg.dtype, pointer % 16 == 0)
                values.append(pointer)
            elif isinstance(arg, int):
                key += (arg == 1, arg % 16 == 0, arg.bit_length() > 31)
                values.append(arg)
            elif isinstance(arg, TensorDescriptor):
                key += (arg.base.dtype, *arg.block_shape, arg.layout)
                values.append(arg)
            else:
                key.append(type(arg))
                values.append(arg)
        found = self._variants.get(tuple(key))
        if found is None:
            hash_callees(self._kernel)
            pdl = gpu_of(device).has_pdl
            options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": pdl}
            compiled = self._kernel[grid](*args, *constants, pdl, **options, **self._options)
            if compiled is not None:  # None where launches are only recorded
                found = (compiled.run, compiled.function, compiled.packed_metadata, pdl)
                self._variants[tuple(key)] = found
            return
        run, function, metadata, pdl = found
        stream = driver.active.get_current_stream(device)
        run(*grid, stream, function, metadata, None, None, None, *values, *constants, pdl)


def shared_bytes(x: Tensor) -> int:
    """Shared memory that a program may have where x is; no bound in the interpreter."""
    return gpu_of(x.device).shared_bytes if x.is_cuda else sys.maxsize


def hash_callees(function: Any) -> None:
    """Have Triton hash a function, after the functions that it calls.

    A function's hash is part of the key of a compiled kernel, and contains the constants of those
    callees that were hashed before. In any other order, the key would depend on what this process
    has launched before, and what another one has compiled would not be found.
    """
    if function.hash is not None:
        return
    for step in dis.get_instructions(function.fn):
        callee = function.fn.__globals__.get(step.argval) if step.opname == "LOAD_GLOBAL" else None
        if hasattr(type(callee), "cache_key") and callee is not function:
            hash_callees(callee)
    _ = function.cache_key


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. ``triton.cdiv``, which also works in kernels, takes 3 µs."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two >= n, for n >= 1; for the host, as ``cdiv``."""
    return 1 << (n - 1).bit_length()


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
