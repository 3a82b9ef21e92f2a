"""The sandbox of chat templates: Jinja in transformers' dialect, with bounded work.

Templates come with models, and messages with requests: neither may block the event loop or take all
memory. Iterations, calls, filters and the length of text are counted; an operation with a huge
result is refused before it runs.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from asyncllm.errors import ModelError

if TYPE_CHECKING:
    from jinja2.parser import Parser
    from jinja2.runtime import Context

#: Characters, or elements of a list, that count as one step.
_CHARS_PER_STEP: Final = 64
_SIZED: Final = (str, list, tuple, range)
#: The most characters or elements that one operation may make.
_MAX_SIZE: Final = 1 << 26
#: The largest number that a method of a string, or a filter, takes: most are widths or counts.
_MAX_NUMBER: Final = 1 << 17
#: How many steps are between two looks at the clock.
_STEPS_PER_LOOK: Final = 64
#: A width of five digits or more, or one that is an argument.
_WIDE: Final = re.compile(r"%[^a-zA-Z%]*(?:\d{5}|\*)|\{[^{}]*(?:\d{5}|\{)")


class Work(NamedTuple):
    """The most that a rendering may do; ``seconds`` are CPU time of its thread."""

    steps: int
    seconds: float


class TooMuchWork(TemplateError):
    """A rendering has reached its limit."""

    def __init__(self) -> None:
        super().__init__("it takes too many steps, or makes too long a text")


class _Budget:
    def __init__(self, work: Work) -> None:
        self._left = work.steps
        self._end = time.thread_time() + work.seconds
        self._next_look = self._left - _STEPS_PER_LOOK

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < self._next_look:
            self._next_look = self._left - _STEPS_PER_LOOK
            if self._left < 0 or time.thread_time() > self._end:
                raise TooMuchWork


class _Rendering(threading.local):
    budget: _Budget | None = None


class BudgetedSandbox(ImmutableSandboxedEnvironment):
    """Counts the work of templates within ``budget``, in each thread separately."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._rendering = _Rendering()
        del self.globals["lipsum"]  # makes text of any length

    @contextmanager
    def budget(self, work: Work) -> Iterator[None]:
        """Within this, rendering in this thread raises ``TooMuchWork`` when it takes more."""
        self._rendering.budget = _Budget(work)
        try:
            yield
        finally:
            self._rendering.budget = None

    def make_globals(self, d: MutableMapping[str, Any] | None) -> MutableMapping[str, Any]:
        """A template's globals as a dict: each rendering copies them.

        Jinja makes a ``ChainMap``, which takes five times as long to copy.
        """
        return {**self.globals, **(d or {})}

    def limit_filters(self) -> None:
        """Count the work of all filters added so far."""
        for name, function in self.filters.items():
            self.filters[name] = self._limited(name, function)

    @property
    def counted(self) -> bool:
        """True; reading it counts one iteration of a loop."""
        self._spend(1)
        return True

    def join_text(self, *values: Any) -> str:
        """The operator ~."""
        return self.concat(map(str, values))

    def concat(self, parts: Iterable[str]) -> str:
        """Join text: Jinja calls this for templates, macros and blocks."""
        texts = list(parts)
        self._spend_size(sum(map(len, texts)))
        return "".join(texts)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            _check_method(__obj.__name__, (text, *args), kwargs)
        __self._spend(1)
        return __self._count(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_safely = super().wrap_str_format(value)
        if format_safely is not None and _WIDE.search(value.__self__):
            raise TooMuchWork
        return format_safely

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            return self._count(left + right)
        if operator == "*" and _size_of(left) * _size_of(right) > _MAX_SIZE:
            raise TooMuchWork
        bits = left.bit_length() if isinstance(left, int) else 1
        if operator == "**" and bits * max(abs(right), 1) > _MAX_NUMBER:
            raise TooMuchWork
        if operator == "%" and isinstance(left, str) and _WIDE.search(left):
            raise TooMuchWork
        return self._count(super().call_binop(context, operator, left, right))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        _Counting().visit(template)
        return template

    def _limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)  # also what Jinja is to pass to it
        def limited(*args: Any, **kwargs: Any) -> Any:
            _check_method(name, args, kwargs)
            self._spend(1)
            result = function(*args, **kwargs)
            return self._counted(result) if hasattr(result, "__next__") else self._count(result)

        return limited

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            self._spend(1)
            yield item

    def _count(self, result: Any) -> Any:
        if isinstance(result, _SIZED) and len(result) > _CHARS_PER_STEP:
            self._spend_size(len(result))
        return result

    def _spend_size(self, size: int) -> None:
        if size > _MAX_SIZE:
            raise TooMuchWork
        self._spend(size // _CHARS_PER_STEP)

    def _spend(self, steps: int) -> None:
        if (budget := self._rendering.budget) is not None:
            budget.spend(steps)


class _Counting(NodeTransformer):
    """Makes loops read ``counted``, and ~ call ``join_text``."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        counted = nodes.EnvironmentAttribute("counted", lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(counted, lineno=node.lineno))
        if node.test is not None:  # items that it rejects never come to the body
            node.test = nodes.And(counted, node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Call:
        self.generic_visit(node)
        join = nodes.EnvironmentAttribute("join_text", lineno=node.lineno)
        return nodes.Call(join, node.nodes, [], None, None, lineno=node.lineno)


def _check_method(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a call with a huge result; the first of ``args`` is the text of the method."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and value > _MAX_NUMBER and name != "tojson":
            raise TooMuchWork
    texts = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    if name == "replace" and len(texts) >= 3:
        text, old, new = texts[:3]
        if len(new) > len(old) and text.count(old) * len(new) > _MAX_SIZE:
            raise TooMuchWork
    if name == "join":
        counts = [len(value) for value in args if isinstance(value, list | tuple | range)]
        if texts and counts and len(texts[0]) * counts[0] > _MAX_SIZE:
            raise TooMuchWork
    if name == "format" and texts and _WIDE.search(texts[0]):
        raise TooMuchWork
    if name == "tojson" and _size_of(kwargs.get("indent")) > 64:
        raise TooMuchWork


def _size_of(value: Any) -> int:
    if isinstance(value, str | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int) else 1


def template_environment() -> BudgetedSandbox:
    """A sandbox for a model's templates, which are untrusted code."""
    environment = BudgetedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.limit_filters()
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda format: datetime.now().strftime(format),
        namespace=_Namespace,
    )
    return environment


def read_template(path: str) -> str:
    """The source of the template in a file, or the template itself.

    Raises:
        ModelError: the file cannot be read, or it does not compile.
    """
    try:
        is_source = "{%" in path or "{{" in path
        source = path if is_source else Path(path).expanduser().read_text("utf-8")
        template_environment().from_string(source)
    except OSError as error:
        raise ModelError(f"cannot read chat_template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"chat_template {path} is not UTF-8") from error
    except TemplateSyntaxError as error:
        raise ModelError(f"chat_template {path}, line {error.lineno}: {error.message}") from error
    except (TemplateError, RecursionError) as error:
        raise ModelError(f"chat_template {path}: {error}") from error
    return source


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's text for training; here it is only a block."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Namespace(Namespace):
    """A namespace without attributes such as ``__class__``, which would disguise it."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]  # so that a template may call an attribute "self"
        Namespace.__init__(self)
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot have the attribute {name!r}")
        super().__setitem__(name, value)
