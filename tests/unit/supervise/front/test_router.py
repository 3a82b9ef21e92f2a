"""Which replica gets a request, without any process."""

from __future__ import annotations

import json
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncllm.supervise.front.router import (
    PROMPT_BYTES,
    SHARE,
    SLACK,
    Placed,
    Router,
    blocks,
    prompt_bytes,
)


def place(router: Router, prompt: str, among: tuple[int, ...] = (0, 1)) -> Placed:
    data = prompt.encode()
    return router.place(blocks(data), len(data), among)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(
            st.integers(0, 6), st.integers(0, 40_000), st.booleans(), st.integers(1, 2**5 - 1)
        ),
        max_size=60,
    ),
)
def test_imbalance_is_bounded(
    num_replicas: int, requests: list[tuple[int, int, bool, int]]
) -> None:
    router = Router(num_replicas, most_blocks=200)
    running: list[Placed] = []
    for conversation, length, ends, mask in requests:
        among = [r for r in range(num_replicas) if mask >> r & 1] or [0]
        prompt = (f"{conversation}" * length).encode()
        before = list(router.work)
        placed = router.place(blocks(prompt), len(prompt), among)
        assert placed.replica in among
        assert 1.0 <= placed.work <= 1.0 + length / PROMPT_BYTES
        least = min(before[r] for r in among)
        assert before[placed.replica] <= least + max(SLACK, SHARE * least)
        running.append(placed)
        if ends:
            router.ended(running.pop(0))
    for placed in running:
        router.ended(placed)
    assert all(work < 1e-6 for work in router.work)


def test_a_conversation_goes_on_where_it_began() -> None:
    """Also when an answer and a question are longer than what was there before."""
    router = Router(3)
    rng = random.Random(0)
    texts = [f"{rng.random()}" * 20 for _ in range(30)]
    homes = [place(router, text, (0, 1, 2)).replica for text in texts]
    assert {homes.count(r) for r in range(3)} == {10}
    for _ in range(3):
        for i in rng.sample(range(30), 30):
            texts[i] += f"{rng.random()}" * 100
            placed = place(router, texts[i], (0, 1, 2))
            assert placed.replica == homes[i]
            router.ended(placed)


def test_a_shared_beginning_draws_nobody_to_one_replica() -> None:
    router = Router(2)
    system = "You are a helpful assistant. " * 40
    homes = [place(router, f"{system}{i}" + f"{i} " * 1500).replica for i in range(10)]
    assert homes.count(0) == 5


def test_a_replica_that_is_gone_is_not_chosen_and_forgets() -> None:
    router = Router(2)
    text = "abc" * 500
    home = place(router, text).replica
    assert place(router, text).replica == home
    assert place(router, text, (1 - home,)).replica == 1 - home
    router.forget(home)
    assert place(router, text).replica == 1 - home


def test_what_is_remembered_is_bounded() -> None:
    router = Router(1, most_blocks=100)
    for i in range(50):
        place(router, f"{i} " * 1000, (0,))
    assert len(router._known[0]) == 100


def test_blocks_are_those_of_the_prompt_alone() -> None:
    one = json.dumps({"temperature": 0.3, "messages": [{"role": "user", "content": "x" * 999}]})
    two = json.dumps({"messages": [{"role": "user", "content": "x" * 999}], "seed": 7})
    assert blocks(prompt_bytes(one.encode())) == blocks(prompt_bytes(two.encode()))
    assert len(blocks(b"x" * 2**21)) == 32 + 120 + 240
    assert blocks(b"x" * 2**21)[:40] == blocks(b"x" * (4096 + 8 * 512 + 511))
    for body in (b"", b"\xff" * 300, b"[" * 100_000, b"[1]"):
        assert prompt_bytes(body) == body


def test_any_bytes_have_blocks() -> None:
    rng = random.Random(1)
    for length in (0, 1, 127, 128, 5000, 70_000):
        data = rng.randbytes(length)
        assert len(blocks(prompt_bytes(data))) == len(blocks(data))


def test_claude_codes_billing_line_moves_no_conversation() -> None:
    """It is different in each request, and is not in the prompt."""

    def body(line: str, *, whole: bool) -> bytes:
        head = f"x-anthropic-billing-header: cc_version=2.1; cch={line};"
        texts = [f"{head}\nYou are"] if whole else [head, "You are"]
        system = [{"type": "text", "text": text} for text in texts]
        return json.dumps({"system": system, "messages": ["a" * 999]}).encode()

    for whole in (False, True):
        one, two = (blocks(prompt_bytes(body(line, whole=whole))) for line in ("1a2b", "c"))
        assert one == two
    quoted = json.dumps({"system": "a" * 600 + "x-anthropic-billing-header: b"}).encode()
    assert b"x-anthropic" in prompt_bytes(quoted)
