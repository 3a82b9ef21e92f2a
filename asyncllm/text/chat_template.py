"""Chat messages to prompt text, by the Jinja template that comes with a model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, Self

import jinja2

from asyncllm.errors import BadRequest, ModelError
from asyncllm.text.chat_messages import MessageForm
from asyncllm.text.jinja_env import template_environment
from asyncllm.text.model_files import read_json, read_special_tokens

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

# Names of templates for requests with tools, the best first.
_WITH_TOOLS = ("tool_use", "default")

# The same mark as transformers: its space shows whether a template strips the message.
_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """The chat template of one model, compiled once.

    Renders what transformers' ``apply_chat_template(tokenize=False)`` renders. A template is asked
    once, with probes, which form of messages it takes; see ``_Template``.
    """

    def __init__(
        self, sources: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ):
        """Compile a template, or several by name.

        Args:
            sources: the template. Of several, "tool_use" serves requests with tools and "default"
                all others.
            special_tokens: what templates see as ``bos_token``, ``eos_token``, ...

        Raises:
            ModelError: a template does not compile.
        """
        if isinstance(sources, str):
            sources = {"default": sources}
        self._sources = dict(sources)
        environment = template_environment()
        # What transformers passes to every template; a variable of a request overrides it.
        defaults = {**(special_tokens or {}), "tools": None, "documents": None}
        try:
            self._templates = {
                name: _Template(environment, source, defaults) for name, source in sources.items()
            }
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template does not compile: {error}") from error

    #: A chat of at most this many messages, parts, calls and tools is rendered on the event loop
    #: itself. Each takes 5 to 30 us, and the hop to a thread and back about 100.
    INLINE_PIECES: Final = 128

    @classmethod
    def from_folder(cls, folder: Path) -> Self | None:
        """The chat template of a model folder, None if it has none.

        chat_template.jinja (and additional_chat_templates/*.jinja) come before the entry in
        tokenizer_config.json.

        Raises:
            ModelError: a template does not compile, or a file is not valid JSON.
        """
        sources = {
            path.stem: path.read_text("utf-8")
            for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
        }
        if (single := folder / "chat_template.jinja").is_file():
            sources["default"] = single.read_text("utf-8")
        if not sources:
            sources = _configured_sources(read_json(folder / "tokenizer_config.json"))
        return cls(sources, read_special_tokens(folder)) if sources else None

    @property
    def source(self) -> str:
        """Of the template for requests with tools; "" when there is none."""
        return next((self._sources[name] for name in _WITH_TOOLS if name in self._sources), "")

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> str:
        """The prompt text for a conversation.

        Args:
            messages: OpenAI's messages; content is a string or a list of text parts.
            tools: OpenAI's tool definitions, for templates that know tools.
            add_generation_prompt: end with the header of the assistant's next message.
            continue_final_message: end within the final message, for the model to continue it;
                excludes ``add_generation_prompt``.
            variables: further variables for the template, such as ``enable_thinking``.

        Raises:
            BadRequest: the messages are malformed, or the template refuses them or fails.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        template = self._choose(with_tools=tools is not None)
        formed = template.form.apply(messages)
        final_text = _open_final_message(formed[-1]) if continue_final_message else ""
        try:
            text = template.render(
                {
                    **variables,
                    "messages": formed,
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # a template can raise anything Python can
            raise BadRequest(f"chat template: {error}", param="messages") from error
        return _cut_open_end(text, final_text) if continue_final_message else text

    async def render_async(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """``render``; a long chat in a thread, so that the event loop runs on meanwhile."""
        if _num_pieces(messages, tools) <= self.INLINE_PIECES:
            return self.render(messages, tools=tools, **options)
        return await asyncio.to_thread(self.render, messages, tools=tools, **options)

    def _choose(self, *, with_tools: bool) -> _Template:
        names = _WITH_TOOLS if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise BadRequest(
            f"the model has no default chat template, only {sorted(self._templates)}",
            param="messages",
        )


def _num_pieces(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> int:
    count = len(messages) + len(tools or ())
    for message in messages:
        for name in ("content", "tool_calls"):
            if isinstance(inside := message.get(name), list):
                count += len(inside)
    return count


class _Template:
    """A compiled template, and the form of messages that it takes.

    Content as a list of parts is kept for templates that print a list's text. For tool calls the
    first form counts that makes the template print the call: most take any, DeepSeek's older ones
    want arguments as JSON text and None as content. The role "developer" is kept for templates that
    mention it.
    """

    def __init__(
        self,
        environment: jinja2.Environment,
        source: str,
        defaults: Mapping[str, Any],
    ):
        self._template = environment.from_string(source)
        self._defaults = defaults
        default = MessageForm(keep_parts=self._prints_parts(), keep_developer="developer" in source)
        forms = (
            replace(default, parse_arguments=parse_arguments, no_content=no_content)
            for parse_arguments in (True, False)
            for no_content in ({}, {"content": ""}, {"content": None})
        )
        self.form = next((form for form in forms if self._prints_tool_call(form)), default)

    def render(self, variables: Mapping[str, Any]) -> str:
        return self._template.render({**self._defaults, **variables})

    def _prints_parts(self) -> bool:
        text = self._probe([{"role": "user", "content": [{"type": "text", "text": "PROBE"}]}])
        return "PROBE" in text and "'type'" not in text  # not the list as Python prints it

    def _prints_tool_call(self, form: MessageForm) -> bool:
        function = {"name": "PROBE", "arguments": '{"key": "value"}'}
        call = {"id": "call_0000", "type": "function", "function": function}
        conversation: list[dict[str, Any]] = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
        text = self._probe(form.apply(conversation))
        return "PROBE" in text and "'key'" not in text

    def _probe(self, messages: list[dict[str, Any]]) -> str:
        """The text of a conversation; "" if the template fails on it."""
        try:
            return self.render({"messages": messages, "add_generation_prompt": False})
        except Exception:  # a template can raise anything Python can
            return ""


def _configured_sources(config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name from a tokenizer_config.json: one string, or a list of named ones."""
    entry = config.get("chat_template") or []
    if isinstance(entry, str):
        return {"default": entry}
    try:
        return {template["name"]: template["template"] for template in entry}
    except (KeyError, TypeError) as error:
        raise ModelError("chat_template in tokenizer_config.json is malformed") from error


def _open_final_message(message: dict[str, Any]) -> str:
    """Mark where the final message's text ends; return that text."""
    match message.get("content"):
        case str(text):
            message["content"] = text + _OPEN_END
        case [*_, {"text": str(text)} as part]:
            part["text"] = text + _OPEN_END
        case _:
            raise BadRequest("the final message has no text to continue", param="messages")
    return text


def _cut_open_end(rendered: str, final_text: str) -> str:
    """The rendered text up to the mark."""
    end = rendered.rfind(_OPEN_END.strip())
    if end < 0 or final_text.strip() not in rendered:
        raise BadRequest(
            "the chat template changes the final message: it cannot be continued",
            param="messages",
        )
    # A template that strips messages stripped the mark's space, and would have stripped the text's.
    return rendered[:end] if rendered.startswith(_OPEN_END, end) else rendered[:end].rstrip()
