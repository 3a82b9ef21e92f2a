"""An AsyncLLM without a model: one token per byte, and the answer echoes the prompt."""

from __future__ import annotations

import asyncio
import codecs
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.engine.stats import EngineStats
from asyncllm.errors import BadRequest, QueueFull
from asyncllm.types import FinishReason, SamplingParams, Sink, TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

BOS, EOS, VOCAB = 256, 257, 258


class FakeTokenizer:
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < BOS else b""


class FakeTemplate:
    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.seen = (messages, options)
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return text + "assistant: " if options["add_generation_prompt"] else text


@dataclass
class _Sequence:
    prompt_ids: Sequence[int]
    params: SamplingParams
    sink: Sink
    made: int = 0
    text: str = ""
    decoder: Any = field(default_factory=codecs.getincrementaldecoder("utf-8"))

    def step(self) -> TokenDelta:
        """The next byte of the prompt, EOS after the last one."""
        params = self.params
        source = [token for token in self.prompt_ids if token < BOS]
        at_end = self.made >= len(source) and not params.ignore_eos
        token = EOS if at_end else source[self.made % len(source)]
        self.made += 1
        delta = TokenDelta(token_ids=[token])
        if token < BOS:
            delta.text = self.decoder.decode(bytes([token]))
        if params.logprobs is not None:
            top = tuple(((token + i) % BOS, -0.5 - 1e9 * i) for i in range(params.logprobs))
            delta.logprobs = [TokenLogprob(token, -0.5, top)]
        if token == EOS:
            delta.finish_reason = FinishReason.STOP
        elif any(stop in delta.text for stop in params.stop):
            delta.finish_reason, delta.stop_reason, delta.text = FinishReason.STOP, delta.text, ""
        elif self.made == params.max_tokens:
            delta.finish_reason = FinishReason.LENGTH
        return delta


class FakeLLM:
    """Deterministic; ``hold()`` stops its steps, ``fail`` makes the next step fail with it."""

    model_name = "fake"
    created = 1_700_000_000

    def __init__(
        self,
        *,
        max_running: int = 4,
        step_seconds: float = 0.0,
        load_seconds: float = 0.0,
        load_error: Exception | None = None,
        life_seconds: float = 1e6,
    ):
        self.config = EngineConfig()
        self.limits = EngineLimits(
            device="cpu",
            dtype="float32",
            num_pages=64,
            page_size=16,
            max_model_len=4096,
            max_num_seqs=max_running,
            max_num_batched_tokens=1024,
            prefill_chunk=1024,
            max_waiting=16,
            steps_in_flight=1,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
        )
        self.tokenizer = FakeTokenizer()
        self.chat_template: FakeTemplate | None = FakeTemplate()
        self.default_params = SamplingParams(temperature=0.7)
        self.stats = EngineStats(pages_total=64)
        self.ready = False
        self.healthy = True
        self.params: list[SamplingParams] = []
        self.aborted: list[int] = []
        self.fail: Exception | None = None
        self._step_seconds = step_seconds
        self._load_seconds = load_seconds
        self._load_error = load_error
        self._life_seconds = life_seconds
        self._running: dict[int, _Sequence] = {}
        self._waiting: dict[int, _Sequence] = {}
        self._go = asyncio.Event()
        self._go.set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await asyncio.sleep(self._load_seconds)
        if self._load_error is not None:
            raise self._load_error
        self.ready = True

    async def stopped(self) -> str:
        await asyncio.sleep(self._life_seconds)
        self.ready = self.healthy = False
        return "planted death"

    async def aclose(self) -> None:
        self.ready = self.healthy = False
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def encode_all(
        self, texts: list[str], *, add_special_tokens: bool = True
    ) -> list[list[int]]:
        return [await self.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens)

    async def encode_chat(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        assert self.chat_template is not None
        return await self.encode(
            self.chat_template.render(messages, **options), add_special_tokens=False
        )

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, sink: Sink) -> int:
        room = self.limits.max_model_len - len(prompt_ids)
        if (params.max_tokens or 1) > room:
            param = "prompt" if room < 1 else "max_tokens"
            raise BadRequest("too long", param=param, code="context_length_exceeded")
        if max(prompt_ids) >= VOCAB:
            raise BadRequest("no such token", param="prompt")
        if len(self._waiting) >= self.limits.max_waiting:
            raise QueueFull("the queue is full", retry_after=2.5)
        self.params.append(params)
        request_id = len(self.params)
        self._waiting[request_id] = _Sequence(prompt_ids, params, sink)
        self._update()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        return request_id

    def abort(self, request_id: int) -> None:
        for queue in (self._running, self._waiting):
            if queue.pop(request_id, None) is not None:
                self.aborted.append(request_id)
        self._update()

    def hold(self) -> None:
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    async def _run(self) -> None:
        while self._running or self._waiting:
            await asyncio.sleep(self._step_seconds)
            await self._go.wait()
            while self._waiting and len(self._running) < self.limits.max_num_seqs:
                request_id = next(iter(self._waiting))
                self._running[request_id] = self._waiting.pop(request_id)
            self.stats.steps += 1
            for request_id, sequence in list(self._running.items()):
                self._deliver(request_id, sequence)
            self._update()

    def _deliver(self, request_id: int, sequence: _Sequence) -> None:
        if self.fail is not None:
            del self._running[request_id]
            sequence.sink.fail(self.fail)
            return
        delta = sequence.step()
        self.stats.generation_tokens += 1
        if delta.finish_reason is not None:
            del self._running[request_id]
            self.stats.finished[delta.finish_reason.value] += 1
        sequence.sink.emit(delta)

    def _update(self) -> None:
        self.stats.running = len(self._running)
        self.stats.waiting = len(self._waiting)
        self.stats.pages_held = len(self._running)
