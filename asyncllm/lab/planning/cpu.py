"""What ``asyncllm doctor`` says on a machine without a GPU: what its CPU and memory can do."""

from __future__ import annotations

import os
import time
from typing import Any, Final, Literal

import msgspec
import torch
from torch.nn.functional import linear

from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.executor.build import CPU_CACHE_SHARE
from asyncllm.executor.choose_device import cache_dtype
from asyncllm.executor.device import available_host_bytes
from asyncllm.executor.memory.limits import resolve_limits, wanted_length
from asyncllm.lab.planning.gpus import GPUS
from asyncllm.lab.planning.rank import work_of
from asyncllm.models.loading.loader import make_model
from asyncllm.models.spec import ModelSpec
from asyncllm.system.terminal import table, wrapped

CpuDType = Literal["float32", "bfloat16"]
#: What a CPU computes in; it has no fast kernels for float16.
DTYPES: Final[tuple[CpuDType, ...]] = ("float32", "bfloat16")
#: Billions of parameters of common models.
SIZES: Final = (0.6, 1.7, 4.0, 8.0, 14.0, 32.0, 70.0)
#: For Python, activations and a KV cache, beside the weights.
_BESIDE_WEIGHTS: Final = 2 * 2**30
#: A matrix that no cache holds, as in a large model, and a part of a prompt.
_MATRIX: Final = (8192, 4096)
_PROMPT_ROWS: Final = 256


class CpuSpeed(msgspec.Struct, frozen=True):
    """Measured: bytes of weights a second for one row, and operations a second for many rows."""

    bandwidth: float
    flops: float


class CpuMachine(msgspec.Struct, frozen=True):
    """This machine. Memory is in bytes; ``vectors`` are the instructions that PyTorch uses."""

    cores: int
    threads: int
    vectors: str
    memory: int
    free: int
    speeds: dict[CpuDType, CpuSpeed]


class CpuPlan(msgspec.Struct, frozen=True):
    """A model on this machine, in one type. Of speeds, only matrices are counted.

    Attributes:
        problem: why it cannot be served; None if it can.
        kv_bytes_per_token: 0, as are the next three, where only the number of parameters is known.
        decode_rate: tokens a second of one request.
        prompt_rate: tokens a second of prompts.
    """

    weights: int
    kv_bytes_per_token: int
    state_bytes: int
    kv_tokens: int
    longest: int
    problem: str | None
    decode_rate: float
    prompt_rate: float


def this_machine(config: EngineConfig, seconds: float = 0.5) -> CpuMachine:
    """Describe it, and measure its speed.

    Args:
        seconds: how long each of four measurements takes.
    """
    if config.cpu_threads is not None:
        torch.set_num_threads(config.cpu_threads)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return CpuMachine(
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        vectors=torch.backends.cpu.get_cpu_capability(),
        memory=total,
        free=available_host_bytes(),
        speeds={dtype: _measure(getattr(torch, dtype), seconds) for dtype in DTYPES},
    )


def _measure(dtype: torch.dtype, seconds: float) -> CpuSpeed:
    """Averages, as other programs that run now will slow a model down as well."""
    weight = torch.ones(_MATRIX, dtype=dtype)
    rows = torch.ones((_PROMPT_ROWS, _MATRIX[1]), dtype=dtype)
    return CpuSpeed(
        bandwidth=weight.nbytes / _seconds(rows[:1], weight, seconds),
        flops=2 * _PROMPT_ROWS * weight.numel() / _seconds(rows, weight, seconds),
    )


def _seconds(rows: torch.Tensor, weight: torch.Tensor, budget: float) -> float:
    linear(rows, weight)
    begun, count = time.perf_counter(), 0
    while (taken := time.perf_counter() - begun) < budget or count == 0:
        linear(rows, weight)
        count += 1
    return taken / count


def plan_model(
    config: EngineConfig, spec: ModelSpec, machine: CpuMachine, dtype: CpuDType
) -> CpuPlan:
    """The plan of a model; its weights are counted on PyTorch's meta device.

    Raises:
        ModelError: the model has fewer positions than ``max_model_len``.
    """
    found: torch.dtype = getattr(torch, dtype)
    length = wanted_length(config, spec)
    model = make_model(spec, found, torch.device("meta"), length)
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    kv_itemsize = cache_dtype(config, found, None).itemsize
    work, speed = work_of(model, spec, found.itemsize, kv_itemsize), machine.speeds[dtype]
    kv_tokens = longest = 0
    try:
        limits = resolve_limits(
            config,
            spec,
            device="cpu",
            dtype=dtype,
            cache_bytes=int(machine.free * CPU_CACHE_SHARE),
            host_bytes=machine.free,
            bytes_per_token=work.kv_bytes,
            state_bytes=work.state_bytes,
        )
    except ModelError as error:
        problem: str | None = error.message
    else:
        kv_tokens, longest = limits.num_pages * limits.page_size, limits.max_model_len
        caches = kv_tokens * work.kv_bytes + limits.num_states * work.state_bytes
        problem = _too_large(weights + caches, machine)
    read = work.weight_bytes + work.token_expert_bytes
    return CpuPlan(
        weights=weights,
        kv_bytes_per_token=work.kv_bytes,
        state_bytes=work.state_bytes,
        kv_tokens=kv_tokens,
        longest=longest,
        problem=problem,
        decode_rate=speed.bandwidth / read,
        prompt_rate=speed.flops / work.token_flops,
    )


