"""Row parameters, with and without constraints, made the plain way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncllm.types import Reasoning
from asyncllm.wire.messages import Constraints, RowLogprobs, RowParams, pack

if TYPE_CHECKING:
    from asyncllm.executor.sampling.logprobs import Logprobs


def mask_of(tokens: Iterable[int], vocab: int) -> np.ndarray:
    """int32 [ceil(vocab / 32)] with the bits of these tokens."""
    words = [0] * -(-vocab // 32)
    for token in tokens:
        words[token // 32] |= 1 << token % 32
    return np.array(words, dtype=np.uint32).view(np.int32)


def row_params(
    vocab: int,
    *,
    bias: dict[int, float] | None = None,
    allowed: Iterable[int] = (),
    bad_words: Iterable[tuple[int, ...]] = (),
    grammar: bytes = b"",
    reasoning: Reasoning | None = None,
    **changes: Any,
) -> RowParams:
    """Plain sampling, with constraints and changes; nothing ``allowed`` is everything."""
    words = list(bad_words)
    banned = {word[0] for word in words if len(word) == 1}
    left = set(allowed or range(vocab)) - banned
    bias = bias or {}
    constraints = Constraints(
        bias_ids=pack(bias),
        biases=np.array(list(bias.values()), dtype="<f4").tobytes(),
        mask=mask_of(left, vocab).tobytes() if len(left) < vocab else b"",
        bad_words=tuple(word for word in words if len(word) > 1),
        grammar=grammar,
        reasoning=reasoning,
    )
    asked = None if constraints == Constraints() else constraints
    return RowParams(**{"constraints": asked, **changes})


def unpacked(logprobs: Logprobs) -> list[RowLogprobs]:
    """The rows' logprobs, after a copy to the host."""
    return list(logprobs.unpack(logprobs.packed.cpu().numpy()))
