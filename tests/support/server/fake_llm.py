"""An AsyncLLM without a model: one token per byte, and the answer echoes the prompt."""

from __future__ import annotations

import asyncio
import codecs
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.engine.pooling import PooledParams
from asyncllm.engine.requests.history import RequestTrace, StepRecord
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.engine.requests.reservations import Reservation, Reservations
from asyncllm.engine.requests.view import LiveRequest, LiveView
from asyncllm.engine.scheduling.batch import Progress
from asyncllm.engine.scheduling.timeline import Event
from asyncllm.engine.scheduling.waiting.reason import Wait
from asyncllm.engine.stats import EngineStats
from asyncllm.errors import BadRequest, ContextLengthExceeded, EngineDead
from asyncllm.executor.startup_bill import StartupBill
from asyncllm.text.chat_reader import ChatReader
from asyncllm.text.decoding import ByteDetokenizer
from asyncllm.text.parsing import Formats
from asyncllm.types import (
    FinishReason,
    PromptLogprob,
    SamplingParams,
    SchedulingParams,
    Sink,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from asyncllm.types.beam_search import Beam, BeamSearchParams
from asyncllm.types.embedding import EmbeddingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

BOS, EOS, VOCAB = 256, 257, 258
MAX_LEN = 4096
EMBEDDING_SIZE = 8


class FakeTokenizer:
    special_ids = frozenset((BOS, EOS))

    def content(self, token_id: int) -> str | None:
        return {BOS: "<bos>", EOS: "<eos>"}.get(token_id)

    def token_id(self, content: str) -> int | None:
        return {"<bos>": BOS, "<eos>": EOS}.get(content)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < BOS else b""

    def detokenizer(
        self,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        shown: tuple[int, ...] = (),
    ) -> ByteDetokenizer:
        table = {token: self.token_bytes(token) for token in range(VOCAB)}
        return ByteDetokenizer(table, strip_first_space=False)

    def min_tokens(self, num_bytes: int) -> int:
        return num_bytes


def hidden_of(tokens: Sequence[int]) -> bytes:
    """Each token's hidden state is one of EMBEDDING_SIZE unit vectors; their mean."""
    counts = np.bincount(np.array(tokens) % EMBEDDING_SIZE, minlength=EMBEDDING_SIZE)
    return (counts / len(tokens)).astype("<f4").tobytes()


class FakeTemplate:
    def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> str:
        self.seen = (messages, options)
        text = "".join(f"{m['role']}: {m.get('content')}\n" for m in messages)
        return text + "assistant: " if options["add_generation_prompt"] else text


@dataclass
class _Sequence:
    prompt_ids: Sequence[int]
    params: SamplingParams
    scheduling: SchedulingParams
    sink: Sink
    arrived: float
    started: float | None = None
    ended: float | None = None
    outcome: str = "waiting"
    cached: int = 0
    made: int = 0
    text: str = ""
    decoder: Any = field(default_factory=partial(codecs.getincrementaldecoder("utf-8"), "replace"))

    def step(self) -> TokenDelta:
        """The next byte of the prompt, EOS after the last one."""
        params = self.params
        if params.max_tokens == 0:
            delta = TokenDelta(finish_reason=FinishReason.LENGTH, cached_tokens=self.cached)
            delta.prompt_logprobs = self._scores()
            if isinstance(params, PooledParams):
                delta.hidden = hidden_of(
                    self.prompt_ids[params.first_wanted(len(self.prompt_ids)) :]
                )
            return delta
        source = [token for token in self.prompt_ids if token < BOS]
        at_end = self.made >= len(source) and not params.ignore_eos
        token = EOS if at_end else source[self.made % len(source)]
        self.made += 1
        delta = TokenDelta(token_ids=[token])
        if self.made == 1:
            delta.prompt_logprobs = self._scores()
        if token < BOS:
            delta.text = self.decoder.decode(bytes([token]))
        if params.logprobs is not None:
            top = tuple(((token + i) % BOS, -0.5 - 1e9 * i) for i in range(params.logprobs))
            delta.logprobs = [TokenLogprob(token, -0.5, top)]
        if token == EOS:
            delta.finish_reason = FinishReason.STOP
        elif any(stop in delta.text for stop in params.stop):
            delta.finish_reason, delta.stop_reason, delta.text = FinishReason.STOP, delta.text, ""
        elif self.made == params.max_tokens or len(self.prompt_ids) + self.made == MAX_LEN:
            delta.finish_reason = FinishReason.LENGTH
        if delta.finish_reason is not None:
            delta.cached_tokens = self.cached
        return delta

    def _scores(self) -> list[PromptLogprob | None] | None:
        count = self.params.prompt_logprobs
        if count is None:
            return None
        scores: list[PromptLogprob | None] = [None]
        for token in self.prompt_ids[1:]:
            top = tuple(((token + i) % BOS, -0.25 - 1e9 * i) for i in range(count))
            scores.append(PromptLogprob(token, -0.25, top, 1))
        return scores

    def live(self, request_id: int, now: float) -> LiveRequest:
        num_prompt = len(self.prompt_ids)
        waits = self.started is None
        return LiveRequest(
            id=request_id,
            tenant=self.scheduling.tenant,
            arrived=self.arrived,
            first_token=None if waits else 1.0,
            prompt_tokens=num_prompt,
            cached_tokens=self.cached,
            output_tokens=self.made,
            max_output_tokens=self.params.max_tokens or MAX_LEN,
            pages=0 if waits else 1,
            preemptions=0,
            waited={"slots": (now if self.started is None else self.started) - self.arrived},
            wait=Wait("slots", needs=1) if waits else None,
            progress=None if waits else Progress(num_prompt, 0, 1, -1),
        )

    def trace(self, request_id: int, steps: list[StepRecord]) -> RequestTrace:
        """One second a step, and the whole prompt in the first."""
        num_prompt, num_tokens = len(self.prompt_ids), len(self.prompt_ids) + self.made
        events = [Event(self.arrived, -1, "queued", 0, 0)]
        if self.started is not None:
            step = int(self.started)
            events.append(Event(self.started, step, "admitted", 0, self.cached))
            events.append(Event(self.started, step, "chunk", self.cached, num_prompt - self.cached))
        if self.ended is not None:
            events.append(Event(self.ended, -1, "finished", num_tokens, 0))
        return RequestTrace(
            request_id=request_id,
            outcome=self.outcome,
            prompt_tokens=num_prompt,
            completion_tokens=self.made,
            cached_tokens=self.cached,
            priority=self.scheduling.priority,
            tenant=self.scheduling.tenant,
            waited={"slots": (self.started or self.arrived) - self.arrived},
            arrived=self.arrived,
            started=self.started,
            first_token=None if self.started is None else self.started + 1,
            ended=self.ended,
            events=events,
            num_events_dropped=0,
            steps=steps if self.started is not None else [],
        )


class FakeQueue:
    """What waits, for those who reserve; there are no free slots, and tenants are not counted."""

    num_free_slots = 0

    def __init__(self, waiting: dict[int, _Sequence]):
        self._waiting = waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(len(sequence.prompt_ids) for sequence in self._waiting.values())

    def waiting_for(self, tenant: str) -> tuple[int, int]:
        return 0, 0

    def expected_wait(self) -> float:
        return 25.0


class FakeLLM:
    """Deterministic; ``hold()`` stops its steps, ``fail`` makes the next step fail with it.

    Setting ``death`` ends the engine; so does time, after ``life_seconds``.
    """

    model_name = "fake"
    created = 1_700_000_000
    spec = SimpleNamespace(architecture="FakeForCausalLM", weight_format=None)

    def __init__(
        self,
        *,
        max_running: int = 4,
        max_waiting: int = 16,
        step_seconds: float = 0.0,
        load_seconds: float = 0.0,
        load_error: Exception | None = None,
        life_seconds: float = 1e6,
        formats: Formats | None = None,
    ):
        self.config = EngineConfig()
        self.limits = EngineLimits(
            device="cpu",
            dtype="float32",
            num_pages=64,
            page_size=16,
            max_model_len=MAX_LEN,
            max_num_seqs=max_running,
            max_num_batched_tokens=1024,
            prefill_chunk=1024,
            itl_target=0.01,
            prefix_caching=True,
            host_pages=0,
            page_copy_seconds=0.0,
            max_waiting=max_waiting,
            max_waiting_tokens=50_000,
            steps_in_flight=1,
            vocab_size=VOCAB,
            eos_token_ids=(EOS,),
            embedding_size=EMBEDDING_SIZE,
        )
        self.tokenizer = FakeTokenizer()
        tokenizer: Any = self.tokenizer
        self.chat_reader = ChatReader(formats or Formats(), tokenizer)
        self.chat_template: FakeTemplate | None = FakeTemplate()
        self.default_params = SamplingParams(temperature=0.7)
        self.default_embedding = EmbeddingParams()
        self.stats = EngineStats(pages_total=64)
        self.startup = StartupBill()
        self.ready = False
        self.healthy = True
        self.vitals: Any = None
        self.params: list[SamplingParams] = []
        self.scheduling: list[SchedulingParams] = []
        self.encoded: list[str] = []
        self.cached = 0
        self.aborted: list[int] = []
        self.fail: Exception | None = None
        self._step_seconds = step_seconds
        self._load_seconds = load_seconds
        self._load_error = load_error
        self._life_seconds = life_seconds
        self.death = asyncio.Event()
        self._known: dict[int, _Sequence] = {}
        self._running: dict[int, _Sequence] = {}
        self._waiting: dict[int, _Sequence] = {}
        self._go = asyncio.Event()
        self._go.set()
        self._task: asyncio.Task[None] | None = None
        self._reservations = Reservations(FakeQueue(self._waiting), self.limits)

    async def start(self) -> None:
        await asyncio.sleep(self._load_seconds)
        if self._load_error is not None:
            raise self._load_error
        self.ready = True

    async def stopped(self) -> str:
        with suppress(TimeoutError):
            await asyncio.wait_for(self.death.wait(), self._life_seconds)
        self.give_up("planted death")
        return "planted death"

    def give_up(self, cause: str) -> None:
        self.ready = self.healthy = False
        error = EngineDead(cause)
        for queue in (self._running, self._waiting):
            while queue:
                sequence = queue.popitem()[1]
                self._end(sequence, "error")
                sequence.sink.fail(error)

    async def aclose(self) -> None:
        self.ready = self.healthy = False
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def encode_all(
        self, texts: list[str], *, add_special_tokens: bool = True, any_length: bool = False
    ) -> list[list[int]]:
        longest = max(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        if longest > self.limits.max_model_len and not any_length:
            raise ContextLengthExceeded(self.limits.max_model_len, longest, at_least=True)
        self.encoded += texts
        return [self.tokenizer.encode(text, add_special_tokens) for text in texts]

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        [ids] = await self.encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        reservation: Reservation | None = None,
        /,
        **options: Any,
    ) -> list[int]:
        assert self.chat_template is not None
        any_length = options.pop("any_length", False)
        text = self.chat_template.render(messages, **options)
        [ids] = await self.encode_all([text], add_special_tokens=False, any_length=any_length)
        return ids

    async def prepare(self, params: SamplingParams) -> SamplingParams:
        return params

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        sink: Sink,
        scheduling: SchedulingParams | None = None,
        reservation: Reservation | None = None,
    ) -> int:
        scheduling = scheduling or SchedulingParams()
        self.check_prompt(prompt_ids, params.max_tokens)
        if reservation is not None:
            reservation.take(len(prompt_ids))
        else:
            self.reservations.check(len(prompt_ids), 1, scheduling.tenant)
        self.params.append(params)
        self.scheduling.append(scheduling)
        request_id = len(self.params)
        now = float(self.stats.steps)
        sequence = _Sequence(prompt_ids, params, scheduling, sink, now, cached=self.cached)
        self._waiting[request_id] = self._known[request_id] = sequence
        self._update()
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._run())
        return request_id

    def start_beam_search(
        self,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        scheduling: SchedulingParams | None = None,
        reservation: Reservation | None = None,
    ) -> FakeBeamSearch:
        self.check_prompt(prompt_ids, params.max_tokens)
        return FakeBeamSearch(self, prompt_ids, params, reservation)

    def check_prompt(self, prompt_ids: Sequence[int], max_tokens: int | None) -> None:
        room = self.limits.max_model_len - len(prompt_ids)
        if (1 if max_tokens is None else max_tokens) > room:
            least = 1 if max_tokens is None else max_tokens
            raise ContextLengthExceeded(self.limits.max_model_len, len(prompt_ids), least)
        if max(prompt_ids) >= VOCAB:
            raise BadRequest("no such token", param="prompt")

    @property
    def reservations(self) -> Reservations:
        self._reservations._limits = self.limits  # tests change them
        return self._reservations

    def reserve(self, num_tokens: int = 1, num_requests: int = 1, tenant: str = "") -> Reservation:
        return self.reservations.make(num_tokens, num_requests, tenant)

    @property
    def num_reserved(self) -> int:
        return self._reservations.num_requests

    def trace(self, request_id: int, *, steps: bool = True) -> RequestTrace | None:
        sequence = self._known.get(request_id)
        if sequence is None:
            return None
        count = len(self._running) or 1
        first = 0 if sequence.started is None else int(sequence.started)
        last = self.stats.steps if sequence.ended is None else int(sequence.ended)
        records = [StepRecord(i, float(i), count, count, i, 0.5) for i in range(first, last)]
        return sequence.trace(request_id, records if steps else [])

    def view(self, most: int = 64) -> LiveView:
        """Every request is as its trace says; those that wait do so for a slot."""
        now = float(self.stats.steps)
        ended = [id for id, sequence in self._known.items() if sequence.ended is not None]
        traces = [self.trace(id, steps=False) for id in reversed(ended)]
        return LiveView(
            time=now,
            running=[sequence.live(id, now) for id, sequence in self._running.items()][:most],
            waiting=[sequence.live(id, now) for id, sequence in self._waiting.items()][:most],
            ended=[trace for trace in traces if trace is not None],
            steps=[],
            own_pages=len(self._running),
            prefixes=[],
        )

    def abort(self, request_id: int) -> None:
        for queue in (self._running, self._waiting):
            if (sequence := queue.pop(request_id, None)) is not None:
                self.aborted.append(request_id)
                self._end(sequence, "abort")
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
                sequence = self._running[request_id] = self._waiting.pop(request_id)
                sequence.started, sequence.outcome = float(self.stats.steps), "running"
            self.stats.steps += 1
            for request_id, sequence in list(self._running.items()):
                self._deliver(request_id, sequence)
            self._update()

    def _deliver(self, request_id: int, sequence: _Sequence) -> None:
        if self.fail is not None:
            self._end(self._running.pop(request_id), "error")
            sequence.sink.fail(self.fail)
            return
        delta = sequence.step()
        self.stats.generation_tokens += 1
        if delta.finish_reason is not None:
            del self._running[request_id]
            self.stats.finished[delta.finish_reason.value] += 1
        sequence.sink.emit(delta)
        if delta.finish_reason is not None:  # only now, as in the engine
            self._end(sequence, delta.finish_reason.value)

    def _end(self, sequence: _Sequence, outcome: str) -> None:
        sequence.ended, sequence.outcome = float(self.stats.steps), outcome

    def _update(self) -> None:
        self.stats.running = len(self._running)
        self.stats.waiting = len(self._waiting)
        self.stats.pages_held = len(self._running)


class FakeBeamSearch:
    """Every beam echoes the prompt."""

    def __init__(
        self,
        llm: FakeLLM,
        prompt_ids: Sequence[int],
        params: BeamSearchParams,
        reservation: Reservation | None,
    ):
        self._llm = llm
        self._reservation = reservation
        self._prompt = prompt_ids
        self._params = params

    async def run(self) -> list[Beam]:
        params = self._params
        sampling = SamplingParams(max_tokens=params.max_tokens, logprobs=params.logprobs)
        collector = Collector()
        request_id = self._llm.submit(
            self._prompt, sampling, collector, reservation=self._reservation
        )
        try:
            whole = await collector.whole()
        finally:
            self._llm.abort(request_id)
        assert whole.finish_reason is not None
        beam = Beam(
            text=whole.text,
            token_ids=whole.token_ids,
            finish_reason=whole.finish_reason,
            stop_reason=None,
            logprobs=whole.logprobs,
            usage=Usage(len(self._prompt), len(whole.token_ids), whole.cached_tokens),
        )
        return [beam] * params.beam_width
