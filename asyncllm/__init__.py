"""asyncllm serves large language models from one asyncio process.

The public names are loaded on first use, so ``import asyncllm`` costs nothing.
"""

from __future__ import annotations

import sys

if sys.version_info < (3, 11):  # noqa: UP036 - pip checks, but a checkout runs without pip
    found = f"{sys.version_info[0]}.{sys.version_info[1]}"
    raise ImportError(f"asyncllm needs Python 3.11 or newer, and this is {found}")

from importlib import import_module
from typing import TYPE_CHECKING, Any

from asyncllm.version import __version__ as __version__

if TYPE_CHECKING:
    from asyncllm.config import EngineConfig
    from asyncllm.engine.policy import Policy
    from asyncllm.errors import (
        AsyncLLMError,
        BadRequest,
        DeadlineExceeded,
        EngineDead,
        ModelError,
        QueueFull,
        RateLimited,
    )
    from asyncllm.llm.async_llm import AsyncLLM
    from asyncllm.llm.client.client import Client
    from asyncllm.llm.llm import LLM
    from asyncllm.types import (
        Completion,
        FinishReason,
        SamplingParams,
        SchedulingParams,
        TokenDelta,
        Usage,
    )
    from asyncllm.types.beam_search import Beam, BeamSearchParams
    from asyncllm.types.embedding import EmbeddingParams

_HOMES = {
    "AsyncLLM": "asyncllm.llm.async_llm",
    "AsyncLLMError": "asyncllm.errors",
    "BadRequest": "asyncllm.errors",
    "Beam": "asyncllm.types.beam_search",
    "BeamSearchParams": "asyncllm.types.beam_search",
    "Client": "asyncllm.llm.client.client",
    "Completion": "asyncllm.types",
    "DeadlineExceeded": "asyncllm.errors",
    "EmbeddingParams": "asyncllm.types.embedding",
    "EngineConfig": "asyncllm.config",
    "EngineDead": "asyncllm.errors",
    "FinishReason": "asyncllm.types",
    "LLM": "asyncllm.llm.llm",
    "ModelError": "asyncllm.errors",
    "Policy": "asyncllm.engine.policy",
    "QueueFull": "asyncllm.errors",
    "RateLimited": "asyncllm.errors",
    "SamplingParams": "asyncllm.types",
    "SchedulingParams": "asyncllm.types",
    "TokenDelta": "asyncllm.types",
    "Usage": "asyncllm.types",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncLLMError",
    "BadRequest",
    "Beam",
    "BeamSearchParams",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "EmbeddingParams",
    "EngineConfig",
    "EngineDead",
    "FinishReason",
    "ModelError",
    "Policy",
    "QueueFull",
    "RateLimited",
    "SamplingParams",
    "SchedulingParams",
    "TokenDelta",
    "Usage",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'asyncllm' has no attribute {name!r}")
    return getattr(import_module(home), name)
