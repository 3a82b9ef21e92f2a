"""Training data: dialogues and plain documents from the generators, as padded rows of token ids.

A row holds one document. Bit 15 of an id marks a token that the model has to predict: every token
of a plain document, the assistant's tokens of a dialogue.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np
from heldout import LETTERS, vocabulary_words
from tasks import (
    arithmetic,
    calendar,
    chat,
    common,
    knowledge,
    letters,
    product,
    stories,
    structured,
    tools,
    unknown,
)
from tasks.common import Messages, Task, pick
from words import CAPITALS, COLORS, DAYS, HEROES, MONTHS, NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray
    from tokenizers import Tokenizer

    Rows = NDArray[np.uint16]

TARGET = 0x8000
# Padded lengths. Powers of two and one and a half times those waste little and divide a batch.
LENGTHS = (32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)

TASKS: dict[Task, float] = {
    arithmetic.calculation: 28, arithmetic.claim: 5, arithmetic.follow_up: 4,
    arithmetic.several: 3, arithmetic.story_problem: 3, arithmetic.about_a_number: 5,
    arithmetic.compare: 3, arithmetic.word_numbers: 2,
    letters.reverse: 20, letters.reverse_more: 3, letters.spell: 9, letters.join_letters: 2,
    letters.count_letters: 9, letters.one_letter: 6, letters.palindrome: 1.5,
    letters.change_case: 3, letters.repeat: 5, letters.sort_things: 11, letters.choose_word: 3,
    calendar.day: 4, calendar.month: 3, calendar.count: 5, calendar.sequence: 3,
    knowledge.fact: 5, knowledge.capital: 3.5, knowledge.relation: 3, knowledge.language: 3,
    knowledge.emoji: 3, unknown.unknown: 12,
    chat.small_talk: 6, product.about_asyncllm: 9,
    structured.json_object: 5, structured.json_invented: 1, structured.json_list: 3,
    structured.json_value: 3.5, structured.csv: 2,
    stories.story: 2, stories.poem: 1.5,
}  # fmt: skip
_TASKS = list(TASKS)
_WEIGHTS = list(np.cumsum(list(TASKS.values())))

TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


# What people try first on a completion endpoint.
OPENINGS = [
    "The president of the United States is elected every four years.",
    "The future of AI is bright: small models and large models help people to learn, to write and "
    "to play.",
    "San Francisco is a city by the sea, with hills, fog and a famous red bridge.",
    "The quick brown fox jumps over the lazy dog.",
    "Hello, world! This is a tiny demo model. It can count, spell and tell short stories.",
    "The meaning of life is 42, of course.",
    "Roses are red, violets are blue, this model is tiny, but it sings for you.",
    "The weather today is sunny and warm, so we go to the sea.",
    "def add(a, b):\n    return a + b\n",
    'def hello():\n    print("Hello, world!")\n',
    "The largest planet is Jupiter, and the smallest planet is Mercury.",
    "To be, or not to be, that is the question.",
    "In the beginning, there was a tiny model that wanted to learn to count: 1, 2, 3, 4, 5.",
    "My favorite food is apple pie, because it is sweet and warm.",
    "The sky is blue, the grass is green, and snow is white.",
    "Water freezes at 0 degrees Celsius and boils at 100 degrees Celsius.",
]


def render(messages: Messages, tools: list[dict[str, Any]] | None = None) -> str:
    """Write a dialogue as text: what the chat template writes, much faster than Jinja."""
    parts: list[str] = []
    rest = messages
    if tools:
        head = ""
        if messages[0]["role"] == "system":
            head, rest = messages[0]["content"] + "\n\n", messages[1:]
        listing = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        parts.append(f"<|im_start|>system\n{head}{TOOLS_BEFORE}{listing}{TOOLS_AFTER}<|im_end|>\n")
    before = ""
    for i, message in enumerate(rest):
        role, content = message["role"], message["content"]
        if role == "tool":
            parts.append("" if before == "tool" else "<|im_start|>user")
            parts.append(f"\n<tool_response>\n{content}\n</tool_response>")
            if i + 1 == len(rest) or rest[i + 1]["role"] != "tool":
                parts.append("<|im_end|>\n")
        else:
            for call in message.get("tool_calls", ()):
                function = call["function"]
                arguments = json.dumps(function["arguments"], ensure_ascii=False)
                content += "\n" if content else ""
                content += f'<tool_call>\n{{"name": "{function["name"]}", '
                content += f'"arguments": {arguments}}}\n</tool_call>'
            parts.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
        before = role
    return "".join(parts)


def task(rng: random.Random) -> Messages:
    """Draw one question with its answer, or a few that belong together."""
    return rng.choices(_TASKS, cum_weights=_WEIGHTS)[0](rng)


def tool_free(rng: random.Random) -> Messages:
    """Draw a task that no tool could help with."""
    while True:
        messages = chat.small_talk(rng) if rng.random() < 0.3 else task(rng)
        if messages[-1]["content"] not in (chat.NO_WEATHER, chat.NO_CLOCK):
            return messages


def dialogue(rng: random.Random) -> tuple[Messages, list[dict[str, Any]] | None]:
    """Draw a dialogue of one or more tasks, with or without a system message and tools."""
    messages: Messages = []
    defined: list[dict[str, Any]] | None = None
    if rng.random() < 0.25:
        messages.append({"role": "system", "content": chat.system_prompt(rng)})
    roll = rng.random()
    if roll < 0.13:
        if rng.random() < 0.2:
            defined = tools.unneeded(rng) or None
            for _ in range(rng.randint(1, 3)):
                messages += tool_free(rng)
        else:
            defined, used = tools.tool_dialogue(rng)
            messages += used
        return messages, defined
    if roll < 0.16:
        system, asked = chat.persona(rng)
        first = [{"role": "system", "content": system}]
        for _ in range(rng.choices((0, 1, 2), (60, 25, 15))[0]):
            first += task(rng)
        return first + asked, None
    if roll < 0.23:
        told, asked = chat.memory_parts(rng)
        messages += told
        for _ in range(rng.choices((0, 1, 2, 4, 8), (35, 25, 20, 15, 5))[0]):
            messages += task(rng)
        return messages + asked, None
    if roll < 0.24:
        messages += chat.not_told(rng)
    turns = rng.choices((1, 2, 3, 5, 8, 16, 30), (65, 16, 8, 6, 3, 1.4, 0.6))[0]
    for _ in range(turns):
        messages += task(rng)
    return messages, None


def document(rng: random.Random) -> str:
    """Draw a plain text without any chat markup, for completions."""
    kind = rng.randrange(14)
    if kind < 3:
        mark = pick(
            rng, [("Question: ", "\nAnswer: "), ("Q: ", "\nA: "), ("User: ", "\nAssistant: ")]
        )
        rounds = []
        for _ in range(rng.randint(1, 5)):
            messages = task(rng)
            rounds.append(f"{mark[0]}{messages[0]['content']}{mark[1]}{messages[1]['content']}")
        return pick(rng, ["\n", "\n\n"]).join(rounds)
    if kind == 3:
        top = rng.randint(5, 300) if rng.random() < 0.3 else rng.randint(5, 60)
        start = rng.choice([0, 1, 1, 1, 1, rng.randint(0, 500)])
        step = rng.choice([1, 1, 1, 1, 1, 2, 5, 10])
        return pick(rng, [", ", " ", "\n"]).join(str(start + step * i) for i in range(top))
    if kind == 4:
        lines = []
        for _ in range(rng.randint(2, 20)):
            op = pick(rng, "++--*")
            a, b, c = arithmetic.pair(rng, op)
            lines.append(f"{a} {op} {b} = {c}")
        return "\n".join(lines)
    if kind == 5:
        arrow = pick(rng, [" -> ", ": ", " => ", " = ", ", backwards: "])
        words = [common.fresh_word(rng, 2, 9) for _ in range(rng.randint(2, 12))]
        return "\n".join(f"{word}{arrow}{word[::-1]}" for word in words)
    if kind == 6:
        lines = []
        for country, city in rng.sample(list(CAPITALS.items()), rng.randint(1, 8)):
            lines.append(f"The capital of {country} is {city}.")
        return pick(rng, [" ", "\n"]).join(lines)
    if kind == 7:
        return pick(rng, [
            f"The days of the week are {common.listed(DAYS)}.", ", ".join(DAYS) + ".",
            ", ".join(DAYS),
            f"The months of the year are {common.listed(MONTHS)}.", ", ".join(MONTHS) + ".",
            ", ".join(MONTHS), " ".join(DAYS), " ".join(MONTHS), "\n".join(DAYS),
            ", ".join(LETTERS), ", ".join(LETTERS.upper()), LETTERS,
            " ".join(LETTERS), "The alphabet: " + ", ".join(LETTERS),
            "The first prime numbers are " + ", ".join(map(str, calendar.PRIMES[:15])) + ".",
        ])  # fmt: skip
    if kind < 10:
        hero, name = pick(rng, HEROES), pick(rng, NAMES)
        return stories.tell(rng, hero, name, rng.random() < 0.3)
    if kind == 10:
        return stories.verse(rng, pick(rng, stories.TOPICS), rng.randint(2, 6))
    if kind == 11:
        name = pick(rng, NAMES)
        hello = pick(rng, ["Hello, my name is", "Hi, my name is", "My name is", "Hello, I am"])
        return (f"{hello} {name}. I live in {pick(rng, stories.PLACES)} and I like the color "
                f"{pick(rng, COLORS)}. My best friend is a {pick(rng, stories.HELPERS)}. "
                f"One day, {name} found {pick(rng, stories.THINGS)} near the river.")  # fmt: skip
    if kind == 12 and rng.random() < 0.4:
        return pick(rng, OPENINGS)
    if kind == 12:
        make: Task = product.about_asyncllm
    else:
        make = structured.json_object if rng.random() < 0.5 else knowledge.fact
    return str(make(rng)[1]["content"])


def text(rng: random.Random) -> str:
    """Draw the text of one training row."""
    if rng.random() < 0.08:
        return document(rng) + "<|endoftext|>"
    return render(*dialogue(rng))


def load_tokenizer(path: str) -> Tokenizer:
    """Load a tokenizer, and tell the generators which words it keeps whole."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    words = vocabulary_words(tokenizer.get_vocab())
    common.set_token_forms(word for word in words if len(tokenizer.encode(word).ids) == 1)
    return tokenizer


