"""vLLM's options: what each is called here, why it is not needed, or what is missing.

``serve --help`` and docs/from-vllm.md print this table; nothing else knows vLLM's options.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final, Literal

import msgspec

from asyncllm.vllm_options import values
from asyncllm.vllm_options.values import FieldsOf, Missing, flag, renamed, rope_override

#: vLLM's options that have the same name and meaning here.
SAME: Final = (
    *("model", "config", "revision", "download_dir", "tokenizer", "chat_template"),
    *("default_chat_template_kwargs", "generation_config", "override_generation_config"),
    *("reasoning_parser", "dtype", "load_format", "quantization", "hf_overrides", "max_model_len"),
    *("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "device", "host", "port"),
    *("api_key", "served_model_name", "kv_cache_dtype", "mamba_ssm_cache_dtype"),
    "speculative_config",
)

#: Short forms of these.
SAME_SHORT: Final = {"quantization": "-q", "speculative_config": "-sc"}

# A name may be followed by "!" if it takes no value, "+" if it takes several, "/-x" for its short
# form, and, if it is missing here, by "=" and values that ask for nothing.

#: Options with another name: what they are here, and our fields for a value.
_RENAMED: Final[tuple[tuple[str, str, FieldsOf], ...]] = (
    ("tensor-parallel-size/-tp", "--tp", renamed("tp")),
    ("data-parallel-size/-dp", "--dp", renamed("dp")),
    ("tool-call-parser", "--tool-parser", renamed("tool_parser")),
    ("block-size", "--page-size", renamed("page_size")),
    ("enable-prefix-caching!", "--prefix-caching", flag("prefix_caching")),
    ("enforce-eager!", "--no-cuda-graphs", flag("cuda_graphs", False, True)),
    ("async-scheduling!", "--steps-in-flight 2, the default", flag("steps_in_flight", 2, 1)),
    ("scheduling-policy", "--policy fcfs; every policy respects priorities", values.policy),
    ("long-prefill-token-threshold", "--prefill-chunk", values.prefill_threshold),
    ("kv-offloading-size", "--host-kv-gib", renamed("host_kv_gib")),
    ("kv-events-config", "--kv-events and --kv-events-topic", values.kv_events),
    ("attention-backend", "--attention, if it has these kernels", values.attention),
    ("pooler-config", "--pooling", values.pooling),
    ("rope-scaling", "rope_scaling in --hf-overrides", rope_override("rope_scaling")),
    ("rope-theta", "rope_theta in --hf-overrides", rope_override("rope_theta")),
    ("ssl-certfile", "--tls-cert", renamed("tls_cert")),
    ("ssl-keyfile", "--tls-key", renamed("tls_key")),
    ("allowed-origins", "--cors-origin, once for each origin in the JSON list", values.origins),
    ("otlp-traces-endpoint", "--otlp-endpoint, over HTTP", values.traces_endpoint),
    ("enable-log-requests!", "--log-requests, without texts", flag("log_requests")),
    ("disable-log-requests!", "--no-log-requests", flag("log_requests", False, True)),
    ("shutdown-timeout", "--drain-seconds", renamed("drain_seconds")),
    ("max-logprobs", "always 20; more are refused", values.max_logprobs),
)

#: Why options are not needed.
_NOT_NEEDED: Final = {
    "no code of a model's repository is run": "trust-remote-code! code-revision",
    "the model may call the tools of any request": "enable-auto-tool-choice!",
    "the chat template says how the model writes reasoning": "enable-reasoning! reasoning-config",
    "with tool_choice none, tools are not in the prompt": ("exclude-tools-when-tool-choice-none!"),
    "the server finds out what the chat template accepts": "chat-template-content-format",
    "only the text part of a model is served": (
        "language-model-only! limit-mm-per-prompt mm-processor-kwargs mm-processor-cache-gb "
        "mm-processor-cache-type mm-shm-cache-max-object-size-mb mm-encoder-tp-mode "
        "mm-encoder-attn-backend mm-encoder-attn-dtype mm-tensor-ipc media-io-kwargs "
        "interleave-mm-strings! skip-mm-profiling! disable-mm-preprocessor-cache! "
        "disable-chunked-mm-input! allowed-local-media-path allowed-media-domains+ "
        "video-pruning-rate renderer-num-workers"
    ),
    "scales of an 8-bit KV cache are the checkpoint's, or measured at start-up": (
        "calculate-kv-scales!"
    ),
    "a request's own seed makes its answer repeatable": "seed",
    "only the files for Hugging Face are read": "tokenizer-mode config-format",
    "weights are read ahead and streamed": (
        "safetensors-load-strategy safetensors-prefetch-num-threads "
        "safetensors-prefetch-block-size model-loader-extra-config ignore-patterns+ "
        "max-parallel-loading-workers use-tqdm-on-load! pt-load-map-location"
    ),
    "the scheduler decides how many prompts share a step": (
        "max-num-partial-prefills max-long-partial-prefills scheduler-delay-factor "
        "num-scheduler-steps multi-step-stream-outputs! scheduler-reserve-full-isl! "
        "num-lookahead-slots disable-async-output-proc! use-v2-block-manager!"
    ),
    "preempted requests are computed again; --host-kv-gib keeps prefixes in CPU memory": (
        "swap-space preemption-mode kv-offloading-backend"
    ),
    "the prefix cache is a tree of tokens": (
        "prefix-caching-hash-algo disable-hybrid-kv-cache-manager! disable-cascade-attn! "
        "kv-sharing-fast-prefill!"
    ),
    "kernels and CUDA graphs are chosen by model and GPU": (
        "compilation-config/-cc optimization-level/-O performance-mode cudagraph-capture-sizes+ "
        "max-cudagraph-capture-size max-seq-len-to-capture attention-config/-ac kernel-config "
        "moe-backend linear-backend ir-op-priority enable-flashinfer-autotune! "
        "override-attention-dtype use-fp64-gumbel! enable-cumem-allocator! "
        "disable-custom-all-reduce!"
    ),
    "recurrent layers have one kind of kernels, and the scheduler owns their states": (
        "mamba-backend mamba-cache-dtype mamba-block-size mamba-cache-mode "
        "enable-mamba-cache-stochastic-rounding! mamba-cache-philox-rounds gdn-prefill-backend"
    ),
    "--tp divides each expert among its GPUs; those of --dp share no experts": (
        "enable-expert-parallel/-ep! enable-ep-weight-filter! enable-eplb! eplb-config "
        "all2all-backend expert-placement-strategy"
    ),
    "every GPU except the first has a process of its own": (
        "distributed-executor-backend data-parallel-backend/-dpb worker-use-ray! engine-use-ray! "
        "disable-nccl-for-dp-synchronization! distributed-timeout-seconds "
        "cpu-distributed-timeout-seconds"
    ),
    "one process does all HTTP": (
        "api-server-count/-asc disable-frontend-multiprocessing! root-path "
        "h11-max-incomplete-event-size h11-max-header-count"
    ),
    "structured output has one backend": "guided-decoding-backend structured-outputs-config",
    "this is always on": (
        "enable-prompt-tokens-details! enable-request-id-headers! enable-server-load-tracking!"
    ),
    "keys are sent in headers; browsers may send everything that the API accepts": (
        "allow-credentials! allowed-methods allowed-headers"
    ),
    "SIGHUP makes the server read certificates again": "enable-ssl-refresh!",
    "the only description is /openapi.json": "disable-fastapi-docs! enable-offline-docs!",
    "--log-level, --log-format and --log-requests say what is logged, and texts never are": (
        "disable-log-stats! aggregate-engine-logging! uvicorn-log-level "
        "disable-uvicorn-access-log! disable-access-log-for-endpoints max-log-len log-config-file "
        "enable-log-deltas! log-error-stack! enable-logging-iteration-details!"
    ),
    "/metrics always has all metrics": (
        "show-hidden-metrics-for-version collect-detailed-traces kv-cache-metrics! "
        "kv-cache-metrics-sample cudagraph-metrics! enable-mfu-metrics! enable-mm-processor-stats!"
    ),
    "the tokens of a slow reader are merged": "stream-interval",
    "answers have a fingerprint with --deterministic alone": "fingerprint-mode fingerprint-value",
    "options are not read from the environment": "fail-on-environ-validation!",
}

#: What is missing.
_MISSING: Final = {
    "--speculative-config has the method, its model and its numbers": (
        "spec-method spec-model spec-tokens speculative-model num-speculative-tokens "
        "speculative-draft-tensor-parallel-size ngram-prompt-lookup-max ngram-prompt-lookup-min"
    ),
    "the number of GPUs does not change while the server runs": "enable-elastic-ep!",
    "a step is not divided into parts that overlap": (
        "enable-dbo! ubatch-size=0,1 dbo-decode-token-threshold dbo-prefill-token-threshold"
    ),
    "there is no pipeline or context parallelism": (
        "pipeline-parallel-size/-pp=1 decode-context-parallel-size/-dcp=1 "
        "prefill-context-parallel-size/-pcp=1 dcp-comm-backend dcp-kv-cache-interleave-size "
        "cp-kv-cache-interleave-size"
    ),
    "--ray serves on several machines": (
        "nnodes/-n=1 node-rank/-r=0 master-addr master-port headless! data-parallel-rank/-dpn=0 "
        "data-parallel-start-rank/-dpr=0 data-parallel-size-local/-dpl data-parallel-address/-dpa "
        "data-parallel-rpc-port/-dpp data-parallel-hybrid-lb/-dph! data-parallel-external-lb/-dpe! "
        "data-parallel-multi-port-external-lb/-dpm! data-parallel-supervisor-port "
        "ray-workers-use-nsight!"
    ),
    "all layers have the same type of KV cache": "kv-cache-dtype-skip-layers+",
    "set the size of the KV cache in tokens, with --kv-cache-tokens": (
        "kv-cache-memory-bytes num-gpu-blocks-override"
    ),
    "all weights are on the GPUs": (
        "cpu-offload-gb=0,0.0 cpu-offload-params+ offload-backend=auto offload-group-size=0 "
        "offload-num-in-group offload-prefetch-step offload-params+"
    ),
    "adapters are not served": (
        "enable-lora! lora-modules+ max-loras max-lora-rank max-cpu-loras lora-dtype "
        "fully-sharded-loras! lora-target-modules+ default-mm-loras enable-tower-connector-lora! "
        "specialize-active-lora! enable-mixed-moe-lora-format! enable-lora-bias! "
        "lora-extra-vocab-size enable-prompt-adapter!"
    ),
    "a model generates text, and embeds at /v1/embeddings; it does not classify or transcribe": (
        "runner=auto,generate,pooling convert=auto,none,embed task=auto,generate,embed,embedding"
    ),
    "prompts are always processed in chunks": "enable-chunked-prefill!=true",
    "the model decides about sliding windows": "disable-sliding-window!",
    "models run on this project's code, not on transformers'": "model-impl=auto,vllm",
    "weights become fp8 while they are loaded in one way only": "quantization-config",
    "logprobs are those before penalties and temperature": "logprobs-mode=raw_logprobs",
    "set the token with HF_TOKEN or 'hf auth login'": "hf-token",
    "serve a folder that has the files you want": (
        "hf-config-path tokenizer-revision model-weights"
    ),
    "code of yours is not loaded": (
        "tool-parser-plugin reasoning-parser-plugin io-processor-plugin logits-processors+ "
        "middleware+ worker-cls=auto worker-extension-cls scheduler-cls additional-config "
        "profiler-config"
    ),
    "each request asks for it with a field": (
        "return-tokens-as-token-ids! enable-force-include-usage! enable-per-request-metrics!"
    ),
    "requests cannot bring a template, and no route shows the template": (
        "trust-request-chat-template! enable-tokenizer-info-endpoint!"
    ),
    "the texts of requests and answers are not logged": "enable-log-outputs!",
    "prompts are text, token ids or messages": (
        "enable-prompt-embeds! enable-mm-embeds! mm-encoder-only! skip-tokenizer-init! tokens-only!"
    ),
    "the server listens on TCP and speaks HTTP": "uds grpc!",
    "let a proxy in front of the server check client certificates and choose ciphers": (
        "ssl-ca-certs ssl-cert-reqs=0 ssl-ciphers"
    ),
    "answers always have the role assistant": "response-role=assistant",
    "start the server under numactl": "numa-bind! numa-bind-nodes+ numa-bind-cpus+",
    "there is no such feature": (
        "enable-sleep-mode! kv-transfer-config ec-transfer-config weight-transfer-config "
        "enable-return-routed-experts! tool-server enable-layerwise-nvtx-tracing! "
        "allow-deprecated-quantization!"
    ),
}


class Option(msgspec.Struct, frozen=True):
    """One of vLLM's options.

    Attributes:
        name: as a keyword argument; on the command line with dashes.
        short: its short form, such as "-tp"; "" if it has none.
        takes: values on the command line.
        status: where it is in the table.
        says: its name here, why it is not needed, or what is missing.
        fields_of: our fields for a value; raises Missing.
    """

    name: str
    short: str
    takes: Literal["nothing", "one", "several"]
    status: Literal["renamed", "not needed", "missing"]
    says: str
    fields_of: FieldsOf


@cache
def options() -> dict[str, Option]:
    """All that have another name than here, by name."""
    found = [_option(written, "renamed", says, fields) for written, says, fields in _RENAMED]
    for why, names in _NOT_NEEDED.items():
        found += [_option(written, "not needed", why, lambda _: {}) for written in names.split()]
    for what, names in _MISSING.items():
        for written in names.split():
            plain, _, neutral = written.partition("=")
            missing = _missing(what, neutral.split(",") if neutral else [])
            found.append(_option(plain, "missing", what, missing))
    return {option.name: option for option in found}


def _option(
    written: str, status: Literal["renamed", "not needed", "missing"], says: str, fields: FieldsOf
) -> Option:
    takes: Literal["nothing", "one", "several"] = "one"
    if written[-1] in "!+":
        takes = "nothing" if written[-1] == "!" else "several"
        written = written[:-1]
    name, _, short = written.partition("/")
    return Option(name.replace("-", "_"), short, takes, status, says, fields)


def _missing(what: str, neutral: list[str]) -> FieldsOf:
    nothing = {"none", "null", "false", *neutral} - ({"false"} if "true" in neutral else set())

    def fields_of(value: Any) -> dict[str, Any]:
        if value not in ([], {}) and str(value).lower() not in nothing:
            raise Missing(what, value if neutral else "")
        return {}

    return fields_of


def sections() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """The table in three parts: each a title, and rows of options and what is said about them."""
    same = [flag for name in SAME for flag in _flags(name, SAME_SHORT.get(name, ""))]
    renamed = [(", ".join(_flags(o.name, o.short)), o.says) for o in _of("renamed")]
    yield "Taken", [(", ".join(same), "the same name and meaning"), *renamed]
    for title, status in (
        ("Not needed, which a line in the log says", "not needed"),
        ("Not supported, which is an error", "missing"),
    ):
        rows: dict[str, list[str]] = {}
        for option in _of(status):
            rows.setdefault(option.says, []).extend(_flags(option.name, option.short))
        yield title, [(", ".join(flags), says) for says, flags in rows.items()]


def _of(status: str) -> list[Option]:
    return [option for option in options().values() if option.status == status]


def _flags(name: str, short: str) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    return [flag, short] if short else [flag]
