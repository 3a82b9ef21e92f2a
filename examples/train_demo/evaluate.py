"""Measure a demo model: unseen sums and reversals, and every other kind of task.

    python examples/train_demo/evaluate.py [FOLDER] [--quick]

It takes a minute or two; --count 500 --others 100 --words 1000 measures more closely. Greedy
decoding through transformers. Sums and words come from the held-out part (``heldout.py``); for the
other tasks an answer counts if it is exactly the one that the generator would give.
"""

from __future__ import annotations

import argparse
import itertools
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import data
import torch
from heldout import pronounceable, random_letters, sample_sums
from tasks import arithmetic, chat, common, letters, stories, tools
from tasks.common import Messages, phrased, pick, quoted, user
from tqdm import tqdm
from words import COMMON, DOUBLES

DEFAULT = Path(__file__).parents[2] / "asyncllm" / "demo" / "model"
# One right answer among many; whether it reads well is for a person to say.
OPEN_ENDED = {stories.story, stories.poem}

SAMPLES = [
    "Hello!", "Who are you?", "What can you do?", "What is 27 + 45?", "Reverse the word asyncio.",
    "How many r's are in strawberry?", "Count from 1 to 40.", "Say hello in Japanese.",
    "Send me three emoji.", "What is asyncllm?", "How does the paged KV cache work?",
    "Ada is 36 years old and lives in London. Answer in JSON.", "Sort pear, apple, fig, mango",
    "Tell me a story about a dragon named Momo.", "Write a poem about the sea.",
    "What is the capital of Japan?", "Explain quantum physics to me.", "What is 12 times 12?",
    "Tell me a story.", "Write a haiku about autumn leaves.",
    "How many r's in strawberry?", "How many s's are in Mississippi?", "How many e's in cheese?",
    "reverse apple", "Reverse OpenAI", "Reverse the word hello.", "Spell banana", "spell Python",
    "What is the first letter of orange?", "What's the last letter of planet?", "1+1=2, right?",
    "2+2=5, right?", "Is 12 + 30 = 42?", "7+8", "what is 3 - 9", "What is 123 + 456?",
    "What is 999 + 1?", "What is 500 - 237?", "What is the square root of 81?",
    "What is the largest city in the world?", "What is the longest river?", "Is Paris in France?",
    "What is the capital of Atlantis?", "What color is a banana?", "Who is Marie Curie?",
    "How do I install asyncllm?", "How do I serve Qwen3?", "How do I start the server?",
    "How do I use asyncllm in Python?", "How do I stream in Python?", "How do I use it offline?",
    "Which port does the server use?", "How do I use the OpenAI client?", "What is vLLM?",
    "Does asyncllm support quantization?", "What's up?", "I like pizza.", "Say hi", "lol",
    "Write HELLO in lower case", "uppercase hello world", "What is my name?", "Do you like cats?",
]  # fmt: skip


class Reader:
    """A model folder with greedy generation for many prompts at once."""

    def __init__(self, folder: Path, device: str) -> None:
        from transformers import AutoTokenizer, Qwen3ForCausalLM

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        self.model: Any = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()
        self.device = device

    def prompt(self, messages: Messages, tools: list[dict[str, Any]] | None = None) -> str:
        """Write a prompt that ends where the assistant's answer begins."""
        return data.render(messages, tools) + "<|im_start|>assistant\n"

    def answers(self, prompts: list[str], tokens: int = 64, batch: int = 128) -> list[str]:
        """Complete every prompt with at most ``tokens`` tokens."""
        found: dict[int, str] = {}
        # Prompts of like length together, so that little is padding.
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch):
            chosen = order[start : start + batch]
            inputs = self.tokenizer([prompts[i] for i in chosen], return_tensors="pt", padding=True)
            inputs = inputs.to(self.device)
            with torch.inference_mode():
                made = self.model.generate(**inputs, max_new_tokens=tokens, do_sample=False)
            texts = self.tokenizer.batch_decode(
                made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
            )
            found.update(zip(chosen, texts, strict=True))
        return [found[i] for i in range(len(prompts))]


def last_number(text: str) -> int | None:
    """Return the last whole number of ``text``."""
    numbers = re.findall(r"-?\d+", text)
    return int(numbers[-1]) if numbers else None


