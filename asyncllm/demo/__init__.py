"""The built-in demo model: what ``asyncllm serve`` serves when no model is named.

A Qwen3 of about five million weights in plain Hugging Face format. ``examples/train_demo`` trains
it from text that it generates itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: Its name for clients, and the name that serves it unless a folder has it.
NAME: Final = "asyncllm-demo"


def path() -> Path:
    """Return the folder that holds the model's configuration, tokenizer and weights."""
    return Path(__file__).parent / "model"
