"""What every generator shares: the types, and helpers for phrasing questions in many ways."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from heldout import LETTERS, is_heldout_word, pronounceable, random_letters
from words import COMMON, DOUBLES, split

Message = dict[str, Any]
Messages = list[Message]
Task = Callable[[random.Random], Messages]
# Questions that have the same answer, with it.
Answers = list[tuple[list[str], str]]
T = TypeVar("T")

# Words that are single tokens for the model, as they are written, and those of them in lower case
# (both set by data.py). The model has to learn how they are spelled, while other words reach it
# letter by letter.
token_forms: list[str] = []
token_words: list[str] = []
_token_lower: set[str] = set()


def set_token_forms(forms: Iterable[str]) -> None:
    """Tell the generators which words are single tokens."""
    token_forms[:] = sorted(forms)
    token_words[:] = [word for word in token_forms if word.islower()]
    _token_lower.clear()
    _token_lower.update(word.lower() for word in token_forms)


def is_unseen(word: str) -> bool:
    """Say whether ``word`` is held out and no single token: no training text reverses it."""
    lower = word.lower()
    return is_heldout_word(word) and _token_lower.isdisjoint((lower, lower[::-1]))


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
    if roll < 0.18:
        return pick(rng, COMMON)
    if roll < 0.38 and token_words:
        return pick(rng, token_words)
    if roll < 0.42:
        return doubled(rng, low, high)
    # Six letters and fewer are what people try first.
    length = rng.randint(low, high) if rng.random() < 0.5 else rng.randint(3, 6)
    return pronounceable(rng, length) if roll < 0.77 else random_letters(rng, length)


def fresh_word(rng: random.Random, low: int = 2, high: int = 9) -> str:
    """Draw a word that is not held out."""
    while True:
        word = any_word(rng, low, high)
        if not is_unseen(word):
            return word


def letter_word(rng: random.Random, low: int = 2, high: int = 9, unseen: bool = True) -> str:
    """Draw a word whose letters matter: more single tokens, and more letters that come twice.

    Without ``unseen`` it is no held-out word.
    """
    while True:
        roll = rng.random()
        if roll < 0.17 and token_forms:
            word = pick(rng, token_forms)
        elif roll < 0.27:
            word = doubled(rng, low, high + 2)
        else:
            word = any_word(rng, low, high)
        if unseen or not is_unseen(word):
            return word


def doubled(rng: random.Random, low: int, high: int) -> str:
    """Draw a lower-case word with the same letter or letters several times."""
    roll = rng.random()
    if roll < 0.25:
        return pick(rng, DOUBLES)
    length = rng.randint(low, high)
    word = (pronounceable if rng.random() < 0.6 else random_letters)(rng, length)
    if roll < 0.6:
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(word))
            word = word[:place] + word[place] * rng.choice((1, 1, 1, 2)) + word[place:]
    elif roll < 0.8:
        part = word[: rng.randint(1, 4)]
        place = rng.randrange(3)
        word = word[:place] + part * rng.randint(2, 4) + word[place:]
    else:
        few = rng.sample(LETTERS, rng.randint(2, 4))
        word = "".join(pick(rng, few) for _ in range(length))
    return word[:length]


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
