"""What scheduler tests share: limits, sequences, a device that believes nothing, and the books."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from asyncllm.config import EngineLimits
from asyncllm.engine.cache.manager import KVCacheManager
from asyncllm.engine.cache.node import NO_PAGE, NO_STATE, Node
from asyncllm.engine.cache.state_slots import StateSlots
from asyncllm.engine.policy import Fair, Policy
from asyncllm.engine.scheduling.forecast import OutputLengths
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.engine.scheduling.sequence import Sequence
from asyncllm.types import SamplingParams, SchedulingParams
from asyncllm.wire.messages import (
    NO_TOKEN,
    STATE_TO_DEVICE,
    STATE_TO_HOST,
    TO_DEVICE,
    TO_HOST,
    PooledPrompt,
    ScoredPrompt,
    StepPlan,
    StepResult,
    pack,
    unpack,
)

EOS = 7


def limits(**changes: Any) -> EngineLimits:
    numbers: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "num_pages": 64,
        "page_size": 4,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "prefill_chunk": 32,
        "itl_target": 0.01,
        "prefix_caching": True,
        "host_pages": 0,
        "page_copy_seconds": 1e-4,
        "max_waiting": 100,
        "max_waiting_tokens": 10_000,
        "steps_in_flight": 2,
        "vocab_size": 100,
        "eos_token_ids": (EOS,),
    }
    return EngineLimits(**{**numbers, **changes})


def scheduler(policy: Policy | None = None, **changes: Any) -> Scheduler:
    return Scheduler.create(limits(**changes), policy or Fair())


def sequence(
    id: int,
    prompt: int | list[int],
    max_tokens: int = 4,
    params: SamplingParams | None = None,
    *,
    arrival: float = 0.0,
    **scheduling: Any,
) -> Sequence:
    """A number stands for a prompt of so many tokens that no other prompt begins with."""
    tokens = [1000 + id] * prompt if isinstance(prompt, int) else prompt
    return Sequence(
        id,
        tokens,
        params or SamplingParams(max_tokens=max_tokens),
        SchedulingParams(**scheduling),
        max_length=len(tokens) + max_tokens,
        eos_ids=(EOS,),
        seed=0,
        arrival=arrival,
    )


def rows(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Slot, promised start and length."""
    return [(slot, start, q_len) for slot, start, q_len in unpack(plan.rows, 3).tolist()]


class Step:
    """A step that the device has taken; ``tokens`` are what it samples."""

    def __init__(
        self,
        number: int,
        tokens: list[int],
        prompts: list[ScoredPrompt],
        pooled: list[PooledPrompt],
    ):
        self.number = number
        self.tokens = tokens
        self.prompts = prompts
        self.pooled = pooled


