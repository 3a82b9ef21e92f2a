"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web

from asyncllm.errors import ContextLengthExceeded
from asyncllm.server.chat.large import read_large
from asyncllm.server.chat.parameters import sampling_params
from asyncllm.server.chat.prompts import encode_prompts, expect_prompts, split_prompts, truncate
from asyncllm.server.http.answer import in_slices
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.model import Tokenizer
from asyncllm.server.openai import schemas
from asyncllm.server.openai.beams import answer_beams
from asyncllm.server.openai.logprobs import LogprobLists, joined, prompt_logprobs
from asyncllm.server.openai.reply import OpenAIReply
from asyncllm.server.openai.requests import (
    MAX_TOKENS,
    CompletionRequest,
    check_options,
    ineffective_fields,
    logprobs_needed,
    num_generated,
)
from asyncllm.server.service import SERVICE
from asyncllm.types import PromptLogprob, TokenDelta


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    body = await service.receive(request, CompletionRequest)
    model = service.resolve_model(body.model)
    given, scored = split_prompts(body.prompt), _prompt_logprobs_needed(body)
    service.note_ineffective(ineffective_fields(body))
    check_options(body, len(given), llm.limits.max_waiting)
    logprobs, count = logprobs_needed(body, body.logprobs), num_generated(body)
    scheduling = service.scheduling(request, body)
    params = sampling_params(
        body,
        llm.default_params,
        max_tokens=MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=logprobs,
        prompt_logprobs=scored,
    )
    expect_prompts(llm, request[RESERVATION], given, count)
    encoded = await encode_prompts(llm, given, body)
    context = llm.limits.max_model_len
    prompts = [truncate(ids, body, context, params.max_tokens) for ids in encoded]
    _check_lengths(prompts, params.max_tokens, context)
    echo = None
    if body.echo:
        echo = [
            prompt if ids is kept and isinstance(prompt, str) else llm.tokenizer.decode(kept)
            for prompt, ids, kept in zip(given, encoded, prompts, strict=True)
        ]
    reply = await read_large(CompletionReply, body, model, prompts, llm.tokenizer, echo)
    reply.sign(service.fingerprint)
    if body.use_beam_search:
        return await answer_beams(service, request, prompts, params, scheduling, reply, body)
    return await service.answer(request, prompts, params, scheduling, reply, body, count)


