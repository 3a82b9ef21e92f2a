"""Chat messages to prompt text, by the Jinja template that comes with a model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from copy import copy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import jinja2
from msgspec.structs import replace

from asyncllm.errors import BadRequest, ModelError
from asyncllm.text.model_files import read_json, read_special_tokens
from asyncllm.text.template_form import (
    Form,
    Message,
    WriteCalls,
    calls_as_json,
    checked,
    fallbacks,
    find_form,
    is_lost,
)
from asyncllm.text.template_sandbox import BudgetedSandbox, TooMuchWork, Work, template_environment

#: Rendering on the event loop. A model's own template takes some ten steps a message, of about a
#: microsecond each.
INLINE: Final = Work(steps=10_000, seconds=0.02)
#: Of so many parts of messages, tools and variables; of more, what comes before takes long as well.
FEW: Final = 128
#: Rendering in a thread: far more than a request needs.
MOST: Final = Work(steps=1_000_000, seconds=2.0)
#: Rendering a conversation of a few messages.
_PROBE: Final = Work(steps=20_000, seconds=1.0)

# Names of templates for requests with tools, the best first.
_WITH_TOOLS = ("tool_use", "default")

# The same marker as in transformers: its space shows whether a template strips the message.
_OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """The chat template of one model, compiled once.

    Renders the same text as transformers' ``apply_chat_template(tokenize=False)``, if the template
    can place every message. Otherwise the messages are brought into a form that it takes:
    ``asyncllm.text.template_form``.
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
        self._write_calls: WriteCalls = calls_as_json

    def with_calls(self, write: WriteCalls) -> Self:
        """A copy that writes like this the calls that its templates do not print."""
        made = copy(self)
        made._write_calls = write
        return made

    @classmethod
    def from_folder(
        cls, folder: Path, source: str | None = None, variables: Mapping[str, Any] | None = None
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

    @property
    def cannot(self) -> str:
        """What the templates cannot do, and what is done instead; "" if they can do everything."""
        return "; ".join(
            (f"{name}: " if len(self._templates) > 1 else "") + "; ".join(template.cannot)
            for name, template in self._templates.items()
            if template.cannot
        )

    async def render_async(self, messages: Sequence[Mapping[str, Any]], /, **options: Any) -> str:
        """Like ``render``; what takes long runs in a thread, one rendering after the other."""
        work = partial(self.render, messages, **options)
        if _num_parts(messages) + len(options.get("tools") or ()) + len(options) <= FEW:
            with suppress(TooMuchWork, _NoFormFits):
                return self.render(messages, work=INLINE, most_forms=1, **options)
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
        most_forms: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        as_text: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text for a conversation.

        Args:
            messages: OpenAI's messages; content is a string or a list of text parts.
            most_forms: in how many forms the messages are tried.
            tools: OpenAI's tool definitions, for templates that know tools.
            add_generation_prompt: end with the header of the assistant's next message.
            continue_final_message: end within the final message, for the model to continue it;
                excludes ``add_generation_prompt``.
            as_text: write the calls and tools that the template does not print.
            variables: further variables for the template, such as ``enable_thinking``.

        Raises:
            BadRequest: the messages are malformed, or the template fails in every form of them.
            TooMuchWork: more than ``work``.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        template = self._choose(with_tools=tools is not None)
        given = checked(messages)
        if continue_final_message and given[-1].get("content", []) == []:
            raise BadRequest("the final message has no text to continue", param="messages")
        options = {**variables, "add_generation_prompt": add_generation_prompt}
        with template.budget(work):
            write = self._write_calls if as_text else None
            tries = template.tries(given, tools, options, write, continues=continue_final_message)
            return _best(islice(tries, most_forms), given, is_all=most_forms is None)

    def _choose(self, *, with_tools: bool) -> _Template:
        names = _WITH_TOOLS if with_tools else ("default",)
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise BadRequest(
            f"the model has no default chat template, only {sorted(self._templates)}",
            param="messages",
        )


def _num_parts(messages: Sequence[Mapping[str, Any]]) -> int:
    """Messages, and what they list."""
    if len(messages) > FEW:
        return len(messages)
    lists = (value for message in messages for value in dict(message).values())
    return len(messages) + sum(len(value) for value in lists if isinstance(value, list))


class _NoFormFits(BadRequest):
    """The template fails, or loses a text, in the forms that were tried."""


def _best(tries: Iterator[str | BadRequest], given: Sequence[Message], *, is_all: bool) -> str:
    """The first text without a loss; else, of all forms, the first text that there is.

    A template may change texts in a way that only looks like a loss.
    """
    texts: list[str] = []
    errors: list[BadRequest] = []
    for outcome in tries:
        if isinstance(outcome, BadRequest):
            errors.append(outcome)
        elif is_lost(given, outcome):
            texts.append(outcome)
        else:
            return outcome
    if not is_all:
        raise _NoFormFits("the template does not take the messages as they are", param="messages")
    if not texts:
        raise errors[0]
    return texts[0]


class _Template:
    """A compiled template.

    Attributes:
        cannot: what it cannot do.
    """

    def __init__(self, environment: BudgetedSandbox, source: str, defaults: Mapping[str, Any]):
        self._environment = environment
        self._template = environment.from_string(source)
        self._defaults = defaults
        found = find_form(self._probe, keep_developer="developer" in source)
        self.cannot = found.cannot
        self._forms = (found.form, *fallbacks(found.form))

    def budget(self, work: Work) -> AbstractContextManager[None]:
        """Within this, rendering raises ``TooMuchWork`` when it takes more."""
        return self._environment.budget(work)

    def tries(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        write: WriteCalls | None,
        *,
        continues: bool,
    ) -> Iterator[str | BadRequest]:
        """The text of checked messages in one form after the other, or why there is none.

        Args:
            write: writes calls that the template does not print; without it they are left out.
        """
        for form in self._forms:
            if write is None:
                calls = "parallel" if form.calls == "text" else form.calls
                form = replace(form, calls=calls, tools_as_text=False)
            try:
                yield self._in_form(form, messages, tools, options, write, continues=continues)
            except TooMuchWork:
                raise
            except BadRequest as error:
                yield error
            except Exception as error:  # a template can raise anything Python can
                yield BadRequest(f"chat template: {error}", param="messages")

    def _in_form(
        self,
        form: Form,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        write: WriteCalls | None,
        *,
        continues: bool,
    ) -> str:
        formed, offered = form.apply(messages, tools, write or calls_as_json)
        final_text = _open_final_message(formed[-1]) if continues else ""
        text = self._render({**options, "messages": formed, "tools": offered})
        return _cut_open_end(text, final_text) if continues else text

    def _render(self, variables: Mapping[str, Any]) -> str:
        return self._template.render({**self._defaults, **variables})

    def _probe(
        self, messages: list[Message], tools: Sequence[Mapping[str, Any]] | None
    ) -> str | None:
        """The text of a conversation; None if the template fails on it."""
        options = {"messages": messages, "tools": tools, "add_generation_prompt": True}
        try:
            with self.budget(_PROBE):
                return self._render(options)
        except TooMuchWork:
            raise
        except Exception:  # a template can raise anything Python can
            return None


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
            return text
        case [*_, {"text": str(text)} as part]:
            part["text"] = text + _OPEN_END
            return text
    raise BadRequest("the final message has no text to continue", param="messages")


def _cut_open_end(rendered: str, final_text: str) -> str:
    """The rendered text up to the marker."""
    end = rendered.rfind(_OPEN_END.strip())
    if end < 0 or final_text.strip() not in rendered:
        raise BadRequest(
            "the chat template changes the final message: it cannot be continued", param="messages"
        )
    # A template that stripped the marker's space would have stripped the text's, too.
    return rendered[:end] if rendered.startswith(_OPEN_END, end) else rendered[:end].rstrip()
