"""``asyncllm doctor``: what fits on which GPUs, and how fast it will be, before one is rented."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from asyncllm.cli.options import add_model, add_options, config_from_args, usage_error
from asyncllm.cli.parser import list_of, positive
from asyncllm.config import EngineConfig
from asyncllm.config.option_names import name_options
from asyncllm.errors import BadRequest, ModelError

if TYPE_CHECKING:
    from asyncllm.lab.planning.load import LoadPlan
    from asyncllm.lab.planning.plan import Plan
    from asyncllm.lab.planning.predict import Prediction
    from asyncllm.models.spec import ModelSpec

#: The options of serving that change what fits or how fast it is.
OPTIONS: Final = (
    *("revision", "download_dir", "hf_overrides", "quantization", "dtype", "max_model_len"),
    *("mamba_ssm_cache_dtype", "kv_cache_tokens", "kv_cache_dtype"),
    *("gpu_memory_utilization", "page_size", "max_num_seqs", "max_num_batched_tokens"),
    *("prefill_chunk", "itl_target_ms"),
    *("prefix_caching", "policy", "cuda_graphs", "max_decode_steps"),
)
_MEMORY: Final = (
    "Memory: weights are exact, from the model's own layers. A step is the sum of its tensors and "
    "16 % for the allocator's gaps, graphs are a rule from measurements. With Qwen3-8B on an H200 "
    "it is 1.03 GiB for 1.02, and the KV cache 790,480 tokens for 790,608."
)
_LOAD_HEAD: Final = (
    *("", "TTFT p50", "p99", "ITL p50", "p99", "per token", "tokens/s", "requests/s"),
    *("cached %", "preempted"),
)
_GROWING: Final = "Requests come faster than they are served: waiting has no end."


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Predict whether a model fits on given GPUs, how large its KV cache will be, and how fast "
        "it answers. It needs no GPU and no weights, only the model's config.json. The real "
        "scheduler serves the load on a simulated device. Without --gpu, on a machine without a "
        "GPU, it says what fits on the CPU and about how fast that is."
    )
    parser.epilog = """\