def plan_size(billions: float, machine: CpuMachine, dtype: CpuDType) -> CpuPlan:
    """The plan of a dense model with so many parameters."""
    found: torch.dtype = getattr(torch, dtype)
    speed, weights = machine.speeds[dtype], int(billions * 1e9 * found.itemsize)
    return CpuPlan(
        weights=weights,
        kv_bytes_per_token=0,
        state_bytes=0,
        kv_tokens=0,
        longest=0,
        problem=_too_large(weights + _BESIDE_WEIGHTS, machine),
        decode_rate=speed.bandwidth / weights,
        prompt_rate=speed.flops / (2e9 * billions),
    )


def largest(machine: CpuMachine, dtype: CpuDType) -> float:
    """The parameters of the largest model that fits."""
    found: torch.dtype = getattr(torch, dtype)
    return max(machine.free - _BESIDE_WEIGHTS, 0) / found.itemsize


def _too_large(num_bytes: int, machine: CpuMachine) -> str | None:
    if num_bytes <= machine.free:
        return None
    return f"it takes {num_bytes / 2**30:,.2f} GiB, and {machine.free / 2**30:,.2f} are free"


_NOTES: Final = (
    "Speeds are estimates, from how fast a large matrix is read for one row (tokens of a request), "
    "and multiplied for many (prompts), while whatever else runs now runs. 'asyncllm bench offline "
    "MODEL' measures a model.",
    "A CPU computes in float32 unless --dtype bfloat16 says otherwise.",
    f"--gpu plans for GPUs: {', '.join(GPUS)}.",
)


def cpu_report(
    config: EngineConfig, model: str, spec: ModelSpec
) -> tuple[str, dict[str, Any], list[str]]:
    """The report as text and for JSON, and why the model does not fit in one type or the other.

    Raises:
        ModelError: the model has fewer positions than ``max_model_len``.
    """
    machine = this_machine(config)
    plans = {dtype: plan_model(config, spec, machine, dtype) for dtype in DTYPES}
    sizes = {str(size): {d: plan_size(size, machine, d) for d in DTYPES} for size in SIZES}
    problems = [f"{dtype}: {plan.problem}" for dtype, plan in plans.items() if plan.problem]
    parts = [
        f"This machine has no GPU, {machine.cores} cores ({machine.vectors}, {machine.threads} "
        f"threads) and {_gib(machine.memory)} GiB of memory, {_gib(machine.free)} of them free.",
        "",
        _speeds(machine),
        "",
        f"{model}:",
        table(["", *DTYPES], _rows(list(plans.values()))),
        "",
        "Dense models by their billions of parameters; tokens/s of one request, and of prompts:",
        _sizes(sizes),
        "",
        *(wrapped(f"* {note}") for note in _NOTES),
    ]
    found = {"model": model, "cpu": {"machine": machine, "plans": plans, "sizes": sizes}}
    return "\n".join(parts), found, problems


def _speeds(machine: CpuMachine) -> str:
    speeds = machine.speeds.values()
    most = (f"{largest(machine, dtype) / 1e9:,.1f}" for dtype in DTYPES)
    rows = [
        ["billions of parameters that fit", *most],
        ["weights read, GB/s", *(f"{speed.bandwidth / 1e9:,.1f}" for speed in speeds)],
        ["arithmetic, GFLOP/s", *(f"{speed.flops / 1e9:,.0f}" for speed in speeds)],
    ]
    return table(["", *DTYPES], rows)


def _rows(plans: list[CpuPlan]) -> list[list[str]]:
    states = [["MiB of a recurrent state", *(f"{p.state_bytes / 2**20:,.1f}" for p in plans)]]
    return [
        ["weights, GiB", *(f"{plan.weights / 2**30:,.2f}" for plan in plans)],
        ["KV cache, tokens", *(f"{plan.kv_tokens:,}" for plan in plans)],
        ["KiB of a token", *(f"{plan.kv_bytes_per_token / 2**10:,.1f}" for plan in plans)],
        *(states if any(plan.state_bytes for plan in plans) else ()),
        ["longest sequence", *(f"{plan.longest:,}" for plan in plans)],
        ["fits", *("no" if plan.problem else "yes" for plan in plans)],
        ["tokens/s of one request", *(_rate(plan, plan.decode_rate) for plan in plans)],
        ["tokens/s of prompts", *(_rate(plan, plan.prompt_rate) for plan in plans)],
    ]


def _sizes(sizes: dict[str, dict[Any, CpuPlan]]) -> str:
    head = ["", *(name for dtype in DTYPES for name in (f"{dtype}, GiB", "tokens/s", "prompts"))]
    rows = []
    for size, plans in sizes.items():
        row = [size]
        for plan in plans.values():
            row += [_gib(plan.weights), _rate(plan, plan.decode_rate)]
            row.append(_rate(plan, plan.prompt_rate))
        rows.append(row)
    return table(head, rows)


def _rate(plan: CpuPlan, rate: float) -> str:
    if plan.problem:
        return "-"
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f}"
