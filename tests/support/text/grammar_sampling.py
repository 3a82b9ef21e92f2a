"""Random outputs under a grammar, and validators that judge them."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np

import asyncllm.demo
from asyncllm.text import Tokenizer
from asyncllm.text.grammar import GrammarSpec
from asyncllm.text.grammar.compiler import GrammarCompiler
from asyncllm.text.grammar.matcher import Grammar, Mask, Matcher

#: The demo model: its logits are wider than its tokenizer.
VOCAB_SIZE = 2368
EOS_IDS = (2, 0)
_FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER
SUITE = Path(__file__).parents[2] / "data" / "json-schema-test-suite-draft2020-12.tar.xz"


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(Path(asyncllm.demo.__file__).parent / "model")


@cache
def demo_compiler() -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer(), VOCAB_SIZE, EOS_IDS)


def compiled(spec: GrammarSpec) -> Grammar:
    return demo_compiler().compile(spec)


def new_mask(rows: int | None = None) -> Mask:
    words = -(-VOCAB_SIZE // 32)
    # Poisoned: whatever a fill leaves out shows.
    return np.full(words if rows is None else (rows, words), 0xA5A5A5A5, np.uint32)


def tokens_in(row: Mask) -> list[int]:
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token) for token in np.nonzero(bits)[0]]


class Sample(NamedTuple):
    """What random choices among the allowed tokens came to.

    Attributes:
        tokens: without the end token.
        finished: whether the grammar was complete, or an end token was chosen.
    """

    tokens: list[int]
    finished: bool

    @property
    def text(self) -> str:
        return demo_tokenizer().decode(self.tokens)


def sample(grammar: Grammar, seed: int, most: int = 1000) -> Sample:
    """Choose each token uniformly among those allowed, up to so many."""
    rng = np.random.default_rng(seed)
    matcher, row = grammar.matcher(), new_mask()
    tokens: list[int] = []
    while not matcher.is_finished:
        matcher.fill(row)
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        assert len(allowed), f"nowhere to go: {matcher.error} behind {tokens}"
        assert bits[list(EOS_IDS)].tolist() == [matcher.can_stop] * len(EOS_IDS), matcher.error
        token = int(allowed[rng.integers(len(allowed))])
        if token in EOS_IDS:
            break
        if len(tokens) >= most:
            return Sample(tokens, finished=False)
        assert matcher.accept(token), matcher.error
        tokens.append(token)
    assert matcher.error is None
    return Sample(tokens, finished=True)


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether a text is a whole sentence, spelled as the tokenizer does."""
    matcher = grammar.matcher()
    tokens = demo_tokenizer().encode(text, add_special_tokens=False)
    return all(map(matcher.accept, tokens)) and matcher.can_stop


def count_allowed(matcher: Matcher, tokens: list[int]) -> int:
    """How many of these tokens the grammar allows in a row; the state does not change."""
    return matcher._matcher.validate_tokens(tokens)


def follow(matcher: Matcher, tokens: list[int]) -> None:
    for token in tokens:
        assert matcher.accept(token), matcher.error


def check_valid(schema: Any, text: str) -> None:
    """Raises ValidationError if a text is not JSON that is valid against a schema.

    With exact decimals: in binary floats 0.07 is no multiple of 0.01.
    """
    instance = json.loads(text, parse_float=Decimal, parse_constant=_no_constant)
    exact_schema = json.loads(json.dumps(schema), parse_float=Decimal)
    dialect = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    types = dialect.TYPE_CHECKER.redefine("integer", _is_integer)
    validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
        dialect, type_checker=types
    )
    validator(_for_python(exact_schema), format_checker=_FORMATS).validate(instance)


def suite_groups() -> Iterator[tuple[str, dict[str, Any]]]:
    """The groups of the official test suite: the file's name, then description, schema, tests."""
    with tarfile.open(SUITE) as archive:
        for member in archive.getmembers():
            if member.name.endswith(".json"):
                file = archive.extractfile(member)
                assert file is not None
                name = member.name.removeprefix("tests/draft2020-12/").removesuffix(".json")
                for group in json.load(file):
                    yield name, group


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def _is_integer(checker: object, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return False
    return value == int(value)


def _python_pattern(pattern: str) -> str:
    """A pattern of ECMA 262 for Python's re, as far as the tests have it."""
    pattern = re.sub(r"\\c([A-Za-z])", lambda found: re.escape(chr(ord(found[1]) % 32)), pattern)
    space = r"\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
    sets = {"d": "0-9", "w": "0-9A-Za-z_", "s": space}
    if "[^" not in pattern:
        pattern = re.sub(
            r"\\([dwsDWS])(?![^\[]*\])",
            lambda found: f"[{'^' * found[1].isupper()}{sets[found[1].lower()]}]",
            pattern,
        )
    pattern = re.sub(r"(?<!\\)\.(?![^\[]*\])", r"[^\\n\\r\\u2028\\u2029]", pattern)
    # With the digits of Unicode 16, which is newer than Python's.
    digit = (
        r"[\d\U00010D40-\U00010D49\U00016130-\U00016139\U0001CCF0-\U0001CCF9\U0001E5F1-\U0001E5FA]"
    )
    properties = {"Letter": r"[^\W\d_]", "L": r"[^\W\d_]", "digit": digit, "Nd": digit}
    pattern = re.sub(r"\\p\{(\w+)\}", lambda found: properties[found[1]], pattern)
    return re.sub(r"\$(?!\))", r"\\Z", pattern) if pattern.endswith("$") else pattern


def _for_python(schema: Any) -> Any:
    """A copy of a schema with its patterns for Python's re."""
    if isinstance(schema, list):
        return list(map(_for_python, schema))
    if not isinstance(schema, dict):
        return schema
    copy: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            copy[key] = _python_pattern(value)
        elif key == "patternProperties":
            copy[key] = {_python_pattern(name): _for_python(one) for name, one in value.items()}
        else:
            copy[key] = _for_python(value)
    return copy
