"""Where the reasoning at the beginning of an output is, by its tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncllm.types import Reasoning


class ReasoningSpan:
    """Follows one output.

    Markers that are several tokens are found by the text of these, for a model may write them with
    other tokens than the tokenizer does.

    Attributes:
        inside: whether the next token is part of the reasoning, as far as is known before it.
        at_start: nothing has come yet, so reasoning may begin.
        length: how many tokens were part of it, as its markers are.
        beyond: what the latest token says after the marker that it has completed.
        reads_text: whether ``accept`` has to be told the texts of tokens.
    """

    __slots__ = (
        "_begins",
        "_end_texts",
        "_ends",
        "_num_tokens",
        "_starts",
        "_text",
        "at_start",
        "beyond",
        "inside",
        "length",
        "reads_text",
    )

    def __init__(self, asked: Reasoning):
        self.inside = asked.is_open
        self.at_start = True
        self.length = 0
        self.beyond = b""
        self._starts = frozenset(() if asked.is_open else asked.start_ids)
        self._ends = frozenset(asked.end_ids)
        # Those with which the output may still begin.
        self._begins = () if asked.is_open else tuple(map(str.encode, asked.start_texts))
        self._end_texts = tuple(map(str.encode, asked.end_texts))
        self.reads_text = bool(self._begins or self._end_texts)
        self._text = b""  # the latest, as far as a marker may begin in it
        self._num_tokens = 0

    def accept(self, token: int, text: bytes = b"") -> bool:
        """Take the next token; whether it is part of the reasoning, as its markers are.

        Args:
            text: of the token; only looked at if ``reads_text``.
        """
        self._num_tokens += 1
        self.beyond = b""
        if self.at_start:
            self.at_start = False
            self.inside |= token in self._starts
        if self.inside:
            self.length += 1
        elif not (self._begins and self._begin(text)):
            return False
        else:
            text = b""  # it is in ``_text`` already, as far as it matters
        self.inside = token not in self._ends and not self._ended(text)
        return True

    def _begin(self, text: bytes) -> bool:
        """Whether the output so far is a marker that begins reasoning, and what follows it."""
        so_far = (self._text + text).lstrip()
        for marker in self._begins:
            if so_far.startswith(marker):
                self._text, self.length = so_far[len(marker) :], self._num_tokens
                return True
        self._text = so_far
        if not any(marker.startswith(so_far) for marker in self._begins):
            self._begins, self._text = (), b""
        return False

    def _ended(self, text: bytes) -> bool:
        """Whether the reasoning has a marker that ends it, now that it goes on with a text."""
        if not self._end_texts:
            return False
        so_far = self._text + text
        found = [(so_far.find(marker), marker) for marker in self._end_texts]
        ends = [at + len(marker) for at, marker in found if at >= 0]
        if ends:
            self.beyond = so_far[min(ends) :]
            return True
        longest = max(map(len, self._end_texts))
        self._text = so_far[max(0, len(so_far) - longest + 1) :]
        return False
