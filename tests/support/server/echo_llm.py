"""AsyncLLM's own ``generate`` and ``stream`` on the fake engine of the HTTP tests."""

from __future__ import annotations

from typing import Any, Self

from asyncllm.config import EngineConfig
from asyncllm.llm.async_llm import AsyncLLM
from tests.support.server.fake_llm import FakeLLM


class EchoLLM(FakeLLM):
    """Answers with the prompt. Made as ``AsyncLLM`` is, so it can take its place.

    Class attributes configure the instances that the code under test makes.
    """

    step_seconds = 0.0
    load_error: Exception | None = None
    step_error: Exception | None = None
    made: list[EchoLLM]

    def __init__(
        self,
        model: str | None = None,
        *,
        config: EngineConfig | None = None,
        policy: Any = None,
        progress: Any = None,
        **options: Any,
    ):
        super().__init__(step_seconds=self.step_seconds, load_error=self.load_error)
        self.config = config or EngineConfig(model=model, **options)
        self.policy = policy
        self.fail = self.step_error
        self.made.append(self)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def encode_chat(
        self, messages: list[dict[str, Any]], reservation: Any = None, /, **options: Any
    ) -> list[int]:
        return await super().encode_chat(messages, **{"add_generation_prompt": True, **options})

    def _least_tokens(self, texts: list[str]) -> int:
        return max(map(len, texts))

    generate: Any = AsyncLLM.generate
    stream: Any = AsyncLLM.stream
    encode_prompt: Any = AsyncLLM.encode_prompt


def echo_class(**attributes: Any) -> type[EchoLLM]:
    """A class of its own for one test, which knows the instances made of it."""
    return type("Echo", (EchoLLM,), {"made": [], **attributes})
