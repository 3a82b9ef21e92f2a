"""Tool calls in the Qwen/Hermes format: choosing a tool, its arguments, and using its result.

A ``Case`` is one situation: a tool definition, a request that needs it, the arguments, what the
tool may return and the answer in words. Names of tools and parameters vary, so that the model
learns to copy them from the definition instead of remembering them.
"""

# Lists of phrases read better with several to a line.
# fmt: off
from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from heldout import is_heldout_pair, pronounceable
from words import CITIES, COMMON, JOBS, NAMES, split

from .common import Message, Messages, any_word, listed, phrased, pick, reply, user

Tool = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One request that needs one tool."""

    tool: Tool
    question: str
    arguments: dict[str, Any]
    result: str
    answer: str
    # How a second request of the same kind is put: "And in Rome?"
    again: str = ""


def _string(text: str = "") -> dict[str, Any]:
    return {"type": "string", "description": text} if text else {"type": "string"}


def _number(rng: random.Random) -> dict[str, Any]:
    return {"type": pick(rng, ["number", "integer"])}


def _tool(
    rng: random.Random,
    name: str,
    description: str,
    properties: dict[str, Any],
    optional: tuple[str, ...] = (),
) -> Tool:
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.9:
        function["description"] = description if rng.random() < 0.7 else description.rstrip(".")
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.85:
        parameters["required"] = [key for key in properties if key not in optional]
    if rng.random() < 0.1:
        parameters["additionalProperties"] = False
    function["parameters"] = parameters
    return {"type": "function", "function": function}


LONG_NAMES = [
    "San Francisco", "New York", "Los Angeles", "San Francisco, CA", "Boston, MA", "New York, NY",
    "Paris, France", "Rio de Janeiro", "London, UK", "Tokyo, Japan", "Las Vegas", "Hong Kong",
    "Bogotá, Colombia", "Zürich", "São Paulo", "Málaga", "München", "Łódź", "Москва", "東京",
    "北京",
]


def _place(rng: random.Random) -> str:
    if rng.random() < 0.15:
        return pick(rng, LONG_NAMES)
    if rng.random() < 0.55:
        return pick(rng, CITIES)
    return pronounceable(rng, rng.randint(4, 9)).capitalize()


NOUNS = ["light rain", "heavy rain", "rain", "snow", "light snow", "fog", "mist", "showers", "sun",
         "thunderstorms", "partly cloudy", "mostly sunny", "clear sky", "overcast", "drizzle",
         "scattered clouds", "strong wind", "few clouds", "light wind", "a thunderstorm", "hail",
         "broken clouds", "sunny intervals", "moderate rain", "haze", "freezing fog"]
SKY = split("sunny cloudy rainy windy foggy snowy clear stormy dry cold warm hot")


def _weather(rng: random.Random) -> Case:
    name = pick(rng, ["get_weather", "weather", "get_current_weather", "fetch_weather",
                      "current_weather", "getWeather", "weather_report", "lookup_weather"])
    key = pick(rng, ["city", "city", "location", "place", "town", "city_name"])
    about = pick(rng, ["", "", "Name of the city", "The city", "City name", "The city to look up",
                      "The city and state, e.g. San Francisco, CA"])
    properties: dict[str, Any] = {key: _string(about)}
    city = _place(rng)
    arguments: dict[str, Any] = {key: city}
    question = pick(rng, [
        "What is the weather in {c}?", "What's the weather in {c}?", "How is the weather in {c}?",
        "What is the weather like in {c}?", "Is it raining in {c}?", "Weather in {c}?",
        "Tell me the weather in {c}.", "What's the weather like in {c} today?",
        "How warm is it in {c}?",
        "What is the weather in {c} today?", "What is the temperature in {c}?",
        "Is it cold in {c}?",
        "Do I need an umbrella in {c}?", "Check the weather in {c}.", "Get the weather for {c}.",
        "What is the weather in {c} right now?",
    ])
    unit = pick(rng, ["celsius", "fahrenheit"])
    if rng.random() < 0.25:
        properties[pick(rng, ["unit", "units"])] = {"type": "string",
                                                    "enum": ["celsius", "fahrenheit"]}
        if rng.random() < 0.5:
            arguments[list(properties)[1]] = unit
            question = pick(rng, ["What is the weather in {c} in {u}?",
                                  "How warm is it in {c} in {u}?"])
    degrees: Any = rng.randint(-15, 40)
    if rng.random() < 0.15:
        degrees = rng.randint(-150, 400) / 10
    sky = pick(rng, SKY) if rng.random() < 0.6 else pick(rng, NOUNS)
    if rng.random() < 0.1:
        sky = _phrase(rng, 1, 3)
    temperature = pick(rng, ["temperature", "temperature", "temp", "temp_c", "degrees"])
    condition = pick(rng, ["condition", "conditions", "weather", "sky", "description", "forecast"])
    data: dict[str, Any] = {temperature: degrees, condition: sky}
    shown = f"{degrees} degrees"
    if rng.random() < 0.2:
        shown = f"{degrees}{pick(rng, [' C', '°C', 'C', ' F', '°F', ' degrees', '°'])}"
        data[temperature] = shown
    if rng.random() < 0.15:
        data[pick(rng, ["humidity", "wind", "rain", "id", "pressure", "wind_kph"])] = pick(
            rng, [rng.randint(0, 100), f"{rng.randint(0, 100)}%", f"{rng.randint(1, 90)} km/h"])
    answer = f"The weather in {city}: {sky}, {shown}."
    roll = rng.random()
    if roll < 0.2:
        data = {key: city, **data}
    elif roll < 0.35:
        data = {condition: sky, **data}
    elif roll < 0.5:
        data = {temperature: degrees, "unit": unit}
        answer = f"It is {degrees} degrees in {city}."
    elif roll < 0.6:
        data = {temperature: data[temperature]}
        answer = f"It is {shown} in {city}."
    result = json.dumps(data, ensure_ascii=rng.random() < 0.5)
    if roll > 0.7:
        result = _report(rng, sky)
        answer = f"The weather in {city}: {_ended(result)}"
    tool = _tool(rng, name, pick(rng, [
        "Get the weather in a city.", "Get the current weather.", "Returns the weather of a city.",
        "Get the current weather in a given location.", "Look up the weather.",
        "Weather of a place.",
    ]), properties, ("unit", "units"))
    return Case(tool, question.format(c=city, u=unit), arguments, result, answer,
                pick(rng, ["And in {c}?", "What about {c}?", "And {c}?"]).format(c=city))


def _report(rng: random.Random, sky: str) -> str:
    """Write the weather in words, as a tool may return it; the answer repeats it as it is."""
    degrees = f"{rng.randint(-15, 40)}{pick(rng, [' C', '°C', 'C', ' degrees', '°', ' F', '°F'])}"
    text = pick(rng, ["{d} and {s}", "{s}, {d}", "{d}, {s}", "{s} and {d}", "{s} at {d}",
                      "{d}, {s}, {x}", "{s}, {d}, {x}", "It is {s}, {d}.", "{s}", "{d}",
                      "{d} with {s}", "It is {d} and {s}", "{x}, {d}", "{d} ({s})", "{d} / {s}",
                      "{d}; {s}", "{s}. {d}.", "{d}, feels like {e}, {s}", "{d} {s}"])
    extra = pick(rng, ["wind {n} km/h", "humidity {n}%", "wind from the north", "no rain", "{p}",
                       "{p}", "rain later", "{n}% rain", "windy", "dry"])
    extra = extra.format(n=rng.randint(1, 99), p=_phrase(rng, 1, 4))
    text = text.format(d=degrees, s=sky, x=extra, e=f"{rng.randint(-15, 40)} C")
    return text[:1].upper() + text[1:] if rng.random() < 0.35 else text


def _ended(text: str) -> str:
    return text if text[-1] in ".!?" else text + "."


def _time(rng: random.Random) -> Case:
    key = pick(rng, ["city", "location", "place", "timezone", "city", "zone"])
    city = _place(rng)
    clock = f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}"
    name = pick(rng, ["get_time", "time", "get_current_time", "current_time", "clock", "time_in",
                      "getTime", "local_time"])
    tool = _tool(rng, name, pick(rng, ["Get the time in a city.", "Get the current time.",
                                       "Returns the local time.", "What time it is in a city."]),
                 {key: _string(pick(rng, ["", "", "The city", "Name of the city"]))})
    question = pick(rng, ["What time is it in {c}?", "What is the time in {c}?", "Time in {c}?",
                          "Tell me the time in {c}.", "How late is it in {c}?",
                          "What time is it now in {c}?", "What's the time in {c}?"])
    result = pick(rng, [clock, json.dumps({"time": clock}), json.dumps({key: city, "time": clock}),
                        f"It is {clock}", f"{clock} in {city}"])
    return Case(tool, question.format(c=city), {key: city}, result, f"It is {clock} in {city}.",
                pick(rng, ["And in {c}?", "What about {c}?", "And {c}?"]).format(c=city))


def _calculate(rng: random.Random) -> Case:
    op = pick(rng, "++-**")
    while True:
        a, b = rng.randint(0, 10 ** rng.randint(1, 4)), rng.randint(0, 10 ** rng.randint(1, 4))
        if not is_heldout_pair(op, a, b):
            break
    value = a + b if op == "+" else a - b if op == "-" else a * b
    word = {"+": "plus", "-": "minus", "*": "times"}[op]
    question = pick(rng, [f"What is {a} {op} {b}?", f"What is {a} {word} {b}?", f"{a} {op} {b}",
                          f"Calculate {a} {op} {b}.", f"Compute {a} {op} {b}.",
                          f"How much is {a} {word} {b}?"])
    result = pick(rng, [str(value), json.dumps({"result": value})])
    answer = f"{a} {op} {b} = {value}"
    if rng.random() < 0.5:
        key = pick(rng, ["expression", "expression", "formula", "input", "expr"])
        name = pick(rng, ["calculator", "calculate", "calc", "evaluate", "math", "compute"])
        tool = _tool(rng, name, pick(rng, ["Calculate an expression.", "A calculator.",
                                           "Evaluate a math expression.", "Does math."]),
                     {key: _string(pick(rng, ["", "", "The expression", "Such as 1 + 2"]))})
        return Case(tool, question, {key: f"{a} {op} {b}"}, result, answer)
    one, two = pick(rng, [("a", "b"), ("a", "b"), ("x", "y"), ("first", "second"), ("m", "n"),
                          ("left", "right"), ("num1", "num2")])
    verb = {"+": "add", "-": "subtract", "*": "multiply"}[op]
    name = pick(rng, [verb, f"{verb}_numbers", f"{verb}_two", f"{verb}Numbers"])
    kind = _number(rng)
    tool = _tool(rng, name, pick(rng, [f"{verb.capitalize()} two numbers.",
                                       f"{verb.capitalize()}s two numbers."]),
                 {one: kind, two: dict(kind)})
    if rng.random() < 0.4:
        question = {"+": f"Add {a} and {b}.", "-": f"Subtract {b} from {a}.",
                    "*": f"Multiply {a} by {b}."}[op]
    return Case(tool, question, {one: a, two: b}, result, answer)


def _phrase(rng: random.Random, low: int = 1, high: int = 4) -> str:
    return " ".join(any_word(rng, 2, 8) for _ in range(rng.randint(low, high)))


def _search(rng: random.Random) -> Case:
    key = pick(rng, ["query", "query", "q", "text", "keywords", "term"])
    name = pick(rng, ["search", "web_search", "search_web", "google", "find", "lookup",
                      "search_docs", "internet_search"])
    what = _phrase(rng)
    tool = _tool(rng, name, pick(rng, ["Search the web.", "Search for information.",
                                       "Find pages about something.", "Search the documents."]),
                 {key: _string(pick(rng, ["", "", "What to search for", "The search query"]))})
    question = pick(rng, ["Search for {t}.", "Look up {t}.", "Find {t} on the web.",
                          "Search the web for {t}.", "Find information about {t}.",
                          "Can you search for {t}?", "What does the web say about {t}?"])
    found = _free_text(rng)
    if rng.random() < 0.4:
        found = " ".join(pick(rng, COMMON) for _ in range(rng.randint(3, 8))).capitalize() + "."
    result = pick(rng, [found, found, json.dumps({"result": found}, ensure_ascii=False)])
    answer = f"I found this: {_ended(found)}"
    return Case(tool, question.format(t=what), {key: what}, result, answer)


def _free_text(rng: random.Random) -> str:
    """Write words, names, numbers and marks in any order, as a tool may return them."""
    parts = []
    for _ in range(rng.randint(1, 4)):
        number = rng.randint(0, 10 ** rng.randint(1, 5))
        parts.append(pick(rng, [
            _phrase(rng, 1, 3), _phrase(rng, 2, 5), pick(rng, NAMES), pick(rng, CITIES),
            f"{number} {any_word(rng, 2, 7)}", f"{number / 10}", f"{any_word(rng, 3, 8)}: {number}",
            f"{number}%", f"${number}", f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}",
            f"{pick(rng, NAMES)} {any_word(rng, 4, 8).capitalize()}", f"{any_word(rng, 3, 8)} is "
            f"{any_word(rng, 3, 8)}", f"{rng.randint(1900, 2030)}", pick(rng, NOUNS),
        ]))
    text = pick(rng, [", ", ", ", " and ", " ", "; ", ". "]).join(parts)
    text = text[:1].upper() + text[1:] if rng.random() < 0.5 else text
    return text + pick(rng, ["", "", ".", "!"])


MONEY = {"dollars": "USD", "euros": "EUR", "pounds": "GBP", "yen": "JPY", "francs": "CHF"}


def _currency(rng: random.Random) -> Case:
    one, two = rng.sample(list(MONEY), 2)
    if rng.random() < 0.5:
        one, two = MONEY[one], MONEY[two]
    start, end = MONEY.get(one, one), MONEY.get(two, two)
    amount, value = rng.randint(1, 999), rng.randint(1, 9999) / pick(rng, [1, 10, 100])
    keys = pick(rng, [("amount", "from", "to"), ("amount", "from_currency", "to_currency"),
                      ("value", "source", "target"), ("amount", "source", "target")])
    name = pick(rng, ["convert_currency", "currency_converter", "exchange", "convert_money",
                      "convert", "exchange_rate"])
    tool = _tool(rng, name, pick(rng, ["Convert money.", "Convert an amount to another currency.",
                                       "Currency conversion."]),
                 {keys[0]: _number(rng), keys[1]: _string(), keys[2]: _string()})
    question = pick(rng, ["Convert {n} {a} to {b}.", "How much is {n} {a} in {b}?",
                          "What is {n} {a} in {b}?", "Change {n} {a} to {b}."])
    result = pick(rng, [f"{value}", json.dumps({"result": value}), json.dumps({"amount": value}),
                        f"{value} {end}"])
    return Case(tool, question.format(n=amount, a=one, b=two),
                {keys[0]: amount, keys[1]: start, keys[2]: end}, result,
                f"{amount} {start} is {value} {end}.")


def _message(rng: random.Random) -> Case:
    person = pick(rng, NAMES) if rng.random() < 0.6 else pronounceable(rng, 6).capitalize()
    text = _phrase(rng, 1, 6).capitalize()
    kind = pick(rng, ["message", "email", "mail"])
    to = pick(rng, ["to", "recipient", "name", "person"])
    body = pick(rng, ["text", "message", "body", "content"])
    name = pick(rng, [f"send_{kind}", f"write_{kind}", f"{kind}_send", f"send{kind.capitalize()}"])
    tool = _tool(rng, name, f"Send a {kind} to a person.", {to: _string(), body: _string()})
    question = pick(rng, ["Send a {k} to {p}: {t}", "Write a {k} to {p}: {t}",
                          "Send {p} a {k}: {t}", 'Send a {k} to {p} that says "{t}".'])
    result = pick(rng, ["ok", "sent", "OK", json.dumps({"status": "sent"}),
                        json.dumps({"ok": True})])
    return Case(tool, question.format(k=kind, p=person, t=text), {to: person, body: text}, result,
                f"I sent the {kind} to {person}.")


def _home(rng: random.Random) -> Case:
    kind = rng.randrange(4)
    done = pick(rng, ["ok", "done", "OK", json.dumps({"status": "ok"}), json.dumps({"ok": True})])
    if kind == 0:
        minutes = rng.randint(1, 90)
        key = pick(rng, ["minutes", "duration", "time"])
        tool = _tool(rng, pick(rng, ["set_timer", "timer", "start_timer"]),
                     "Set a timer in minutes.",
                     {key: _number(rng)})
        question = pick(rng, ["Set a timer for {n} minutes.", "Start a timer of {n} minutes.",
                              "Wake me in {n} minutes."])
        return Case(tool, question.format(n=minutes), {key: minutes}, done,
                    f"The timer is set to {minutes} minutes.")
    if kind == 1:
        room = pick(rng, ["kitchen", "bedroom", "garage", "office", "bathroom", "garden", "hall"])
        state = pick(rng, ["on", "off"])
        tool = _tool(rng, pick(rng, ["set_light", "switch_light", "light", "control_light"]),
                     "Switch the light in a room on or off.",
                     {"room": _string(), "state": {"type": "string", "enum": ["on", "off"]}})
        question = pick(rng, ["Turn {s} the light in the {r}.", "Switch the {r} light {s}.",
                              "Turn the {r} light {s}."])
        return Case(tool, question.format(s=state, r=room), {"room": room, "state": state}, done,
                    f"The {room} light is {state}.")
    if kind == 2:
        song = _phrase(rng, 1, 4).title()
        key = pick(rng, ["song", "title", "name", "track"])
        tool = _tool(rng, pick(rng, ["play_music", "play_song", "play"]), "Play a song.",
                     {key: _string()})
        question = pick(rng, ["Play {t}.", "Play the song {t}.", 'Play "{t}".'])
        return Case(tool, question.format(t=song), {key: song}, done, f"Now playing {song}.")
    sides = pick(rng, [4, 6, 8, 10, 12, 20, 100])
    key = pick(rng, ["sides", "n", "faces"])
    value = rng.randint(1, sides)
    tool = _tool(rng, pick(rng, ["roll_dice", "dice", "roll"]), "Roll a dice.", {key: _number(rng)})
    question = pick(rng, ["Roll a dice with {n} sides.", "Throw a dice with {n} sides."])
    result = pick(rng, [str(value), json.dumps({"result": value})])
    return Case(tool, question.format(n=sides), {key: sides}, result, f"The dice shows {value}.")


def _stock(rng: random.Random) -> Case:
    symbol = "".join(pick(rng, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") for _ in range(rng.randint(2, 4)))
    key = pick(rng, ["symbol", "ticker", "stock"])
    price = rng.randint(100, 99999) / 100
    tool = _tool(rng, pick(rng, ["get_stock_price", "stock_price", "get_price", "quote"]),
                 "Get the price of a stock.", {key: _string()})
    question = pick(rng, ["What is the stock price of {s}?", "How much is {s}?", "Price of {s}?",
                          "What is the price of {s}?", "Get the price of {s}."])
    result = pick(rng, [str(price), json.dumps({"price": price}),
                        json.dumps({key: symbol, "price": price})])
    return Case(tool, question.format(s=symbol), {key: symbol}, result,
                f"The price of {symbol} is {price}.",
                pick(rng, ["And {s}?", "What about {s}?"]).format(s=symbol))


def _invented(rng: random.Random) -> Case:
    """Build a tool that exists nowhere: look up one property of one thing by its name or number."""
    noun = pick(rng, ["user", "order", "book", "file", "customer", "ticket", "product", "account",
                      "page", "room", "flight", "movie", pick(rng, COMMON), any_word(rng, 3, 8)])
    verb = pick(rng, ["get", "find", "read", "lookup", "fetch", "open", "load", "show", "delete"])
    by_number = rng.random() < 0.5
    key = pick(rng, ["id", f"{noun}_id", "number"] if by_number else ["name", noun, "title", "key"])
    value: int | str = rng.randint(1, 9999) if by_number else any_word(rng, 3, 9)
    if not by_number and rng.random() < 0.3:
        value = str(value).capitalize()
    shown = {"lookup": "look up"}.get(verb, verb)
    name = pick(rng, [f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}",
                      f"{verb}-{noun}"])
    kind = _number(rng) if by_number else _string()
    tool = _tool(rng, name, f"{shown.capitalize()} a {noun}.", {key: kind})
    question = pick(rng, ["{v} the {n} {x}.", "{v} {n} {x}.", "Please {w} {n} {x}.",
                          "Can you {w} the {n} {x}?", "{v} {x} with the tool."])
    text = question.format(v=shown.capitalize(), w=shown, n=noun, x=value)
    state = pick(rng, ["open", "closed", "ready", "new", "done", "empty", pick(rng, JOBS)])
    field = pick(rng, ["status", "state", "kind", "type", "note"])
    roll = rng.random()
    if roll < 0.3:
        result = json.dumps({field: state}) if roll < 0.2 else f"{field}: {state}"
        answer = f"The {field} is {state}."
    elif roll < 0.6:
        result, answer = _any_fields(rng)
    else:
        found = _free_text(rng)
        result = pick(rng, [found, found, json.dumps({"result": found}, ensure_ascii=False)])
        answer = f"Here is the result: {_ended(found)}"
    return Case(tool, text, {key: value}, result, answer)


def _any_fields(rng: random.Random) -> tuple[str, str]:
    """Return a JSON object with any fields, and it in words."""
    data: dict[str, Any] = {}
    for _ in range(rng.randint(1, 4)):
        name = pick(rng, COMMON) if rng.random() < 0.5 else any_word(rng, 2, 8)
        data[name] = pick(rng, [
            rng.randint(0, 9999), rng.randint(0, 99), rng.randint(0, 9999) / 10, _phrase(rng, 1, 3),
            any_word(rng, 2, 8), pick(rng, NAMES), pick(rng, CITIES),
        ])
    told = [f"the {name} is {value}" for name, value in data.items()]
    answer = listed(told)
    return json.dumps(data), f"{answer[0].upper()}{answer[1:]}."


MAKERS: dict[str, tuple[Callable[[random.Random], Case], int]] = {
    "weather": (_weather, 4), "time": (_time, 2), "calculate": (_calculate, 3),
    "search": (_search, 2), "currency": (_currency, 1), "message": (_message, 1),
    "home": (_home, 1), "stock": (_stock, 1), "invented": (_invented, 5),
}
_FAMILIES = list(MAKERS)
_WEIGHTS = [weight for _, weight in MAKERS.values()]


def _draw(rng: random.Random) -> tuple[str, Case]:
    family = rng.choices(_FAMILIES, _WEIGHTS)[0]
    return family, MAKERS[family][0](rng)


def call(cases: list[Case]) -> Message:
    """Build the assistant's message that calls the tools of ``cases``."""
    calls = [{"type": "function",
              "function": {"name": case.tool["function"]["name"], "arguments": case.arguments}}
             for case in cases]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _results(cases: list[Case]) -> Messages:
    return [{"role": "tool", "content": case.result} for case in cases]


