"""Spelling, reversing, counting letters, changing case, and sorting."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import random

from heldout import LETTERS, VOWELS
from words import COLORS, COMMON, FRUITS, NAMES, ORDINALS

from .common import (
    Messages,
    any_word,
    ask,
    fresh_word,
    is_unseen,
    letter_word,
    phrased,
    pick,
    quoted,
)

REVERSE = [
    "Reverse {w}.", "Reverse the word {w}.", "Reverse: {w}", "Spell {w} backwards.",
    "Write {w} backwards.", "What is {w} backwards?", "What is {w} reversed?",
    "What is the reverse of {w}?", "What is {w} spelled backwards?", "Turn {w} around.",
    "Write the word {w} in reverse.", "Say {w} backwards.", "Reverse the letters of {w}.",
    "Reverse the string {w}.", "What do you get when you reverse {w}?", "{w} backwards",
    "{w} in reverse", "How do you write {w} backwards?", "Reverse this word: {w}",
    "Give me {w} in reverse order.", "Please reverse the word {w}.", "{w} reversed",
    "Can you reverse {w}?", "Can you reverse the word {w}?", "Reverse {w}", "What's {w} backwards?",
    "Spell the word {w} backwards.", "Flip the word {w}.", "Write {w} in reverse.",
    "Reverse the text {w}.", "Reverse the name {w}.", "Backwards: {w}",
]
SPELL = [
    "Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", "Spell out {w}.",
    "Spell {w} letter by letter.", "Write {w} letter by letter.", "Spell: {w}",
    "Can you spell {w}?", "Tell me the letters of {w}.", "What are the letters of {w}?",
    "Spell {w}", "How is {w} spelled?", "How is the word {w} spelled?", "How to spell {w}?",
    "List the letters of {w}.", "List the letters in {w}.", "Split {w} into letters.",
]
# Where the word comes first, a change of the sentence's first letter would change the word.
BEGIN_WITH_WORD = "{w}"


def reverse(rng: random.Random) -> Messages:
    """Ask for a word backwards."""
    word = letter_word(rng, 2, 12, unseen=False)
    roll = rng.random()
    if roll < 0.08:
        word = word.capitalize()
    elif roll < 0.11:
        word = word.upper()
    elif roll < 0.15:
        word = "".join(letter.upper() if rng.random() < 0.4 else letter for letter in word)
    form = pick(rng, REVERSE)
    question = form.format(w=quoted(rng, word))
    if not form.startswith(BEGIN_WITH_WORD):
        question = phrased(rng, question)
    if "What" in form:
        return ask(question, f'"{word}" backwards is "{word[::-1]}".')
    return ask(question, word[::-1])


def reverse_more(rng: random.Random) -> Messages:
    """Ask for several words reversed one by one, or for the words of a phrase in reverse order."""
    words = [fresh_word(rng, 2, 7) for _ in range(rng.randint(2, 4))]
    if rng.random() < 0.5:
        question = pick(rng, ["Reverse each word: {t}", "Reverse these words: {t}",
                              "Reverse every word of: {t}"])
        return ask(question.format(t=", ".join(words)), ", ".join(word[::-1] for word in words))
    question = pick(rng, ["Reverse the order of these words: {t}", "Reverse the word order: {t}",
                          "Write these words in the opposite order: {t}"])
    return ask(question.format(t=" ".join(words)), " ".join(reversed(words)))


def spell(rng: random.Random) -> Messages:
    """Ask for the letters of a word."""
    # Spelling a word is no reversal, so held-out words are spelled, too.
    word = letter_word(rng, 2, 12)
    roll = rng.random()
    shown = word.capitalize() if roll < 0.15 else word.upper() if roll < 0.2 else word
    question = phrased(rng, pick(rng, SPELL).format(w=quoted(rng, shown)))
    return ask(question, "-".join(shown))


def join_letters(rng: random.Random) -> Messages:
    """Ask for the word that some letters make."""
    word = fresh_word(rng, 2, 9)
    letters = pick(rng, ["-", " ", ", "]).join(word)
    question = pick(rng, ["Which word do these letters make: {t}", "Join the letters {t}",
                          "Put these letters together: {t}", "What word is {t}?"])
    return ask(question.format(t=letters), word)


COUNT_LETTER = [
    "How many {c}'s are in {w}?", 'How many "{c}" are in {w}?', "How many {c}s are in {w}?",
    "How often is the letter {c} in {w}?", "Count the {c} in {w}.", "Count the {c}'s in {w}.",
    "How many times does {c} appear in {w}?", "How many {c} are there in {w}?",
    "How many {c}'s in {w}?", "How many {c}s in {w}?", "How many {c} in {w}?",
    "How many {c}'s are there in {w}?", "How many {c}'s does {w} have?",
    "How many {c}'s are in the word {w}?", "How many {c}'s in the word {w}?",
    "How many {c}s does {w} have?", "How many times is {c} in {w}?",
    "How many letters {c} are in {w}?", "Count the letter {c} in {w}.",
    "How many times does the letter {c} appear in {w}?", "How many '{c}' are in {w}?",
    "How many times does the letter {c} occur in the word {w}?",
    "How many {c}'s are there in the word {w}?", "Number of {c}'s in {w}?",
]


def count_letters(rng: random.Random) -> Messages:
    """Ask how long a word is, or how often a letter is in it, or how many vowels it has."""
    word = letter_word(rng, 2, 12)
    roll = rng.random()
    shown = word.capitalize() if roll < 0.06 else word.upper() if roll < 0.09 else word
    shown = quoted(rng, shown)
    word = word.lower()
    kind = rng.choice((0, 1, 1, 2))
    if kind == 0:
        question = pick(rng, ["How many letters are in {w}?", "How long is the word {w}?",
                              "How many letters does {w} have?", "Count the letters in {w}.",
                              "What is the length of {w}?", "How many letters in {w}?",
                              "How many letters are in the word {w}?", "How long is {w}?",
                              "How many letters are there in {w}?", "Count the letters of {w}.",
                              "How many letters does the word {w} have?"])
        answer = f'"{word}" has {len(word)} letters.'
        return ask(phrased(rng, question.format(w=shown)), answer)
    if kind == 1:
        letter = pick(rng, word) if rng.random() < 0.5 else max(word, key=word.count)
        if rng.random() < 0.15:
            letter = pick(rng, LETTERS)
        # Counted while spelling, as people do on their fingers: s-t-r(1)-a-w-b-e-r(2)-r(3)-y.
        count, parts = 0, []
        for each in word:
            count += each == letter
            parts.append(f"{each}({count})" if each == letter else each)
        question = pick(rng, COUNT_LETTER)
        times = "once" if count == 1 else f"{count} times"
        answer = f'{"-".join(parts)}: the letter {letter} is in "{word}" {times}.'
        asked = letter.upper() if rng.random() < 0.12 else letter
        return ask(phrased(rng, question.format(w=shown, c=asked)), answer)
    vowels = [letter for letter in word if letter in VOWELS]
    question = pick(rng, ["How many vowels are in {w}?", "Count the vowels in {w}.",
                          "How many vowels does {w} have?", "How many vowels in {w}?",
                          "How many vowels are there in {w}?", "What vowels are in {w}?",
                          "How many vowels are in the word {w}?", "Which vowels are in {w}?"])
    found = ", ".join(vowels) if vowels else "none"
    answer = f'The vowels in "{word}": {found}. That makes {len(vowels)}.'
    return ask(phrased(rng, question.format(w=shown)), answer)


def one_letter(rng: random.Random) -> Messages:
    """Ask for the first, last or n-th letter of a word, or for a letter's place."""
    word = letter_word(rng, 3, 9)
    shown = quoted(rng, word)
    roll = rng.random()
    if roll < 0.2:
        index = rng.randrange(25)
        if rng.random() < 0.5:
            question = pick(rng, ["Which letter comes after {c}?", "What letter follows {c}?"])
            answer = f"{LETTERS[index + 1]} comes after {LETTERS[index]}."
            return ask(phrased(rng, question.format(c=LETTERS[index])), answer)
        question = pick(rng, ["Which letter comes before {c}?", "What letter comes before {c}?"])
        answer = f"{LETTERS[index]} comes before {LETTERS[index + 1]}."
        return ask(phrased(rng, question.format(c=LETTERS[index + 1])), answer)
    if roll < 0.45:
        place, letter = "last", word[-1]
    else:
        index = 0 if rng.random() < 0.4 else rng.randrange(min(len(word), 6))
        place, letter = ORDINALS[index], word[index]
    question = pick(rng, ["What is the {p} letter of {w}?", "Which letter is the {p} in {w}?",
                          "Tell me the {p} letter of {w}.", "What is the {p} letter in {w}?",
                          "{P} letter of {w}?", "{P} letter of {w}",
                          "What's the {p} letter of {w}?",
                          "What is the {p} letter of the word {w}?",
                          "Give me the {p} letter of {w}.",
                          "Which is the {p} letter of {w}?", "{P} letter in {w}?"])
    answer = f'The {place} letter of "{word}" is {letter}.'
    question = question.format(p=place, P=place.capitalize(), w=shown)
    return ask(phrased(rng, question), answer)


