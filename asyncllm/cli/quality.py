"""``asyncllm doctor --quality``: what rounding weights, states or the KV cache does to logprobs."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from asyncllm.cli.options import usage_error
from asyncllm.cli.prompts import read_rows
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.llm.load import name_of
from asyncllm.models.spec import ModelSpec


def report_quality(
    args: argparse.Namespace,
    config: EngineConfig,
    spec: ModelSpec,
    read_model: Callable[[EngineConfig], ModelSpec],
) -> int:
    """Run the models that ``config`` asks to compare, and print the differences."""
    if args.gpu is not None or args.load or len(args.tps) > 1 or args.replicas != 1:
        usage_error(
            args, "--quality runs the model here: --gpu, --load, --dp or several --tp do not"
        )
    rounds_states = config.mamba_ssm_cache_dtype == "bfloat16"
    if rounds_states and not spec.state_bytes(0):
        usage_error(args, "--mamba-ssm-cache-dtype: the model has no recurrent states")
    is_stored = spec.quantization is not None and not spec.quantization.while_loading
    # The weights of the checkpoint are those of both models, unless there is a reference.
    rounds_weights = spec.quantization is not None and not (is_stored and args.reference is None)
    if not (rounds_weights or rounds_states or config.has_fp8_cache):
        if is_stored:
            usage_error(args, "the model is quantised: --reference names the same in 16 bits")
        usage_error(
            args,
            "--quality is of a quantised model, of rounded states or of an 8-bit KV cache: this "
            "one needs --quantization fp8, --mamba-ssm-cache-dtype bfloat16 or --kv-cache-dtype "
            "fp8",
        )

    from asyncllm.lab.quality import PROMPTS, measure_cache, measure_quality

    served = msgspec.structs.replace(config, tp=args.tps[0])
    quantized = msgspec.structs.replace(served, kv_cache_dtype="auto")
    if rounds_states:  # after each token, as while an answer is generated
        quantized = msgspec.structs.replace(quantized, prefill_chunk=1)
    exact = "auto" if rounds_states else config.mamba_ssm_cache_dtype
    reference = msgspec.structs.replace(quantized, quantization=None, mamba_ssm_cache_dtype=exact)
    if args.reference is not None:
        reference = msgspec.structs.replace(reference, model=args.reference, revision=None)
        if read_model(reference).quantization is not None:
            raise ModelError(f"{args.reference} is quantised itself")
    given = args.prompts
    prompts = PROMPTS if given is None else [row.prompt for row in read_rows(given)]
    model, report, lines = name_of(config.model), dict[str, Any](), list[str]()
    if rounds_weights or rounds_states:
        found = asyncio.run(measure_quality(reference, quantized, prompts))
        report |= msgspec.to_builtins(found)
        tested = f" in {spec.weight_format}" if rounds_weights else ""
        tested += " with states in bfloat16" if rounds_states else ""
        other = "in 16 bits or more" if rounds_weights else "with states in float32"
        lines += [
            f"{model}{tested} beside {name_of(reference.model)} {other}, "
            f"{found.tokens:,} tokens of {len(prompts)} texts:",
            *found.lines(),
        ]
    if config.has_fp8_cache:
        of_lengths = asyncio.run(measure_cache(served, prompts))
        report["kv_cache"] = msgspec.to_builtins(of_lengths)
        for one in of_lengths:
            compared = f"the last {one.tokens:,} of {one.length:,} tokens"
            lines.append(f"{model} with an 8-bit KV cache beside one of its own type, {compared}:")
            lines += one.lines()
    text = msgspec.json.format(msgspec.json.encode(report)).decode() if args.json else None
    print(text or "\n".join(lines))
    return 0
