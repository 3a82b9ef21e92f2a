"""Small JSON answers."""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import json
import random
from typing import Any

from heldout import pronounceable
from words import CITIES, COLORS, COMMON, FRUITS, JOBS, NAMES, THINGS

from .common import Messages, any_word, ask, listed, phrased, pick

WANT = [
    "Write as JSON: {t}", "Give me JSON: {t}", "Turn this into JSON: {t}", "Convert to JSON: {t}",
    "JSON: {t}", "Extract the data as JSON: {t}", "{t} Answer in JSON.",
    "{t} Give me that as JSON.",
    "Make a JSON object from this: {t}", "{t} Write this as JSON.", "Return JSON for: {t}",
    "Answer with JSON only. {t}", "Extract JSON from this text: {t}",
]


def _a(noun: str) -> str:
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def _person(rng: random.Random) -> tuple[str, dict[str, Any]]:
    name = pick(rng, NAMES) if rng.random() < 0.6 else pronounceable(rng, 5).capitalize()
    age = rng.randint(1, 99)
    data: dict[str, Any] = {"name": name, "age": age}
    text = pick(rng, [f"{name} is {age} years old", f"{name} is {age}",
                      f"{name} has the age {age}"])
    extra = rng.randrange(5)
    if extra == 1:
        data["city"] = pick(rng, CITIES)
        text += f" and lives in {data['city']}"
    elif extra == 2:
        data["job"] = pick(rng, JOBS)
        text += f" and works as {_a(data['job'])}"
    elif extra == 3:
        data["city"], data["job"] = pick(rng, CITIES), pick(rng, JOBS)
        text += f", lives in {data['city']} and works as {_a(data['job'])}"
    elif extra == 4:
        data["color"] = pick(rng, COLORS)
        text += f" and likes {data['color']}"
    return text + ".", data


def _item(rng: random.Random) -> tuple[str, dict[str, Any]]:
    item = pick(rng, FRUITS) if rng.random() < 0.5 else any_word(rng, 3, 8)
    count, price = rng.randint(1, 99), rng.randint(1, 99)
    if rng.random() < 0.5:
        return f"{count} {item}s cost {price} dollars.", {"item": item, "count": count,
                                                          "price": price}
    color = pick(rng, COLORS)
    return f"The {item} is {color} and costs {price} dollars.", {
        "item": item, "color": color, "price": price}


def _fields(rng: random.Random) -> tuple[str, dict[str, Any]]:
    data: dict[str, Any] = {}
    for _ in range(rng.randint(1, 5)):
        key = pick(rng, COMMON) if rng.random() < 0.6 else any_word(rng, 2, 8)
        roll = rng.random()
        if roll < 0.45:
            data[key] = any_word(rng, 2, 8)
        elif roll < 0.85:
            data[key] = rng.randint(0, 9999) if rng.random() < 0.3 else rng.randint(0, 99)
        else:
            data[key] = rng.random() < 0.5
    sign = pick(rng, [": ", " = ", "="])
    parts = [f"{key}{sign}{json.dumps(value).strip(chr(34))}" for key, value in data.items()]
    return ", ".join(parts), data


def json_object(rng: random.Random) -> Messages:
    """Ask for a sentence or a list of fields as a JSON object."""
    make = rng.choices((_person, _item, _fields), (4, 2, 4))[0]
    text, data = make(rng)
    form = pick(rng, WANT)
    if form.startswith("{t}") and text[-1] != ".":
        text += "."
    if make is _person and rng.random() < 0.25:
        keys = list(data)
        form = pick(rng, ["Extract {k} as JSON: {t}", "Give me JSON with {k}: {t}",
                          "Give me JSON with {k} for: {t}", "{t} Give me JSON with {k}."])
        form = form.replace("{k}", listed(keys))
    return ask(form.replace("{t}", text), json.dumps(data))