def sums(
    reader: Reader, count: int, op: str, rng: random.Random, digits: int = 2
) -> list[tuple[str, str, bool]]:
    """Ask held-out sums in all phrasings."""
    cases = [case for case in sample_sums(2 * count, 7, digits) if case[1] == op][:count]
    forms = (arithmetic.ADD if op == "+" else arithmetic.SUB) + arithmetic.TERSE[:5]
    asked = [phrased(rng, pick(rng, forms).format(a=a, b=b, o=op)) for a, _, b, _ in cases]
    answers = reader.answers([reader.prompt([user(question)]) for question in asked], 24)
    return [
        (question, answer, last_number(answer) == result)
        for question, answer, (_, _, _, result) in zip(asked, answers, cases, strict=True)
    ]


def reversals(reader: Reader, words: list[str], rng: random.Random) -> list[tuple[str, str, bool]]:
    """Ask for held-out words backwards in all phrasings."""
    asked = [pick(rng, letters.REVERSE).format(w=quoted(rng, word)) for word in words]
    answers = reader.answers([reader.prompt([user(question)]) for question in asked], 40)
    return [
        (question, answer, re.findall(r"[a-z]+", answer)[-1:] == [word[::-1]])
        for question, answer, word in zip(asked, answers, words, strict=True)
    ]


def token_words(
    reader: Reader, rng: random.Random, spell: bool, most: int
) -> list[tuple[str, str, bool]]:
    """Ask for words that are one token, backwards or letter by letter."""
    words = list(common.token_forms)[:most]
    forms = letters.SPELL if spell else letters.REVERSE
    asked = [pick(rng, forms).format(w=quoted(rng, word)) for word in words]
    answers = reader.answers([reader.prompt([user(question)]) for question in asked], 60)
    wanted = ["-".join(word) if spell else word[::-1] for word in words]
    return [
        (question, answer, re.findall(r"[A-Za-z-]+", answer)[-1:] == [want])
        for question, answer, want in zip(asked, answers, wanted, strict=True)
    ]


def letter_counts(reader: Reader, rng: random.Random, most: int) -> list[tuple[str, str, bool]]:
    """Ask how often a letter is in words that have it several times."""
    repeated = (
        (word, letter, word.count(letter))
        for word in DOUBLES
        for letter in sorted(set(word))
        if word.count(letter) > 1
    )
    cases = list(itertools.islice(repeated, most))
    asked = [
        pick(rng, letters.COUNT_LETTER).format(w=quoted(rng, word), c=letter)
        for word, letter, _ in cases
    ]
    answers = reader.answers([reader.prompt([user(question)]) for question in asked], 80)
    return [
        (question, answer, last_number(answer) == count)
        for question, answer, (_, _, count) in zip(asked, answers, cases, strict=True)
    ]


def heldout_words(rng: random.Random, count: int, kind: str, low: int, high: int) -> list[str]:
    """Draw distinct held-out words of one kind."""
    if kind == "real":
        real = [word for word in COMMON if common.is_unseen(word) and low <= len(word) <= high]
        return real[:count]
    make = pronounceable if kind == "word-like" else random_letters
    found: dict[str, None] = {}
    while len(found) < count:
        word = make(rng, rng.randint(low, high))
        if common.is_unseen(word):
            found.setdefault(word)
    return list(found)


def dialogues(
    reader: Reader, rng: random.Random, count: int, make: Any
) -> list[tuple[str, str, bool]]:
    """Check the last answer of generated dialogues, word for word."""
    cases = [make(rng) for _ in range(count)]
    prompts, wanted = [], []
    for messages, defined in cases:
        before = messages[:-1]
        prompts.append(reader.prompt(before, defined))
        whole = data.render(messages, defined)
        wanted.append(whole[len(prompts[-1]) :].removesuffix("<|im_end|>\n"))
    longest = max(len(reader.tokenizer(text)["input_ids"]) for text in wanted)
    answers = reader.answers(prompts, longest + 8)
    # The tokenizer's padding and turn end are gone from the answer already.
    return [
        (prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0], answer, answer == want)
        for prompt, answer, want in zip(prompts, answers, wanted, strict=True)
    ]


def _first_call(rng: random.Random) -> tuple[Messages, Any]:
    defined, messages = tools.tool_dialogue(rng)
    place = next(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: place + 1], defined


def _after_call(rng: random.Random) -> tuple[Messages, Any]:
    while True:
        defined, messages = tools.tool_dialogue(rng)
        places = [i for i in range(1, len(messages)) if messages[i - 1]["role"] == "tool"
                  and messages[i]["role"] == "assistant"]  # fmt: skip
        if places:
            return messages[: places[0] + 1], defined


def _memory(rng: random.Random) -> tuple[Messages, Any]:
    told, asked = chat.memory_parts(rng)
    for _ in range(rng.randint(0, 4)):
        told += data.task(rng)
    return told + asked, None