def palindrome(rng: random.Random) -> Messages:
    """Ask whether a word reads the same backwards."""
    word = letter_word(rng, 2, 8, unseen=False)
    if rng.random() < 0.5:
        half = word[:5].lower()
        made = half + half[-2::-1] if rng.random() < 0.6 else half + half[::-1]
        word = word if is_unseen(made) else made
    question = pick(rng, ["Is {w} a palindrome?", "Is the word {w} a palindrome?",
                          "Does {w} read the same backwards?", "Is {w} the same backwards?"])
    back = word[::-1]
    verdict = "yes, it is" if back == word else "no, it is not"
    answer = f'"{word}" backwards is "{back}", so {verdict} a palindrome.'
    return ask(phrased(rng, question.format(w=quoted(rng, word))), answer)


def change_case(rng: random.Random) -> Messages:
    """Ask for a text in upper or lower case."""
    words = [any_word(rng, 2, 8) for _ in range(rng.randint(1, 4))]
    text = " ".join(words)
    if rng.random() < 0.6:
        question = pick(rng, ["Write {w} in upper case.", "Write {w} in capital letters.",
                              "Convert {w} to uppercase.", "Make {w} uppercase.",
                              "Upper case: {w}", "Shout {w}.", "Uppercase {w}", "Capitalize {w}.",
                              "Uppercase: {w}", "{w} in upper case", "Put {w} in capitals.",
                              "Write {w} in all caps.", "Turn {w} into upper case.",
                              "{w} in capital letters"])
        if question.startswith(BEGIN_WITH_WORD):
            return ask(question.format(w=quoted(rng, text)), text.upper())
        return ask(phrased(rng, question.format(w=quoted(rng, text))), text.upper())
    text = pick(rng, [text.upper(), text.title()])
    question = pick(rng, ["Write {w} in lower case.", "Convert {w} to lowercase.",
                          "Make {w} lowercase.", "Lower case: {w}", "Lowercase {w}",
                          "Write {w} in small letters.", "Turn {w} into lower case."])
    return ask(phrased(rng, question.format(w=quoted(rng, text))), text.lower())