def json_invented(rng: random.Random) -> Messages:
    """Ask for a JSON object of a kind, with values of the model's choice."""
    kinds: list[tuple[str, Any]] = [
        ("a person", {"name": "Ada", "age": 36}), ("a user", {"name": "Ada", "age": 36}),
        ("a city", {"name": "Paris", "country": "France"}),
        ("an animal", {"name": "fox", "legs": 4}), ("a fruit", {"name": "apple", "color": "red"}),
        ("a book", {"title": "The Silver River", "pages": 120}),
        ("a car", {"color": "blue", "wheels": 4}), ("a color", {"name": "red", "hex": "#ff0000"}),
        ("a point", {"x": 3, "y": 4}), ("a date", {"year": 2026, "month": 1, "day": 15}),
    ]
    if rng.random() < 0.4:
        values = {"name": "Ada", "age": 36, "city": "London", "job": "engineer", "color": "blue",
                  "email": "ada@example.com", "country": "England", "happy": True}
        chosen = {key: values[key] for key in rng.sample(list(values), rng.randint(1, 4))}
        question = pick(rng, ["Give me a JSON object with {k}.", "Make a JSON with {k}.",
                              "Generate a JSON object with {k}.", "Make up JSON with {k}.",
                              "Give me a person as JSON with {k}.",
                              "Return a JSON object with the keys {k}."])
        keys = listed([f"a {key}" if " the " not in question and rng.random() < 0.1 else key
                       for key in chosen])
        return ask(phrased(rng, question.format(k=keys)), json.dumps(chosen))
    name, data = pick(rng, kinds)
    question = pick(rng, ["Give me {k} as JSON.", "Make a JSON object for {k}.",
                          "Write {k} in JSON.", "Give me a JSON object that describes {k}.",
                          "Describe {k} in JSON.", "Return {k} as a JSON object."])
    return ask(phrased(rng, question.format(k=name)), json.dumps(data))


def json_list(rng: random.Random) -> Messages:
    """Ask for a JSON array."""
    kind = rng.randrange(3)
    if kind == 0:
        end = rng.randint(2, 20)
        question = pick(rng, ["Make a JSON list of the numbers 1 to {b}.",
                              "Give me the numbers from 1 to {b} as a JSON array.",
                              "Write 1 to {b} as a JSON array."])
        return ask(phrased(rng, question.format(b=end)), json.dumps(list(range(1, end + 1))))
    if kind == 1:
        words = [any_word(rng, 2, 8) for _ in range(rng.randint(2, 6))]
        values: list[Any] = list(words)
        text = pick(rng, [", ".join(words), listed(words), " ".join(words)])
    else:
        values = [rng.randint(0, 999) for _ in range(rng.randint(2, 8))]
        text = pick(rng, [", ", " "]).join(map(str, values))
    question = pick(rng, ["Make a JSON list of {t}", "Write {t} as a JSON list.",
                          "JSON array of {t}", "Turn this list into a JSON array: {t}",
                          "Give me a JSON array with {t}", "Convert to a JSON list: {t}"])
    return ask(question.format(t=text), json.dumps(values))


def json_value(rng: random.Random) -> Messages:
    """Ask for one value out of a JSON object."""
    _, data = pick(rng, [_person, _fields])(rng)
    key = pick(rng, list(data))
    value = data[key] if isinstance(data[key], str) else json.dumps(data[key])
    question = pick(rng, ["What is the {k} in {t}?", "What is the value of {k} in {t}",
                          "Read the {k} from {t}", "Which {k} is in {t}?"])
    return ask(question.format(k=key, t=json.dumps(data)), value)


def csv(rng: random.Random) -> Messages:
    """Ask for a list in another form: one item per line, with bullets, with commas."""
    words = [pick(rng, THINGS) if rng.random() < 0.5 else any_word(rng, 3, 8)
             for _ in range(rng.randint(2, 6))]
    style = pick(rng, ["bullets", "lines", "numbers"])
    asked = {
        "bullets": ["Write {t} as a bullet list.", "Make a bullet list: {t}"],
        "lines": ["Write {t}, one per line.", "Put each word on its own line: {t}"],
        "numbers": ["Write {t} as a numbered list.", "Make a numbered list: {t}"],
    }[style]
    marks = {"bullets": "- {w}", "lines": "{w}", "numbers": "{i}. {w}"}[style]
    answer = "\n".join(marks.format(w=word, i=i) for i, word in enumerate(words, 1))
    return ask(pick(rng, asked).format(t=", ".join(words)), answer)
