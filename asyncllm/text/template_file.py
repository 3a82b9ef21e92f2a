"""Reads a chat template from the user's file, which replaces the model's own."""

from __future__ import annotations

from pathlib import Path

import jinja2

from asyncllm.errors import ModelError
from asyncllm.text.jinja_env import template_environment


def read_template(path: str) -> str:
    """The source of the template in a file.

    Raises:
        ModelError: the file cannot be read, or it does not compile.
    """
    try:
        source = Path(path).expanduser().read_text("utf-8")
        template_environment().from_string(source)
    except OSError as error:
        raise ModelError(f"cannot read chat_template {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"chat_template {path} is not UTF-8") from error
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(f"chat_template {path}, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, RecursionError) as error:
        raise ModelError(f"chat_template {path}: {error}") from error
    return source
