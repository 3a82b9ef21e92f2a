"""Reasoning: the markers around it, by the names of their formats, and its tokens in an output."""

from __future__ import annotations

from typing import Final

from asyncllm.types import Reasoning

#: The markers that begin it, any of several; those that end it; those around the answer behind it.
REASONING_MARKS: Final[dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]]] = {
    "think": (("<think>",), ("</think>",), ()),  # Qwen 3, DeepSeek R1, many others
    "mistral": (("[THINK]",), ("[/THINK]",), ()),  # Magistral
    "granite": (  # 3.2
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        (),
    ),
    "granite_tags": (("<think>",), ("</think>",), ("<response>", "</response>")),
    "seed_oss": (("<seed:think>",), ("</seed:think>",), ()),
    "gemma4": (("<|channel>thought",), ("<channel|>",), ()),
    "command": (
        ("<|START_THINKING|>",),
        ("<|END_THINKING|>",),
        ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
}
#: The markers that end a message on a channel, as gpt-oss writes them.
CHANNEL_ENDS: Final = ("<|end|>", "<|call|>", "<|return|>")


class ReasoningSpan:
    """Follows the tokens of one output.

    Markers of several tokens are found by text, as a model may write them with other tokens than
    the tokenizer.

    Attributes:
        inside: whether the next token is part of the reasoning, unless it begins or ends it.
        at_start: no token has come yet, so reasoning may begin.
        length: the number of tokens of the reasoning, its markers included.
        beyond: the text of the latest token behind the marker that it has completed.
        reads_text: whether ``accept`` needs the texts of tokens.
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

    def __init__(self, reasoning: Reasoning):
        self.inside = reasoning.is_open
        self.at_start = True
        self.length = 0
        self.beyond = b""
        self._starts = frozenset(() if reasoning.is_open else reasoning.start_ids)
        self._ends = frozenset(reasoning.end_ids)
        # The markers with which the output may still begin.
        self._begins = () if reasoning.is_open else tuple(map(str.encode, reasoning.start_texts))
        self._end_texts = tuple(map(str.encode, reasoning.end_texts))
        self.reads_text = bool(self._begins or self._end_texts)
        self._text = b""  # the end of the text, in which a marker may have begun
        self._num_tokens = 0

    def accept(self, token: int, text: bytes = b"") -> bool:
        """Take the next token; return whether it is part of the reasoning or its markers.

        Args:
            text: of the token; only read if ``reads_text``.
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
            text = b""  # ``_text`` has it already
        self.inside = token not in self._ends and not self._ended(text)
        return True

    def _begin(self, text: bytes) -> bool:
        """Whether the output so far starts with a marker that begins reasoning."""
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
        """Whether a text completes a marker that ends the reasoning."""
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
