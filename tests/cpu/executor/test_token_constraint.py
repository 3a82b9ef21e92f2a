"""Rows whose masks depend on their tokens: matchers are told all of them, once, and in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncllm.executor.device import CpuDevice
from asyncllm.executor.sampling.sampler import Sampled, Sampler
from asyncllm.executor.sampling.token_constraint import TokenConstraint
from asyncllm.types import Reasoning
from asyncllm.wire.messages import BAD_TOKEN
from tests.support.models.constraining import mask_of, row_params

VOCAB, EOS, STOP = 40, 39, 38


class ScriptMatcher:
    """Allows the tokens that are listed for each position; after the last one the end."""

    def __init__(self, script: list[list[int]]):
        self.script = script
        self.accepted: list[int] = []
        self.error: str | None = None

    @property
    def is_finished(self) -> bool:
        done = EOS in self.accepted or len(self.accepted) >= len(self.script)
        return done and self.error is None

    def accept(self, token: int) -> None:
        assert not self.is_finished
        if self.error is None and token not in self.allowed():
            self.error = f"{token} does not follow {self.accepted}"
        self.accepted.append(token)

    def accept_bytes(self, text: bytes) -> None:
        self.accept(text[0])

    def allowed(self) -> list[int]:
        if self.error is not None:
            return []
        return [EOS] if self.is_finished else self.script[len(self.accepted)]


class ScriptGrammars:
    """A grammar is the JSON of its script; remembers the matchers that it has made."""

    def __init__(self) -> None:
        self.made: list[ScriptMatcher] = []

    def matcher(self, grammar: bytes) -> ScriptMatcher:
        self.made.append(ScriptMatcher(json.loads(grammar)))
        return self.made[-1]

    def token_bytes(self, token: int) -> bytes:
        """Letters, and the pieces of a marker."""
        return {30: b"</", 31: b"end", 32: b">", 33: b">\n{", 34: b"<s", 35: b"> a</end"}.get(
            token, bytes([65 + token])
        )

    def fill(self, matchers: Sequence[ScriptMatcher], masks: np.ndarray) -> None:
        assert masks.dtype == np.int32
        assert masks.shape == (len(matchers), -(-VOCAB // 32))
        for matcher, mask in zip(matchers, masks, strict=True):
            mask[:] = mask_of(matcher.allowed(), VOCAB)


def script(*positions: list[int], **changes: Any) -> dict[str, Any]:
    return {"grammar": json.dumps(positions).encode(), "stop_ids": (EOS,), **changes}


class Bench:
    """A sampler of a few slots, whose logits prefer higher tokens, or come from a seed."""

    def __init__(self, num_slots: int = 4, *, with_grammars: bool = True) -> None:
        self.grammars = ScriptGrammars()
        made = self.grammars if with_grammars else None
        self.sampler = Sampler(num_slots, VOCAB, CpuDevice(), made)
        self.lengths = np.zeros(num_slots, dtype=np.int64)

    def admit(
        self, slot: int, generated: Sequence[int] = (), prompt: Sequence[int] = (1,), **kwargs: Any
    ) -> None:
        known = np.array([*prompt, *generated], dtype=np.int32)
        self.lengths[slot] = len(known)
        params = row_params(VOCAB, **{"temperature": 0.0, **kwargs})
        self.sampler.admit(slot, params, known, len(prompt))

    def step(self, *slots: int, logits: torch.Tensor | None = None) -> Sampled:
        if logits is None:
            logits = torch.arange(VOCAB).float().expand(len(slots), -1)
        sampled = self.sampler.sample(logits, np.array(slots), self.lengths[list(slots)])
        self.lengths[list(slots)] += 1
        return sampled

    def tokens(self, *slots: int) -> list[int]:
        tokens: list[int] = self.step(*slots).tokens.tolist()
        return tokens


def test_a_grammar_is_followed_to_its_end_and_only_the_end_remains() -> None:
    bench = Bench()
    bench.admit(0, **script([3, 5], [7], [2, EOS]))
    assert [bench.tokens(0) for _ in range(3)] == [[5], [7], [EOS]]
    # Rows that are in flight behind the end: they are dropped, and must do no harm.
    assert [bench.tokens(0) for _ in range(3)] == [[EOS]] * 3
    assert bench.grammars.made[0].accepted == [5, 7, EOS]
    assert bench.grammars.made[0].error is None


def test_rows_are_told_their_own_tokens_whatever_their_order() -> None:
    bench = Bench()
    bench.admit(0, **script([3], [4], [5]))
    bench.admit(1, bad_words=((39, 39), (38, 38)))
    bench.admit(2)
    bench.admit(3, **script([6], [7], [8]))
    assert bench.tokens(3, 1, 0, 2) == [6, 39, 3, 39]
    assert bench.tokens(0, 1) == [4, 38]
    assert bench.tokens(2) == [39]
    assert bench.tokens(1, 2, 3) == [39, 39, 7]
    assert bench.tokens(3, 0, 1) == [8, 5, 38]
    bench.tokens(0, 3)
    assert [made.accepted for made in bench.grammars.made] == [[3, 4, 5], [6, 7, 8]]


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    bench = Bench()
    bench.admit(0, **script([3], [4, 9], [5], [6]), bad_words=((9,), (4, 5, 6)))
    assert [bench.tokens(0)[0] for _ in range(2)] == [3, 4]
    # A token that its slot's last step has sampled, and nobody read, is not its successor's.
    bench.admit(0, **script([8], [7]))
    bench.admit(2, generated=[3, 4], prompt=[5, 5], **script([3], [4], [5], [6, 7]))
    assert bench.tokens(2, 0) == [5, 8]
    bench.admit(1, generated=[3, 4, 5], prompt=[5, 5], **script([3], [4], [5], [6, 7]))
    assert bench.tokens(0, 1) == [7, 7]


def test_words_count_from_the_first_token_that_was_generated() -> None:
    words = ((37, 39), (39, 37, 38))
    bench = Bench()
    bench.admit(0, prompt=[39, 37], bad_words=words)
    assert bench.tokens(0) == [39]  # the prompt is not what is generated
    bench.admit(1, prompt=[1], generated=[37], bad_words=words)
    assert bench.tokens(1) == [38]
    bench.admit(2, prompt=[1], generated=[39, 37], bad_words=words)
    assert bench.tokens(2) == [37]  # neither 38 nor 39


def test_a_grammar_that_fails_ends_its_row_alone() -> None:
    torch.manual_seed(0)
    kinds: list[dict[str, Any]] = [
        script(list(range(30)), list(range(30)), temperature=1.0, seed=1),
        {"temperature": 1.0, "seed": 2, "bad_words": ((1, 2),)},
        script([3], [4]),
        {"temperature": 1.0, "seed": 3},
    ]
    spoiled, healthy = Bench(), Bench()
    for slot, kwargs in enumerate(kinds):
        spoiled.admit(slot, **kwargs)
        healthy.admit(slot, **kwargs)
    for step in range(4):
        logits = torch.randn(4, VOCAB)
        got, want = (bench.step(0, 1, 2, 3, logits=logits) for bench in (spoiled, healthy))
        if step == 0:
            spoiled.grammars.made[1].error = "out of fuel"
            assert got.failures == {}
        else:
            assert got.failures == {2: "out of fuel"}
            assert got.tokens[2] == BAD_TOKEN
        assert want.failures == {}
        for i in (0, 1, 3):
            assert got.tokens[i] == want.tokens[i]


@pytest.mark.parametrize("with_grammars", [True, False])
def test_a_grammar_that_cannot_be_made_ends_its_row_alone(with_grammars: bool) -> None:
    bench = Bench(with_grammars=with_grammars)
    bench.admit(0, grammar=b"no JSON")
    bench.admit(1, bad_words=((39,),))
    sampled = bench.step(1, 0)
    assert sampled.tokens.tolist() == [38, BAD_TOKEN]
    assert list(sampled.failures) == [1]
    assert "the grammar cannot be used" in sampled.failures[1]
    bench.admit(0)
    assert bench.tokens(0) == [39]


def test_constraints_that_leave_nothing_are_told() -> None:
    bench = Bench()
    bench.admit(0, **script([3], [4, 5], allowed=[3, 5]), bad_words=((3, 5),))
    bench.admit(1, allowed=[7], bad_words=((7, 7),))
    assert bench.tokens(0, 1) == [3, 7]
    sampled = bench.step(0, 1)
    assert sampled.tokens.tolist() == [BAD_TOKEN] * 2
    assert sampled.failures.keys() == {0, 1}
    assert "leaves no token" in sampled.failures[0]


def test_a_grammar_ends_early_only_where_it_must() -> None:
    bench = Bench()
    stops: dict[str, Any] = {"stop_ids": (EOS, STOP), "min_length": 4}
    bench.admit(0, **(script([3, EOS], [4, STOP], [5, EOS], [6, EOS]) | stops))
    assert [bench.tokens(0)[0] for _ in range(4)] == [3, 4, 5, EOS]
    bench.admit(1, **(script([3]) | stops))
    assert [bench.tokens(1)[0] for _ in range(2)] == [3, EOS]
    bench.admit(2, bad_words=((37, 37),), **stops)
    assert [bench.tokens(2)[0] for _ in range(4)] == [37, 36, 37, EOS]


def test_a_grammar_begins_after_the_reasoning() -> None:
    opened = Reasoning(end_ids=(30, 31), is_open=True)
    bench = Bench()
    bench.admit(0, **script([3], [4]), reasoning=opened)
    favoured = torch.zeros(1, VOCAB)

    def step(token: int, slot: int = 0) -> int:
        """The token that is sampled where this one would be the best, and then the end."""
        logits = favoured.clone()
        logits[0, token], logits[0, EOS] = 9.0, 5.0
        return int(bench.step(slot, logits=logits).tokens)

    assert [step(7), step(3), step(31), step(7), step(7)] == [7, 3, 31, 3, 4]
    assert step(7) == EOS
    # In reasoning there is no end of the sequence, as the grammar has not begun.
    bench.admit(0, **script([3]), reasoning=opened)
    assert step(EOS) != EOS
    # One that the output may begin itself: the grammar's first token comes instead, or after it.
    either = Reasoning(start_ids=(29,), end_ids=(30,))
    bench.admit(1, **script([3], [29, 5]), reasoning=either)
    assert [step(29, 1), step(8, 1), step(30, 1), step(29, 1), step(29, 1)] == [29, 8, 30, 3, 29]
    bench.admit(1, **script([3], [5]), reasoning=either)
    assert [step(3, 1), step(29, 1)] == [3, 5]
    bench.admit(1, **script([3], [5]), reasoning=either)
    assert step(8, 1) in (3, 29)
    # Back from a preemption, within it and after it.
    bench.admit(2, generated=[7, 8], **script([3]), reasoning=opened)
    assert [step(9, 2), step(30, 2), step(9, 2)] == [9, 30, 3]
    bench.admit(2, generated=[7, 30], **script([3]), reasoning=opened)
    assert step(9, 2) == 3


def test_reasoning_ends_in_time() -> None:
    bench = Bench()
    bench.admit(0, reasoning=Reasoning(end_ids=(30, 31), is_open=True, max_tokens=3))
    assert [bench.tokens(0)[0] for _ in range(6)] == [39, 39, 39, 30, 39, 39]
    bench.admit(0, reasoning=Reasoning(end_ids=(39,), is_open=True, max_tokens=3))
    assert [bench.tokens(0)[0] for _ in range(4)] == [39] * 4
    bench.admit(1, reasoning=Reasoning((39,), (30,), max_tokens=2), **script([3], [4]))
    assert [bench.tokens(1)[0] for _ in range(5)] == [39, 38, 30, 3, 4]
    bench.admit(2, reasoning=Reasoning((39,), (30,), max_tokens=0), **script([3], [4]))
    assert [bench.tokens(2)[0] for _ in range(2)] == [3, 4]
    bench.admit(2, reasoning=Reasoning((29,), (30,), max_tokens=2))
    assert [bench.tokens(2)[0] for _ in range(4)] == [39] * 4
    bench.admit(3, reasoning=Reasoning(end_ids=(30,), is_open=True, max_tokens=0))
    assert [bench.tokens(3)[0] for _ in range(2)] == [30, 39]


MARKED = Reasoning(
    start_texts=("<s>",), end_texts=("</end>",), closing_ids=(30, 31, 32), max_tokens=3
)


def test_markers_of_several_tokens() -> None:
    bench = Bench()
    opened = msgspec.structs.replace(MARKED, is_open=True)
    # 38 is the best token, where it may come.
    bench.admit(0, **(script([3], [4]) | {"stop_ids": (39,)}), reasoning=opened)
    assert [bench.tokens(0)[0] for _ in range(8)] == [38, 38, 38, 30, 31, 32, 3, 4]
    # The marker has begun by itself, with its own tokens or with others.
    for begun, forced in (((38, 30, 31), [32, 3]), ((38, 38, 35), [32, 3]), ((30, 31, 32), [3, 4])):
        bench.admit(0, generated=begun, **script([3], [4]), reasoning=opened)
        if begun[-1] == 35:
            assert bench.tokens(0)[0] == 30  # nothing tells how to go on with other tokens
            continue
        assert [bench.tokens(0)[0] for _ in range(2)] == forced
    # What a token says after the marker is the beginning of the answer.
    bench.admit(1, generated=(30, 31, 33), **script([ord("{")], [5]), reasoning=opened)
    assert bench.tokens(1)[0] == 5
    # Begun by the output itself, which is possible without a grammar only.
    bench.admit(2, generated=(34, 32), reasoning=MARKED)
    assert [bench.tokens(2)[0] for _ in range(5)] == [39, 30, 31, 32, 39]
    bench.admit(3, generated=(36, 34, 32), reasoning=MARKED)
    assert [bench.tokens(3)[0] for _ in range(3)] == [39, 39, 39]


def test_seeds_and_preemptions_do_not_show() -> None:
    positions = [list(range(0, 30, 1 + i % 3)) for i in range(12)]
    kwargs = script(*positions, temperature=1.5, top_p=0.9, bad_words=((3, 6), (0,)), seed=4)
    logits = torch.randn(12, VOCAB, generator=torch.Generator().manual_seed(1)) * 2

    def generate(preempt_at: set[int]) -> list[int]:
        bench, slot = Bench(), 0
        tokens: list[int] = []
        bench.admit(0, **kwargs)
        for step in range(12):
            if step in preempt_at:
                slot = (slot + 1) % 4
                bench.admit(slot, generated=tokens, **kwargs)
            tokens += bench.step(slot, logits=logits[step : step + 1]).tokens.tolist()
        return tokens

    want = generate(set())
    assert len(set(want)) > 4
    for first in range(6):
        assert generate({first, first + 4}) == want


def test_what_is_narrowed() -> None:
    asked = row_params(
        VOCAB, allowed=[0], bad_words=[(1, 2)], stop_ids=(4,), min_length=9, grammar=b"x"
    )
    constraint = TokenConstraint(asked, mask_of([0, 2, 4, 33], VOCAB), ScriptMatcher([[1], [33]]))
    constraint.accept(BAD_TOKEN)

    def narrow(tokens: list[int], length: int = 9) -> list[int]:
        mask = mask_of(tokens, VOCAB)
        assert constraint.narrow(mask, length) is None
        return [token for token in range(VOCAB) if mask[token // 32] >> token % 32 & 1]

    assert narrow([1, 2, 3, 33]) == [2, 33]
    constraint.accept(1)
    assert narrow([1, 2, 3, 33]) == [33]
    assert narrow([1, 2, 3]) == []
    constraint.accept(33)
    assert narrow([2, 4]) == [2, 4]
    assert narrow([2, 4], length=8) == [2]
    assert narrow([4], length=8) == [4]