def failure(rng: random.Random) -> tuple[str, str]:
    """Return what a tool says when it fails, and the answer to the user."""
    reason = pick(rng, ["not found", "timeout", "city not found", "invalid request",
                        "no connection",
                        "permission denied", "unknown id", "no data", "try again later",
                        "internal error", "rate limit", _phrase(rng, 1, 4)])
    result = pick(rng, [json.dumps({"error": reason}), f"Error: {reason}", f"error: {reason}",
                        json.dumps({"status": "error", "message": reason})])
    return result, f"The tool reports an error: {reason}."


def _second(rng: random.Random, family: str, first: Case) -> Case | None:
    """Draw another request for the tool of ``first``, with other arguments."""
    for _ in range(20):
        case = MAKERS[family][0](rng)
        if list(case.arguments) == list(first.arguments) and case.arguments != first.arguments:
            return Case(first.tool, case.question, case.arguments, case.result, case.answer,
                        case.again)
    return None


def unneeded(rng: random.Random) -> list[Tool]:
    """Draw tool definitions for a dialogue that does not need any of them."""
    tools: dict[str, Tool] = {}
    for _ in range(rng.choices((1, 2, 3), (60, 30, 10))[0]):
        family, case = _draw(rng)
        # Sums are what a calculator is for, so none may be at hand when the answer is in words.
        if family not in ("calculate", "time"):
            tools[case.tool["function"]["name"]] = case.tool
    return list(tools.values())


