"""EngineConfig: every option of a run. EngineLimits: the limits that follow from it and the model.

The command line is generated from the fields and their ``Meta`` descriptions. There is no
configuration through environment variables.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Final, Literal, get_args

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest
from asyncllm.types import MAX_CACHE_TTL
from asyncllm.validate import check_tcp_endpoint, check_types

DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
AttentionName = Literal["auto", "triton", "flashinfer", "sdpa"]
PolicyName = Literal["fair", "aged", "fcfs", "longest"]
ExecutorName = Literal["thread", "process"]
#: Besides files that ``asyncllm replay --calibrate`` wrote.
SIM_PROFILES: Final = ("auto", "h200-8b", "h200-0.6b")

_DEVICE: Final = re.compile(r"auto|cpu|sim|cuda(?::\d{1,3})?")


#: ``--help`` lists the options of one group together, in this order.
Group = Literal[
    "model", "memory", "scheduling", "device", "server", "limits", "logging", "for developers"
]
GROUPS: Final[tuple[Group, ...]] = get_args(Group)


def doc(text: str, group: Group = "server", metavar: str | None = None) -> Meta:
    """Describes a field: its documentation and its group in ``--help``."""
    return Meta(description=text, extra={"group": group, "metavar": metavar})


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
    tokenizer: Annotated[
        str | None, doc("folder or hub id of another tokenizer than the model's own", "model")
    ] = None
    chat_template: Annotated[
        str | None,
        doc("Jinja template for chats; the model's own template by default", "model", "FILE"),
    ] = None
    tool_parser: Annotated[
        str,
        doc("format of the model's tool calls; auto reads it off the chat template", "model"),
    ] = "auto"
    reasoning_parser: Annotated[
        str,
        doc("format of the model's reasoning; auto reads it off the chat template", "model"),
    ] = "auto"
    load_format: Annotated[
        LoadFormat,
        doc("dummy fills in random weights instead of loading them", "for developers"),
    ] = "auto"
    device: Annotated[
        str,
        doc(
            "where the model runs: cpu, cuda, cuda:1 (the second GPU) and so on; auto takes a GPU "
            "if there is one, else the CPU; sim only simulates the time that steps take",
            "device",
        ),
    ] = "auto"
    tp: Annotated[
        int,
        doc(
            "GPUs that share the model and its KV cache (tensor parallelism), from that of "
            "--device on",
            "device",
        ),
    ] = 1
    dp: Annotated[
        int,
        doc(
            "replicas of the model, each with GPUs and a KV cache of its own (data parallelism); "
            "a request goes where its prefix is cached",
            "device",
        ),
    ] = 1
    executor: Annotated[
        ExecutorName,
        doc(
            "what runs the steps: a thread of the server, or a process of its own, which leaves "
            "the server's Python to HTTP (Linux)",
            "device",
        ),
    ] = "thread"
    sim_profile: Annotated[
        str,
        doc(
            "step times of --device sim: h200-8b and h200-0.6b were measured with Qwen3; a FILE of "
            "asyncllm replay --calibrate is for the model that is served; auto computes them from "
            "its shape",
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
    max_model_len: Annotated[
        int | None,
        doc("longest sequence in tokens, prompt and output; the model's limit by default", "model"),
    ] = None
    kv_cache_tokens: Annotated[
        int | None,
        doc("size of the KV cache in tokens; what fits in free memory by default", "memory"),
    ] = None
    gpu_memory_utilization: Annotated[
        float, doc("share of the GPU's memory to use for weights and KV cache", "memory")
    ] = 0.9
    page_size: Annotated[int, doc("tokens per page of the KV cache", "for developers")] = 16
    max_num_seqs: Annotated[int, doc("most sequences that run at once", "scheduling")] = 256
    max_num_batched_tokens: Annotated[
        int | None,
        doc("most tokens in one step; 8192 on a GPU, 1024 on a CPU by default", "scheduling"),
    ] = None
    prefill_chunk: Annotated[
        int | None,
        doc("most prompt tokens of one sequence in one step; no limit by default", "scheduling"),
    ] = None
    itl_target_ms: Annotated[
        float,
        doc(
            "longest time between two tokens while prompts are processed, in milliseconds; never "
            "less than twice a decode-only step; 0: no target, prompts fill whole steps",
            "scheduling",
        ),
    ] = 27.0
    prefix_caching: Annotated[
        bool,
        doc("keep the KV cache of prompts for later requests with the same prefix", "memory"),
    ] = True
    host_kv_gib: Annotated[
        float,
        doc(
            "CPU memory for KV cache pages that the GPU has no room for, in GiB; 0: none", "memory"
        ),
    ] = 0.0
    max_cache_ttl_s: Annotated[
        float,
        doc("longest time for which a request may pin its prefix in the cache, in s", "limits"),
    ] = 3600.0
    max_pinned_share: Annotated[
        float,
        doc(
            "share of the KV cache that one tenant may pin; all together, twice as much; 0: none",
            "limits",
        ),
    ] = 0.25
    policy: Annotated[
        PolicyName,
        doc(
            "who is served next: fair (equal shares for each tenant), aged (shortest prompt "
            "first, nobody starves), fcfs (in order of arrival), longest (longest output first)",
            "scheduling",
        ),
    ] = "fair"
    max_waiting: Annotated[
        int, doc("most waiting requests; further ones are refused with 429", "limits")
    ] = 4096
    max_waiting_tokens: Annotated[
        int, doc("most waiting prompt tokens; further requests are refused with 429", "limits")
    ] = 4_000_000
    cuda_graphs: Annotated[
        bool,
        doc(
            "run steps as CUDA graphs; without, the start is faster and steps are slower", "device"
        ),
    ] = True
    max_decode_steps: Annotated[
        int | None,
        doc(
            "most tokens of a sequence computed in one step while few run and none wait; 4 with "
            "CUDA graphs, else 1 by default",
            "for developers",
        ),
    ] = None
    steps_in_flight: Annotated[
        int,
        doc("2 plans a step while the one before still runs, 1 does not", "for developers"),
    ] = 2
    cpu_threads: Annotated[
        int | None, doc("threads of CPU kernels; PyTorch's choice by default", "device")
    ] = None
    kernel_cache: Annotated[
        str | None,
        doc("folder of compiled Triton kernels; Triton's own by default", "device", "FOLDER"),
    ] = None
    kv_events: Annotated[
        str | None,
        doc(
            "publish what the prefix cache holds at this address, such as tcp://*:5557, for "
            "routers; replays are at the next port; needs the extra 'kv-events'",
            "memory",
            "ENDPOINT",
        ),
    ] = None
    kv_events_topic: Annotated[str, doc("topic of --kv-events, such as kv@pod@model", "memory")] = (
        ""
    )
    trace: Annotated[
        str | None,
        doc("record scheduling in this file, for asyncllm replay", "for developers", "FILE"),
    ] = None

    def __post_init__(self) -> None:
        check_types(self)
        if not _DEVICE.fullmatch(self.device):
            raise BadRequest(
                f"device must be auto, cpu, cuda, cuda:N or sim, not {self.device!r}",
                param="device",
            )
        if self.sim_profile not in SIM_PROFILES and not self.sim_profile.endswith(".json"):
            raise BadRequest(
                f"sim_profile must be {', '.join(SIM_PROFILES)} or a .json file, not "
                f"{self.sim_profile!r}",
                param="sim_profile",
            )
        if self.tp > 1 and self.device == "sim":
            raise BadRequest(
                "the simulated device has no tensor parallelism: tp must be 1", param="tp"
            )
        if self.executor == "process" and self.device == "sim":
            raise BadRequest(
                "the simulated device runs on the event loop: executor must be thread",
                param="executor",
            )
        if self.kv_events is not None:
            check_tcp_endpoint("kv_events", self.kv_events)
            if not self.prefix_caching:
                raise BadRequest("kv_events needs prefix_caching", param="kv_events")
        at_least_one = ("tp", "dp", "page_size", "max_num_seqs", "max_waiting")
        optional = (
            "max_waiting_tokens",
            "max_model_len",
            "kv_cache_tokens",
            "max_num_batched_tokens",
            "prefill_chunk",
            "max_decode_steps",
            "cpu_threads",
        )
        if self.dp > 256:
            raise BadRequest("dp must be at most 256", param="dp")
        for name in at_least_one + optional:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise BadRequest(f"{name} must be at least 1, not {value}", param=name)
        if self.steps_in_flight not in (1, 2):
            raise BadRequest("steps_in_flight must be 1 or 2", param="steps_in_flight")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise BadRequest(
                "gpu_memory_utilization must be greater than 0 and at most 1",
                param="gpu_memory_utilization",
            )
        if not 0 <= self.itl_target_ms < math.inf:
            raise BadRequest("itl_target_ms must not be negative", param="itl_target_ms")
        if not 0 <= self.host_kv_gib < math.inf:
            raise BadRequest("host_kv_gib must not be negative", param="host_kv_gib")
        if not 0 <= self.max_cache_ttl_s <= MAX_CACHE_TTL:
            raise BadRequest(
                f"max_cache_ttl_s must be between 0 and {MAX_CACHE_TTL}", param="max_cache_ttl_s"
            )
        if not 0 <= self.max_pinned_share <= 1:
            raise BadRequest("max_pinned_share must be between 0 and 1", param="max_pinned_share")
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise BadRequest(
                f"max_num_batched_tokens ({budget}) must leave every one of max_num_seqs "
                f"({self.max_num_seqs}) its decode token",
                param="max_num_batched_tokens",
            )

    @property
    def gpu(self) -> int | None:
        """The index of the GPU to run on, if there is one; None: not on a GPU."""
        if self.device in ("cpu", "sim"):
            return None
        return int(self.device.partition(":")[2] or 0)


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's limits, once device and model are known.

    Attributes:
        device: "cpu", "cuda" or "sim".
        dtype: of the computation.
        max_model_len: never more than the KV cache holds, so every sequence can finish alone.
        itl_target: seconds; 0 for none.
        host_pages: size of the host tier; 0 for none.
        page_copy_seconds: a first guess of the time to move one page between the tiers.
        max_decode_steps: the most tokens that one plan may decode of each row.
        multi_step_rows: the most rows for which it decodes more than one: with few rows, launching
            a step and returning its result take long compared with the step itself.
        step_sizes: the numbers of tokens, rising, that steps with prompts are padded to, where
            padding costs time.
        max_cache_ttl: seconds, of ``SchedulingParams.cache_ttl_s``.
        max_pinned_share: the share of the pages that one tenant may pin.
        embedding_size: of a final hidden state, and so of an embedding.
    """

    device: str
    dtype: str
    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    itl_target: float
    prefix_caching: bool
    host_pages: int
    page_copy_seconds: float
    max_waiting: int
    max_waiting_tokens: int
    steps_in_flight: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_decode_steps: int = 1
    multi_step_rows: int = 8
    step_sizes: tuple[int, ...] = ()
    embedding_size: int = 0
    max_cache_ttl: float = 3600.0
    max_pinned_share: float = 0.25
