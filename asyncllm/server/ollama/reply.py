"""What an answer says, in Ollama's words: a line of JSON for each piece, or one object."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from asyncllm.server.http.answer import encode
from asyncllm.server.ollama.errors import ollama_error
from asyncllm.server.openai.logprobs import chat_logprobs
from asyncllm.text.parsing import Content, Reasoning, ToolArguments, ToolStart, message_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from asyncllm.server.chat.message_reader import Turn
    from asyncllm.server.model import Tokenizer
    from asyncllm.text.parsing import Event
    from asyncllm.types import TokenDelta

LINES: Final = "application/x-ndjson"


class Piece(NamedTuple):
    """More of an answer; ``calls`` are whole."""

    content: str = ""
    thinking: str = ""
    calls: tuple[dict[str, Any], ...] = ()


def chat_words(piece: Piece) -> dict[str, Any]:
    """How /api/chat says it."""
    message: dict[str, Any] = {"role": "assistant", "content": piece.content}
    if piece.thinking:
        message["thinking"] = piece.thinking
    if piece.calls:
        message["tool_calls"] = piece.calls
    return {"message": message}


def generate_words(piece: Piece) -> dict[str, Any]:
    """How /api/generate says it; there are no calls."""
    words = {"response": piece.content}
    return words | {"thinking": piece.thinking} if piece.thinking else words


def timestamp(seconds: float | None = None) -> str:
    """A time, in seconds since 1970, as Ollama writes it; now if it is None."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat().replace("+00:00", "Z")


class OllamaReply:
    """One answer, from its first token to its end."""

    id = ""
    content_type = LINES
    explain: Callable[[], dict[str, Any]] | None = None

    def __init__(
        self,
        model: str,
        turn: Turn,
        words: Callable[[Piece], dict[str, Any]],
        *,
        prompt_tokens: int,
        began: int,
        tokenizer: Tokenizer | None,
    ):
        """
        Args:
            began: when the request came, in ``time.perf_counter_ns()``.
            tokenizer: None where no logprobs are wanted.
        """
        self._model = model
        self._turn = turn
        self._words = words
        self._began = began
        self._tokenizer = tokenizer
        self._calls = _Calls()
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._reason = ""

    def opening(self) -> bytes:
        return b""

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        self._count(delta)
        pieces = list(self._pieces(self._turn.read(delta), ended=delta.finish_reason is not None))
        if self._tokenizer is None:
            return b"".join([self._line(self._words(piece)) for piece in pieces])
        # The first line has what belongs to the tokens; there is one even without a text.
        first, *others = pieces or [Piece()]
        lines = [self._line({**self._words(first), **self._logprobs(delta)})]
        lines += [self._line(self._words(piece)) for piece in others]
        return b"".join(lines)

    def closing(self) -> bytes:
        return encode({**self._head(), **self._words(Piece()), **self._end()}) + b"\n"

    def failure(self, error: Exception) -> bytes:
        return ollama_error(error) + b"\n"

    def body(self, outputs: list[TokenDelta]) -> bytes:
        [output] = outputs
        self._count(output)
        message = message_of(self._turn.read(output))
        calls = [
            _call(i, call.id, call.name, call.arguments) for i, call in enumerate(message.calls)
        ]
        whole = Piece(message.content, message.reasoning, tuple(filter(None, calls)))
        fields = {**self._words(whole), **self._logprobs(output), **self._end()}
        return encode({**self._head(), **fields})

    def _count(self, delta: TokenDelta) -> None:
        self._tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason.value

    def _pieces(self, events: list[Event], *, ended: bool) -> Iterator[Piece]:
        """What events add; a call comes when it is over."""
        for event in events:
            match event:
                case ToolArguments():
                    self._calls.extend(event)
                    continue
                case ToolStart():
                    yield from self._calls.take()
                    self._calls.start(event)
                case Content(text):
                    yield from self._calls.take()
                    yield Piece(content=text)
                case Reasoning(text):
                    yield Piece(thinking=text)
        if ended:
            yield from self._calls.take()

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": timestamp()}

    def _line(self, fields: dict[str, Any]) -> bytes:
        return encode({**self._head(), **fields, "done": False}) + b"\n"

    def _logprobs(self, delta: TokenDelta) -> dict[str, Any]:
        if self._tokenizer is None:
            return {}
        return {"logprobs": chat_logprobs(delta.logprobs or (), self._tokenizer)["content"]}

    def _end(self) -> dict[str, Any]:
        """Why it ended, and the counters; durations in nanoseconds.

        What passed before the prompt was begun is the load: of no model, but that is where Ollama
        has the time in its queue, too.
        """
        total = time.perf_counter_ns() - self._began
        prompt, answer = self._durations()
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": total,
            "load_duration": max(0, total - prompt - answer),
            "prompt_eval_count": self._prompt_tokens,
            "prompt_eval_duration": prompt,
            "eval_count": self._tokens,
            "eval_duration": answer,
        }

    def _durations(self) -> tuple[int, int]:
        """Of the prompt, up to the first token, and of the answer, as the engine knows them."""
        sequences = () if self.explain is None else self.explain()["sequences"]
        for sequence in sequences:
            start, first = sequence["started_ms"], sequence["first_token_ms"]
            end = sequence["ended_ms"]
            if None not in (start, first, end):
                return int((first - start) * 1e6), int((end - first) * 1e6)
        return 0, 0


class _Calls:
    """The call that is being made, if any."""

    def __init__(self) -> None:
        self._start: ToolStart | None = None
        self._arguments: list[str] = []

    def start(self, event: ToolStart) -> None:
        self._start, self._arguments = event, []

    def extend(self, event: ToolArguments) -> None:
        self._arguments.append(event.text)

    def take(self) -> Iterator[Piece]:
        """The call, which is over."""
        start, self._start = self._start, None
        if start is not None:
            call = _call(start.index, start.id, start.name, "".join(self._arguments))
            if call is not None:
                yield Piece(calls=(call,))


def _call(index: int, id: str, name: str, arguments: str) -> dict[str, Any] | None:
    """A call in Ollama's words.

    None when its arguments were cut off or are no object: these words have no way to say so, and
    nobody should make a call with other arguments.
    """
    try:
        found = msgspec.json.decode(arguments or "{}", type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return None
    return {"id": id, "function": {"index": index, "name": name, "arguments": found}}
