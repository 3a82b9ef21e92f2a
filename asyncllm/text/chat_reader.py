"""Reads the chat text of one model: its formats, and the tokens of their markers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from asyncllm.text.decoding import Detokenizer
from asyncllm.text.parsing import Formats, Parser, visible_special_tokens
from asyncllm.text.parsing.formats import ReasoningFormat
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Reasoning

#: Tokens at the end of a prompt that tell whether the answer starts within reasoning.
_TAIL = 64
#: A template that disables reasoning ends with empty reasoning, at most so many tokens before the
#: end of the prompt.
_CLOSED = 4


class ChatReader:
    """One per model.

    Attributes:
        formats: how the model writes reasoning and tool calls.
        shown: ids of the special tokens that a parser must see in the text.
        reasoning_starts, reasoning_ends: ids of the tokens that begin and end reasoning; empty if
            the markers are several tokens.
    """

    def __init__(self, formats: Formats, tokenizer: Tokenizer):
        self.formats = formats
        self._tokenizer = tokenizer
        special = {tokenizer.content(id) or "": id for id in tokenizer.special_ids}
        shown = visible_special_tokens(formats, special)
        self.shown = tuple(sorted(special[text] for text in shown))
        form = formats.reasoning if isinstance(formats.reasoning, ReasoningFormat) else None
        self.reasoning_starts = self._ids_of(() if form is None else form.begins)
        self.reasoning_ends = self._ids_of(() if form is None else form.ends)
        self._markers: Reasoning | None = None
        if form is not None:
            alone = tokenizer.token_id
            self._markers = Reasoning(
                tuple(sorted(self.reasoning_starts)),
                tuple(sorted(self.reasoning_ends)),
                start_texts=tuple(text for text in form.begins if alone(text) is None),
                end_texts=tuple(text for text in form.ends if alone(text) is None),
                closing_ids=tuple(tokenizer.encode(form.ends[0], add_special_tokens=False)),
            )

    def reasoning(
        self, prompt_ids: Sequence[int], budget: int | None, continued: str = ""
    ) -> Reasoning | None:
        """The reasoning that the answer to a prompt may begin with; None for no reasoning.

        Args:
            budget: most tokens of reasoning; None for no limit.
            continued: the beginning of the answer, if the prompt ends with it.
        """
        parser = self.parser(prompt_ids, continued=continued)
        markers = self._markers
        if parser is None or markers is None:
            return None
        if not parser.in_reasoning and self._ends_reasoning(prompt_ids, markers):
            return None  # ended by the prompt: the model is not to reason
        return msgspec.structs.replace(markers, is_open=parser.in_reasoning, max_tokens=budget)

    def parser(
        self,
        prompt_ids: Sequence[int],
        tools: Sequence[Mapping[str, Any]] = (),
        continued: str = "",
    ) -> Parser | None:
        """A parser for the answer to one prompt; None if the answer is all content.

        Args:
            tools: the tools that may be called.
            continued: the beginning of the answer, if the prompt ends with it.
        """
        if not tools and self.formats.reasoning is None:
            return None
        tail = prompt_ids[-(_TAIL + len(continued)) :]
        prompt = self._tokenizer.decode(tail, skip_special_tokens=False)
        return Parser(self.formats, tools=tools, prompt=prompt, continued=continued)

    def places(
        self, prompt_ids: Sequence[int], *, skip_special_tokens: bool, shown: tuple[int, ...]
    ) -> TokenPlaces:
        """The places of an answer's tokens in the text that the parser gets.

        Args:
            shown: special tokens that are not skipped.
        """
        tokenizer = self._tokenizer
        detokenizer = tokenizer.detokenizer(skip_special_tokens, prompt_ids, shown)
        hidden = tokenizer.special_ids.difference(shown) if skip_special_tokens else ()
        return TokenPlaces(detokenizer, hidden)

    def _ends_reasoning(self, prompt_ids: Sequence[int], markers: Reasoning) -> bool:
        """Whether a prompt ends with reasoning that has ended."""
        if self.reasoning_ends.intersection(prompt_ids[-_CLOSED:]):
            return True
        if not markers.end_texts:
            return False
        tail = prompt_ids[-_CLOSED - len(markers.closing_ids) :]
        text = self._tokenizer.decode(tail, skip_special_tokens=False)
        return text.rstrip().endswith(markers.end_texts)

    def _ids_of(self, markers: tuple[str, ...]) -> frozenset[int]:
        ids = (self._tokenizer.token_id(marker) for marker in markers)
        return frozenset(id for id in ids if id is not None)


class TokenPlaces:
    """Follows the tokens of one sequence.

    A stop string may end the real text, or hold back its end; places are those in the whole text.

    Args:
        detokenizer: like the sequence's own, for this object alone.
        hidden: tokens that are left out of the text.
    """

    def __init__(self, detokenizer: Detokenizer, hidden: Collection[int]):
        self._detokenizer = detokenizer
        self._hidden = hidden
        self._length = 0

    def next(self, token_id: int) -> tuple[int, int]:
        """Start and end, in characters, of the next token.

        A part of a character has the place of the character; a hidden token has an empty place.
        """
        start = self._length
        self._length += len(self._detokenizer.push(token_id))
        if token_id in self._hidden:
            return start, start
        return start, max(self._length, start + 1)
