"""Chat messages to prompt text, by the Jinja template that comes with a model."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import jinja2
from msgspec.structs import replace

from asyncllm.errors import BadRequest, ModelError
from asyncllm.text.chat_messages import MessageForm
from asyncllm.text.jinja_env import template_environment
from asyncllm.text.model_files import read_json, read_special_tokens
from asyncllm.text.template_budget import BudgetedSandbox, TooMuchWork, Work

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

#: Rendering on the event loop. A model's own template takes some ten steps a message, of about a
#: microsecond each.
INLINE: Final = Work(steps=10_000, seconds=0.02)
#: Rendering in a thread: far more than a request needs.
MOST: Final = Work(steps=1_000_000, seconds=2.0)
#: Rendering a conversation of two messages.
_PROBE: Final = Work(steps=20_000, seconds=1.0)

# Names of templates for requests with tools, the best first.
_WITH_TOOLS = ("tool_use", "default")

# The same marker as in transformers: its space shows whether a template strips the message.
_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """The chat template of one model, compiled once.

    Renders the same text as transformers' ``apply_chat_template(tokenize=False)``. Probes find out
    once which form of messages a template takes; see ``_Template``.
    """

    def __init__(
        self, sources: str | Mapping[str, str], variables: Mapping[str, Any] | None = None
    ):
        """Compile a template, or several by name.

        Args:
            sources: the template. Of several, "tool_use" serves requests with tools and "default"
                all others.
            variables: of templates, such as ``bos_token``; a request's come before them.

        Raises:
            ModelError: a template does not compile, or does not come to an end.
        """
        if isinstance(sources, str):
            sources = {"default": sources}
        self._sources = dict(sources)
        environment = template_environment()
        # Those that transformers passes to every template.
        defaults = {"tools": None, "documents": None, **(variables or {})}
        try:
            self._templates = {
                name: _Template(environment, source, defaults) for name, source in sources.items()
            }
        except TooMuchWork as error:
            raise ModelError(f"the chat template cannot be used: {error}") from None
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the chat template does not compile: {error}") from error
        self._turn = asyncio.Lock()

    @classmethod
    def from_folder(
        cls,
        folder: Path,
        source: str | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> Self | None:
        """The chat template of a model folder, None if it has none.

        chat_template.jinja (and additional_chat_templates/*.jinja) come before the entry in
        tokenizer_config.json.

        Args:
            source: a template to use instead, with the special tokens of the folder.
            variables: those that a request does not give.

        Raises:
            ModelError: a template does not compile, or a file is not valid JSON.
        """
        known = {**read_special_tokens(folder), **(variables or {})}
        if source is not None:
            return cls(source, known)
        sources = {
            path.stem: path.read_text("utf-8")
            for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
        }
        if (single := folder / "chat_template.jinja").is_file():
            sources["default"] = single.read_text("utf-8")
        if not sources:
            sources = _configured_sources(read_json(folder / "tokenizer_config.json"))
        return cls(sources, known) if sources else None

    @property
    def source(self) -> str:
        """The source of the template for requests with tools; "" if there is none."""
        return next((self._sources[name] for name in _WITH_TOOLS if name in self._sources), "")

    async def render_async(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """Like ``render``; long renderings run in a thread, one after the other."""
        try:
            return self.render(messages, work=INLINE, **options)
        except TooMuchWork:
            work = partial(self.render, messages, **options)
        async with self._turn:
            try:
                return await asyncio.to_thread(work)
            except TooMuchWork as error:
                raise BadRequest(f"chat template: {error}", param="messages") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        work: Work = MOST,
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
            TooMuchWork: more than ``work``.
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
                },
                work,
            )
        except TooMuchWork:
            raise
        except Exception as error:  # a template can raise anything Python can
            raise BadRequest(f"chat template: {error}", param="messages") from error
        return _cut_open_end(text, final_text) if continue_final_message else text

    def _choose(self, *, with_tools: bool) -> _Template:
        names = _WITH_TOOLS if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise BadRequest(
            f"the model has no default chat template, only {sorted(self._templates)}",
            param="messages",
        )


class _Template:
    """A compiled template, and the form of messages that it takes.

    Content stays a list of parts for templates that print a list's text. For tool calls, the first
    form is taken with which the template prints the call: most take any, DeepSeek's older ones want
    arguments as JSON text and None as content. The role "developer" stays for templates that
    mention it.
    """

    def __init__(
        self,
        environment: BudgetedSandbox,
        source: str,
        defaults: Mapping[str, Any],
    ):
        self._environment = environment
        self._template = environment.from_string(source)
        self._defaults = defaults
        default = MessageForm(keep_parts=self._prints_parts(), keep_developer="developer" in source)
        forms = (
            replace(default, parse_arguments=parse_arguments, no_content=no_content)
            for parse_arguments in (True, False)
            for no_content in ({}, {"content": ""}, {"content": None})
        )
        self.form = next((form for form in forms if self._prints_tool_call(form)), default)

    def render(self, variables: Mapping[str, Any], work: Work) -> str:
        with self._environment.budget(work):
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
            return self.render({"messages": messages, "add_generation_prompt": False}, _PROBE)
        except TooMuchWork:
            raise
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
    """Put a marker behind the final message's text; return that text."""
    match message.get("content"):
        case str(text):
            message["content"] = text + _OPEN_END
        case [*_, {"text": str(text)} as part]:
            part["text"] = text + _OPEN_END
        case _:
            raise BadRequest("the final message has no text to continue", param="messages")
    return text


def _cut_open_end(rendered: str, final_text: str) -> str:
    """The rendered text up to the marker."""
    end = rendered.rfind(_OPEN_END.strip())
    if end < 0 or final_text.strip() not in rendered:
        raise BadRequest(
            "the chat template changes the final message: it cannot be continued",
            param="messages",
        )
    # A template that stripped the marker's space would have stripped the text's, too.
    return rendered[:end] if rendered.startswith(_OPEN_END, end) else rendered[:end].rstrip()
