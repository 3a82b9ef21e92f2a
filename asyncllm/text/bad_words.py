"""Bad words as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from asyncllm.text.tokenizer import Tokenizer


async def bad_word_ids(
    tokenizer: Tokenizer, words: Sequence[str | tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens at the beginning of a text and after a space, as in vLLM.

    Words given as token ids stay as they are. A word without tokens is left out.

    Raises:
        BadRequest: a word has an unpaired surrogate.
    """
    ids = [word for word in words if not isinstance(word, str)]
    bare = [word.lstrip() for word in words if isinstance(word, str)]
    if bare:
        texts = [prefix + word for word in bare for prefix in ("", " ")]
        ids += map(tuple, await tokenizer.encode_async(texts, add_special_tokens=False))
    return tuple(dict.fromkeys(word for word in ids if word))
