"""Values as vLLM writes them: our fields for its options, and its words for our values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final, TypeAlias, get_type_hints

import msgspec

from asyncllm.config import EngineConfig
from asyncllm.config.ray_config import RayConfig
from asyncllm.config.server_config import ServerConfig
from asyncllm.errors import BadRequest
from asyncllm.types.validate import type_of

#: From the value of an option of vLLM's to our fields; none where it changes nothing here.
FieldsOf: TypeAlias = Callable[[Any], dict[str, Any]]

#: 16k is 16,000 and 16K is 16,384.
_SUFFIXES: Final = {
    **{letter: 1000 ** (power + 1) for power, letter in enumerate("kmgt")},
    **{letter: 1024 ** (power + 1) for power, letter in enumerate("KMGT")},
}
#: Most logprobs of a token that a request may ask for.
_MAX_LOGPROBS: Final = 20
#: Reasoning between <think> and </think>.
_THINK: Final = "deepseek_r1 deepseek_v3 ernie45 glm45 glm47 holo2 kimi_k2 mimo minimax_m2 qwen3"
#: Parsers without a counterpart by name: the chat template says which format it is.
_OTHER_TOOLS: Final = (
    "apertus cohere_command4 deepseek_v32 deepseek_v4 ernie45 functiongemma gigachat3 "
    "granite-20b-fc granite4 hunyuan_a13b hy_v3 inkling internlm jamba kimi_k3 longcat mimo "
    "minicpm5 minimax minimax_m3 poolside_v1 solar_open2 step3 step3p5 xlam"
)
_OTHER_REASONING: Final = (
    "cohere_command4 deepseek_v4 hunyuan_a13b hy_v3 inkling kimi_k3 "
    "minimax_m2_append_think minimax_m3 nemotron_v3 olmo3 poolside_v1 solar_open2 step3 step3p5"
)
#: vLLM's words for values of our fields.
WORDS: Final[dict[str, dict[str, Any]]] = {
    "dtype": {"half": "float16", "float": "float32"},
    "max_model_len": {"auto": None, "-1": None},
    "generation_config": {"vllm": "none"},
    "load_format": dict.fromkeys(
        ("safetensors", "pt", "hf", "npcache", "mistral", "runai_streamer", "fastsafetensors"),
        "auto",
    ),
    "quantization": {
        "awq_marlin": "awq",
        "gptq_marlin": "gptq",
        "compressed-tensors": "fp8",
        "gpt_oss_mxfp4": "mxfp4",
    },
    "tool_parser": {
        "openai": "harmony",
        "glm47": "glm45",
        "llama4_json": "llama3_json",
        "qwen3_xml": "qwen3_coder",
        "cohere_command3": "command",
        "phi4_mini_json": "phi4_mini",
        "llama4_pythonic": "pythonic",
        **dict.fromkeys(_OTHER_TOOLS.split(), "auto"),
    },
    "reasoning_parser": {
        "openai_gptoss": "harmony",
        "cohere_command3": "command",
        **dict.fromkeys(_THINK.split(), "think"),
        **dict.fromkeys(_OTHER_REASONING.split(), "auto"),
    },
}
_ATTENTION: Final = {"FLASHINFER": "flashinfer", "TRITON_ATTN": "triton", "TORCH_SDPA": "sdpa"}
_POOLING: Final = {"LAST": "last", "MEAN": "mean"}


class Missing(Exception):
    """An option asks for something that does not exist here; ``value`` is what, "" if any does."""

    def __init__(self, what: str, value: Any = ""):
        super().__init__(what)
        self.value = value


def own_word(field: str, value: Any) -> Any:
    """A value of one of our fields, if it is one of vLLM's words or a number such as 16k."""
    words = WORDS.get(field, {})
    if isinstance(value, (str, int)) and str(value) in words:
        return words[str(value)]
    if isinstance(value, str) and value[-1:] in _SUFFIXES and _kinds().get(field) is int:
        return whole_number(value, field)
    return value


