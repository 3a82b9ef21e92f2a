"""Sums, differences, products, comparisons, and follow-up questions about them."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import random
from itertools import pairwise

from heldout import is_heldout_pair
from words import NAMES, THINGS, in_words

from .common import Messages, ask, casual, listed, pick, reply, user

ADD = [
    "What is {a} + {b}?", "What is {a} plus {b}?", "What's {a} + {b}?", "What's {a} plus {b}?",
    "Add {a} and {b}.", "Add {b} to {a}.", "Calculate {a} + {b}.", "Compute {a} + {b}.",
    "Compute {a} plus {b}.", "Calculate {a} plus {b}.", "How much is {a} + {b}?",
    "How much is {a} plus {b}?", "What is the sum of {a} and {b}?", "Find the sum of {a} and {b}.",
    "Sum of {a} and {b}?", "Solve {a} + {b}.", "What do you get if you add {a} and {b}?",
    "What does {a} + {b} equal?", "What is the result of {a} + {b}?", "What is {a}+{b}?",
    "How much do {a} and {b} make together?", "Work out {a} + {b}.", "{a} plus {b}",
    "{a} plus {b}?", "{a} plus {b} equals?", "{a} + {b} equals?", "Tell me what {a} + {b} is.",
    "I need the sum of {a} and {b}.",
    "What is the total of {a} and {b}?", "Do you know what {a} + {b} is?", "Evaluate {a} + {b}.",
    "What is {a} and {b} added together?", "Sum {a} and {b}.", "Whats {a} + {b}?",
    "What is {a} + {b} equal to?", "What does {a} plus {b} make?", "Can you add {a} and {b}?",
    "Calculate the sum of {a} and {b}.", "{a} and {b} make?", "Give me {a} + {b}.",
    "If I add {a} and {b}, what do I get?", "What is the answer to {a} + {b}?",
]
SUB = [
    "What is {a} - {b}?", "What is {a} minus {b}?", "What's {a} - {b}?", "What's {a} minus {b}?",
    "Subtract {b} from {a}.", "Take {b} away from {a}.", "Calculate {a} - {b}.",
    "Compute {a} - {b}.", "Compute {a} minus {b}.", "Calculate {a} minus {b}.",
    "How much is {a} - {b}?", "How much is {a} minus {b}?", "Solve {a} - {b}.",
    "What is the difference of {a} and {b}?", "What do you get if you subtract {b} from {a}?",
    "What does {a} - {b} equal?", "What is the result of {a} - {b}?", "What is {a}-{b}?",
    "Work out {a} - {b}.", "{a} minus {b}", "{a} minus {b}?", "Do you know what {a} - {b} is?",
    "Evaluate {a} - {b}.", "What remains of {a} after you take away {b}?",
    "{a} minus {b} equals?", "{a} - {b} equals?", "Tell me what {a} - {b} is.",
    "Whats {a} - {b}?", "What is {a} - {b} equal to?", "Give me {a} - {b}.",
    "What is the difference between {a} and {b}?", "Calculate the difference of {a} and {b}.",
    "What is the answer to {a} - {b}?", "{a} take away {b}",
]
MUL = [
    "What is {a} * {b}?", "What is {a} times {b}?", "What's {a} x {b}?", "Multiply {a} by {b}.",
    "Calculate {a} * {b}.", "Compute {a} times {b}.", "How much is {a} times {b}?",
    "What is the product of {a} and {b}?", "Solve {a} * {b}.", "{a} times {b}", "{a} times {b}?",
    "What is {a}*{b}?", "What is {a} multiplied by {b}?", "What's {a} times {b}?",
    "{a} x {b}", "{a}x{b}", "What is {a} x {b}?", "What's {a} * {b}?", "{a} multiplied by {b}",
    "How much is {a} x {b}?", "Work out {a} times {b}.", "What is {a}x{b}?",
    "{a} times {b} equals?",
]
DIV = [
    "What is {a} / {b}?", "What is {a} divided by {b}?", "What's {a} divided by {b}?",
    "Divide {a} by {b}.", "Calculate {a} / {b}.", "How much is {a} divided by {b}?",
    "Solve {a} / {b}.", "{a} divided by {b}", "What is {a}/{b}?", "Compute {a} / {b}.",
    "What's {a} / {b}?", "{a} divided by {b}?", "{a} divided by {b} equals?",
]
TERSE = ["{a}{o}{b}=", "{a} {o} {b} =", "{a}{o}{b}", "{a} {o} {b}", "{a} {o} {b} = ?",
         "{a}{o}{b}=?",
         "{a}{o}{b}?", "{a} {o} {b}?", "Compute: {a} {o} {b}", "Calculate: {a}{o}{b}",
         "Solve: {a} {o} {b} ="]
BARE = [" Answer with the number only.", " Just the number.", " Reply with just the number.",
        " Only give the result.", " Answer with just the number, please.",
        " Answer with a single number."]
PHRASES = {"+": ADD, "-": SUB, "*": MUL, "/": DIV}


# A text that says what the result is, and asks whether that is so.
CLAIMS = [
    "{t} = {c}, right?", "{t} is {c}, right?", "{t} = {c}, correct?", "Is {t} = {c}?",
    "Is {t} equal to {c}?", "Does {t} equal {c}?", "Is it true that {t} = {c}?",
    "Is it correct that {t} is {c}?", "{t} = {c}?", "{t} = {c}, true or false?",
    "True or false: {t} = {c}", "{t} equals {c}, right?", "Is {t} {c}?", "{t} makes {c}, right?",
    "Is this right: {t} = {c}", "{t} = {c}. Is that right?", "I think {t} is {c}.",
    "I think that {t} = {c}. Am I right?", "{t} = {c}, isn't it?", "{t} is {c}, isn't it?",
    "Does {t} make {c}?", "Is the sum {t} = {c} right?", "Check this: {t} = {c}", "{t} = {c}, yes?",
    "Is {t} really {c}?", "{t} = {c}, or not?", "Why is {t} = {c}?", "Is {c} the result of {t}?",
]


def _with_digits(rng: random.Random, digits: int) -> int:
    return rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)


def _number(rng: random.Random) -> int:
    roll = rng.random()
    if roll < 0.2:
        return rng.randint(1, 10) * pick(rng, [10, 100, 1000])
    if roll < 0.35:
        return pick(rng, [10, 100, 1000]) + rng.randint(-1, 1)
    return _with_digits(rng, rng.choices((1, 2, 3, 4), (30, 35, 25, 10))[0])


def _operands(rng: random.Random) -> tuple[int, int]:
    """Draw two numbers, most often with as many digits."""
    roll = rng.random()
    if roll < 0.2:
        return _number(rng), _number(rng)
    digits = 2 if roll < 0.68 else 3 if roll < 0.86 else 1 if roll < 0.92 else 0
    if digits:
        return _with_digits(rng, digits), _with_digits(rng, digits)
    one, two = rng.sample((1, 2, 2, 3, 3, 4), 2)
    return _with_digits(rng, one), _with_digits(rng, two)


def pair(rng: random.Random, op: str) -> tuple[int, int, int]:
    """Draw operands that are not held out, with the result."""
    while True:
        if op == "*":
            if rng.random() < 0.7:
                a, b = rng.randint(0, 12), rng.randint(0, 12)
            else:
                a, b = rng.randint(10, 99), rng.randint(2, 9)
            return (a, b, a * b) if rng.random() < 0.5 else (b, a, a * b)
        if op == "/":
            b, c = rng.randint(1, 12), rng.randint(0, 12)
            return b * c, b, c
        a, b = _operands(rng)
        if is_heldout_pair(op, a, b):
            continue
        return a, b, a + b if op == "+" else a - b


def _operation(rng: random.Random) -> str:
    return rng.choices("+-*/", (37, 44, 13, 6))[0]


def calculation(rng: random.Random) -> Messages:
    """Ask for one operation on two numbers."""
    op = _operation(rng)
    a, b, c = pair(rng, op)
    if op in "+-" and rng.random() < 0.03:
        a = -a
        c = a + b if op == "+" else a - b
    if rng.random() < 0.25:
        return ask(pick(rng, TERSE).format(a=a, b=b, o=op), f"{c}")
    question = casual(rng, pick(rng, PHRASES[op]).format(a=a, b=b))
    if rng.random() < 0.12:
        if question[-1].isalnum():
            question += "?"
        return ask(question + pick(rng, BARE), f"{c}")
    return ask(question, f"{a} {op} {b} = {c}")


def claim(rng: random.Random) -> Messages:
    """Ask whether a result is right."""
    op = rng.choices("+-*/", (50, 30, 14, 6))[0]
    a, b, c = pair(rng, op) if rng.random() < 0.7 else _small_pair(rng, op)
    said = c
    if rng.random() < 0.5:
        said = c + pick(rng, [-10, -2, -1, -1, 1, 1, 2, 10, rng.randint(1, 99)])
    roll = rng.random()
    if roll < 0.35:
        text = f"{a}{op}{b}"
    elif roll < 0.7:
        text = f"{a} {op} {b}"
    else:
        words = {"+": "plus", "-": "minus", "*": "times", "/": "divided by"}
        text = f"{a} {words[op]} {b}"
    question = pick(rng, CLAIMS)
    if roll < 0.35:
        question = question.replace(" = ", "=")
    verdict = "yes, that is right" if said == c else "no, that is not right"
    question = casual(rng, question.format(t=text, c=said))
    return ask(question, f"{a} {op} {b} = {c}, so {verdict}.")


def _small_pair(rng: random.Random, op: str) -> tuple[int, int, int]:
    a, b = rng.randint(0, 12), rng.randint(0, 9)
    if op == "/":
        b += 1
        return a * b, b, a
    return a, b, a + b if op == "+" else a - b if op == "-" else a * b


def follow_up(rng: random.Random) -> Messages:
    """Ask for an operation, then for more operations on the result."""
    a, b, c = pair(rng, "+")
    messages = ask(casual(rng, pick(rng, ADD).format(a=a, b=b)), f"{a} + {b} = {c}")
    for _ in range(rng.randint(1, 3)):
        op = rng.choices("+-*", (45, 40, 15))[0]
        n = rng.randint(2, 99) if op != "*" else rng.randint(2, 5)
        if (op != "*" and is_heldout_pair(op, c, n)) or not 0 <= c < 1000:
            continue
        text = {
            "+": ["Now add {n}.", "And plus {n}?", "Add {n} to that.", "Plus {n}?"],
            "-": ["Now subtract {n}.", "And minus {n}?", "Take {n} away from that.", "Minus {n}?"],
            "*": ["Now multiply that by {n}.", "And times {n}?", "Times {n}?"],
        }[op]
        result = c + n if op == "+" else c - n if op == "-" else c * n
        messages += ask(pick(rng, text).format(n=n), f"{c} {op} {n} = {result}")
        c = result
    return messages


def several(rng: random.Random) -> Messages:
    """Ask for the sum of three or four numbers, or for two operations, answered step by step."""
    if rng.random() < 0.35:
        return _two_operations(rng)
    while True:
        numbers = [rng.randint(1, 99) for _ in range(rng.randint(3, 4))]
        total, steps, unseen = numbers[0], [], False
        for before, number in pairwise(numbers):
            unseen |= is_heldout_pair("+", total, number) or is_heldout_pair("+", before, number)
            steps.append(f"{total} + {number} = {total + number}")
            total += number
        if not unseen:
            break
    text = pick(rng, [" + ", ", ", ", ", "and"]).join(map(str, numbers))
    if "+" in text:
        question = pick(rng, ["What is {t}?", "{t} =", "{t}", "Calculate {t}.", "{t} = ?"])
    else:
        if "and" in text:
            text = listed([str(number) for number in numbers])
        question = pick(rng, ["Add {t}.", "What is the sum of {t}?", "Sum these numbers: {t}",
                              "Add up {t}.", "Add these numbers: {t}", "I need the sum of {t}."])
    return ask(question.format(t=text), f"{', '.join(steps)}. The sum is {total}.")


def _two_operations(rng: random.Random) -> Messages:
    while True:
        one, two = pick(rng, "+-*"), pick(rng, "+-")
        top = 12 if one == "*" else 99
        a, b, c = rng.randint(1, top), rng.randint(1, top), rng.randint(1, 99)
        middle = a + b if one == "+" else a - b if one == "-" else a * b
        if is_heldout_pair(one, a, b) or is_heldout_pair(two, middle, c):
            continue
        # "b two c" stands in the question, too.
        if not is_heldout_pair(two, b, c):
            break
    result = middle + c if two == "+" else middle - c
    if rng.random() < 0.4:
        words = {"+": "plus", "-": "minus", "*": "times"}
        text = f"{a} {words[one]} {b} {words[two]} {c}"
    else:
        text = f"{a} {one} {b} {two} {c}"
    question = pick(rng, ["What is {t}?", "{t}", "Calculate {t}.", "Compute {t}.", "{t} = ?"])
    steps = f"{a} {one} {b} = {middle}, {middle} {two} {c} = {result}"
    name = "sum" if one == two == "+" else "result"
    return ask(casual(rng, question.format(t=text)), f"{steps}. The {name} is {result}.")


def story_problem(rng: random.Random) -> Messages:
    """Ask a sum in the form of a little story."""
    name, thing = pick(rng, NAMES), pick(rng, THINGS)
    op = "+-"[rng.random() < 0.5]
    while True:
        a, b = rng.randint(2, 99), rng.randint(1, 99)
        if not is_heldout_pair(op, a, b) and (op == "+" or b < a):
            break
    c = a + b if op == "+" else a - b
    if op == "+":
        text = pick(rng, [
            "{name} has {a} {thing} and gets {b} more. How many {thing} does {name} have now?",
            "{name} has {a} {thing} and buys {b} more. How many are there now?",
            "There are {a} {thing} in a box and {b} {thing} in a bag. How many are there in all?",
            "I have {a} {thing} and {name} gives me {b} more. How many {thing} do I have?",
        ])
    else:
        text = pick(rng, [
            "{name} has {a} {thing} and gives away {b}. How many {thing} are left?",
            "{name} has {a} {thing} and loses {b} of them. How many {thing} does {name} have now?",
            "There are {a} {thing} in a box. {name} takes {b} of them. How many are left?",
            "I have {a} {thing} and give {b} to {name}. How many {thing} do I have left?",
        ])
    return ask(text.format(name=name, a=a, b=b, thing=thing),
               f"{a} {op} {b} = {c}, so the answer is {c} {thing}.")


def is_prime(number: int) -> bool:
    """Say whether ``number`` is prime."""
    return number > 1 and all(number % divisor for divisor in range(2, number))


def about_a_number(rng: random.Random) -> Messages:
    """Ask for a property of one number: parity, double, half, square, neighbours, its words."""
    n = rng.randint(0, 99) if rng.random() < 0.7 else rng.randint(100, 999)
    kind = rng.randrange(13)
    if kind > 8:
        return _more_about_numbers(rng, kind)
    if kind == 8:
        n %= 100
        is_it = "Yes, {n} is a prime number." if is_prime(n) else "No, {n} is not a prime number."
        question = pick(rng, ["Is {n} prime?", "Is {n} a prime number?", "Is {n} a prime?"])
        return ask(casual(rng, question.format(n=n)), is_it.format(n=n))
    if kind == 0:
        word = "odd" if n % 2 else "even"
        question = pick(rng, ["Is {n} even or odd?", "Is the number {n} odd or even?"])
        return ask(casual(rng, question.format(n=n)), f"{n} is {word}.")
    if kind == 1:
        question = pick(rng, ["What is the double of {n}?", "Double {n}.", "What is twice {n}?"])
        return ask(casual(rng, question.format(n=n)), f"Twice {n} is {2 * n}.")
    if kind == 2:
        n -= n % 2
        question = pick(rng, ["What is half of {n}?", "Halve {n}.", "What is the half of {n}?"])
        return ask(casual(rng, question.format(n=n)), f"Half of {n} is {n // 2}.")
    if kind == 3:
        n %= 21
        question = pick(rng, ["What is {n} squared?", "What is the square of {n}?", "Square {n}."])
        return ask(casual(rng, question.format(n=n)), f"{n} squared is {n * n}.")
    if kind == 4:
        question = pick(rng, ["What number comes after {n}?", "Which number follows {n}?",
                              "What comes after {n}?"])
        return ask(casual(rng, question.format(n=n)), f"{n + 1} comes after {n}.")
    if kind == 5:
        n += 1
        question = pick(rng, ["What number comes before {n}?", "What comes before {n}?"])
        return ask(casual(rng, question.format(n=n)), f"{n - 1} comes before {n}.")
    if kind == 6:
        question = pick(rng, ["Write {n} in words.", "How do you write {n} in words?",
                              "Spell out the number {n}.", "Say {n} in words."])
        return ask(casual(rng, question.format(n=n)), f"{n} in words is {in_words(n)}.")
    question = pick(rng, ["Write {w} as a number.", "What number is {w}?",
                          "Write {w} in digits."])
    return ask(casual(rng, question.format(w=in_words(n))), f"{in_words(n)} is {n}.")


def _more_about_numbers(rng: random.Random, kind: int) -> Messages:
    if kind == 9:
        root = rng.randint(1, 20)
        question = pick(rng, ["What is the square root of {n}?", "Square root of {n}?",
                              "What's the square root of {n}?", "Calculate the root of {n}.",
                              "sqrt({n})"])
        answer = f"The square root of {root * root} is {root}."
        return ask(casual(rng, question.format(n=root * root)), answer)
    if kind == 10:
        base, power = pick(rng, [(rng.randint(1, 12), 2), (rng.randint(1, 10), 3),
                                 (2, rng.randint(0, 12)), (10, rng.randint(0, 6)),
                                 (rng.randint(2, 5), 4)])
        question = pick(rng, ["What is {a} to the power of {b}?", "{a} to the power of {b}",
                              "What is {a}^{b}?", "{a}^{b}", "{a} ** {b}", "What is {a} ** {b}?",
                              "Calculate {a}^{b}."])
        answer = f"{base} to the power of {power} is {base**power}."
        return ask(casual(rng, question.format(a=base, b=power)), answer)
    if kind == 11:
        share = pick(rng, [1, 10, 20, 25, 50, 50, 100, 200])
        whole = 100 // share * rng.randint(1, 40) if share < 100 else rng.randint(1, 200)
        question = pick(rng, ["What is {a}% of {b}?", "What is {a} percent of {b}?",
                              "{a}% of {b}", "Calculate {a}% of {b}.", "How much is {a}% of {b}?"])
        answer = f"{share}% of {whole} is {share * whole // 100}."
        return ask(casual(rng, question.format(a=share, b=whole)), answer)
    n, divisor = rng.randint(1, 99), rng.randint(0, 10)
    question = pick(rng, ["What is the remainder of {a} divided by {b}?", "{a} mod {b}",
                          "What is {a} mod {b}?", "What is {a} modulo {b}?", "{a} % {b}"])
    if divisor == 0:
        question = pick(rng, DIV)
        answer = "You can not divide by zero."
    else:
        answer = f"{n} divided by {divisor} is {n // divisor}, and the remainder is {n % divisor}."
    return ask(casual(rng, question.format(a=n, b=divisor)), answer)


def compare(rng: random.Random) -> Messages:
    """Ask for the larger or smaller of a few numbers."""
    top = 99 if rng.random() < 0.6 else 999
    count = 2 if rng.random() < 0.5 else rng.randint(3, 6)
    numbers = rng.sample(range(top + 1), count)
    text = " or ".join(map(str, numbers)) if count == 2 else ", ".join(map(str, numbers))
    if rng.random() < 0.5:
        words = ["larger", "bigger", "greater"] if count == 2 else ["largest", "biggest"]
        best = max(numbers)
    else:
        words = ["smaller"] if count == 2 else ["smallest"]
        best = min(numbers)
    word = pick(rng, words)
    if count == 2 and rng.random() < 0.7:
        question = pick(rng, ["Which is {w}, {t}?", "Which number is {w}, {t}?",
                              "What is {w}, {t}?"])
    else:
        text = ", ".join(map(str, numbers))
        question = pick(rng, ["Which of these numbers is the {w}: {t}", "What is the {w} of {t}?",
                              "Find the {w} number: {t}"])
    return ask(casual(rng, question.format(w=word, t=text)), f"The {word} number is {best}.")


def word_numbers(rng: random.Random) -> Messages:
    """Ask for a sum with the numbers written in words."""
    while True:
        a, b = rng.randint(0, 99), rng.randint(0, 99)
        op = "+-"[rng.random() < 0.5]
        if not is_heldout_pair(op, a, b):
            break
    c = a + b if op == "+" else a - b
    word = "plus" if op == "+" else "minus"
    question = pick(rng, ["What is {a} {w} {b}?", "{a} {w} {b}", "How much is {a} {w} {b}?"])
    return [
        user(casual(rng, question.format(a=in_words(a), w=word, b=in_words(b)))),
        reply(f"{a} {op} {b} = {c}"),
    ]