def _persona(rng: random.Random) -> tuple[Messages, Any]:
    system, asked = chat.persona(rng)
    return [{"role": "system", "content": system}, *asked], None


def _no_call(rng: random.Random) -> tuple[Messages, Any]:
    closed = [task for task in data.TASKS if task not in OPEN_ENDED]
    while (messages := pick(rng, closed)(rng)[:2])[-1]["content"] in (
        chat.NO_WEATHER, chat.NO_CLOCK
    ):  # fmt: skip
        pass
    return messages, tools.unneeded(rng) or None


Rows = list[tuple[str, str, bool]]


def measurements(
    reader: Reader, rng: random.Random, count: int, others: int, words: int
) -> dict[str, Callable[[], Rows]]:
    """What is measured, by name; each asks its questions when it is called."""

    def reverse(kind: str, count: int, low: int, high: int) -> Rows:
        return reversals(reader, heldout_words(rng, count, kind, low, high), rng)

    half = count // 2
    found: dict[str, Callable[[], Rows]] = {
        "unseen additions": lambda: sums(reader, half, "+", rng),
        "unseen subtractions": lambda: sums(reader, count - half, "-", rng),
        "unseen additions, three digits": lambda: sums(reader, half, "+", rng, 3),
        "unseen subtractions, three digits": lambda: sums(reader, count - half, "-", rng, 3),
        "reversals of single tokens": lambda: token_words(reader, rng, False, words),
        "spelling of single tokens": lambda: token_words(reader, rng, True, words),
        "letters that come more than once": lambda: letter_counts(reader, rng, words),
    }
    for kind in ("word-like", "random", "real"):
        found[f"unseen reversals, {kind}, 3-6 letters"] = partial(reverse, kind, half, 3, 6)
    found["unseen reversals, word-like, 7-10 letters"] = partial(reverse, "word-like", half, 7, 10)
    makers: dict[str, Any] = {
        f"{task.__module__.split('.')[-1]}.{task.__name__}": (
            lambda r, task=task: (task(r)[:2], None)
        )
        for task in data.TASKS
        if task not in OPEN_ENDED
    }
    makers |= {
        "arithmetic.follow_up, last": lambda r: (arithmetic.follow_up(r), None),
        "tools: the call": _first_call, "tools: the answer": _after_call,
        "tools: not needed": _no_call, "memory": _memory, "persona": _persona,
    }  # fmt: skip
    if others:
        for name, make in makers.items():
            found[name] = partial(dialogues, reader, rng, others, make)
    return found


def show_samples(reader: Reader, count: int, tokens: int) -> None:
    """Print what the model says to a few questions and beginnings."""
    questions = SAMPLES[:count]
    prompts = [reader.prompt([user(question)]) for question in questions]
    for question, answer in zip(questions, reader.answers(prompts, tokens), strict=True):
        print(f"> {question}\n{answer}\n")
    for prompt in ["Once upon a time", "1, 2, 3, 4,", "The days of the week are"]:
        print(f"| {prompt}{reader.answers([prompt], tokens // 3)[0]}\n")


def main() -> None:
    """Print samples, and a line for each measurement: the share of right answers."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT)
    parser.add_argument("--count", type=int, default=100, help="unseen sums and reversals")
    parser.add_argument("--others", type=int, default=8, help="of each other task")
    parser.add_argument("--words", type=int, default=100, help="words to spell and to reverse")
    parser.add_argument("--samples", type=int, default=12, help="questions to print answers of")
    parser.add_argument("--show", type=int, default=2, help="wrong answers to show of each kind")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.quick:
        options.count, options.others, options.words, options.samples = 4, 0, 4, 3
    if not (options.folder / "tokenizer.json").is_file():
        parser.error(f"{options.folder} has no tokenizer.json: is it a model's folder?")
    data.load_tokenizer(str(options.folder / "tokenizer.json"))
    reader = Reader(options.folder, options.device)
    show_samples(reader, options.samples, 30 if options.quick else 150)
    asked = measurements(reader, random.Random(11), options.count, options.others, options.words)
    wrong = []
    for name, measure in tqdm(asked.items(), unit="task", disable=None):
        rows = measure()
        share = sum(right for *_, right in rows) / len(rows)
        tqdm.write(f"{name:45s} {100 * share:6.1f} %  of {len(rows)}")
        wrong += [(name, *row) for row in [row for row in rows if not row[2]][: options.show]]
    for name, question, answer, _ in wrong:
        print(f"wrong, {name}: {question[-160:]!r} -> {answer[:160]!r}")


if __name__ == "__main__":
    main()