def own_value(field: str, value: Any) -> Any:
    """A value of one of our fields, which may be text as on the command line.

    Raises:
        BadRequest: it is no such value; ``param`` names the field.
    """
    value = own_word(field, value)
    if not isinstance(value, str):
        return value
    kind = _kinds()[field]
    if kind is int:
        return whole_number(value, field)
    try:
        return value if kind is str else msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise BadRequest(str(error), param=field) from None


def whole_number(text: str, field: str | None = None) -> int:
    """The number that is written as 4096, 4k or 4K.

    Raises:
        BadRequest: it is none.
    """
    digits, factor = (text[:-1], _SUFFIXES[text[-1]]) if text[-1:] in _SUFFIXES else (text, 1)
    try:
        # 25.6k is a whole number, too.
        value = round(float(digits) * factor, 6) if factor % 1000 == 0 else int(digits) * factor
        if value != int(value):
            raise ValueError
    except (ValueError, OverflowError):
        raise BadRequest(f"invalid int value: {text!r}", param=field) from None
    return int(value)


def merged(old: Any, new: Any) -> Any:
    """The value of an option that is given again: the last one; objects have the keys of both."""
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {key: merged(old.get(key), value) for key, value in new.items()}
    return new


def is_true(value: Any) -> bool:
    """Whether a flag is on, which is given as text where it came from a file or a variable."""
    return value if isinstance(value, bool) else str(value).lower() not in ("false", "0", "no")


def json_object(value: Any) -> dict[str, Any]:
    """A JSON object, or the text of one.

    Raises:
        BadRequest: it is something else.
    """
    try:
        found = msgspec.json.decode(value) if isinstance(value, str) else value
    except msgspec.DecodeError as error:
        raise BadRequest(f"{value!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequest(f"{value!r} is not a JSON object")
    return found


@cache
def _kinds() -> dict[str, Any]:
    """The types of our fields."""
    structs = (EngineConfig, ServerConfig, RayConfig)
    hints = {name: hint for struct in structs for name, hint in get_type_hints(struct).items()}
    return {name: type_of(hint)[0] for name, hint in hints.items()}


# -- our fields for a value ------------------------------------------------------------------------


def renamed(field: str) -> FieldsOf:
    """The value as it is."""
    return lambda value: {field: value}


def flag(field: str, on: Any = True, off: Any = False) -> FieldsOf:
    return lambda value: {field: on if is_true(value) else off}


def rope_override(key: str) -> FieldsOf:
    return lambda value: {
        "hf_overrides": {key: json_object(value) if key == "rope_scaling" else float(value)}
    }


def origins(value: Any) -> dict[str, Any]:
    is_list = isinstance(value, str) and value.startswith("[")
    found = msgspec.json.decode(value) if is_list else value
    return {"cors_origin": found if isinstance(found, list) else [found]}


def attention(value: Any) -> dict[str, Any]:
    known = _ATTENTION.get(str(value).upper())
    return {} if known is None else {"attention": known}


def policy(value: Any) -> dict[str, Any]:
    return {"policy": "fcfs"} if value == "fcfs" else {}


def prefill_threshold(value: Any) -> dict[str, Any]:
    return {"prefill_chunk": None if str(value) == "0" else value}


def traces_endpoint(value: Any) -> dict[str, Any]:
    return {"otlp_endpoint": str(value).removesuffix("/v1/traces")}


def kv_events(value: Any) -> dict[str, Any]:
    config = json_object(value)
    if not config.get("enable_kv_cache_events") or config.get("publisher") == "null":
        return {}
    endpoint, topic = config.get("endpoint", "tcp://*:5557"), config.get("topic", "")
    return {"kv_events": endpoint, "kv_events_topic": topic}


def pooling(value: Any) -> dict[str, Any]:
    config = json_object(value)
    name = config.get("pooling_type") or config.get("seq_pooling_type")
    if name is None:
        return {}
    if str(name).upper() not in _POOLING:
        raise Missing(f"an embedding is the last token's state or the mean, not {name}")
    return {"pooling": _POOLING[str(name).upper()]}


def max_logprobs(value: Any) -> dict[str, Any]:
    if not 0 <= int(value) <= _MAX_LOGPROBS:
        raise Missing(f"a request may ask for {_MAX_LOGPROBS} logprobs at most")
    return {}
