"""POST /v1/completions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncllm.errors import BadRequest
from asyncllm.server.chat.sampling import fan_out, sampling_params
from asyncllm.server.chat.scheduling import expect_prompts
from asyncllm.server.http.middleware import RESERVATION
from asyncllm.server.openai.beams import answer_beams
from asyncllm.server.openai.logprobs import CompletionLogprobs, joined, prompt_logprobs
from asyncllm.server.openai.options import (
    check_count,
    check_options,
    logprobs_needed,
    num_generated,
)
from asyncllm.server.openai.prompts import (
    check_lengths,
    check_scoring,
    check_truncation,
    prompt_fields,
    truncate,
)
from asyncllm.server.openai.reply import OpenAIReply
from asyncllm.server.openai.requests import CompletionRequest
from asyncllm.server.service import SERVICE
from asyncllm.types import TokenDelta, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp import web

    from asyncllm.server.model import Model, Tokenizer
    from asyncllm.types import PromptLogprob

#: OpenAI's default, which clients of this route rely on.
MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    service = request.app[SERVICE]
    llm = service.llm
    asked = await service.receive(request, CompletionRequest)
    model = service.resolve_model(asked.model)
    check_options(asked)
    check_truncation(asked)
    params = sampling_params(
        asked,
        llm.default_params,
        max_tokens=MAX_TOKENS if asked.max_tokens is None else asked.max_tokens,
        logprobs=logprobs_needed(asked, asked.logprobs),
        prompt_logprobs=_prompt_logprobs_needed(asked),
    )
    scheduling = service.scheduling(request, asked)
    given, count = split_prompts(asked.prompt), num_generated(asked)
    check_count(len(given), asked, llm.limits.max_waiting)
    expect_prompts(llm, request[RESERVATION], given, count)
    encoded = await encode_prompts(llm, given, asked)
    context = llm.limits.max_model_len
    prompts = [truncate(ids, asked, context, params.max_tokens) for ids in encoded]
    check_lengths(prompts, params.max_tokens, context)
    check_scoring(asked, prompts, params.prompt_logprobs)
    echo = None
    if asked.echo:
        cut = zip(given, encoded, prompts, strict=True)
        echo = [_text_of(llm, prompt, whole=ids is kept, kept=kept) for prompt, ids, kept in cut]
    reply = CompletionReply(asked, model, prompts, llm.tokenizer, echo)
    if asked.use_beam_search:
        return await answer_beams(service, request, prompts, params, scheduling, reply, asked)
    jobs = await fan_out(llm, prompts, count, params, scheduling, asked)
    return await service.answer(request, jobs, reply, asked)


def _prompt_logprobs_needed(asked: CompletionRequest) -> int | None:
    """With ``echo``, the logprobs of the answer begin with the prompt's."""
    wanted = [asked.prompt_logprobs, asked.logprobs if asked.echo else None]
    return max((most for most in wanted if most is not None), default=None)


def split_prompts(prompt: str | list[Any]) -> list[str] | list[list[int]]:
    """One text or list of token ids for each prompt, whichever of the four forms was sent."""
    if isinstance(prompt, str):
        prompt = [prompt]
    kinds = set(map(type, prompt))  # in C: there may be a million
    if kinds == {int}:
        prompt = [prompt]
    elif len(kinds) > 1:
        raise BadRequest("prompt mixes texts and token ids", param="prompt")
    if not prompt or not all(prompt):
        raise BadRequest("the prompt is empty", param="prompt")
    return prompt


async def encode_prompts(
    llm: Model, given: list[str] | list[list[int]], asked: CompletionRequest
) -> list[list[int]]:
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if not texts:
        return [prompt for prompt in given if not isinstance(prompt, str)]
    return await llm.encode_all(
        texts,
        add_special_tokens=asked.add_special_tokens is not False,
        any_length=asked.truncate_prompt_tokens is not None,
    )


def _text_of(llm: Model, prompt: object, *, whole: bool, kept: list[int]) -> str:
    return prompt if whole and isinstance(prompt, str) else llm.tokenizer.decode(kept)