def repeat(rng: random.Random) -> Messages:
    """Ask for a text to be repeated, once or several times, exactly as it is."""
    if rng.random() < 0.4:
        word = any_word(rng, 2, 8)
        times = rng.randint(2, 8)
        question = pick(rng, ["Say {w} {n} times.", "Repeat {w} {n} times.",
                              "Write {w} {n} times.", "Repeat the word {w} {n} times.",
                              "Say the word {w} {n} times.", "Write the word {w} {n} times."])
        answer = " ".join([word] * times)
        return ask(phrased(rng, question.format(w=quoted(rng, word), n=times)), answer)
    roll = rng.random()
    if roll < 0.35:
        text = _any_characters(rng)
    elif roll < 0.5:
        text = " ".join(str(rng.randint(0, 10 ** rng.randint(1, 6))) for _ in range(rng.randint(1,
                                                                                                6)))
    else:
        text = " ".join(any_word(rng, 1, 9) for _ in range(rng.randint(1, 9)))
        if rng.random() < 0.5:
            text = text.capitalize() + pick(rng, [".", "!", "?"])
    question = pick(rng, ["Repeat after me: {t}", "Say: {t}", "Repeat: {t}", "Echo: {t}",
                          "Repeat this exactly: {t}", 'Say "{t}"', 'Repeat "{t}"',
                          "Please repeat: {t}"])
    return ask(question.format(t=text), text)


