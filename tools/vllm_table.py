"""Writes the table of vLLM's options into docs/from-vllm.md: ``python -m tools.vllm_table``."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from asyncllm.vllm_options.table import sections

PAGE: Final = Path(__file__).parents[1] / "docs" / "from-vllm.md"
_START: Final = "## The table\n"


def page(text: str) -> str:
    """The page with the table as it is now, which is its last section."""
    parts = [text.partition(_START)[0] + _START]
    for title, rows in sections():
        parts.append(f"\n### {title}\n\n| of vLLM | here |\n|--|--|\n")
        parts += [f"| {_code(names)} | {_code(says)} |\n" for names, says in rows]
    return "".join(parts)


def _code(text: str) -> str:
    return re.sub(r"(?<![\w`-])--?[A-Za-z][\w-]*", r"`\g<0>`", text)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
