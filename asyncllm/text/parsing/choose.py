"""Chooses a model's formats by its chat template, and the special tokens they need visible."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import Final

from msgspec.structs import replace

from asyncllm.errors import BadRequest, ModelError
from asyncllm.text.chat_template import ChatTemplate
from asyncllm.text.parsing.derived.calls import derive_format
from asyncllm.text.parsing.derived.probe import (
    TOOLS,
    RenderedCalls,
    render_calls,
    render_reasoning,
    same_arguments,
)
from asyncllm.text.parsing.derived.reasoning import derive_reasoning
from asyncllm.text.parsing.events import message_of
from asyncllm.text.parsing.formats import ChannelFormat, Formats, ReasoningFormat, ToolFormat
from asyncllm.text.parsing.known_formats import HARMONY, REASONING_FORMATS, TOOL_FORMATS
from asyncllm.text.parsing.parser import Parser

log = logging.getLogger(__name__)

#: A format's name that means: choose by the template.
AUTO: Final = "auto"
#: A format's name that means: no format.
NONE: Final = "none"

#: Tags that end an answer with calls; the tokenizer hides them from a parser.
_TURN_END = re.compile(r"(<[^<>\s]+>\s*)*")

# For templates that write no calls, and so cannot be asked: all texts of a row occur in those of
# one family; the first row that fits is taken.
_TOOLS_BY_TEXT = (
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
    (("<|tool|>", "<|/tool|>"), "phi4_mini"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<|python_tag|>",), "llama3_json"),
    (("<|start_header_id|>", '"parameters"'), "llama3_json"),
)
_REASONING_BY_TEXT = (
    (("<|channel|>", "<|message|>"), "harmony"),
    (("[THINK]",), "mistral"),
    (("<|START_THINKING|>",), "command"),
    (("<seed:think>",), "seed_oss"),
    (("<|channel>thought",), "gemma4"),
    (("<think></think>", "<response></response>"), "granite_tags"),
    (("</think>",), "think"),
    (("<think>",), "think"),
    (("Here is my thought process:",), "granite"),
)

# For models without a template, or whose template does not write calls or reasoning: the types of
# models by format.
_TOOLS_BY_MODEL = {
    "harmony": ("gpt_oss",),
    "mistral": ("mistral", "ministral", "mistral3", "mixtral"),
    "mistral_args": ("ministral3",),
    "hermes": ("qwen2", "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl", "smollm3"),
    "olmo3": ("olmo3",),
    "glm45": ("glm4_moe",),
    "seed_oss": ("seed_oss",),
    "deepseek_v3": ("deepseek_v3",),
    "phi4_mini": ("phi3",),
    "lfm2": ("lfm2", "lfm2_moe"),
    "gemma4": ("gemma4", "gemma4_text"),
    "glm4": ("glm4",),
    "granite": ("granite", "granitemoe"),
}
_REASONING_BY_MODEL = {
    "harmony": ("gpt_oss",),
    "think": ("qwen3", "qwen3_moe", "smollm3", "glm4_moe", "deepseek_v3"),
    "seed_oss": ("seed_oss",),
    "gemma4": ("gemma4", "gemma4_text"),
}


def choose_formats(
    chat_template: str | ChatTemplate | None,
    model_type: str | None = None,
    *,
    tools: str = AUTO,
    reasoning: str = AUTO,
) -> Formats:
    """The formats in which a model writes tool calls and reasoning.

    The template is asked: it renders calls, and the format is the one that reads them back. If none
    of ours does, one is derived from what the template wrote. Where a template writes no calls, its
    text or the model's type tells. The log says what was found, and warns if nothing was.

    Args:
        chat_template: of several, the one for requests with tools.
        model_type: as in the model's config.json.
        tools: the name of a format in TOOL_FORMATS, "none", or "auto": by the template, else by the
            model, else the generic "json".
        reasoning: likewise of REASONING_FORMATS; by the template, else by the model, else none.

    Raises:
        BadRequest: there is no format of that name, or the two cannot be combined.
    """
    known = {AUTO, NONE}
    for name, named in ((tools, TOOL_FORMATS), (reasoning, REASONING_FORMATS)):
        if name not in {*named, *known}:
            choices = sorted({*TOOL_FORMATS, *REASONING_FORMATS, *known})
            raise BadRequest(f"there is no parser {name!r}; known are {choices}")
    template = _compiled(chat_template)
    tagged = _reasoning_of(template, model_type or "")
    if tools == AUTO:
        calls: ToolFormat | ChannelFormat | None = _tools_of(template, model_type or "", tagged)
        if reasoning != AUTO and (calls == HARMONY) != (reasoning == HARMONY.name):
            calls = TOOL_FORMATS["harmony" if reasoning == "harmony" else "json"]
    else:
        calls = TOOL_FORMATS.get(tools)
    thoughts: ReasoningFormat | ChannelFormat | None
    if reasoning == AUTO:
        thoughts = HARMONY if calls == HARMONY else tagged
    else:
        thoughts = REASONING_FORMATS.get(reasoning)
    try:
        return Formats(calls, thoughts)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _compiled(chat_template: str | ChatTemplate | None) -> ChatTemplate:
    try:
        if isinstance(chat_template, ChatTemplate):
            return chat_template
        return ChatTemplate(chat_template or "")
    except ModelError:
        return ChatTemplate("")


def _tools_of(
    template: ChatTemplate, model_type: str, reasoning: ReasoningFormat | None
) -> ToolFormat | ChannelFormat:
    """The format of a model's calls, which the log is told."""
    by_model = _by_model(model_type, _TOOLS_BY_MODEL)
    guess = TOOL_FORMATS[_by_text(template.source, _TOOLS_BY_TEXT) or by_model or "json"]
    written = ""
    for rendered in render_calls(template):
        written = written or rendered.texts[0]
        if form := _reading(_without_reasoning(rendered, reasoning), by_model):
            log.info("tool calls are read as the chat template writes them: format %s", form.name)
            return form
    if written:
        what = f"writes tool calls in a form that is not known, {written!r}"
    elif re.search(r"\btools\b", template.source):
        what = "offers tools but writes no calls"
    else:
        return guess
    log.warning(
        "the chat template %s: calls may not be read. They are looked for in format %s; "
        "--tool-parser names another, or none",
        what,
        guess.name,
    )
    return guess