def tool_dialogue(rng: random.Random) -> tuple[list[Tool], Messages]:
    """Build tool definitions and a dialogue that uses one of them."""
    family, case = _draw(rng)
    taken = {case.tool["function"]["name"]}
    families = {family}
    tools = [case.tool]
    for _ in range(rng.choices((0, 1, 2, 3), (40, 30, 20, 10))[0]):
        other, extra = _draw(rng)
        name = extra.tool["function"]["name"]
        # With two tools for the weather, the right choice would be a matter of luck.
        if name not in taken and (other not in families or other == "invented"):
            taken.add(name)
            families.add(other)
            tools.append(extra.tool)
    rng.shuffle(tools)
    messages = [user(phrased(rng, case.question) if case.question[-1] in ".?!" else case.question)]
    second = _second(rng, family, case) if case.again and rng.random() < 0.5 else None
    if second and rng.random() < 0.4:
        place = next(iter(second.arguments.values()))
        first_place = next(iter(case.arguments.values()))
        if len(case.arguments) == 1 and str(first_place) in case.question:
            both = case.question.replace(str(first_place), f"{first_place} and {place}")
            messages = [user(both), call([case, second])]
            if rng.random() < 0.8:
                messages += [*_results([case, second]), reply(f"{case.answer} {second.answer}")]
            return tools, messages
    messages.append(call([case]))
    if rng.random() < 0.25:
        return tools, messages
    if rng.random() < 0.05:
        result, answer = failure(rng)
        return tools, [*messages, {"role": "tool", "content": result}, reply(answer)]
    messages += [*_results([case]), reply(case.answer)]
    if second:
        messages += [user(second.again), call([second])]
        if rng.random() < 0.7:
            messages += [*_results([second]), reply(second.answer)]
    elif rng.random() < 0.2:
        messages += [user(pick(rng, ["Thanks!", "Thank you!", "Thank you.", "thanks"])),
                     reply("You are welcome!")]
    return tools, messages