# Ranges of letters, signs and emoji. Every byte that UTF-8 uses turns up in them, so the model
# learns to copy text in any script.
_RANGES = [(0xC0, 0x17F), (0x370, 0x3FF), (0x400, 0x45F), (0x5D0, 0x5EA), (0x621, 0x64A),
           (0x905, 0x939), (0xE01, 0xE30), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5),
           (0xAC00, 0xD7A3), (0x2190, 0x21FF), (0x1F300, 0x1F64F), (0x1F680, 0x1F6C5),
           (0x20000, 0x2A6D6), (0x1000, 0x10FF), (0x10000, 0x1005D), (0x80, 0xFF),
           (0x40000, 0x40100), (0xC0000, 0xC0100), (0x100000, 0x10FFFD)]
_RANGE_WEIGHTS = [8] * 14 + [3, 3, 1, 2, 1, 1, 1]


def _any_characters(rng: random.Random) -> str:
    low, high = rng.choices(_RANGES, _RANGE_WEIGHTS)[0]
    text = "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 8)))
    if low < 0x300:  # an accent or two within a word, as in most of Europe
        place = rng.randrange(len(text))
        text = any_word(rng, 2, 5) + text[place : place + 1] + any_word(rng, 2, 4)
    return text.strip() or "é"


def sort_things(rng: random.Random) -> Messages:
    """Ask for words or numbers in order."""
    roll = rng.random()
    separator = pick(rng, [", ", ", ", " "])
    if roll < 0.5:
        top = 99 if rng.random() < 0.7 else pick(rng, [9, 999, 999])
        numbers = [rng.randint(0, top) for _ in range(rng.randint(2, 9))]
        text = separator.join(map(str, numbers))
        if rng.random() < 0.75:
            question = pick(rng, ["Sort these numbers: {t}", "Sort {t}", "Sort the numbers {t}.",
                                  "Put these numbers in order: {t}", "Order these numbers: {t}",
                                  "Sort: {t}", "Sort the following numbers: {t}",
                                  "Sort from smallest to largest: {t}",
                                  "Sort {t} in ascending order."])
            done = sorted(numbers)
        else:
            question = pick(rng, ["Sort from largest to smallest: {t}",
                                  "Sort {t} in descending order.",
                                  "Sort these numbers in descending order: {t}"])
            done = sorted(numbers, reverse=True)
        return ask(phrased(rng, question.format(t=text)), separator.join(map(str, done)))
    pool = pick(rng, [COMMON, COMMON, FRUITS, COLORS, NAMES])
    count = rng.randint(3, 7)
    words = rng.sample(pool, count) if roll < 0.8 else [any_word(rng, 3, 7) for _ in range(count)]
    question = pick(rng, ["Sort these words: {t}", "Sort {t}", "Sort alphabetically: {t}",
                          "Put these words in alphabetical order: {t}",
                          "Sort the words {t} alphabetically.", "Order these words: {t}",
                          "Sort these words alphabetically: {t}", "Sort: {t}",
                          "Sort the following words: {t}", "Sort these: {t}",
                          "Sort the following words alphabetically: {t}"])
    answer = separator.join(sorted(words))
    return ask(phrased(rng, question.format(t=separator.join(words))), answer)


def choose_word(rng: random.Random) -> Messages:
    """Ask for the longest or shortest of some words, or their number."""
    count = rng.randint(3, 6)
    words = [any_word(rng, 2, 9) for _ in range(count)]
    text = ", ".join(words)
    if rng.random() < 0.3:
        question = pick(rng, ["How many words are in this list: {t}", "Count these words: {t}",
                              'How many words are in "{s}"?', "How many words are in '{s}'?"])
        question = question.format(t=text, s=" ".join(words))
        return ask(question, f"There are {count} words.")
    sizes = [len(word) for word in words]
    best, name = (max(sizes), "longest") if rng.random() < 0.6 else (min(sizes), "shortest")
    if sizes.count(best) > 1:
        return sort_things(rng)
    question = pick(rng, ["Which word is the {n}: {t}", "What is the {n} word: {t}",
                          "Find the {n} word: {t}"])
    return ask(question.format(n=name, t=text), f'The {name} word is "{words[sizes.index(best)]}".')
