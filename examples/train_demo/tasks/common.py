"""What every generator shares: the types, and helpers for phrasing questions in many ways."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from heldout import is_heldout_word, pronounceable, random_letters
from words import COMMON, split

Message = dict[str, Any]
Messages = list[Message]
Task = Callable[[random.Random], Messages]
T = TypeVar("T")

# Words that are single tokens for the model (set by data.py). The model has to learn how they are
# spelled, while other words reach it letter by letter.
token_words: list[str] = []


def user(text: str) -> Message:
    """Build a user's message."""
    return {"role": "user", "content": text}


def reply(text: str) -> Message:
    """Build an assistant's message."""
    return {"role": "assistant", "content": text}


def ask(question: str, answer: str) -> Messages:
    """Build one question with its answer."""
    return [user(question), reply(answer)]


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Choose one of ``options``."""
    return options[int(rng.random() * len(options))]


_ASKING = frozenset(split("what which who where when why how is are do does can could if today"))


def phrased(rng: random.Random, question: str) -> str:
    """Vary how a question is typed: first letter, final mark, a polite word before or after it."""
    roll = rng.random()
    if roll < 0.6:
        return question
    if rng.random() < 0.5 and question[:1].isupper() and question[1:2].islower():
        question = question[0].lower() + question[1:]
    if rng.random() < 0.4 and question[-1] in ".?!" and question[-2:-1].isalnum():
        question = question[:-1]
    if roll < 0.8:
        return question
    if roll < 0.9:
        after = pick(
            rng, [", please.", " please", ", please", ", thanks.", " pls", "!", "?", " now."]
        )
        plain = question[-2:-1].isalnum() and question[-1] in ".?!"
        return question[:-1] + after if plain else question
    first = question[0].lower() + question[1:] if question[1:2].islower() else question
    if not first[0].islower() or re.split("[ ']", first)[0] in _ASKING:
        before = ["Hey, ", "Hi! ", "Hello, ", "Quick question: ", "Tell me: ", "So, ", "Now, "]
        return pick(rng, before) + first
    chosen = pick(rng, ["Please ", "please ", "Hey, ", "Can you ", "Could you ", "Now "])
    if chosen.endswith("ou ") and question[-1] in ".!":
        first = first[:-1] + "?"
    return chosen + first


def casual(rng: random.Random, question: str) -> str:
    """Vary a question in whose answer upper and lower case do not matter."""
    question = phrased(rng, question)
    return question.lower() if rng.random() < 0.08 else question


def any_word(rng: random.Random, low: int = 2, high: int = 9) -> str:
    """Draw a lower-case word: real, word-like or without any pattern."""
    roll = rng.random()
    if roll < 0.2:
        return pick(rng, COMMON)
    if roll < 0.42 and token_words:
        return pick(rng, token_words)
    # Six letters and fewer are what people try first.
    length = rng.randint(low, high) if rng.random() < 0.5 else rng.randint(3, 6)
    return pronounceable(rng, length) if roll < 0.77 else random_letters(rng, length)


def fresh_word(rng: random.Random, low: int = 2, high: int = 9) -> str:
    """Draw a word that is not held out."""
    while True:
        word = any_word(rng, low, high)
        if not is_heldout_word(word):
            return word


def quoted(rng: random.Random, word: str) -> str:
    """Write ``word`` as people do when they talk about a word: bare or in some kind of quotes."""
    roll = rng.random()
    if roll < 0.45:
        return f'"{word}"'
    if roll < 0.65:
        return f"'{word}'"
    return word


def listed(items: Sequence[str], last: str = "and") -> str:
    """Join words as in a sentence: ``a, b and c``."""
    if len(items) == 1:
        return items[0]
    return f"{', '.join(items[:-1])} {last} {items[-1]}"
