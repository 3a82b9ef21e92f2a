"""What structured output costs and covers, printed as tables.

    python examples/bench_grammar.py [--vocabulary 128000] [--rows 64] [--suite] [--quick]

It needs the repository and its test extra (pip install -e '.[test]'): the schemas are the tests'.
The large vocabulary is made of pairs of the demo model's tokens. It measures, in this order:
compiling schemas never seen before; the same schemas with llguidance's own compiler, where it
takes them; one row's mask along random outputs; the masks of whole batches in the filler's
threads; and how fast a busy Python thread runs meanwhile. With --suite it also runs the official
JSON-Schema-Test-Suite, with asyncllm's compiler of schemas and with the library's.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import tokenizers
from tokenizers import decoders, models
from tqdm import tqdm

import asyncllm.demo
from asyncllm.errors import BadRequest
from asyncllm.text import Tokenizer
from asyncllm.text.grammar import JsonSchema
from asyncllm.text.grammar.compiler import GrammarCompiler
from asyncllm.text.grammar.matcher import Grammar, Mask, MaskFiller

sys.path.insert(0, str(Path(__file__).parents[1]))
try:
    import jsonschema
    import referencing

    from tests.support.text.grammar_sampling import (
        EOS_IDS,
        VOCAB_SIZE,
        check_valid,
        demo_tokenizer,
        sample,
        suite_groups,
        tokens_in,
    )
    from tests.support.text.grammar_schemas import SCHEMAS
    from tests.unit.text.grammar.test_suite import GROUPS, admits_objects
except ImportError as error:
    sys.exit(f"this needs the repository and its test extra, pip install -e '.[test]': {error}")

MOST_TOKENS = 200


def large_tokenizer(size: int) -> Tokenizer:
    """The demo model's tokens, and pairs of them until there are ``size``."""
    folder = Path(asyncllm.demo.__file__).parent / "model"
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = dict(backend.get_vocab(with_added_tokens=True))
    pieces = [piece for piece, token in vocabulary.items() if token > max(EOS_IDS)]
    rng = random.Random(0)
    while len(vocabulary) < size:
        pair = rng.choice(pieces) + rng.choice(pieces)
        vocabulary.setdefault(pair, len(vocabulary))
    large = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    large.decoder = decoders.ByteLevel()
    large.add_special_tokens([backend.id_to_token(token) or "" for token in sorted(EOS_IDS)])
    return Tokenizer(large)


