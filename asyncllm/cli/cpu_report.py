"""What ``asyncllm doctor`` says on a machine without a GPU: what this machine can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from asyncllm.lab.planning.cpu import (
    DTYPES,
    SIZES,
    CpuPlan,
    largest,
    plan_model,
    plan_size,
    this_machine,
)
from asyncllm.lab.planning.gpus import GPUS
from asyncllm.system.terminal import table, wrapped

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig
    from asyncllm.lab.planning.cpu import CpuMachine
    from asyncllm.models.spec import ModelSpec

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
    return [
        ["weights, GiB", *(f"{plan.weights / 2**30:,.2f}" for plan in plans)],
        ["KV cache, tokens", *(f"{plan.kv_tokens:,}" for plan in plans)],
        ["KiB of a token", *(f"{plan.kv_bytes_per_token / 2**10:,.1f}" for plan in plans)],
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
