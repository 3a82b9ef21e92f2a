"""Log probabilities as clients want them: chat's list of objects, completions' parallel lists, and
those of prompts."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from asyncllm.server.model import Tokenizer
    from asyncllm.types import PromptLogprob, TokenLogprob

#: JSON has no -inf; clients know this number from vLLM.
LOWEST = -9999.0

_encode = msgspec.json.Encoder().encode


def token_text(raw: bytes) -> str:
    """A token alone as text; one that is not whole characters is spelled out, as OpenAI does."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def token_names(tokenizer: Tokenizer, *, as_ids: bool) -> Callable[[int], str]:
    """What tokens are called in logprobs: their texts, or, to tell all apart, ``token_id:N``."""
    if as_ids:
        return "token_id:{}".format
    return lambda token_id: token_text(tokenizer.token_bytes(token_id))


def chat_logprobs(
    entries: Iterable[TokenLogprob], tokenizer: Tokenizer, *, as_ids: bool = False
) -> dict[str, Any]:
    """Chat's object for the tokens of one frame or of the whole answer."""
    name = token_names(tokenizer, as_ids=as_ids)

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": name(token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    return {
        "content": [
            {
                **entry(found.token_id, found.logprob),
                "top_logprobs": [entry(token, logprob) for token, logprob in found.top],
            }
            for found in entries
        ],
        "refusal": None,
    }


def prompt_logprobs(
    entries: Iterable[PromptLogprob | None], tokenizer: Tokenizer, most: int
) -> msgspec.Raw:
    """For each token of a prompt, by token id: its own logprob, and ``most`` likely others.

    vLLM's shape; the first token has none. It is JSON already, written entry by entry: all of a
    long prompt's as objects would take a gigabyte.
    """

    def value(token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        text = token_text(tokenizer.token_bytes(token_id))
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    def written(entry: PromptLogprob | None) -> bytes:
        if entry is None:
            return b"null"
        # Its own comes first, and is never overwritten.
        values = {str(entry.token_id): value(entry.token_id, entry.logprob, entry.rank)}
        for rank, (token, logprob) in enumerate(entry.top[:most], 1):
            if token != entry.token_id:
                values[str(token)] = value(token, logprob, rank)
        return _encode(values)

    return msgspec.Raw(b"[%b]" % b",".join(map(written, entries)))


class CompletionLogprobs:
    """Builds completions' lists for one choice, frame by frame: offsets count from its start."""

    def __init__(self, tokenizer: Tokenizer, *, as_ids: bool = False, hidden: Collection[int] = ()):
        """``hidden`` tokens are left out of the answer's text."""
        self._bytes_of = tokenizer.token_bytes
        self._name = token_names(tokenizer, as_ids=as_ids)
        self._hidden = hidden
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def lists(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        """For tokens that were generated."""
        lists = _no_lists()
        for entry in entries:
            self._add(lists, entry, self._hidden, len(entry.top))
        return lists

    def prompt_lists(
        self,
        tokens: Sequence[int],
        entries: Sequence[TokenLogprob | None],
        text: str,
        *,
        hidden: Collection[int],
        most: int,
    ) -> dict[str, Any]:
        """For a prompt that is echoed as ``text``, before any other lists.

        Args:
            hidden: tokens that are left out of it.
            most: of the likeliest tokens.
        """
        lists = _no_lists()
        for token, entry in zip(tokens, entries, strict=True):
            if entry is not None:
                self._add(lists, entry, hidden, most)
                continue
            lists["tokens"].append(self._name(token))
            lists["token_logprobs"].append(None)
            lists["top_logprobs"].append(None)
            lists["text_offset"].append(self._offset)
            self._advance(token, hidden)
        # The tokenizer need not give back what it was given.
        lists["text_offset"] = [min(offset, len(text)) for offset in lists["text_offset"]]
        self._offset = len(text)
        return lists

    def _add(
        self, lists: dict[str, Any], entry: TokenLogprob, hidden: Collection[int], most: int
    ) -> None:
        name, logprob = self._name(entry.token_id), _finite(entry.logprob)
        top: dict[str, float] = {}
        for token, likely in entry.top[:most]:
            top.setdefault(self._name(token), _finite(likely))  # of two written alike, the likelier
        top.setdefault(name, logprob)  # the token itself is always there
        lists["tokens"].append(name)
        lists["token_logprobs"].append(logprob)
        lists["top_logprobs"].append(top)
        lists["text_offset"].append(self._offset)
        self._advance(entry.token_id, hidden)

    def _advance(self, token: int, hidden: Collection[int]) -> None:
        if token not in hidden:
            self._offset += len(self._decoder.decode(self._bytes_of(token)))


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Completions' lists, one after the other."""
    return {name: values + second[name] for name, values in first.items()}


def _no_lists() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _finite(logprob: float) -> float:
    # Not max() alone: NaN compares false with everything.
    return logprob if logprob > LOWEST else LOWEST