def _without_reasoning(rendered: RenderedCalls, reasoning: ReasoningFormat | None) -> RenderedCalls:
    """The calls without empty reasoning, and an empty answer, before them."""
    if reasoning is None:
        return rendered
    begins, ends = ("|".join(map(re.escape, m)) for m in (reasoning.begins, reasoning.ends))
    empty = [re.compile(rf"\s*(?:{begins})?\s*(?:{ends})")]
    if reasoning.answer:
        begin, end = map(re.escape, reasoning.answer[:2])
        empty.append(re.compile(rf"\A\s*(?:{begin})?\s*{end}"))
    texts = rendered.texts
    for pattern in empty:
        texts = tuple(pattern.sub("", text, count=1) for text in texts)
    return replace(rendered, texts=texts)


def _reading(rendered: RenderedCalls, by_model: str | None) -> ToolFormat | ChannelFormat | None:
    """The format that reads these calls: of several the one that writes them like this, too."""
    names = (*filter(None, (by_model,)), *TOOL_FORMATS)
    listed = [form for form in map(TOOL_FORMATS.__getitem__, names) if _reads(form, rendered)]
    if alike := [form for form in listed if _writes(form, rendered)]:
        return alike[0]
    derived = derive_format(rendered)
    if derived is None or not _reads(derived, rendered):
        return listed[0] if listed else None
    if listed and isinstance(listed[0], ToolFormat):
        return replace(listed[0], template=derived.template)
    return derived


def _reads(form: ToolFormat | ChannelFormat, rendered: RenderedCalls) -> bool:
    """Whether a format finds the calls in a text, and nothing else but the turn's end."""
    formats = Formats(form, form if isinstance(form, ChannelFormat) else None)
    for count, text in enumerate(rendered.texts, start=1):
        parser = Parser(formats, tools=TOOLS, prompt=rendered.before)
        message = message_of(parser.feed(text) + parser.finish())
        if len(message.calls) != count or not all(
            found.name == call.name and same_arguments(found.arguments, call)
            for found, call in zip(message.calls, rendered.calls, strict=False)
        ):
            return False
        rest = message.content.strip()
        if not _TURN_END.fullmatch(rest) or not text.rstrip().endswith(rest):
            return False
    return True


def _writes(form: ToolFormat | ChannelFormat, rendered: RenderedCalls) -> bool:
    """Whether calls forced by a grammar begin like these, apart from spaces and ids."""
    template, body = form.template, None
    if isinstance(form, ToolFormat):
        body = next((call.named for call in form.calls if call.named is not None), None)
    text = rendered.texts[0]
    if body is not None and body.call_id:
        text = re.sub(re.escape(body.call_id) + r"\w+", "", text)
    written = template.begin + template.before_name + rendered.calls[0].name + template.after_name
    forced = "".join(written.removesuffix("**").split())
    return isinstance(form, ChannelFormat) or "".join(text.split()).startswith(forced)


def _reasoning_of(template: ChatTemplate, model_type: str) -> ReasoningFormat | None:
    """The format of a model's reasoning, where its calls are in no channel."""
    listed = [form for form in REASONING_FORMATS.values() if isinstance(form, ReasoningFormat)]
    rendered = render_reasoning(template)
    if rendered is not None and (form := derive_reasoning(rendered, listed)) is not None:
        return form
    by_model = _by_model(model_type, _REASONING_BY_MODEL)
    name = _by_text(template.source, _REASONING_BY_TEXT) or by_model
    return next((form for form in listed if form.name == name), None)


def _by_text(source: str, rows: tuple[tuple[tuple[str, ...], str], ...]) -> str | None:
    return next((name for texts, name in rows if all(text in source for text in texts)), None)


def _by_model(model_type: str, rows: dict[str, tuple[str, ...]]) -> str | None:
    return next((name for name, types in rows.items() if model_type in types), None)


def visible_special_tokens(formats: Formats, special_tokens: Iterable[str]) -> frozenset[str]:
    """The special tokens that a parser must see in the text; all others should stay hidden."""
    markers = formats.markers()
    return frozenset(
        token for token in special_tokens if token and any(token in marker for marker in markers)
    )