class FakeDevice:
    """Checks every plan as a device would have to believe it, and answers it.

    What a page holds at each offset is the whole prefix that was written there, so a row that would
    read anything but its own prefix is found out.
    """

    def __init__(self, limits: EngineLimits, copy_seconds: float = 1e-4):
        self.limits = limits
        self.copy_seconds = copy_seconds
        self.block_tables: dict[int, dict[int, int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.known: dict[int, int] = {}
        self.written: dict[int, int] = {}
        self.scoring: dict[int, int] = {}
        self.pooling: dict[int, int] = {}
        self.pages: dict[int, dict[int, tuple[int, ...]]] = {}
        self.host: dict[int, dict[int, tuple[int, ...]]] = {}
        self.copies: dict[int, list[tuple[int, int, int]]] = {}
        #: By slot: all tokens that the state has taken in, and the steps that it depends on.
        self.states: dict[int, tuple[tuple[int, ...], frozenset[int]]] = {}
        #: By host page: the state that a part of is there, and which part.
        self.host_states: dict[int, tuple[tuple[int, ...], int]] = {}
        self.failed: set[int] = set()
        self.steps: list[Step] = []

    def take(self, plan: StepPlan, sample: Iterator[int]) -> None:
        """Run a plan; ``sample`` gives the tokens of rows that sample."""
        for admit in plan.admits:
            tokens = unpack(admit.tokens).tolist()
            self.tokens[admit.slot] = tokens
            self.known[admit.slot] = len(tokens)
            self.block_tables[admit.slot] = {}
            self.written.pop(admit.slot, None)
            self.scoring[admit.slot] = admit.num_prompt if admit.prompt_logprobs >= 0 else 0
            self.pooling[admit.slot] = admit.pool_from if admit.pool_from >= 0 else 2**31
        entries = [(slot, index) for slot, index, _ in unpack(plan.new_pages, 3).tolist()]
        assert len(entries) == len(set(entries)), "one page for an entry of a block table"
        for slot, index, page in unpack(plan.new_pages, 3).tolist():
            assert 0 <= page < self.limits.num_pages
            self.block_tables[slot][index] = page
        self._take_copies(plan)
        self._check_order(plan)
        settled = self._settled(plan)
        self._copy_states(plan)
        results = (
            [
                self._run(slot, start + after, q_len, sample)
                for after in range(plan.decode_steps)
                for slot, start, q_len in settled
            ]
            if not plan.drafts
            else self._verify(plan, settled, sample)
        )
        self._run_states(plan, settled)
        prompts = [
            ScoredPrompt(row, start + 1, min(start + q_len + 1, self.scoring[slot]), b"", b"")
            for row, (slot, start, q_len) in enumerate(rows(plan))
            if start < self.scoring[slot]
        ]
        pooled = [
            PooledPrompt(row, max(start, self.pooling[slot]), start + q_len, b"")
            for row, (slot, start, q_len) in enumerate(rows(plan))
            if start + q_len > self.pooling[slot]
        ]
        self.steps.append(Step(plan.step, results, prompts, pooled))

    def answer(
        self, *, all_copies: bool = True, error: str | None = None, seconds: float = 0.001
    ) -> StepResult:
        """The result of the oldest step; copies are acknowledged now or later."""
        step = self.steps.pop(0)
        copied = []
        if all_copies or not step.tokens:
            copied = [(number, self.copy_seconds) for number in self.copies]
            for number, _ in copied:
                self._finish_copies(self.copies.pop(number))
        tokens = b"" if error else pack(step.tokens)
        if error:
            self.failed.add(step.number)
        return StepResult(
            step.number,
            tokens,
            (),
            error,
            0.0,
            0.0,
            tuple(copied),
            seconds,
            prompts=() if error else tuple(step.prompts),
            pooled=() if error else tuple(step.pooled),
        )

    def _check_order(self, plan: StepPlan) -> None:
        slots = [slot for slot, _, _ in rows(plan)]
        assert len(slots) == len(set(slots)), "one row a sequence"
        kinds = [start < self.known[slot] for slot, start, _ in rows(plan)]
        assert kinds == sorted(kinds), "decode rows come first"
        total = sum(q_len for _, _, q_len in rows(plan))
        assert total <= self.limits.max_num_batched_tokens
        assert 1 <= plan.decode_steps <= self.limits.max_decode_steps
        assert plan.decode_steps == 1 or not any(kinds), (
            "several decode steps are of decode rows alone"
        )

    def _run(self, slot: int, start: int, q_len: int, sample: Iterator[int]) -> int:
        lim, tokens = self.limits, self.tokens[slot]
        end, known = start + q_len, self.known[slot]
        assert 1 <= q_len <= lim.prefill_chunk
        assert start == self.written.get(slot, start), "no gap and no repetition"
        assert q_len == 1 or end <= known
        assert end <= lim.max_model_len
        table = self.block_tables[slot]
        moving, loading = self._moving(TO_DEVICE, TO_HOST), self._moving(TO_DEVICE)
        for position in range(start):
            page, offset = table[position // lim.page_size], position % lim.page_size
            assert page not in loading, "nothing reads a page that is still being loaded"
            assert self.pages[page][offset] == tuple(tokens[: position + 1])
        for position in range(start, end):
            page, offset = table[position // lim.page_size], position % lim.page_size
            assert page not in moving, "nothing writes a page that is being copied"
            self.pages.setdefault(page, {})[offset] = tuple(tokens[: position + 1])
        self.written[slot] = end
        if end < known:
            return NO_TOKEN
        token = next(sample)
        tokens.append(max(token, 0))
        return token

    def _settled(self, plan: StepPlan) -> list[tuple[int, int, int]]:
        """The rows from where the device finds them to start."""
        settled = rows(plan)
        for row, most, _ in unpack(plan.doubts, 3).tolist():
            slot, promised, q_len = settled[row]
            assert most > 0
            assert promised - most <= self.written[slot] <= promised
            assert promised + q_len <= len(self.block_tables[slot]) * self.limits.page_size
            settled[row] = slot, self.written[slot], q_len
        return settled

    def _verify(
        self, plan: StepPlan, settled: list[tuple[int, int, int]], sample: Iterator[int]
    ) -> list[int]:
        """A step with drafts: a row's tokens are right as long as it samples what was drafted."""
        drafts, parts = unpack(plan.drafts).tolist(), []
        for slot, start, q_len in settled:
            if q_len == 1 or start < self.known[slot]:
                parts.append([self._run(slot, start, q_len, sample)])
                continue
            draft, drafts = drafts[: q_len - 1], drafts[q_len - 1 :]
            assert q_len - 1 == len(draft) <= self.limits.max_draft_tokens
            assert start + q_len <= len(self.block_tables[slot]) * self.limits.page_size
            tokens = [self._run(slot, start, 1, sample)]
            for token in draft:
                if token != tokens[-1]:
                    break
                tokens.append(self._run(slot, start + len(tokens), 1, sample))
            for position in range(start + len(tokens), start + q_len):
                page = self.block_tables[slot][position // self.limits.page_size]
                offset = position % self.limits.page_size
                self.pages.setdefault(page, {})[offset] = (-1,)  # of what was not right
            parts.append(tokens)
        assert not drafts, "each drafted token belongs to a row"
        longest = max(map(len, parts))
        return [
            tokens[place] if place < len(tokens) else NO_TOKEN
            for place in range(longest)
            for tokens in parts
        ]

    def _copy_states(self, plan: StepPlan) -> None:
        for source, target in unpack(plan.state_copies, 2).tolist():
            assert source != target
            assert source not in self._moving(STATE_TO_DEVICE)
            assert target not in self._moving(STATE_TO_DEVICE, STATE_TO_HOST)
            assert 1 <= target <= self.limits.num_states
            tokens, steps = self.states[source]
            assert not steps & self.failed, "no state of a failed step is copied"
            self.states[target] = tokens, steps | {plan.step}

    def _run_states(self, plan: StepPlan, settled: list[tuple[int, int, int]]) -> None:
        """Each row goes on from a state that has taken in exactly the tokens before it."""
        slots = unpack(plan.state_slots).tolist()
        assert len(slots) == (len(rows(plan)) if self.limits.num_states else 0)
        assert len(slots) == len(set(slots)), "one state a sequence"
        for state, (slot, start, _) in zip(slots, settled, strict=bool(slots)):
            assert 1 <= state <= self.limits.num_states
            assert state not in self._moving(STATE_TO_DEVICE, STATE_TO_HOST)
            steps = frozenset([plan.step])
            if start:
                tokens, before = self.states[state]
                assert tokens == tuple(self.tokens[slot][:start])
                assert not before & self.failed, "nobody goes on from the state of a failed step"
                steps |= before
            self.states[state] = tuple(self.tokens[slot][: self.written[slot]]), steps

    def _moving(self, *ways: int) -> set[int]:
        """Device pages, or state slots, of copies under way."""
        copies = (copy for batch in self.copies.values() for copy in batch)
        return {page for way, page, _ in copies if way in ways}

    def _take_copies(self, plan: StepPlan) -> None:
        copies = [(way, page, host) for way, page, host in unpack(plan.copies, 3).tolist()]
        under_way = [host for batch in self.copies.values() for _, _, host in batch]
        for way, page, host in copies:
            assert 0 <= host < self.limits.host_pages
            of_pages = way in (TO_DEVICE, TO_HOST)
            ways = (TO_DEVICE, TO_HOST) if of_pages else (STATE_TO_DEVICE, STATE_TO_HOST)
            assert page not in self._moving(*ways)
            assert host not in under_way
            if way == TO_DEVICE:
                assert host in self.host
                self.pages[page] = {}
            elif way == TO_HOST:
                self.host[host] = dict(self.pages[page])
                self.host_states.pop(host, None)
        self._take_state_copies([copy for copy in copies if copy[0] >= STATE_TO_HOST], plan.step)
        if copies:
            self.copies[plan.step] = copies

    def _take_state_copies(self, copies: list[tuple[int, int, int]], step: int) -> None:
        """A state is in as many host pages as it takes, in order."""
        hosts: dict[tuple[int, int], list[int]] = {}
        for way, slot, host in copies:
            hosts.setdefault((way, slot), []).append(host)
        for (way, slot), pages in hosts.items():
            assert len(pages) == self.limits.state_pages
            if way == STATE_TO_HOST:
                tokens, steps = self.states[slot]
                assert not steps & self.failed
                assert all(done not in {each.number for each in self.steps} for done in steps)
                for part, host in enumerate(pages):
                    self.host_states[host] = tokens, part
                    self.host.pop(host, None)
            else:
                parts = [self.host_states[host] for host in pages]
                assert parts == [(parts[0][0], part) for part in range(len(pages))]
                self.states[slot] = parts[0][0], frozenset()

    def _finish_copies(self, copies: list[tuple[int, int, int]]) -> None:
        for way, page, host in copies:
            if way == TO_HOST:
                assert self.host[host] == self.pages[page], "it was not written meanwhile"
            elif way == TO_DEVICE:
                self.pages[page] = dict(self.host[host])
            elif way == STATE_TO_HOST:
                assert self.host_states[host][0] == self.states[page][0]


def check_books(sched: Scheduler, sequences: Iterable[Sequence]) -> None:
    """Every page is in one place, and everybody who uses one is known.

    Args:
        sequences: all that may hold pages: live ones, and ended ones with rows in flight.
    """
    cache, holders = sched.cache, {seq.id: seq for seq in sequences if seq.kv.node is not None}
    nodes = {id(node): node for node in tree_nodes(cache)}
    for seq in holders.values():
        for node in path(seq.kv.node):
            nodes.setdefault(id(node), node)  # unlinked ones, too
    locks = Counter(id(node) for seq in holders.values() for node in path(seq.kv.node))
    in_tree = [node.page for node in nodes.values() if node.page != NO_PAGE]
    private = [
        page
        for seq in holders.values()
        for page in seq.kv.pages
        if page not in {node.page for node in path(seq.kv.node)}
    ]
    free = cache._pages._free
    everywhere = Counter([*in_tree, *private, *free])
    assert all(count == 1 for count in everywhere.values()), "no page in two places"
    for node in nodes.values():
        assert node.locks == locks[id(node)] + node.saving, "locks are balanced"
        if node.linked:
            device = [c for c in node.children.values() if c.page != NO_PAGE]
            assert node.on_device == len(device)
            assert node.parent is None or node.page != NO_PAGE or not device
    cached = [n for n in nodes.values() if n.linked and n.page != NO_PAGE and n.ready]
    assert cache.num_cached == sum(node.locks == 0 for node in cached)
    in_use = [n for n in nodes.values() if n.page != NO_PAGE and (n.locks or not n.linked)]
    loading = [n for n in nodes.values() if n.page != NO_PAGE and not (n.ready or n.locks)]
    held = len(private) + len(in_use) + sum(n.linked for n in loading)
    assert held <= cache.num_in_use, "free + cached + held is no more than all"
    if not any(not node.linked for node in nodes.values()) and not sched._copies.outstanding:
        # Otherwise pages may be on unlinked nodes that nobody is on.
        assert held == cache.num_in_use
        assert len(everywhere) == cache.num_pages, "no page is lost"
    check_states(sched, nodes.values())
    hosts = [node.host for node in nodes.values() if node.host != NO_PAGE]
    slots = cache.states
    if isinstance(slots, StateSlots):
        hosts += [host for each in {*slots._on_host, *slots._locked} for host in each.host]
    assert len(hosts) == len(set(hosts)), "no host page in two places"
    if not any(not node.linked for node in nodes.values()) and not sched._copies.outstanding:
        assert len(hosts) == cache.num_host_used, "no host page is lost"


def check_states(sched: Scheduler, nodes: Iterable[Node]) -> None:
    """Each state slot is in one place, and each promise will be kept."""
    slots = sched.cache.states
    if not isinstance(slots, StateSlots):
        return
    own = sched._states._kept  # type: ignore[attr-defined]
    taken = [int(sched._states._of[slot]) for slot in own]  # type: ignore[attr-defined]
    assert set(own) == {i for i, seq in enumerate(sched.batch.sequences) if seq is not None}
    kept = [checkpoint for order in (*slots._orders, slots._locked) for checkpoint in order]
    everywhere = sorted([*slots._free, *taken, *(checkpoint.slot for checkpoint in kept)])
    assert everywhere == list(range(1, slots.num_slots + 1)), "none is lost, none has two owners"
    assert slots.num_taken == len(taken)
    trails = [each.trail for each in own.values()]
    promised = [each for kept in own.values() for each in kept.promised.values()]
    coming = [each for copies in sched._states._in_flight.values() for _, each in copies]  # type: ignore[attr-defined]
    coming += [each for _, each in sched._states._copied]  # type: ignore[attr-defined]
    for node in nodes:
        checkpoint = node.checkpoint
        if checkpoint is not None:
            assert node.linked
            assert checkpoint.node is node
            loading = checkpoint.locks and checkpoint not in slots._on_host
            assert checkpoint.ready or checkpoint in promised or checkpoint in coming or loading
            nowhere = checkpoint.slot == NO_STATE and checkpoint not in slots._on_host
            assert nowhere == (checkpoint in promised)
    for checkpoint in kept:
        assert checkpoint in trails or checkpoint.node is not None or checkpoint.locks
    on_host = [checkpoint for checkpoint in slots._on_host if checkpoint.node is not None]
    assert len(on_host) == len(slots._on_host)
    assert set(slots._spare) <= {each for each in on_host if each.slot != NO_STATE}
    assert len(slots._locked) <= slots.num_slots


def path(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


def tree_nodes(cache: KVCacheManager) -> Iterator[Node]:
    unseen = list(cache._tree._roots.values())
    while unseen:
        node = unseen.pop()
        unseen += node.children.values()
        yield node


class _Assumed(OutputLengths):
    """Outputs have a given length, or twice what they have."""

    def __init__(self, tokens: float):
        super().__init__()
        self._tokens = tokens

    def expected(self, num_tokens: int, most: int) -> float:
        return min(max(int(self._tokens), 2 * num_tokens), most)


def expect_outputs(sched: Scheduler, tokens: float) -> Scheduler:
    """Have outputs of this many tokens expected, whatever the scheduler has seen."""
    sched._forecast.lengths = _Assumed(tokens)
    return sched
