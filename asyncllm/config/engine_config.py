"""EngineConfig: every option of a run.

The command line is generated from the fields and their ``Meta`` descriptions. There is no
configuration through environment variables.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

import msgspec

from asyncllm.config import option_fields
from asyncllm.config.option_fields import MANY, Count, Gpus, Share, Threads, doc
from asyncllm.config.speculative_config import check_speculative, draft_rules, with_draft
from asyncllm.errors import BadRequest
from asyncllm.types import MAX_CACHE_TTL
from asyncllm.types.sampling_defaults import check_overrides
from asyncllm.types.validate import Form, Range, check_fields, check_tcp_endpoint

DType = Literal["auto", "float32", "bfloat16", "float16"]
StateDType = Literal["auto", "float32", "bfloat16"]
KVCacheDType = Literal["auto", "fp8", "fp8_e4m3"]
LoadFormat = Literal["auto", "dummy"]
AttentionName = Literal["auto", "triton", "flashinfer", "sdpa"]
PolicyName = Literal["fair", "aged", "fcfs", "longest"]

#: No chat fits into a smaller KV cache.
MIN_CACHE: Final = 64

_DEVICE: Final = Form(r"auto|cpu|sim|cuda(?::\d{1,3})?", "auto, cpu, cuda, cuda:N or sim")
_SIM_PROFILE: Final = Form(
    r"auto|h200-8b|h200-0\.6b|h200-30b-a3b|(?s:.*)\.json",
    "auto, h200-8b, h200-0.6b, h200-30b-a3b or a .json file",
)


def _check_variables(name: str, value: dict[str, Any]) -> None:
    for own in ("add_generation_prompt", "messages", "tools"):
        if own in value:
            raise BadRequest(f"{name} must not contain {own}", param=name)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve and how. ``None`` and ``"auto"`` are resolved when the model is known.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    model: Annotated[
        str | None,
        doc("folder or hub id of the model; the built-in demo model by default", "model"),
    ] = None
    revision: Annotated[str | None, doc("branch, tag or commit of a hub model", "model")] = None
    download_dir: Annotated[
        str | None,
        doc("folder of models from the hub; that of HF_HUB_CACHE by default", "model", "FOLDER"),
    ] = None
    tokenizer: Annotated[
        str | None, doc("folder or hub id of a tokenizer, instead of the model's own", "model")
    ] = None
    chat_template: Annotated[
        str | None,
        doc("Jinja template for chats, or a file with one; else the model's own", "model", "FILE"),
    ] = None
    tool_parser: Annotated[
        str, doc("format of the model's tool calls; auto finds it from the chat template", "model")
    ] = "auto"
    reasoning_parser: Annotated[
        str, doc("format of the model's reasoning; auto finds it from the chat template", "model")
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        _check_variables,
        doc(
            "variables of the chat template, such as '{\"enable_thinking\": false}'; those of a "
            "request override them",
            "model",
        ),
    ] = None
    hf_overrides: Annotated[
        dict[str, Any] | None, doc("values that replace those in the model's config.json", "model")
    ] = None
    generation_config: Annotated[
        str,
        doc(
            "folder of the generation_config.json with defaults of sampling; auto: the model's; "
            "none: OpenAI's defaults",
            "model",
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None,
        check_overrides,
        doc("other defaults of sampling, such as '{\"temperature\": 0.5}'", "model"),
    ] = None
    quantization: Annotated[
        str | None,
        doc(
            "fp8 quantises the weights of a checkpoint in 16 or 32 bits while they are loaded. A "
            "quantised checkpoint is served as it is; one in another format than this (fp8, awq, "
            "gptq or mxfp4) is refused",
            "model",
        ),
    ] = None
    mamba_ssm_cache_dtype: Annotated[
        StateDType,
        doc(
            "type of the recurrent states of models that have them; auto is float32. With bfloat16 "
            "they take half of the memory, and reading and writing them half of the time, but each "
            "step rounds them",
            "memory",
        ),
    ] = "auto"
    load_format: Annotated[
        LoadFormat, doc("dummy fills in random weights instead of loading them", "for developers")
    ] = "auto"
    device: Annotated[
        str,
        _DEVICE,
        doc(
            "where the model runs: cpu, cuda, cuda:1 (the second GPU) and so on; auto takes a GPU "
            "if there is one, else the CPU; sim has no model and only simulates step times",
            "device",
        ),
    ] = "auto"
    tp: Annotated[
        Gpus,
        doc(
            "number of GPUs that share the model and its KV cache (tensor parallelism), beginning "
            "with the one of --device",
            "device",
        ),
    ] = 1
    dp: Annotated[
        Gpus,
        doc(
            "replicas of the model, each with its own GPUs and KV cache (data parallelism); a "
            "request goes to the replica that has its prefix cached",
            "device",
        ),
    ] = 1
    sim_profile: Annotated[
        str,
        _SIM_PROFILE,
        doc(
            "step times of --device sim: h200-8b, h200-0.6b and h200-30b-a3b were measured with "
            "Qwen3; a FILE of asyncllm replay --calibrate has those of the served model; auto "
            "computes them from the model's shape",
            "for developers",
        ),
    ] = "auto"
    dtype: Annotated[
        DType,
        doc(
            "type to compute in; auto is bfloat16 on a GPU (float16 before Ampere) and float32 on "
            "a CPU",
            "model",
        ),
    ] = "auto"
    attention: Annotated[AttentionName, doc("attention kernels", "device")] = "auto"
    deterministic: Annotated[
        bool, doc("answers have the same bits alone and in any batch, on a GPU; slower", "device")
    ] = False
    max_model_len: Annotated[
        Annotated[int, Range(2, MANY)] | None,
        doc("longest sequence in tokens, prompt and output; the model's limit by default", "model"),
    ] = None
    kv_cache_tokens: Annotated[
        Annotated[int, Range(MIN_CACHE, MANY)] | None,
        doc("size of the KV cache in tokens; what fits in free memory by default", "memory"),
    ] = None
    kv_cache_dtype: Annotated[
        KVCacheDType,
        doc(
            "type of the numbers in the KV cache; fp8 (the same as fp8_e4m3) takes half the memory "
            "of 16 bits, so that twice the tokens fit; auto is the type to compute in",
            "memory",
        ),
    ] = "auto"
    gpu_memory_utilization: Annotated[
        float,
        Range(0, 1, is_open=True),
        doc("share of the GPU's memory to use for weights and KV cache", "memory"),
    ] = 0.9
    page_size: Annotated[
        int, Range(1, 4096), doc("tokens per page of the KV cache", "for developers")
    ] = 16
    max_num_seqs: Annotated[
        int, Range(1, 65_536), doc("most sequences that run at once", "scheduling")
    ] = 256
    max_num_batched_tokens: Annotated[
        Count | None,
        doc("most tokens in one step; 8192 on a GPU, 1024 on a CPU by default", "scheduling"),
    ] = None
    prefill_chunk: Annotated[
        Count | None,
        doc("most prompt tokens of one sequence in one step; no limit by default", "scheduling"),
    ] = None
    itl_target_ms: Annotated[
        float,
        Range(0, 3_600_000),
        doc(
            "target for the time between two tokens while prompts are processed, in milliseconds; "
            "at least that of two steps without prompts; 0: no target, prompts fill whole steps",
            "scheduling",
        ),
    ] = 27.0
    prefix_caching: Annotated[
        bool, doc("keep the KV cache of prompts for later requests with the same prefix", "memory")
    ] = True
    host_kv_gib: Annotated[
        float,
        Range(0, 2**20),
        doc(
            "CPU memory for KV cache pages that the GPU has no room for, in GiB; 0: none", "memory"
        ),
    ] = 0.0
    max_cache_ttl_s: Annotated[
        float,
        Range(0, MAX_CACHE_TTL),
        doc("longest time for which a request may pin its prefix in the cache, in s", "limits"),
    ] = 3600.0
    max_pinned_share: Annotated[
        Share,
        doc(
            "share of the KV cache that one tenant may pin; all together, twice as much; 0: none",
            "limits",
        ),
    ] = 0.25
    policy: Annotated[
        PolicyName,
        doc(
            "which request is next: fair (equal shares for each tenant), aged (shortest prompt "
            "first, waits are bounded), fcfs (order of arrival), longest (longest output first)",
            "scheduling",
        ),
    ] = "fair"
    max_waiting: Annotated[
        Count, doc("most waiting requests; further ones are refused with 429", "limits")
    ] = 4096
    max_waiting_tokens: Annotated[
        Count, doc("most waiting prompt tokens; further requests are refused with 429", "limits")
    ] = 4_000_000
    cuda_graphs: Annotated[
        bool,
        doc(
            "run steps as CUDA graphs; without, the start is faster and steps are slower", "device"
        ),
    ] = True
    max_decode_steps: Annotated[
        Annotated[int, Range(1, 64)] | None,
        doc(
            "most tokens that a step computes for a sequence while few requests run and none "
            "wait; by default 4 with CUDA graphs, 1 without",
            "for developers",
        ),
    ] = None
    speculative_config: Annotated[
        dict[str, Any] | None,
        check_speculative,
        doc(
            "guess tokens of every request and verify several in one step, where that is faster: "
            '\'{"method": "ngram"}\' guesses what followed the same tokens before, mtp takes the '
            "model's layer for further tokens, eagle3 the head in model",
            "device",
        ),
    ] = None
    draft: Annotated[
        str | None,
        doc("EAGLE-3 head, a folder or hub id, that drafts for every request", "device", "FOLDER"),
    ] = None
    steps_in_flight: Annotated[
        int,
        Range(1, 2),
        doc("2: plan a step while the one before still runs; 1: do not", "for developers"),
    ] = 2
    cpu_threads: Annotated[
        Threads | None, doc("threads of CPU kernels; PyTorch's choice by default", "device")
    ] = None
    kernel_cache: Annotated[
        str | None,
        doc("folder of compiled Triton kernels; Triton's own by default", "device", "FOLDER"),
    ] = None
    kv_events: Annotated[
        str | None,
        check_tcp_endpoint,
        doc(
            "publish at this address, such as tcp://*:5557, what the prefix cache has, for "
            "routers; the next port answers requests for replays; needs the extra 'kv-events'",
            "memory",
            "ENDPOINT",
        ),
    ] = None
    kv_events_topic: Annotated[str, doc("topic of --kv-events, as kv@pod@model", "memory")] = ""
    trace: Annotated[
        str | None,
        doc("record scheduling in this file, for asyncllm replay", "for developers", "FILE"),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        drafts = with_draft(self.draft, self.speculative_config)
        msgspec.structs.force_setattr(self, "speculative_config", drafts)

        def need(fine: bool, param: str, message: str) -> None:
            if not fine:
                raise BadRequest(message, param=param)

        if self.device == "sim":
            need(self.tp == 1, "tp", "the simulated device has no tensor parallelism: tp must be 1")
        for rule in (*option_fields.deterministic_rules(self), *draft_rules(self)):
            need(*rule)
        publishes = self.kv_events is not None
        need(self.prefix_caching or not publishes, "kv_events", "kv_events needs prefix_caching")
        cache, page = self.kv_cache_tokens, self.page_size
        small = f"kv_cache_tokens must be at least page_size, {page}, not {cache}"
        need(cache is None or cache >= page, "kv_cache_tokens", small)
        budget, rows = self.max_num_batched_tokens, self.max_num_seqs
        few = f"must leave every one of max_num_seqs ({rows}) its decode token"
        param = "max_num_batched_tokens"
        need(budget is None or budget >= rows, param, f"{param} ({budget}) {few}")

    @property
    def model_overrides(self) -> dict[str, Any]:
        """What replaces values of config.json: ``hf_overrides``, and options that are such."""
        given = {"mamba_ssm_cache_dtype": self.mamba_ssm_cache_dtype}
        asked = {name: value for name, value in given.items() if value != "auto"}
        return {**(self.hf_overrides or {}), **asked}

    @property
    def has_fp8_cache(self) -> bool:
        """Whether K and V are kept in 8 bits."""
        return self.kv_cache_dtype != "auto"

    @property
    def gpu(self) -> int | None:
        """The index of the GPU to run on, if there is one; None: not on a GPU."""
        if self.device in ("cpu", "sim"):
            return None
        return int(self.device.partition(":")[2] or 0)