def _prompt_logprobs_needed(body: CompletionRequest) -> int | None:
    """The engine's ``prompt_logprobs``: with ``echo``, the answer's begin with the prompt's."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((most for most in wanted if most is not None), default=None)


def _check_lengths(prompts: Sequence[Sequence[int]], max_tokens: int | None, context: int) -> None:
    """Check early what the engine would refuse in the end.

    Raises:
        ContextLengthExceeded: a prompt is too long.
    """
    least = 1 if max_tokens is None else max_tokens
    longest = max(map(len, prompts))
    if longest + least > context:
        raise ContextLengthExceeded(context, longest, least)


class CompletionReply(OpenAIReply):
    """``text_completion``, which is also the kind of its chunks."""

    id_prefix = "cmpl"
    answer_type = schemas.Completion
    chunk_type = schemas.CompletionChunk

    def __init__(
        self,
        body: CompletionRequest,
        model: str,
        prompts: list[list[int]],
        tokenizer: Tokenizer,
        echo: list[str] | None,
    ):
        """``echo``: the text of each prompt if it is to precede the answer, else None."""
        scored = _prompt_logprobs_needed(body)
        super().__init__(body, model, prompts, scored)
        self._body = body
        self._tokenizer = tokenizer
        self._echo = echo
        self._prompt_fields = self.prompt_fields(body, tokenizer)
        #: Prompts whose logprobs have not come yet, and the deltas of their choices meanwhile.
        self._unscored: set[int] = set()
        self._unsent: dict[int, TokenDelta] = {}
        if scored is not None:
            self.plain = False
            self._unscored.update(range(len(prompts)))
        self._logprobs: dict[int, LogprobLists] = {}
        if body.logprobs is not None:
            self.plain = False

    def text_choice(self, index: int) -> schemas.CompletionChoice:
        return _empty_choice(index)

    def opening(self) -> bytes:
        if self._unscored or (self._echo is None and not self._prompt_fields[0]):
            return b""
        return b"".join(
            [self.frame(self._first_choice(i, None)) for i in range(len(self.prompts) * self.n)]
        )

    def frames(self, index: int, delta: TokenDelta) -> bytes:
        self.count(index, delta)
        if self._unscored and index // self.n in self._unscored:
            return self._scored_frames(index, delta)
        if not self.plain or delta.finish_reason is not None:
            return self.frame(self._choice(index, delta))
        return self.text_frame(index, delta.text) if delta.text else b""

    def _scored_frames(self, index: int, delta: TokenDelta) -> bytes:
        """Every choice begins with its prompt's logprobs, which come with the first one."""
        prompt, first = divmod(index, self.n)
        ended = delta.finish_reason is not None  # aborted, if there are no logprobs
        if first != 0 or (delta.prompt_logprobs is None and not ended):
            self._unsent.setdefault(index, TokenDelta()).merge(delta)
            return b""
        self._unscored.discard(prompt)
        choices = range(index, index + self.n)
        parts = [self._first_choice(i, delta.prompt_logprobs) for i in choices]
        self._unsent[index] = delta
        parts += [self._choice(i, self._unsent.pop(i)) for i in choices if i in self._unsent]
        return b"".join(map(self.frame, parts))

    def body(self, outputs: list[TokenDelta]) -> bytes:
        outputs = self.best_outputs(outputs)
        return self.whole(self._whole_choice(index, outputs) for index in range(len(outputs)))

    def _whole_choice(self, index: int, outputs: list[TokenDelta]) -> schemas.CompletionChoice:
        self.count(index, outputs[index])
        scores = outputs[index // self.n * self.n].prompt_logprobs
        first, choice = self._first_choice(index, scores), self._choice(index, outputs[index])
        choice.text = first.text + choice.text
        if first.logprobs is not None and choice.logprobs is not None:
            choice.logprobs = joined(first.logprobs, choice.logprobs)
        if choice.logprobs is not None:
            choice.logprobs.top_logprobs = in_slices(choice.logprobs.top_logprobs)
        for name in ("prompt_token_ids", "prompt_text", "prompt_logprobs"):
            setattr(choice, name, getattr(first, name))
        return choice

    def _first_choice(
        self, index: int, scores: Sequence[PromptLogprob | None] | None
    ) -> schemas.CompletionChoice:
        """A choice that describes its prompt, before all others; ``scores`` are the prompt's."""
        prompt = index // self.n
        choice = _empty_choice(index, **self._prompt_fields[prompt])
        if self._echo is not None:
            choice.text = self._echo[prompt]
        if scores is not None and self._body.prompt_logprobs is not None:
            most = self._body.prompt_logprobs
            choice.prompt_logprobs = prompt_logprobs(scores, self._tokenizer, most)
        if self._body.logprobs is not None and self._echo is not None:
            choice.logprobs = self._lists(index).prompt(
                self.prompts[prompt] if scores is not None else (),
                scores or (),
                choice.text,
                hidden=self._hidden_in(choice.text, prompt),
                most=self._body.logprobs,
            )
        return choice

    def _lists(self, index: int) -> LogprobLists:
        """The logprobs of a choice, made when it needs them: few of many choices do at once."""
        if (lists := self._logprobs.get(index)) is None:
            shown = self._body.skip_special_tokens is False
            lists = self._logprobs[index] = LogprobLists(
                self._tokenizer,
                as_ids=bool(self._body.return_tokens_as_token_ids),
                hidden=() if shown else self._tokenizer.special_ids,
            )
        return lists

    def _hidden_in(self, text: str, prompt: int) -> frozenset[int]:
        """Tokens that are missing in the prompt's text, because the tokenizer added them."""
        whole = self._tokenizer.decode(self.prompts[prompt], skip_special_tokens=False)
        return frozenset() if whole == text else self._tokenizer.special_ids

    def _choice(self, index: int, delta: TokenDelta) -> schemas.CompletionChoice:
        choice = _empty_choice(index)
        choice.text = delta.text
        if self._body.logprobs is not None:
            choice.logprobs = self._lists(index).generated(delta.logprobs or ())
        if delta.finish_reason is not None:
            choice.finish_reason = delta.finish_reason.value
            choice.stop_reason = delta.stop_reason
        if self.with_ids:
            choice.token_ids = delta.token_ids
        return choice


def _empty_choice(index: int, **more: Any) -> schemas.CompletionChoice:
    return schemas.CompletionChoice(index=index, text="", logprobs=None, finish_reason=None, **more)
