"""Chooses a model's formats by its chat template, and the special tokens they need visible."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncllm.errors import BadRequest
from asyncllm.text.parsing.formats import Formats
from asyncllm.text.parsing.registry import REASONING_FORMATS, TOOL_FORMATS

if TYPE_CHECKING:
    from collections.abc import Iterable

#: A format's name that means: choose by the template.
AUTO = "auto"
#: A format's name that means: no format.
NONE = "none"

# All texts of a row occur in the templates of one family; the first row that fits is taken.
_TOOLS_BY_TEMPLATE = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("[TOOL_CALLS]", "[ARGS]"), "mistral_args"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<｜tool▁call▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁call▁begin｜>",), "deepseek_v31"),
    (("<|tool_call_argument_begin|>",), "kimi_k2"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<|START_ACTION|>",), "command"),
    (("<TOOLCALL>",), "nemotron"),
    (("<function_calls>",), "olmo3"),
    (("<tool_call>", "<arg_key>"), "glm45"),
    (("<tool_call>", "<function=", "<parameter="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<|tool_call|>",), "granite"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)
_REASONING_BY_TEMPLATE = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("[THINK]",), "mistral"),
    (("<|START_THINKING|>",), "command"),
    (("<seed:think>",), "seed_oss"),
    (("<think></think>", "<response></response>"), "granite_tags"),
    (("</think>",), "think"),
    (("<think>",), "think"),
    (("Here is my thought process:",), "granite"),
)

# For models without a template, or whose template does not write calls or reasoning.
_TOOLS_BY_MODEL = {
    "gpt_oss": "harmony",
    "mistral": "mistral",
    "ministral": "mistral",
    "ministral3": "mistral_args",
    "mistral3": "mistral",
    "mixtral": "mistral",
    "qwen2": "hermes",
    "qwen2_5_vl": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "qwen3_vl": "hermes",
    "smollm3": "hermes",
    "olmo3": "olmo3",
    "glm4_moe": "glm45",
    "seed_oss": "seed_oss",
    "deepseek_v3": "deepseek_v3",
    "phi3": "phi4_mini",
}
_REASONING_BY_MODEL = {
    "gpt_oss": "harmony",
    "qwen3": "think",
    "qwen3_moe": "think",
    "smollm3": "think",
    "glm4_moe": "think",
    "seed_oss": "seed_oss",
    "deepseek_v3": "think",
}


def choose_formats(
    chat_template: str | None,
    model_type: str | None = None,
    *,
    tools: str = AUTO,
    reasoning: str = AUTO,
) -> Formats:
    """The formats in which a model writes tool calls and reasoning.

    Args:
        chat_template: the template's source; of several, the one for requests with tools.
        model_type: as in the model's config.json.
        tools: the name of a format in TOOL_FORMATS, "none", or "auto": by the template, else by the
            model, else the generic "json".
        reasoning: likewise of REASONING_FORMATS; by the template, else by the model, else none.

    Raises:
        BadRequest: there is no format of that name, or the two cannot be combined.
    """
    template = chat_template or ""
    if tools == AUTO:
        tools = _by_template(template, _TOOLS_BY_TEMPLATE) or _TOOLS_BY_MODEL.get(
            model_type or "", "json"
        )
        if reasoning != AUTO and (tools == "harmony") != (reasoning == "harmony"):
            tools = "harmony" if reasoning == "harmony" else "json"
    if reasoning == AUTO:
        reasoning = _by_template(template, _REASONING_BY_TEMPLATE) or _REASONING_BY_MODEL.get(
            model_type or "", NONE
        )
        if (tools == "harmony") != (reasoning == "harmony"):
            reasoning = "harmony" if tools == "harmony" else NONE
    try:
        return Formats(
            None if tools == NONE else TOOL_FORMATS[tools],
            None if reasoning == NONE else REASONING_FORMATS[reasoning],
        )
    except KeyError as error:
        known = sorted({*TOOL_FORMATS, *REASONING_FORMATS, AUTO, NONE})
        raise BadRequest(f"there is no parser {error}; known are {known}") from error
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _by_template(template: str, rows: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    return next((name for texts, name in rows if all(text in template for text in texts)), None)


def visible_special_tokens(formats: Formats, special_tokens: Iterable[str]) -> frozenset[str]:
    """The special tokens that a parser must see in the text; all others should stay hidden."""
    markers = formats.markers()
    return frozenset(
        token for token in special_tokens if token and any(token in marker for marker in markers)
    )