examples:
  asyncllm doctor                                          what this machine can do
  asyncllm doctor Qwen/Qwen3-32B --gpu h200,h100 --tp 1,2,4
  asyncllm doctor Qwen/Qwen3-8B --gpu h200 --load rate=10,input=2000,output=200
  asyncllm doctor Qwen/Qwen3-8B --quality --quantization fp8
  asyncllm doctor Qwen/Qwen3-8B --quality --kv-cache-dtype fp8"""
    add_model(parser)
    parser.add_argument(
        "--gpu",
        type=list_of(str),
        metavar="LIST",
        help="kinds of GPUs, such as h200, h100, a100-80, l40s, rtx4090; by default the GPU of "
        "this machine, or its CPU if it has no GPU",
    )
    parser.add_argument(
        "--tp",
        dest="tps",  # EngineConfig.tp is a single one
        type=list_of(positive(int)),
        default=[1],
        metavar="LIST",
        help="number of GPUs that share the model, as in serve --tp; several numbers are planned "
        "one by one (default: 1)",
    )
    parser.add_argument(
        "--dp",
        dest="replicas",
        type=positive(int),
        default=1,
        metavar="INT",
        help="number of replicas, each on that many GPUs (default: 1)",
    )
    parser.add_argument(
        "--load",
        type=_load,
        action="append",
        default=[],
        help="the load whose times are predicted: rate=10,input=2000,output=200 (requests per "
        "second, tokens of each prompt and answer) or "
        "concurrency=64,input=100-1024,output=200 (clients at once). With prefix=500 all "
        "prompts begin with the same 500 tokens; requests=300 is how many are simulated. A "
        "load may also be a case of bench serve, such as c32, or a trace of serve --trace. "
        "May be repeated",
    )
    parser.add_argument(
        "--lengths",
        type=list_of(positive(int)),
        metavar="LIST",
        help="lengths in tokens; for each, print how many sequences fit at once (default: "
        "1024,4096,16384)",
    )
    parser.add_argument(
        "--quality",
        action="store_true",
        help="plan nothing, but run the quantised model (or that with states in bfloat16) and that "
        "in 16 bits on this machine, one after the other, and print how far their logprobs are "
        "apart; with --kv-cache-dtype fp8 compare both kinds of KV cache, over up to 30,000 tokens",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="with --quality: a .txt (a prompt per line), .csv or .jsonl file as for asyncllm "
        "generate (default: a few short texts)",
    )
    parser.add_argument(
        "--reference",
        metavar="MODEL",
        help="with --quality, for a checkpoint that is quantised: folder or hub id of the same "
        "model in 16 bits",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    add_options(parser, EngineConfig, OPTIONS, "as the model will be served")
    parser.set_defaults(run=run, parser=parser)


def run(args: argparse.Namespace) -> int:
    config = config_from_args(args, EngineConfig)
    if args.gpu is not None:
        _gpus(args)  # an unknown one is said first
    folder, spec = _model(config)  # what is wrong with it is said before torch is imported
    if args.quality:
        from asyncllm.cli.quality import report_quality

        return report_quality(args, config, spec, lambda other: _model(other)[1])
    if args.prompts is not None or args.reference is not None:
        usage_error(args, "--prompts and --reference are for --quality")

    import msgspec

    from asyncllm.kernels.cuda_driver import count_gpus
    from asyncllm.llm.load import name_of

    model = name_of(config.model)
    if args.gpu is None and count_gpus() == 0:
        return _report_cpu(args, config, model, spec)

    from asyncllm.lab.planning.plan import LENGTHS, Placement, make_plan

    plans: dict[str, Plan] = {}
    errors: dict[str, ModelError] = {}
    for where in [Placement(gpu, tp, args.replicas) for gpu in _gpus(args) for tp in args.tps]:
        try:
            plans[str(where)] = make_plan(
                config, folder, spec, where, args.load, args.lengths or LENGTHS
            )
        except ModelError as error:
            errors[str(where)] = error
    if not plans and len(errors) == 1:
        raise next(iter(errors.values()))
    if args.json:
        messages = {name: error.message for name, error in errors.items()}
        found = {"model": model, "plans": list(plans.values()), "errors": messages}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print(_report(model, plans))
    for name, refused in errors.items():
        text = name_options(refused.message, refused.param)
        print(f"asyncllm: {name}: {text}", file=sys.stderr)
    return 0 if plans else 1


def _load(text: str) -> LoadPlan:
    from asyncllm.lab.planning.load import LoadPlan

    try:
        return LoadPlan.parse(text)
    except BadRequest as error:
        raise argparse.ArgumentTypeError(error.message) from None


def _gpus(args: argparse.Namespace) -> list[str]:
    """The names of --gpu, or that of the GPU here; an unknown one is a usage error."""
    from asyncllm.lab.planning.gpus import find_planned, gpu_here

    try:
        names: list[str] = args.gpu or [gpu_here()]
        for name in names:
            find_planned(name)
    except BadRequest as error:
        usage_error(args, f"--gpu: {error.message}")
    return names


def _report_cpu(args: argparse.Namespace, config: EngineConfig, model: str, spec: ModelSpec) -> int:
    if args.load or args.tps != [1] or args.replicas != 1:
        usage_error(
            args, "--load, --tp and --dp plan for GPUs, and there is none: name one by --gpu"
        )

    import msgspec

    from asyncllm.lab.planning.cpu import cpu_report

    text, found, problems = cpu_report(config, model, spec)
    print(msgspec.json.format(msgspec.json.encode(found)).decode() if args.json else text)
    for problem in problems:
        print(f"asyncllm: {model} in {name_options(problem)}", file=sys.stderr)
    return 1 if len(problems) == len(found["cpu"]["plans"]) else 0


def _model(config: EngineConfig) -> tuple[Path, ModelSpec]:
    """The folder of the model and its spec; its weights are not downloaded."""
    from asyncllm.models.loading.hub import resolve_folder
    from asyncllm.models.served_spec import served_spec

    where = config.download_dir
    folder = resolve_folder(config.model, config.revision, where, weights=False)
    return folder, served_spec(folder, config)


# -- the table -------------------------------------------------------------------------------------


def _report(model: str, plans: dict[str, Plan]) -> str:
    """A column for each placement, and what the figures rest on."""
    from asyncllm.system.terminal import table, wrapped

    columns = [_cells(plan) for plan in plans.values()]
    names = dict.fromkeys(name for column in columns for name in column)
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in names]
    parts = [f"{model}, each GPU:", table(["", *plans], rows), ""]
    for number, load in enumerate(next(iter(plans.values())).predictions if plans else []):
        found = {where: plan.predictions[number] for where, plan in plans.items()}
        parts.append(f"{load.load}, {load.requests:,} requests, times in ms:")
        parts.append(table(_LOAD_HEAD, [_load_row(where, one) for where, one in found.items()]))
        parts.append("")
    notes: dict[str, list[str]] = {_MEMORY: list(plans)}
    for where, plan in plans.items():
        growing = [p.load for p in plan.predictions if p.is_growing]
        for note in plan.notes + [f"{load}: {_GROWING}" for load in growing]:
            notes.setdefault(note, []).append(where)
    for note, places in notes.items():
        whose = "" if len(places) == len(plans) else f"{', '.join(places)}: "
        parts.append(wrapped(f"* {whose}{note}"))
    return "\n".join(parts)


def _cells(plan: Plan) -> dict[str, str]:
    """Texts of a plan's figures by their names."""
    memory = plan.memory
    cells = {
        "memory, GiB": _gib(memory.total),
        "to be used": _gib(memory.usable),
        "weights": _gib(memory.weights),
        "largest step": _gib(memory.step),
        "CUDA graphs": _gib(memory.graphs),
        "left for the KV cache": _gib(memory.cache),
        "KV cache, tokens": f"{plan.kv_tokens:,}",
        f"pages of {plan.kv_tokens // plan.pages}": f"{plan.pages:,}",
        "KiB of a token": f"{plan.kv_bytes_per_token / 2**10:,.1f}",
    }
    if plan.states:
        cells["recurrent states"] = f"{plan.states:,}"
        cells["MiB of a state"] = f"{plan.state_bytes / 2**20:,.1f}"
    for length, count in plan.sequences.items():
        if length < plan.longest:
            cells[f"sequences of {length:,} at once"] = f"{count:,}"
    cells["longest sequence"] = f"{plan.longest:,}"
    cells["so many of them at once"] = f"{plan.sequences[plan.longest]:,}"
    cells["times"] = "measured" if plan.is_measured else "estimated"
    cells["a token of one request, ms"] = _ms(plan.decode_seconds)
    if plan.sums_per_step:
        cells["of that, between ranks"] = _ms(plan.rank_seconds)
    for rate in plan.decode_rates:
        text = f"{rate.estimated:,.0f} ({rate.limit:,.0f})"
        cells[f"tokens/s of {rate.rows} at once (limit)"] = text
    return cells


def _load_row(where: str, found: Prediction) -> list[str]:
    times = (found.ttft_p50, found.ttft_p99, found.itl_p50, found.itl_p99, found.tpot_p50)
    return [
        where,
        *map(_ms, times),
        f"{found.tokens_per_second:,.0f}",
        f"{found.requests_per_second:,.1f}",
        f"{100 * found.cached_share:.0f}",
        f"{found.preemptions:,}",
    ]


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.2f}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:,.1f}"