class CompletionReply(OpenAIReply):
    """``text_completion``, which is also what its frames are called."""

    def __init__(
        self,
        asked: CompletionRequest,
        model: str,
        prompts: list[list[int]],
        tokenizer: Tokenizer,
        echo: list[str] | None,
    ):
        """``echo`` is the text of each prompt when it is to stand before the answer."""
        super().__init__(
            asked,
            model=model,
            prompts=prompts,
            id_prefix="cmpl",
            kind="text_completion",
            frame_kind="text_completion",
            text_field=b'"text":',
            text_tail=b',"logprobs":null,"finish_reason":null',
        )
        self._asked = asked
        self._tokenizer = tokenizer
        self._echo = echo
        self._prompt_fields = [prompt_fields(asked, prompt, tokenizer) for prompt in prompts]
        #: Prompts whose logprobs are still to come; and what came of their other choices meanwhile.
        self._unscored: set[int] = set()
        self._held: dict[int, TokenDelta] = {}
        if _prompt_logprobs_needed(asked) is not None:
            self.plain = False
            self._unscored.update(range(len(prompts)))
        self._logprobs: list[CompletionLogprobs] | None = None
        if asked.logprobs is not None:
            self.plain = False
            hidden = () if asked.skip_special_tokens is False else tokenizer.special_ids
            as_ids = bool(asked.return_tokens_as_token_ids)
            self._logprobs = [
                CompletionLogprobs(tokenizer, as_ids=as_ids, hidden=hidden)
                for _ in range(len(prompts) * self.n)
            ]

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
        """Every choice begins with its prompt's logprobs, which the first one brings."""
        prompt, first = divmod(index, self.n)
        ended = delta.finish_reason is not None  # it was aborted, if there are none
        if first != 0 or (delta.prompt_logprobs is None and not ended):
            self._held.setdefault(index, TokenDelta()).merge(delta)
            return b""
        self._unscored.discard(prompt)
        choices = range(index, index + self.n)
        parts = [self._first_choice(i, delta.prompt_logprobs) for i in choices]
        self._held[index] = delta
        parts += [self._choice(i, self._held.pop(i)) for i in choices if i in self._held]
        return b"".join(map(self.frame, parts))

    def body(self, outputs: list[TokenDelta]) -> bytes:
        choices = []
        outputs = self.best(outputs)
        for index, output in enumerate(outputs):
            self.count(index, output)
            scores = outputs[index // self.n * self.n].prompt_logprobs
            first, choice = self._first_choice(index, scores), self._choice(index, output)
            choice["text"] = first.pop("text") + choice["text"]
            if first["logprobs"] is not None:
                choice["logprobs"] = joined(first["logprobs"], choice["logprobs"])
            choices.append({**first, **choice})
        return self.whole(choices)

    def _first_choice(
        self, index: int, scores: Sequence[PromptLogprob | None] | None
    ) -> dict[str, Any]:
        """What a choice says of its prompt, before all else; ``scores`` are the prompt's."""
        prompt = index // self.n
        text = "" if self._echo is None else self._echo[prompt]
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "logprobs": None,
            "finish_reason": None,
            **self._prompt_fields[prompt],
        }
        if scores is not None and self._asked.prompt_logprobs is not None:
            most = self._asked.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(scores, self._tokenizer, most)
        if self._logprobs is not None and self._echo is not None:
            choice["logprobs"] = self._logprobs[index].prompt_lists(
                self.prompts[prompt] if scores is not None else (),
                scores or (),
                text,
                hidden=self._hidden_in(text, prompt),
                most=self._asked.logprobs or 0,
            )
        return choice

    def _hidden_in(self, text: str, prompt: int) -> frozenset[int]:
        """Tokens of a prompt that its text does not have: those that the tokenizer added to it."""
        whole = self._tokenizer.decode(self.prompts[prompt], skip_special_tokens=False)
        return frozenset() if whole == text else self._tokenizer.special_ids

    def _choice(self, index: int, delta: TokenDelta) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": index,
            "text": delta.text,
            "logprobs": self._lists(index, delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if self.with_ids:
            choice["token_ids"] = delta.token_ids
        return choice

    def _lists(self, index: int, entries: list[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if self._logprobs is None else self._logprobs[index].lists(entries or ())
