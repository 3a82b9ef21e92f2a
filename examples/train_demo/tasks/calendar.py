"""Days, months, counting, tables and other sequences."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import random

from heldout import LETTERS
from words import DAYS, MONTH_DAYS, MONTHS, ORDINALS, in_words

from .arithmetic import is_prime
from .common import Messages, ask, casual, listed, pick


def day(rng: random.Random) -> Messages:
    """Ask which day comes after, before, or some days after another."""
    index = rng.randrange(7)
    today = DAYS[index]
    kind = rng.randrange(6)
    if kind == 0:
        question = pick(rng, ["What day comes after {d}?", "Which day is after {d}?",
                              "What is the day after {d}?", "Which day follows {d}?",
                              "What comes after {d}?", "What day is after {d}?",
                              "What day follows {d}?"])
        answer = f"{DAYS[(index + 1) % 7]} comes after {today}."
    elif kind == 1:
        question = pick(rng, ["What day comes before {d}?", "Which day is before {d}?",
                              "What is the day before {d}?", "What comes before {d}?",
                              "What day is before {d}?"])
        answer = f"{DAYS[index - 1]} comes before {today}."
    elif kind == 2:
        count = rng.randint(2, 10)
        question = pick(rng, [f"What day is {count} days after {{d}}?",
                              f"Today is {{d}}. What day is it in {count} days?",
                              f"If today is {{d}}, what day is it in {count} days?"])
        answer = f"{count} days after {today} is {DAYS[(index + count) % 7]}."
    elif kind == 3:
        question = pick(rng, ["If today is {d}, what day is tomorrow?",
                              "Today is {d}. What is tomorrow?",
                              "Today is {d}. What day was yesterday?",
                              "If today is {d}, what day was yesterday?"])
        if "tomorrow" in question:
            answer = f"Tomorrow is {DAYS[(index + 1) % 7]}."
        else:
            answer = f"Yesterday was {DAYS[index - 1]}."
    elif kind == 4:
        question = pick(rng, ["Is {d} a weekday?", "Is {d} on the weekend?", "Is {d} a work day?"])
        weekend = index > 4
        yes = weekend == ("weekend" in question)
        rest = "is on the weekend" if weekend else "is a weekday"
        answer = f"{'Yes' if yes else 'No'}, {today} {rest}."
    else:
        question = pick(rng, ["What are the days of the week?", "List the days of the week.",
                              "Name the days of the week.", "How many days are in a week?",
                              "Name all weekdays."])
        if question.startswith("How"):
            answer = "A week has 7 days."
        elif "weekdays" in question:
            answer = f"The weekdays are {listed(DAYS[:5])}."
        else:
            answer = f"The days of the week are {listed(DAYS)}."
    return ask(casual(rng, question.format(d=today)), answer)


def month(rng: random.Random) -> Messages:
    """Ask about the order, number and length of months."""
    index = rng.randrange(12)
    name = MONTHS[index]
    kind = rng.randrange(6)
    if kind == 0:
        question = pick(rng, ["What month comes after {m}?", "Which month is after {m}?",
                              "Which month follows {m}?", "What comes after {m}?"])
        answer = f"{MONTHS[(index + 1) % 12]} comes after {name}."
    elif kind == 1:
        question = pick(rng, ["What month comes before {m}?", "Which month is before {m}?",
                              "What comes before {m}?"])
        answer = f"{MONTHS[index - 1]} comes before {name}."
    elif kind == 2:
        question = pick(rng, ["What is the {o} month?", "Which month is the {o} one?",
                              "What is the {o} month of the year?", "What is month number {n}?",
                              "Which month has the number {n}?"])
        answer = f"The {ORDINALS[index]} month is {name}."
    elif kind == 3:
        question = pick(rng, ["How many days does {m} have?", "How many days are in {m}?",
                              "How long is {m}?"])
        answer = f"{name} has {MONTH_DAYS[index]} days."
        if index == 1:
            answer = "February has 28 days, and 29 in a leap year."
    elif kind == 4:
        season = ["winter", "spring", "summer", "autumn"][(index + 1) // 3 % 4]
        question = pick(rng, ["Which season is {m} in?", "What season is {m}?",
                              "In which season is {m}?"])
        answer = f"{name} is in {season} (in the north)."
    else:
        question = pick(rng, ["What are the months of the year?", "List the months.",
                              "Name the twelve months.", "List the months of the year.",
                              "How many months are in a year?", "Name all months.",
                              "What are the four seasons?", "Name the seasons.",
                              "How many days are in a year?"])
        if question.startswith("How many m"):
            answer = "A year has 12 months."
        elif question.startswith("How many d"):
            answer = "A year has 365 days, and a leap year has 366."
        elif "season" in question:
            answer = "The four seasons are spring, summer, autumn and winter."
        else:
            answer = f"The months of the year are {listed(MONTHS)}."
    return ask(casual(rng, question.format(m=name, o=ORDINALS[index], n=index + 1)), answer)


def _sequence(numbers: range) -> str:
    return ", ".join(map(str, numbers))


def count(rng: random.Random) -> Messages:
    """Ask to count: up, down, in steps, from anywhere, in words or one number per line."""
    roll = rng.random()
    # Most are short; a few are the long streams that show off streaming.
    top = rng.randint(2, 30) if rng.random() < 0.6 else rng.randint(20, 120)
    if rng.random() < 0.25:
        top = pick(rng, [10, 10, 20, 20, 30, 40, 50, 50, 60, 100, 100, 200])
    if rng.random() < 0.02:
        top = rng.randint(100, 300)
    if roll < 0.35:
        question = pick(rng, ["Count to {b}.", "Count from 1 to {b}.", "Count up to {b}.",
                              "List the numbers from 1 to {b}.", "Write the numbers 1 to {b}.",
                              "Count to {b}", "Can you count to {b}?",
                              "Say the numbers from 1 to {b}."])
        shown = in_words(top) if rng.random() < 0.12 else top
        return ask(casual(rng, question.format(b=shown)), _sequence(range(1, top + 1)))
    if roll < 0.55:
        start = rng.randint(0, 200)
        if rng.random() < 0.3:
            start = 1
        end = start + rng.randint(1, 25)
        question = pick(rng, ["Count from {a} to {b}.", "List the numbers from {a} to {b}.",
                              "Write the numbers {a} to {b}.", "Count up from {a} to {b}."])
        answer = _sequence(range(start, end + 1))
        if rng.random() < 0.1:
            return ask(casual(rng, question.format(a=in_words(start), b=in_words(end))), answer)
        return ask(casual(rng, question.format(a=start, b=end)), answer)
    if roll < 0.7:
        top = min(top, 60)
        end = 1 if rng.random() < 0.7 else 0
        question = pick(rng, ["Count down from {a} to {b}.", "Count backwards from {a} to {b}.",
                              "Count from {a} down to {b}.", "Count backwards from {a}.",
                              "Count down from {a}."])
        if "{b}" not in question:
            end = 1
        answer = _sequence(range(top, end - 1, -1))
        return ask(casual(rng, question.format(a=top, b=end)), answer)
    if roll < 0.85:
        step = rng.choice([2, 2, 3, 4, 5, 5, 10, 10])
        end = step * rng.randint(3, 20)
        if step == 2 and rng.random() < 0.5:
            kind = pick(rng, ["even", "odd"])
            question = pick(rng, ["List the {k} numbers up to {b}.",
                                  "Write the {k} numbers to {b}.",
                                  "Count to {b} with {k} numbers only."])
            first = 2 if kind == "even" else 1
            answer = _sequence(range(first, end + 1, 2))
            return ask(casual(rng, question.format(k=kind, b=end)), answer)
        question = pick(rng, ["Count to {b} by {s}s.", "Count by {s} to {b}.",
                              "Count to {b} in steps of {s}.", "Count in {s}s up to {b}."])
        answer = _sequence(range(step, end + 1, step))
        return ask(casual(rng, question.format(b=end, s=step)), answer)
    if roll < 0.93:
        question = pick(rng, ["Count to {b}, one number per line.",
                              "Count from 1 to {b}, each on a new line.",
                              "Write the numbers 1 to {b}, one per line."])
        return ask(question.format(b=top), "\n".join(str(n) for n in range(1, top + 1)))
    top = rng.randint(2, 30)
    question = pick(rng, ["Count to {b} in words.", "Count from 1 to {b} in words.",
                          "Write the numbers from one to {w} in words."])
    answer = ", ".join(in_words(n) for n in range(1, top + 1))
    return ask(casual(rng, question.format(b=top, w=in_words(top))), answer)


PRIMES = [n for n in range(2, 100) if is_prime(n)]


def sequence(rng: random.Random) -> Messages:
    """Ask for a times table, the alphabet, some well-known numbers, or what comes next."""
    kind = rng.randrange(7)
    if kind == 0:
        n = rng.randint(1, 12)
        question = pick(rng, ["Give me the {n} times table.", "What is the {n} times table?",
                              "Write the multiplication table of {n}.",
                              "Show me the times table for {n}."])
        answer = "\n".join(f"{n} x {i} = {n * i}" for i in range(1, 11))
        return ask(casual(rng, question.format(n=n)), answer)
    if kind == 1:
        question = pick(rng, ["Say the alphabet.", "What is the alphabet?", "List the letters.",
                              "Recite the alphabet.", "Say the alphabet backwards.",
                              "List the vowels.", "Write the alphabet."])
        letters = "aeiou" if "vowels" in question else LETTERS
        letters = letters[::-1] if "backwards" in question else letters
        return ask(casual(rng, question), ", ".join(letters))
    if kind == 2:
        n = rng.randint(3, 25)
        question = pick(rng, ["List the first {n} prime numbers.", "Give me {n} prime numbers.",
                              "What are the first {n} primes?"])
        return ask(casual(rng, question.format(n=n)), ", ".join(map(str, PRIMES[:n])))
    if kind == 3:
        n = rng.randint(3, 15)
        question = pick(rng, ["List the first {n} square numbers.",
                              "What are the first {n} squares?",
                              "Write the squares of 1 to {n}."])
        answer = ", ".join(str(i * i) for i in range(1, n + 1))
        return ask(casual(rng, question.format(n=n)), answer)
    if kind == 4:
        n = rng.randint(3, 16)
        numbers = [0, 1]
        while len(numbers) < n:
            numbers.append(numbers[-1] + numbers[-2])
        question = pick(rng, ["List the first {n} Fibonacci numbers.",
                              "Give me {n} Fibonacci numbers.",
                              "Write the first {n} numbers of the Fibonacci sequence."])
        return ask(casual(rng, question.format(n=n)), ", ".join(map(str, numbers[:n])))
    if kind == 5:
        n = rng.randint(5, 30)
        question = pick(rng, ["Play FizzBuzz up to {n}.", "FizzBuzz to {n}.",
                              "Do FizzBuzz to {n}."])
        answer = ", ".join("Fizz" * (i % 3 == 0) + "Buzz" * (i % 5 == 0) or str(i)
                           for i in range(1, n + 1))
        return ask(casual(rng, question.format(n=n)), answer)
    start, step = rng.randint(0, 60), rng.randint(1, 12)
    numbers = [start + step * i for i in range(rng.randint(3, 5))]
    question = pick(rng, ["What comes next: {t}", "What is the next number: {t}, ...",
                          "Continue: {t}, ...", "Which number comes next: {t}?"])
    text = ", ".join(map(str, numbers))
    return ask(question.format(t=text), f"The next number is {numbers[-1] + step}.")