def outline(values: Sequence[float], scale: float) -> str:
    ordered = sorted(values)
    picked = [
        statistics.median(ordered),
        ordered[int(0.9 * len(ordered))],
        ordered[int(0.99 * len(ordered))],
        ordered[-1],
    ]
    return "".join(f"{value * scale:10.2f}" for value in picked)


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def cpu_seconds(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun


def compile_all(
    compiler: GrammarCompiler, schemas: dict[str, Any]
) -> tuple[dict[str, Grammar], list[float]]:
    grammars, seconds = {}, []
    for name, schema in tqdm(schemas.items(), "compile", leave=False, disable=None):
        begun = time.perf_counter()
        grammars[name] = compiler.compile(JsonSchema(schema))
        seconds.append(time.perf_counter() - begun)
    return grammars, seconds


def library_grammar(compiler: GrammarCompiler, schema: object) -> Grammar:
    """The grammar of the library's own compiler of schemas, its first mask made.

    Raises:
        BadRequest: it does not take the schema.
    """
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_flexible": False}}
    vocabulary = compiler.vocabulary
    text = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    matcher = llguidance.LLMatcher(vocabulary.tokenizer, text, log_level=0)
    if matcher.is_error():
        raise BadRequest(matcher.get_error())
    mask = np.zeros(vocabulary.num_words, np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return Grammar(b"", matcher, vocabulary, 0)


def show_both(tokenizer: Tokenizer, vocabulary: int, schemas: dict[str, Any]) -> None:
    """Compile the schemas that the library takes, too, with both compilers in turns.

    In CPU time: a busy machine interrupts the longer of the two more often.
    """
    ours: list[float] = []
    library: list[float] = []
    compiler = GrammarCompiler(tokenizer, vocabulary, EOS_IDS)
    for schema in schemas.values():
        try:
            library_grammar(compiler, schema)
        except BadRequest:
            continue
        ours.append(cpu_seconds(partial(compiler.compile, JsonSchema(schema))))
        library.append(cpu_seconds(partial(library_grammar, compiler, schema)))
    print(f"{f'{len(ours)} both take: ours, CPU ms':34}{outline(ours, 1e3)}")
    print(f"{'the library itself, CPU ms':34}{outline(library, 1e3)}")


def walk(grammar: Grammar, words: int, seed: int) -> Iterator[float]:
    """The seconds of each mask along one random output."""
    matcher, row = grammar.matcher(), np.zeros(words, np.uint32)
    rng = np.random.default_rng(seed)
    for _ in range(MOST_TOKENS):
        if matcher.is_finished:
            return
        begun = time.perf_counter()
        matcher.fill(row)
        yield time.perf_counter() - begun
        allowed = tokens_in(row)
        matcher.accept(allowed[rng.integers(len(allowed))])


def batches(
    compiler: GrammarCompiler, grammars: dict[str, Grammar], rows: int, threads: int
) -> list[float]:
    """Seconds per batch of masks; every row takes a token between two batches."""
    filler = MaskFiller(compiler.vocabulary, threads=threads)
    mask: Mask = np.zeros((rows, compiler.vocabulary.num_words), np.uint32)
    names = list(grammars)
    matchers = [grammars[names[row % len(names)]].matcher() for row in range(rows)]
    rng = np.random.default_rng(0)
    seconds: list[float] = []
    for _ in tqdm(range(150), f"{threads} threads", leave=False, disable=None):
        seconds.append(timed(lambda: filler.fill_rows(matchers, mask)))
        for row, matcher in enumerate(matchers):
            allowed = tokens_in(mask[row])
            matcher.accept(allowed[rng.integers(len(allowed))])
            if matcher.is_finished or matcher.error:
                matchers[row] = grammars[names[row % len(names)]].matcher()
    return seconds


class Spinner:
    """A Python thread that only counts: it loses speed while another thread holds the GIL."""

    def __init__(self) -> None:
        self.count = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin)

    def _spin(self) -> None:
        while not self._stop.is_set():
            self.count += 1

    def speed_during(self, work: Callable[[], object], seconds: float = 0.5) -> float:
        """Counts per second while this thread does the work again and again."""
        self.count = 0
        self._thread.start()
        begun = time.perf_counter()
        while time.perf_counter() < begun + seconds:
            work()
        speed = self.count / (time.perf_counter() - begun)
        self._stop.set()
        self._thread.join()
        return speed


def share_during_fills(compiler: GrammarCompiler, grammar: Grammar, rows: int) -> float:
    """The share of its speed that a Python thread keeps while another fills masks all the time."""
    filler = MaskFiller(compiler.vocabulary, threads=1)
    mask: Mask = np.zeros((rows, compiler.vocabulary.num_words), np.uint32)
    matchers = [grammar.matcher() for _ in range(rows)]
    alone = Spinner().speed_during(lambda: time.sleep(0.1))
    return Spinner().speed_during(lambda: filler.fill_rows(matchers, mask)) / alone


def show_costs(size: int, rows: int, schemas: dict[str, Any]) -> None:
    for tokenizer, vocabulary in ((demo_tokenizer(), VOCAB_SIZE), (large_tokenizer(size), size)):
        compiler = GrammarCompiler(tokenizer, vocabulary, EOS_IDS)
        begun = time.perf_counter()
        words = compiler.vocabulary.num_words
        print(f"\nvocabulary of {vocabulary}: built in {time.perf_counter() - begun:.3f} s")
        print(f"{'':34}    median       90%       99%       max")
        grammars, seconds = compile_all(compiler, schemas)
        print(f"{f'compile, ms ({len(seconds)} schemas)':34}{outline(seconds, 1e3)}")
        show_both(tokenizer, vocabulary, schemas)
        _, again = compile_all(compiler, schemas)
        print(f"{'compile again, us':34}{outline(again, 1e6)}")
        started = [timed(grammar.matcher) for grammar in grammars.values()]
        print(f"{'matcher, us':34}{outline(started, 1e6)}")
        for pass_ in ("first", "second"):
            fills = [
                second
                for grammar in tqdm(grammars.values(), "masks", leave=False, disable=None)
                for seed in range(3)
                for second in walk(grammar, words, seed)
            ]
            print(f"{f'mask of one row, us ({pass_} pass)':34}{outline(fills, 1e6)}")
        for threads in (1, 2):
            found = batches(compiler, grammars, rows, threads)
            label = f"{rows} rows, {threads} threads, us per row"
            print(f"{label:34}{outline(found, 1e6 / rows)}")
        share = share_during_fills(compiler, next(iter(grammars.values())), rows)
        print(f"during fills of {rows} rows a Python thread keeps {share:.0%} of its speed")


def verdict(schema: object, compile_: Callable[[object], Grammar]) -> str:
    try:
        grammar = compile_(schema)
    except BadRequest:
        return "refused"
    outputs = [output for seed in range(6) if (output := sample(grammar, seed, most=300)).finished]
    try:
        for output in outputs:
            check_valid(schema, output.text)
    except (jsonschema.ValidationError, ValueError):
        return "wrong"
    except referencing.exceptions.Unresolvable:
        return "refused"
    return "valid" if outputs else "unfinished"


def show_suite() -> None:
    compiler = GrammarCompiler(demo_tokenizer(), VOCAB_SIZE, EOS_IDS)

    ways: dict[str, Callable[[object], Grammar]] = {
        "asyncllm": lambda schema: compiler.compile(JsonSchema(schema)),  # type: ignore[arg-type]
        "the library's own compiler": partial(library_grammar, compiler),
    }
    groups = [group for group in GROUPS if admits_objects(group)]
    print(f"\nJSON-Schema-Test-Suite, draft 2020-12: {len(groups)} schemas that admit objects,")
    print(f"of {sum(1 for _ in suite_groups())}")
    for name, way in ways.items():
        counts = Counter(
            verdict(group.schema, way) for group in tqdm(groups, name, leave=False, disable=None)
        )
        shares = ", ".join(f"{counts[what]} {what}" for what in sorted(counts))
        print(f"{name:28} {counts['valid'] / len(groups):.1%} valid ({shares})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--vocabulary", type=int, default=128_000)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--suite", action="store_true", help="also the official test suite")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    options = parser.parse_args()
    schemas = {"a tool call": SCHEMAS["a tool call"], **SCHEMAS}
    if options.quick:
        options.vocabulary, options.rows = 4000, 4
        schemas = dict(islice(schemas.items(), 4))
    show_costs(options.vocabulary, options.rows, schemas)
    if options.suite:
        show_suite()


if __name__ == "__main__":
    main()
