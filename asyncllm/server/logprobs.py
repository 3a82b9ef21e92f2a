"""Log probabilities in OpenAI's two shapes: chat's list of objects, completions' parallel lists."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncllm.text.tokenizer import Tokenizer
    from asyncllm.types import TokenLogprob

#: JSON has no -inf; clients know this number from vLLM.
LOWEST = -9999.0


def token_text(raw: bytes) -> str:
    """A token alone as text; one that is not whole characters is spelled out, as OpenAI does."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(entries: Iterable[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """``{"content": [...]}`` for the tokens of one frame or of the whole answer."""
    return {
        "content": [
            {
                **_entry(entry.token_id, entry.logprob, tokenizer),
                "top_logprobs": [_entry(token, lp, tokenizer) for token, lp in entry.top],
            }
            for entry in entries
        ]
    }


def _entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": token_text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionLogprobs:
    """Builds completions' lists for one choice, frame by frame: offsets count from its start."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def lists(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        token_bytes = self._tokenizer.token_bytes
        texts, logprobs, tops, offsets = [], [], [], []
        for entry in entries:
            raw = token_bytes(entry.token_id)
            text, logprob = token_text(raw), _finite(entry.logprob)
            top = {token_text(token_bytes(token)): _finite(lp) for token, lp in entry.top}
            top.setdefault(text, logprob)  # the sampled token is always there
            texts.append(text)
            logprobs.append(logprob)
            tops.append(top)
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(raw))
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def _finite(logprob: float) -> float:
    # Not max() alone: NaN compares false with everything.
    return logprob if logprob > LOWEST else LOWEST
