"""EngineConfig: every choice about a run, in one frozen struct.

A field's ``Meta`` description is its documentation: the command line is generated from it. There is
no configuration through environment variables.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from asyncllm.errors import BadRequest
from asyncllm.types import Pooling
from asyncllm.validate import check_types

Device = Literal["auto", "cpu", "cuda", "sim"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "dummy"]
AttentionName = Literal["auto", "triton", "flashinfer", "sdpa"]
PolicyName = Literal["fair", "aged", "fcfs", "longest"]
SimProfile = Literal["auto", "h200-8b", "h200-0.6b"]

#: Scheme, host and port, as browsers write them in an Origin header.
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s\\@?#]+")


def _doc(text: str) -> Meta:
    return Meta(description=text)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What to serve and how. ``None`` and ``"auto"`` are filled in once the model is known.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    model: Annotated[
        str | None, _doc("folder or hub id of the model; the built-in demo when none is named")
    ] = None
    revision: Annotated[str | None, _doc("branch, tag or commit of a hub model")] = None
    tokenizer: Annotated[str | None, _doc("folder or hub id, when not the model's own")] = None
    tool_parser: Annotated[
        str, _doc("how the model writes tool calls: a format's name, none, or auto: as it seems")
    ] = "auto"
    reasoning_parser: Annotated[str, _doc("how it writes reasoning, likewise")] = "auto"
    load_format: Annotated[LoadFormat, _doc("'dummy' fills in random weights")] = "auto"
    device: Annotated[
        Device,
        _doc("where the model runs; auto falls back to the CPU; sim has a clock and no model"),
    ] = "auto"
    sim_profile: Annotated[
        SimProfile, _doc("whose step times device sim has; auto: an H200 with the model's shape")
    ] = "auto"
    dtype: Annotated[DType, _doc("compute type; auto is bfloat16, on the CPU float32")] = "auto"
    attention: Annotated[AttentionName, _doc("attention kernels")] = "auto"
    max_model_len: Annotated[
        int | None, _doc("longest sequence, prompt and output; the checkpoint's limit by default")
    ] = None
    kv_cache_tokens: Annotated[
        int | None, _doc("size of the KV cache in tokens; from free memory by default")
    ] = None
    gpu_memory_utilization: Annotated[
        float, _doc("share of the GPU's memory that weights and KV cache may take")
    ] = 0.9
    page_size: Annotated[int, _doc("tokens per KV page")] = 16
    max_num_seqs: Annotated[int, _doc("most sequences running at once")] = 256
    max_num_batched_tokens: Annotated[
        int | None, _doc("most tokens in one step; 8192 on a GPU, 1024 on a CPU by default")
    ] = None
    prefill_chunk: Annotated[
        int | None, _doc("most prompt tokens of one sequence in one step; no limit by default")
    ] = None
    itl_target_ms: Annotated[
        float,
        _doc(
            "steps with prompt chunks take at most so long, or twice as long as decoding alone if "
            "that is more; 0: there is no target, and prompts fill steps up to "
            "max_num_batched_tokens"
        ),
    ] = 27.0
    prefix_caching: Annotated[bool, _doc("keep the KV of prefixes for later requests")] = True
    host_kv_gib: Annotated[
        float, _doc("host memory for KV pages that leave the device, in GiB; 0: none")
    ] = 0.0
    policy: Annotated[
        PolicyName,
        _doc(
            "who is served next: shortest prompt first with ageing (aged), the same with equal "
            "shares for each tenant (fair), in order of arrival (fcfs), longest output (longest)"
        ),
    ] = "fair"
    max_waiting: Annotated[int, _doc("most requests waiting before new ones get 429")] = 4096
    max_waiting_tokens: Annotated[
        int, _doc("most prompt tokens waiting before new requests get 429")
    ] = 4_000_000
    cuda_graphs: Annotated[
        bool, _doc("launch steps of a GPU as captured graphs; off is slower and starts sooner")
    ] = True
    max_burst: Annotated[
        int | None,
        _doc(
            "most tokens that one step computes of a sequence when few run and nothing waits; 4 "
            "where steps are captured graphs by default, else 1"
        ),
    ] = None
    steps_in_flight: Annotated[
        int, _doc("2 plans a step while the one before still runs; 1 does not")
    ] = 2
    cpu_threads: Annotated[
        int | None, _doc("threads of CPU kernels; PyTorch's own choice by default")
    ] = None
    kernel_cache: Annotated[
        str | None, _doc("folder of Triton's compiled kernels; by default Triton's own")
    ] = None
    trace: Annotated[str | None, _doc("file to record scheduling in, for asyncllm replay")] = None

    def __post_init__(self) -> None:
        check_types(self)
        at_least_one = ("page_size", "max_num_seqs", "max_waiting", "max_waiting_tokens")
        optional = (
            "max_model_len",
            "kv_cache_tokens",
            "max_num_batched_tokens",
            "prefill_chunk",
            "max_burst",
            "cpu_threads",
        )
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
        budget = self.max_num_batched_tokens
        if budget is not None and budget < self.max_num_seqs:
            raise BadRequest(
                f"max_num_batched_tokens ({budget}) must leave every one of max_num_seqs "
                f"({self.max_num_seqs}) its decode token",
                param="max_num_batched_tokens",
            )


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine works with, once device and model are known.

    ``device`` is "cpu", "cuda" or "sim", ``dtype`` the type of the computation. ``max_model_len``
    never exceeds what the KV cache holds, so every admitted sequence can finish when it runs alone.
    ``itl_target`` is in seconds, 0 for none. ``host_pages`` is the size of the host tier, 0 for
    none; ``page_copy_seconds`` a first guess of what moving one page between the tiers takes.
    ``max_burst`` is the most tokens that a step may compute of each row. ``step_sizes``, rising,
    are numbers of tokens that steps with prompts are padded to, where padding costs time.
    ``embedding_size`` is the size of a final hidden state, and so of an embedding.
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
    max_burst: int = 1
    step_sizes: tuple[int, ...] = ()
    embedding_size: int = 0


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP side of ``asyncllm serve``.

    Raises:
        BadRequest: a value is of the wrong type or out of range; ``param`` names it.
    """

    host: Annotated[str, _doc("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _doc("port to listen on; 0 picks a free one")] = 8000
    served_model_name: Annotated[
        tuple[str, ...], _doc("names clients may use; the model's own by default")
    ] = ()
    api_key: Annotated[tuple[str, ...], _doc("keys that clients must present; none: open")] = ()
    api_key_file: Annotated[str | None, _doc("file with more such keys, one in each line")] = None
    isolate_keys: Annotated[
        bool,
        _doc(
            "share cached prefixes only between requests with the same API key; else cached_tokens "
            "and response times tell one key's clients whether another's sent a prompt"
        ),
    ] = False
    cors_origin: Annotated[
        tuple[str, ...],
        _doc("origins whose web pages may call the server, as https://example.org; * for all"),
    ] = ()
    strict: Annotated[
        bool, _doc("answer 400 to fields that nobody knows, instead of naming them in a header")
    ] = False
    pooling: Annotated[
        Pooling,
        _doc("what an embedding is made of by default: the last token's hidden state, or the mean"),
    ] = "last"
    max_body_bytes: Annotated[int, _doc("largest accepted request body")] = 8 * 1024 * 1024
    request_seconds: Annotated[
        float, _doc("how long a request may take to arrive, and a connection may be idle")
    ] = 75.0
    drain_seconds: Annotated[
        float, _doc("how long a stopping server lets running streams finish")
    ] = 30.0

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 <= self.port < 2**16:
            raise BadRequest(f"port must be between 0 and 65535, not {self.port}", param="port")
        if not all(self.api_key):
            raise BadRequest("api_key must not be empty", param="api_key")
        if self.isolate_keys and not self.api_key and self.api_key_file is None:
            raise BadRequest("isolate_keys needs api_key or api_key_file", param="isolate_keys")
        if not all(self.served_model_name):
            raise BadRequest("served_model_name must not be empty", param="served_model_name")
        for origin in self.cors_origin:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise BadRequest(
                    f"cors_origin must be like https://example.org or *, not {origin!r}",
                    param="cors_origin",
                )
        if self.max_body_bytes < 1:
            raise BadRequest("max_body_bytes must be at least 1", param="max_body_bytes")
        if not 0 < self.request_seconds < math.inf:
            raise BadRequest("request_seconds must be positive", param="request_seconds")
        if not 0 <= self.drain_seconds < math.inf:
            raise BadRequest("drain_seconds must not be negative", param="drain_seconds")
