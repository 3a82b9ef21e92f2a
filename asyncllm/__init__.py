"""asyncllm serves large language models from one asyncio process.

The public names are loaded on first use, so ``import asyncllm`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncllm.api import AsyncLLM
    from asyncllm.client import Client
    from asyncllm.config import EngineConfig
    from asyncllm.offline import LLM
    from asyncllm.types import Completion, SamplingParams, TokenDelta

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "asyncllm.api",
    "Client": "asyncllm.client",
    "Completion": "asyncllm.types",
    "EngineConfig": "asyncllm.config",
    "LLM": "asyncllm.offline",
    "SamplingParams": "asyncllm.types",
    "TokenDelta": "asyncllm.types",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "Client",
    "Completion",
    "EngineConfig",
    "SamplingParams",
    "TokenDelta",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'asyncllm' has no attribute {name!r}")
    return getattr(import_module(home), name)
