"""The Jinja environment that chat templates are written for: transformers' dialect."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.utils import Namespace

from asyncllm.errors import ModelError
from asyncllm.text.template_budget import BudgetedSandbox

if TYPE_CHECKING:
    from jinja2.parser import Parser


def template_environment() -> BudgetedSandbox:
    """A sandbox for a model's templates, which are untrusted code."""
    environment = BudgetedSandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.limit_filters()
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, namespace=_Namespace
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
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


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
