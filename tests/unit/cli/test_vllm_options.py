"""vLLM's options: on the command line, in files, and as arguments of ``AsyncLLM``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

import pytest

from asyncllm.__main__ import main
from asyncllm.cli.options import config_from_args
from asyncllm.config import EngineConfig
from asyncllm.config.option_names import option_of
from asyncllm.config.ray_config import RayConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.llm.options import engine_config
from asyncllm.text.parsing import REASONING_FORMATS, TOOL_FORMATS
from asyncllm.vllm_options.table import SAME, options
from asyncllm.vllm_options.translate import translate
from asyncllm.vllm_options.values import WORDS
from tools.vllm_table import PAGE, page

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable
    from pathlib import Path

OURS: Final = {
    name for struct in (EngineConfig, ServerConfig, RayConfig) for name in struct.__struct_fields__
}


@pytest.fixture
def serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Callable[..., tuple[dict[str, Any], list[str]]]:
    """What a command line of ``asyncllm serve`` changes, and what it logs."""

    def run(args: argparse.Namespace) -> int:
        seen[:] = [config_from_args(args, s) for s in (EngineConfig, ServerConfig, RayConfig)]
        return 0

    seen: list[Any] = []
    monkeypatch.setattr("asyncllm.cli.commands.serve.run", run)

    def serve(*words: str) -> tuple[dict[str, Any], list[str]]:
        caplog.clear()
        assert main(["serve", *words]) == 0
        return {k: v for config in seen for k, v in changes(config).items()}, caplog.messages

    return serve


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """The first line that a wrong command line ends with."""

    def refusal(line: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(shlex.split(line))
        assert left.value.code == 2
        return capsys.readouterr().err.splitlines()[0]

    return refusal


def changes(config: Any) -> dict[str, Any]:
    """Fields that are not as by default."""
    default = type(config)()
    names = type(config).__struct_fields__
    return {n: getattr(config, n) for n in names if getattr(config, n) != getattr(default, n)}


#: Command lines as people paste them, and what they change.
LINES: Final[list[tuple[str, dict[str, Any]]]] = [
    (
        "some/model --tensor-parallel-size 2 --max-model-len 32768 --gpu-memory-utilization 0.95 "
        "--trust-remote-code --enable-auto-tool-choice --tool-call-parser hermes "
        "--reasoning-parser qwen3 --port 8001 --host 0.0.0.0 --max-num-seqs 64 "
        "--max-num-batched-tokens 16384 --no-enable-prefix-caching --async-scheduling "
        "--served-model-name mine --kv-cache-dtype auto --language-model-only",
        {
            "model": "some/model",
            "tp": 2,
            "max_model_len": 32768,
            "gpu_memory_utilization": 0.95,
            "tool_parser": "hermes",
            "reasoning_parser": "think",
            "port": 8001,
            "host": "0.0.0.0",
            "max_num_seqs": 64,
            "max_num_batched_tokens": 16384,
            "prefix_caching": False,
            "served_model_name": ("mine",),
        },
    ),
    (
        "--model=some/model --tensor_parallel_size=2 --max_model_len=auto --dtype half "
        "--disable-log-requests --enable-prefix-caching --enable-chunked-prefill",
        {"model": "some/model", "tp": 2, "dtype": "float16"},
    ),
    (
        "mistralai/Some-24B --tokenizer_mode mistral --config_format mistral --load_format mistral "
        "--tool-call-parser mistral --limit_mm_per_prompt '{\"image\":10}' -tp 2 -dp=2 -q fp8",
        {
            "model": "mistralai/Some-24B",
            "tool_parser": "mistral",
            "tp": 2,
            "dp": 2,
            "quantization": "fp8",
        },
    ),
    (
        "m --served-model-name a b --api-key k1 k2 --block-size 64 --enforce-eager -O3 --seed 42 "
        "--swap-space 16 --max-num-batched-tokens 8k --uvicorn-log-level warning",
        {
            "model": "m",
            "served_model_name": ("a", "b"),
            "api_key": ("k1", "k2"),
            "page_size": 64,
            "cuda_graphs": False,
            "max_num_batched_tokens": 8000,
        },
    ),
    (
        "--served-model-name a b --api-key k --model m",
        {"model": "m", "served_model_name": ("a", "b"), "api_key": ("k",)},
    ),
    (
        "--served-model-name a some/model --api-key k --max-model-len 16K",
        {
            "model": "some/model",
            "served_model_name": ("a",),
            "api_key": ("k",),
            "max_model_len": 16384,
        },
    ),
    (
        "m --default-chat-template-kwargs '{\"enable_thinking\": false}' "
        "--default-chat-template-kwargs.effort low --hf-overrides.rope_scaling.factor=4 "
        "--hf_overrides.rope_scaling.rope_type yarn --rope-theta 1e6 --compilation-config.mode 3",
        {
            "model": "m",
            "default_chat_template_kwargs": {"enable_thinking": False, "effort": "low"},
            "hf_overrides": {"rope_scaling": {"factor": 4, "rope_type": "yarn"}, "rope_theta": 1e6},
        },
    ),
    (
        'm --allowed-origins \'["https://a.org", "https://b.org"]\' --ssl-keyfile k '
        "--ssl-certfile c --otlp-traces-endpoint http://collector:4318/v1/traces "
        "--enable-log-requests "
        "--shutdown-timeout 9 --attention-backend TRITON_ATTN --kv-offloading-size 2 "
        "--long-prefill-token-threshold 512 --scheduling-policy fcfs "
        '--pooler-config \'{"pooling_type": "MEAN"}\' --kv-events-config '
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5600", "topic": "kv@a"}\'',
        {
            "model": "m",
            "cors_origin": ("https://a.org", "https://b.org"),
            "tls_key": "k",
            "tls_cert": "c",
            "otlp_endpoint": "http://collector:4318",
            "log_requests": True,
            "drain_seconds": 9.0,
            "attention": "triton",
            "host_kv_gib": 2.0,
            "prefill_chunk": 512,
            "policy": "fcfs",
            "pooling": "mean",
            "kv_events": "tcp://*:5600",
            "kv_events_topic": "kv@a",
        },
    ),
    (
        "m -pp 1 --nnodes=1 --cpu-offload-gb 0 --task generate --runner auto --no-enable-lora "
        "--no-trust-remote-code --no-async-scheduling --cudagraph-capture-sizes 1 2 4",
        {"model": "m", "steps_in_flight": 1},
    ),
    (
        "m -tp 2 --enable-expert-parallel --all2all-backend naive --download-dir /models "
        "--generation-config vllm --override-generation-config.temperature 0.5 "
        "--override-generation-config '{\"top_p\": 0.9}'",
        {
            "model": "m",
            "tp": 2,
            "download_dir": "/models",
            "generation_config": "none",
            "override_generation_config": {"temperature": 0.5, "top_p": 0.9},
        },
    ),
]


@pytest.mark.parametrize(("line", "expected"), LINES)
def test_pasted_lines_are_understood(line: str, expected: dict[str, Any], serve: Any) -> None:
    assert serve(*shlex.split(line))[0] == expected


def test_what_is_not_needed_gets_a_line(serve: Any) -> None:
    changed, logged = serve("--trust-remote-code", "--tp", "2", "--offload-backend", "auto")
    assert changed == {"tp": 2}
    assert logged == [
        "--trust-remote-code is not needed: no code of a model's repository is run",
        "--offload-backend auto is not needed: it is so anyway",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("serve m --cpu-offload-gb 8", "--cpu-offload-gb 8 is not supported: "),
        ("serve m --kv-cache-dtype fp8_e5m2", "is not one of auto, fp8, fp8_e4m3"),
        (
            "serve m --enable-lora --max_loras 4",
            "--enable-lora and --max-loras are not supported: adapters",
        ),
        ("serve m --no-enable-chunked-prefill", "prompts are always processed in chunks"),
        (
            "serve m --speculative-config.method medusa",
            "--speculative-config: the method 'medusa' is not served; ngram, eagle3 and mtp are",
        ),
        (
            "serve m --speculative-config.method lookup",
            "--speculative-config: method must be ngram, eagle3 or mtp, not 'lookup'",
        ),
        (
            "serve m --speculative-config.num_speculative_tokens 65",
            "--speculative-config: num_speculative_tokens must be from 1 to 64",
        ),
        (
            "serve m --speculative-config.method eagle --speculative-config.model m2",
            "--speculative-config: the method 'eagle' is not served; ngram, eagle3 and mtp are",
        ),
        (
            "serve m --speculative-config.prompt_lookup_max 0",
            "--speculative-config: prompt_lookup_max must be from 1 to 64",
        ),
        (
            "serve m --speculative-config.prompt_lookup_max 30000",
            "--speculative-config: prompt_lookup_max must be from 1 to 64",
        ),
        (
            "serve m --speculative-config.prompt_lookup_min 65",
            "--speculative-config: prompt_lookup_min must be from 1 to prompt_lookup_max (64), "
            "not 65",
        ),
        (
            "serve m --speculative-config.model m2",
            "--speculative-config: model is for the method eagle3; ngram has none",
        ),
        (
            "serve m --speculative-config.method eagle3",
            "--speculative-config: eagle3 needs model, the folder or hub id of the head",
        ),
        (
            "serve m --speculative-config.method mtp --speculative-config.model m2",
            "--speculative-config: model is for the method eagle3; mtp has none",
        ),
        (
            "serve m --draft m2 --attention flashinfer",
            "--speculative-config: eagle3 does not work with attention flashinfer",
        ),
        (
            "serve m --speculative-config.prompt_lookup_min 4 "
            "--speculative-config.prompt_lookup_max 3",
            "prompt_lookup_min must be from 1 to prompt_lookup_max (3), not 4",
        ),
        (
            "serve m --max-num-seqs 8 --speculative-config.num_speculative_tokens 8",
            "a draft of 8 tokens needs --max-num-seqs of more than 8",
        ),
        (
            "serve m --max-num-seqs 1 --speculative-config.method ngram",
            "a draft of 1 token needs --max-num-seqs of more than 1",
        ),
        (
            "serve m --draft m2 --speculative-config.method ngram",
            "--draft: it names an EAGLE-3 head, but method of --speculative-config is 'ngram'",
        ),
        (
            "serve m --draft m2 --speculative-config.method eagle3 --speculative-config.model m3",
            "--draft: it names an EAGLE-3 head, but model of --speculative-config is 'm3'",
        ),
        ("serve m --spec-method ngram", "--speculative-config has the method"),
        (
            "serve m --override-generation-config.max_new_tokens 9",
            "--override-generation-config has no 'max_new_tokens', only 'do_sample', 'temperature'",
        ),
        (
            "serve m --override-generation-config '{\"top_p\": 2}'",
            "--override-generation-config: 'top_p' must be greater than 0",
        ),
        (
            "serve m --override-generation-config.top_k many",
            "--override-generation-config: 'top_k': Expected `int | null`, got `str`",
        ),
        ("serve m --max-logprobs 30", "a request may ask for 20 logprobs"),
        ("serve m -tp x", "--tensor-parallel-size: invalid int value: 'x'"),
        ("serve m -tp 0", "--tp must be at least 1"),
        ("serve m -tp 2 --tp 3", "--tp is given twice, as 3 and as 2"),
        ("serve m --hf-overrides 3", "--hf-overrides: '3' is not a JSON object"),
        ("serve m --pooler-config {", "--pooler-config: '{' is not JSON"),
        ("serve m --tensor-parallel-sise 2", "did you mean --tensor-parallel-size?"),
        ("serve m --max-model-len 1.5", "invalid int value: '1.5'"),
        (
            "serve m --default-chat-template-kwargs.messages 1",
            "--default-chat-template-kwargs must not contain messages",
        ),
        ("serve m n", "unexpected argument 'n'"),
        ("chat --ssl-keyfile k", "--tls-key is an option of 'asyncllm serve' only"),
    ],
)
def test_what_is_wrong_is_said(line: str, message: str, refusal: Any) -> None:
    assert message in refusal(line)


def test_a_token_is_not_repeated(refusal: Any) -> None:
    assert "secret" not in refusal("serve m --hf-token secret")


def test_a_file_may_have_them(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(
        "model: m\ntensor-parallel-size: 4\ntrust_remote_code: true\ndtype: half\n"
        "served-model-name: [a, b]\nenforce-eager: true\nhf-overrides: {a: {b: 1}}\n"
        "max-model-len: 16k\nquantization: gptq_marlin\npipeline-parallel-size: 1\n"
    )
    expected = {
        "model": "m",
        "tp": 4,
        "dtype": "float16",
        "served_model_name": ("a", "b"),
        "cuda_graphs": False,
        "hf_overrides": {"a": {"b": 1}},
        "max_model_len": 16000,
        "quantization": "gptq",
    }
    changed, logged = serve("--config", str(file))
    assert changed == expected
    assert len(logged) == 2
    # The command line wins, by whatever name.
    assert serve("--config", str(file), "--tp", "2")[0] == {**expected, "tp": 2}
    assert serve("--config", str(file), "-tp", "2")[0] == {**expected, "tp": 2}


def test_a_file_with_what_is_missing_is_refused(refusal: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("enable-lora: true\n")
    error = refusal(f"serve --config {file}")
    assert f"{file}: --enable-lora is not supported" in error


def test_arguments_of_the_library(caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(
        "m",
        None,
        {
            "tensor_parallel_size": 2,
            "trust_remote_code": True,
            "enforce_eager": True,
            "max_model_len": "16k",
            "quantization": None,
            "speculative_config": None,
        },
    )
    assert changes(config) == {"model": "m", "tp": 2, "cuda_graphs": False, "max_model_len": 16000}
    assert caplog.messages == [
        "trust_remote_code is not needed: no code of a model's repository is run"
    ]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_lora": True}, "enable_lora is not supported: adapters"),
        ({"ssl_keyfile": "k"}, "tls_key is an option of the server"),
        ({"tp": 2, "tensor_parallel_size": 2}, "tp is given twice"),
        ({"tensor_parallel_sise": 2}, "unknown option 'tensor_parallel_sise'"),
    ],
)
def test_wrong_arguments_of_the_library(given: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        engine_config("m", None, given)


# -- the table -------------------------------------------------------------------------------------


def test_the_same_names_exist() -> None:
    assert set(SAME) - {"config"} <= OURS
    assert not set(SAME) & options().keys()


def test_no_option_is_in_it_twice_or_is_ours() -> None:
    shorts = [option.short for option in options().values() if option.short]
    assert len(shorts) == len(set(shorts))
    assert not options().keys() & OURS


def test_values_that_are_renamed_exist() -> None:
    assert set(WORDS["tool_parser"].values()) <= {*TOOL_FORMATS, "auto"}
    assert set(WORDS["reasoning_parser"].values()) <= {*REASONING_FORMATS, "auto"}
    assert not (WORDS["tool_parser"].keys() & TOOL_FORMATS.keys())
    assert not (WORDS["reasoning_parser"].keys() & REASONING_FORMATS.keys())
    assert WORDS.keys() <= OURS


@pytest.mark.parametrize("name", sorted(options()))
def test_every_option_is_understood_or_refused_by_name(name: str) -> None:
    """Whatever its value: each of them has one of three outcomes, and nothing else is raised."""
    option, refused = options()[name], []
    for value in (True, "1", "x", "{}", "[]"):
        try:
            found = translate({name: value}, option_of)
        except BadRequest as error:
            refused.append(str(error))
            continue
        assert bool(found.fields) != bool(found.notes)
        assert found.fields.keys() <= OURS
        assert option.status != "not needed" or found.notes
    assert all(error.startswith(option_of(name)) for error in refused)
    assert refused or option.status != "missing"


def test_the_help_lists_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out.partition("options of vLLM:")[2]
    for option in options().values():
        assert option_of(option.name) in shown
        assert option.says in shown


def test_the_page_has_the_table() -> None:
    """``python -m tools.vllm_table`` writes it."""
    text = PAGE.read_text("utf-8")
    assert page(text) == text
