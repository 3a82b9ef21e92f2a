"""Which sums and words the training data never shows, and random words to ask about.

The split is a hash of the question itself, so the generators and every later evaluation agree on
it without a stored list. Both rules are symmetric (``a + b`` with ``b + a``, a word with its own
reversal): a question is unseen only if its mirror image is unseen too.

This module uses the standard library alone, so that the tests can load it by its path.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable

VOWELS = "aeiou"
CONSONANTS = "bcdfghjklmnprstvwz"
LETTERS = "abcdefghijklmnopqrstuvwxyz"
ONSETS = ["bl", "br", "ch", "cl", "cr", "dr", "fl", "fr", "gl", "gr", "pl", "pr", "qu", "sh", "sk",
          "sl", "sm", "sn", "sp", "st", "str", "sw", "th", "tr", "wh", "y", "j", "x"]  # fmt: skip
CODAS = ["ck", "ft", "ld", "lk", "lt", "mp", "nd", "ng", "nk", "nt", "pt", "rd", "rk", "rm", "rn",
         "rt", "sh", "sk", "st", "th", "ll", "ss", "y", "x", "e"]  # fmt: skip


def _bucket(text: str, buckets: int) -> int:
    return zlib.crc32(text.encode()) % buckets


def is_heldout_pair(op: str, a: int, b: int) -> bool:
    """Say whether ``a op b`` belongs to the fifth of all pairs that training never shows.

    There are so few pairs with a one-digit number that all of them are shown.
    """
    return min(a, b) >= 10 and _bucket(f"{op} {min(a, b)} {max(a, b)}", 5) == 0


def is_heldout_word(word: str) -> bool:
    """Say whether no training text reverses ``word`` (one word in eight).

    The exceptions are the words that are one token for the model (``vocabulary_words``): those it
    has to learn by heart.
    """
    lower = word.lower()
    return _bucket(min(lower, lower[::-1]), 8) == 0


def pronounceable(rng: random.Random, length: int) -> str:
    """Make a word of ``length`` letters that looks as if it could be one."""
    parts: list[str] = []
    size = 0
    while size < length:
        onset = rng.choice(ONSETS) if rng.random() < 0.3 else rng.choice(CONSONANTS)
        part = onset + rng.choice(VOWELS)
        if rng.random() < 0.25:
            part += rng.choice(VOWELS)
        if rng.random() < 0.35:
            part += rng.choice(CODAS) if rng.random() < 0.5 else rng.choice(CONSONANTS)
        parts.append(part)
        size += len(part)
    word = "".join(parts)
    # Half of the words start with a vowel or in mid-syllable, as real ones do.
    start = rng.randrange(len(word) - length + 1) if rng.random() < 0.5 else 0
    return word[start : start + length]


def random_letters(rng: random.Random, length: int) -> str:
    """Make a word of ``length`` letters drawn without any pattern."""
    return "".join(rng.choice(LETTERS) for _ in range(length))


def vocabulary_words(vocabulary: Iterable[str]) -> set[str]:
    """Return the words of two letters and more in a tokenizer's vocabulary, as they are written."""
    return {
        word for word in (token.removeprefix("Ġ") for token in vocabulary)
        if len(word) > 1 and word.isascii() and word.isalpha()
    }  # fmt: skip


def sample_sums(count: int, seed: int = 0, digits: int = 2) -> list[tuple[int, str, int, int]]:
    """Return ``count`` distinct held-out ``(a, op, b, result)`` of numbers of ``digits`` digits.

    Additions and subtractions alternate; the results of subtractions may be negative.
    """
    rng = random.Random(seed)
    found: dict[tuple[int, str, int], int] = {}
    while len(found) < count:
        op = "+-"[len(found) % 2]
        a, b = (rng.randint(10 ** (digits - 1), 10**digits - 1) for _ in "ab")
        if is_heldout_pair(op, a, b):
            found.setdefault((a, op, b), a + b if op == "+" else a - b)
    return [(a, op, b, result) for (a, op, b), result in found.items()]


def sample_words(
    count: int, seed: int = 0, longest: int = 6, vocabulary: Iterable[str] = ()
) -> list[str]:
    """Return ``count`` distinct held-out words of three to ``longest`` letters.

    Word-like and patternless ones alternate. None of them is, forwards or backwards, one of the
    words in ``vocabulary``.
    """
    rng = random.Random(seed)
    known = {word.lower() for word in vocabulary_words(vocabulary)}
    found: dict[str, None] = {}
    while len(found) < count:
        make = pronounceable if len(found) % 2 == 0 else random_letters
        word = make(rng, rng.randint(3, longest))
        if is_heldout_word(word) and known.isdisjoint((word, word[::-1])):
            found.setdefault(word)
    return list(found)