def mark_targets(ids: list[int], start: int, assistant: int, end: int) -> list[int]:
    """Set the target bit on the assistant's tokens of a rendered dialogue."""
    place = 0
    while True:
        try:
            place = ids.index(start, place)
        except ValueError:
            return ids
        if place + 2 < len(ids) and ids[place + 1] == assistant:
            # Skip the role and the line break, include the token that ends the turn.
            place += 3
            while place < len(ids):
                ids[place] |= TARGET
                if ids[place] == end | TARGET:
                    break
                place += 1
        place += 1


def make_rows(tokenizer: Tokenizer, seed: int, tokens: int) -> dict[int, Rows]:
    """Make about ``tokens`` tokens of training data, as one array of rows per padded length."""
    rng = random.Random(seed)
    start, assistant, end = tokenizer.encode("<|im_start|>assistant<|im_end|>").ids
    rows: dict[int, list[list[int]]] = defaultdict(list)
    made = 0
    while made < tokens:
        for encoding in tokenizer.encode_batch_fast([text(rng) for _ in range(256)]):
            ids = encoding.ids[: LENGTHS[-1]]
            made += len(ids)
            if ids[0] == start:
                ids = mark_targets(ids, start, assistant, end)
            else:
                ids = [token | TARGET for token in ids]
            length = next(length for length in LENGTHS if length >= len(ids))
            rows[length].append(ids + [0] * (length - len(ids)))
    return {length: np.array(group, dtype=np.uint16) for length, group in rows.items()}


_tokenizer: Tokenizer | None = None


def _start_worker(path: str) -> None:
    global _tokenizer
    _tokenizer = load_tokenizer(path)


def _shard(job: tuple[int, int]) -> dict[int, Rows]:
    assert _tokenizer is not None
    return make_rows(_tokenizer, *job)


def stream_rows(path: str, workers: int, tokens: int, seed: int) -> Iterator[dict[int, Rows]]:
    """Yield shards of ``tokens`` tokens each, without end, from ``workers`` processes."""
    if not workers:
        tokenizer = load_tokenizer(path)
        while True:
            yield make_rows(tokenizer, seed, tokens)
            seed += 1
    # Spawned workers share nothing with a process that already uses CUDA and threads.
    pool = get_context("spawn").Pool(workers, _start_worker, (path,))
    with pool:
        jobs = [pool.apply_async(_shard, ((seed + i, tokens),)) for i in range(workers)]
        seed += workers
        while True:
            # In order of the seeds, so that the data does not depend on who is fastest.
            yield jobs.pop(0).get()
            jobs.append(pool.apply_async(_shard, ((seed, tokens),)))
            seed += 1
