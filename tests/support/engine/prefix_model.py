"""A model of the prefix tree: a dict of prefixes, in which everything is searched for."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.engine.cache.node import COLD, NO_PAGE, Node, pending_below
from asyncllm.engine.cache.pages import PageAllocator
from asyncllm.engine.cache.radix import PrefixTree
from tests.support.engine.scheduling import path

#: A salt, and the tokens of one or more whole pages.
Prefix = tuple[bytes, tuple[int, ...]]


SALTS = st.sampled_from([b"", b"", b"a", b"b"])
#: A page holds the same token over and over.
PAGES = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=1, max_size=8)


class Entry:
    """What the model knows of a node.

    Attributes:
        used: time of its last use.
        rested: when the device page fell out of use.
        late: it rests since later than that, as a copy was under way.
        spare: when the host page became the copy of a page in use, or None.
        ahead: saved, or not worth it, as one of the next to be evicted.
        last_ahead: it was pinned when that began.
        passed: it was pinned when it came up: the end of its pin, and in which order.
        pinned: the end of its pin, and the tenant.
    """

    def __init__(self, prefix: Prefix, page: int | None, used: int, *, ready: bool):
        self.prefix = prefix
        self.page = page
        self.ready = ready
        self.used = used
        self.host: int | None = None
        self.saving = False
        self.users = 0
        self.forgotten = False
        self.pinned: tuple[float, str] | None = None
        self.ahead = self.last_ahead = self.late = False
        self.rested = 0
        self.passed: tuple[float, int] | None = None
        self.spare: int | None = None

    def cached(self) -> bool:
        return self.page is not None and self.ready and self.users == 0 and not self.saving


class User:
    """Holds a path: ``node``, and what the model knows of it from the top down."""

    def __init__(self, node: Node, salt: bytes, chain: list[Entry], num_found: int):
        self.node = node
        self.salt = salt
        self.chain = chain
        self.num_found = num_found

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.chain[-1].prefix[1] if self.chain else ()


class TreeMachine(RuleBasedStateMachine):
    """Every method of the tree, in any order that its callers may come up with."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[Prefix, Entry] = {}
        self.forgotten: list[Entry] = []
        self.users: list[User] = []
        self.saves: list[tuple[Node, Entry]] = []
        self.loads: list[tuple[list[Node], list[Entry]]] = []
        self.now = 0
        self.events = count()
        self.num_dropped = 0
        self.time = 0.0
        self.num_pins = 0

    @initialize(
        page_size=st.integers(1, 3),
        pages=st.integers(1, 30),
        hosts=st.sampled_from([0, 3, 8, 30, 100]),
        pinned=st.integers(0, 15),
    )
    def begin(self, page_size: int, pages: int, hosts: int, pinned: int) -> None:
        self.page_size = page_size
        self.pages, self.hosts = PageAllocator(pages), PageAllocator(hosts)
        self.tree = PrefixTree(page_size, self.pages, self.hosts, pinned)
        self.most_pinned = pinned

    # -- what should be --------------------------------------------------------------------------

    def below(self, prefix: Prefix) -> list[Entry]:
        salt, tokens = prefix
        return [
            entry
            for (other, longer), entry in self.known.items()
            if other == salt and len(longer) > len(tokens) and longer[: len(tokens)] == tokens
        ]

    def leaf(self) -> Entry | None:
        """Whose device page is to be evicted next.

        A page under which the host has some that are worth keeping is not, if it was not saved and
        anything else that is not pinned can go.
        """
        leaves = [
            entry
            for entry in self.known.values()
            if entry.cached() and all(child.page is None for child in self.below(entry.prefix))
        ]

        def order(entry: Entry) -> tuple[bool, float, bool, int]:
            until = entry.pinned[0] if entry.pinned is not None else 0.0
            carries = entry.host is None and not entry.ahead and bool(self.below(entry.prefix))
            return entry.pinned is not None, until, carries and not entry.pinned, entry.used

        return min(leaves, key=order, default=None)

    def host_leaf(self) -> Entry | None:
        """Which page, of those that only the host has, it gives up first."""
        leaves = [
            entry
            for entry in self.known.values()
            if entry.page is None and not self.below(entry.prefix)
        ]
        return min(leaves, key=lambda entry: entry.used, default=None)

    def spares(self) -> list[Entry]:
        return [e for e in (*self.known.values(), *self.forgotten) if e.spare is not None]

    def rest(self, entry: Entry, *, late: bool = False) -> None:
        """The device page may have fallen out of use."""
        if entry.cached() and not entry.forgotten and not entry.ahead:
            entry.rested, entry.late, entry.passed = next(self.events), late, None
            if entry.used <= 0 and self.hosts.num_pages:
                self.put_ahead(entry)

    def put_ahead(self, entry: Entry) -> None:
        entry.ahead, entry.last_ahead, entry.passed = True, entry.pinned is not None, None

    def use(self, entry: Entry) -> None:
        """The device page is in use: nothing has to be saved, and a copy is spare."""
        entry.ahead = False
        if entry.host is not None and entry.ready and not entry.saving and entry.spare is None:
            entry.spare = next(self.events)

    def evict_one(self) -> bool:
        entry = self.leaf()
        if entry is None:
            return False
        lost = entry.host is None and not entry.ahead
        self.num_dropped += lost and self.hosts.num_pages > 0
        entry.page, entry.spare, entry.ahead, entry.pinned = None, None, False, None
        if entry.host is None:
            for gone in (entry, *self.below(entry.prefix)):
                del self.known[gone.prefix]
        return True

    def lookup(self, salt: bytes, tokens: list[int]) -> tuple[list[Entry], list[Entry], int]:
        """On the device; then only on the host; how many after those are being written."""
        most = (len(tokens) - 1) // self.page_size
        prefixes = [(salt, tuple(tokens[: n * self.page_size])) for n in range(1, most + 1)]
        chain: list[Entry] = []
        for prefix in prefixes:
            if prefix not in self.known:
                break
            chain.append(self.known[prefix])
        kinds = ["p" if not e.ready else "h" if e.page is None else "d" for e in chain]
        order = "".join(kinds)
        pages = len(order) - len(order.lstrip("d"))
        hosts = len(order[pages:]) - len(order[pages:].lstrip("h"))
        pending = len(order[pages + hosts :]) - len(order[pages + hosts :].lstrip("p"))
        return chain[:pages], chain[pages : pages + hosts], pending

    def settle(self, entry: Entry) -> None:
        """Nobody can find it, so its page goes with its last user."""
        if entry.forgotten and entry.users == 0 and entry.ready and not entry.saving:
            entry.page = entry.host = entry.spare = None
            entry.ahead = False

    # -- what callers do -------------------------------------------------------------------------

    def take(self, count: int) -> list[int] | None:
        short = count - self.pages.num_free
        if short > 0:
            expected = [self.evict_one() for _ in range(short)]
            assert self.tree.evict(short) is all(expected)
        return self.pages.take(count)

    @rule(
        salt=SALTS,
        pages=PAGES,
        tail=st.integers(0, 3),
        own=st.integers(0, 8),
        load=st.sampled_from([True, True, True, False]),
    )
    def enter(self, salt: bytes, pages: list[int], tail: int, own: int, load: bool) -> None:
        """Look up whole pages and a tail of tokens, and begin to write the next ``own`` pages."""
        self.look_up(
            salt, [token for token in pages for _ in range(self.page_size)] + [7] * tail, load
        )
        found = len(self.users[-1].chain)
        self.grow(-1, pages[found : found + own], False)

    @rule(salt=SALTS, pages=PAGES)
    def request(self, salt: bytes, pages: list[int]) -> None:
        """From the beginning to the end."""
        self.enter(salt, pages, 1, len(pages), False)
        self.leave(-1, trusted=True)

    @rule(
        which=st.integers(0, 99),
        load=st.sampled_from([True, True, False]),
        own=PAGES,
        ready=st.booleans(),
    )
    def come_back(self, which: int, load: bool, own: list[int], ready: bool) -> None:
        """For something that may be in host memory only, and more."""
        prefixes = [e.prefix for e in self.known.values() if e.page is None or e.saving]
        if prefixes:
            salt, tokens = prefixes[which % len(prefixes)]
            self.look_up(salt, [*tokens, 7], load)
            self.grow(-1, own, ready)

    def look_up(self, salt: bytes, tokens: list[int], load: bool) -> None:
        match = self.tree.match(array("i", tokens), salt)
        pages, hosts, pending = self.lookup(salt, tokens)
        assert match.pages == [entry.page for entry in pages]
        assert [node.host for node in match.host] == [entry.host for entry in hosts]
        assert (match.pending is not None) == (pending > 0)
        if match.pending is not None:
            assert match.pending.depth == len(pages) + len(hosts) + pending
        assert match.node.depth == len(pages)
        assert pending_below(match.node, array("i", tokens), self.tree.page_size) is match.pending
        self.tree.lock(match.node)
        user = User(match.node, salt, list(pages), len(pages))
        for entry in reversed(pages):
            self.use(entry)
            entry.users += 1
        self.users.append(user)
        taken = self.take(len(hosts)) if load and hosts else None
        if taken is not None:
            self.tree.load(match.host, taken)
            for node, entry, page in zip(match.host, hosts, taken, strict=True):
                self.tree.lock_one(node)
                entry.page, entry.ready, entry.users = page, False, 1
            self.loads.append((match.host, hosts))
            user.node, user.num_found = match.host[-1], len(pages) + len(hosts)
            user.chain += hosts

    @rule(which=st.integers(0, 99))
    def postpone(self, which: int) -> None:
        """What may be in host memory only is looked up, and wanted later."""
        prefixes = [e.prefix for e in self.known.values() if e.page is None]
        if prefixes:
            salt, tokens = prefixes[which % len(prefixes)]
            self.look_up(salt, [*tokens, 7], False)
            nodes = self.tree.match(array("i", [*tokens, 7]), salt).host
            hosts = self.lookup(salt, [*tokens, 7])[1]
            self.leave(-1, trusted=True)
            if nodes:
                self.tree.use_on_host(nodes)
            for entry in hosts:
                entry.used = self.now

    @precondition(lambda self: self.users)
    @rule(which=st.integers(0, 99), pages=PAGES, ready=st.booleans())
    def grow(self, which: int, pages: list[int], ready: bool) -> None:
        user = self.users[which % len(self.users)]
        if user.num_found == len(user.chain) and not user.node.ready:
            return  # it is being loaded
        taken: list[int] = []
        while len(taken) < len(pages) and (one := self.take(1)):
            taken += one
        tokens = array("i", [token for token in pages for _ in range(self.page_size)])
        del tokens[len(taken) * self.page_size :]
        now_ready = ready and user.node.ready
        above, num_before = user.node, len(user.chain)
        lost = bool(user.chain) and user.chain[-1].forgotten
        added = self.tree.insert(user.node, tokens, taken, ready=now_ready)
        for token, page in zip(pages, taken, strict=False):
            prefix = (user.salt, (*user.tokens, *[token] * self.page_size))
            known = self.known.get(prefix)
            if lost or (known is not None and known.page is not None):
                break
            if known is None:
                known = self.known[prefix] = Entry(prefix, page, 0, ready=now_ready)
            else:
                known.used = self.now
            known.page, known.ready, known.users = page, now_ready, 1
            self.use(known)
            user.chain.append(known)
        assert len(added) == len(user.chain) - num_before
        for node in added:
            assert node.parent is above
            above = node
        user.node = above
        self.pages.give_back(taken[len(added) :])

    def land(self, user: User, count: int) -> None:
        """So many of the pages that it writes are written."""
        nodes = list(path(user.node))[::-1][1:]
        written = [(n, e) for n, e in zip(nodes, user.chain, strict=True) if not e.ready]
        own = [pair for pair in written if pair[1] in user.chain[user.num_found :]]
        if own[:count]:
            self.tree.set_path_ready(user.node, own[:count][-1][0].depth)
        for _, entry in reversed(own[:count]):
            entry.ready = True
            self.use(entry)

    @precondition(lambda self: self.users)
    @rule(which=st.integers(0, 99), count=st.integers(1, 3))
    def some_land(self, which: int, count: int) -> None:
        self.land(self.users[which % len(self.users)], count)

    @precondition(lambda self: self.users)
    @rule(
        which=st.integers(0, 99),
        trusted=st.sampled_from([True, True, True, False]),
        cold=st.sampled_from([False, False, True]),
    )
    def leave(self, which: int, trusted: bool, cold: bool = False) -> None:
        user = self.users.pop(which % len(self.users))
        if not trusted and user.num_found < len(user.chain):
            self.forget([*path(user.node)][-2 - user.num_found], user.chain[user.num_found])
        self.land(user, len(user.chain))
        self.tree.unlock(user.node, cold=cold)
        self.now += 1
        for entry in reversed(user.chain):
            entry.users -= 1
            entry.used = self.now + (COLD if cold and entry.used <= 0 else 0)
            self.rest(entry)
            self.settle(entry)

    @precondition(lambda self: self.users)
    @rule(which=st.integers(0, 99), seconds=st.integers(1, 5), tenant=st.sampled_from(["a", "b"]))
    def pin(self, which: int, seconds: int, tenant: str) -> None:
        """The path of a user, for a time that no other pin has."""
        user = self.users[which % len(self.users)]
        if not user.node.linked:
            return
        self.num_pins += 1
        pin = self.time + seconds + self.num_pins / 1e6, tenant
        expected = 0
        for entry in user.chain:
            if entry.pinned is None or entry.pinned < pin:
                pins = [e.pinned for e in self.known.values() if e.pinned and e is not entry]
                if sum(owner == tenant for _, owner in pins) >= self.most_pinned:
                    break
                if len(pins) >= 2 * self.most_pinned:
                    break
                entry.pinned = pin
            expected += 1
        nodes = list(path(user.node))[::-1][1:]
        assert self.tree.pins.pin(nodes, tenant, pin[0]) == expected

    @rule(seconds=st.integers(0, 3))
    def time_passes(self, seconds: int) -> None:
        self.time += seconds
        self.tree.leaves.expire(self.time)
        for entry in self.known.values():
            if entry.pinned is not None and entry.pinned[0] <= self.time:
                entry.pinned = None

    def forget(self, node: Node, entry: Entry) -> None:
        self.tree.forget(node)
        if entry.forgotten:
            return
        for gone in (entry, *self.below(entry.prefix)):
            del self.known[gone.prefix]
            self.forgotten.append(gone)
            gone.forgotten, gone.pinned = True, None
            self.settle(gone)

    @rule(which=st.integers(0, 99))
    def forget_any(self, which: int) -> None:
        """With all that is below it, and whoever uses or loads that."""
        found = sorted(walk(self.tree), key=lambda pair: pair[0])
        if found:
            prefix, node = found[which % len(found)]
            self.forget(node, self.known[prefix])

    @rule(count=st.integers(1, 5))
    def evict(self, count: int) -> None:
        expected = [self.evict_one() for _ in range(count)]
        assert self.tree.evict(count) is all(expected)

    @rule(most=st.integers(1, 4), soon=st.sampled_from([0, 0, 2, 9]))
    def back_up(self, most: int, soon: int = 0) -> None:
        chosen: list[Entry] = []
        free = list(self.hosts._free)
        while len(chosen) < most:
            entry = self.next_to_save(soon)
            if entry is None:
                break
            if entry.host is not None:
                entry.spare = None
            elif not self.is_too_old(entry, free):
                entry.host = self.take_host(free)
                if entry.host is None:
                    break
                entry.saving = True
                chosen.append(entry)
            self.put_ahead(entry)
        started = self.tree.back_up(most, soon)
        assert [(node.page, node.host) for node in started] == [(e.page, e.host) for e in chosen]
        self.saves += zip(started, chosen, strict=True)

    def next_to_save(self, soon: int) -> Entry | None:
        """What is evicted after those ahead; None if enough can be taken at once."""
        lacking = self.tree._host._window + soon - self.pages.num_free - self.num_ahead()
        entries = [*self.known.values(), *self.forgotten]
        resting = [e for e in self.known.values() if e.cached() and not e.ahead]
        ended = [e for e in resting if e.passed is not None and e.pinned is None]
        if ended and lacking + self.tree._host._window > 0:
            return min(ended, key=lambda entry: (entry.used, entry.passed))
        if lacking + sum(entry.ahead and entry.last_ahead for entry in entries) <= 0:
            return None
        plain = [entry for entry in resting if entry.pinned is None and entry.passed is None]
        entry = min(plain, key=lambda entry: entry.rested, default=None)
        for other in sorted(resting, key=lambda entry: entry.rested):
            if other is entry:
                break
            if other.passed is None and other.pinned is not None:
                other.passed = other.pinned[0], next(self.events)
        if entry is not None:
            self.check_ahead(entry, plain)
            return entry
        if lacking <= 0:
            return None
        pinned = [entry for entry in resting if entry.pinned is not None]
        return min(pinned, key=lambda entry: entry.passed or (0.0, 0), default=None)

    def check_ahead(self, entry: Entry, resting: list[Entry]) -> None:
        """See ``ExactHost``."""

    def is_too_old(self, entry: Entry, free: list[int]) -> bool:
        leaf = self.host_leaf()
        full = not free and not self.spares()
        return full and leaf is not None and leaf.used > entry.used

    def take_host(self, free: list[int]) -> int | None:
        """A host page: a free one, else a spare, else the oldest."""
        if free:
            return free.pop()
        if spares := self.spares():
            last = max(spares, key=lambda entry: entry.spare or 0)
            host, last.host, last.spare = last.host, None, None
            return host
        leaf = self.host_leaf()
        if leaf is None:
            return None
        del self.known[leaf.prefix]
        return leaf.host

    def num_ahead(self) -> int:
        return sum(entry.ahead for entry in (*self.known.values(), *self.forgotten))

    @precondition(lambda self: self.saves)
    @rule(which=st.integers(0, 99))
    def backed_up(self, which: int) -> None:
        node, entry = self.saves.pop(which % len(self.saves))
        self.tree.backed_up(node)
        entry.saving = False
        if not entry.ahead:
            self.use(entry)
        self.rest(entry, late=True)
        self.settle(entry)

    @rule(count=st.integers(1, 12), evicted=st.integers(0, 12))
    def spill(self, count: int, evicted: int) -> None:
        """Save and evict, as under pressure."""
        num_saves = len(self.saves)
        self.back_up(count)
        while len(self.saves) > num_saves:
            self.backed_up(num_saves)
        self.evict(evicted)

    @precondition(lambda self: self.loads)
    @rule(which=st.integers(0, 99))
    def loaded(self, which: int) -> None:
        nodes, entries = self.loads.pop(which % len(self.loads))
        for node, entry in zip(nodes, entries, strict=True):
            self.tree.set_ready(node)
            entry.ready = True
            self.use(entry)
            self.rest(entry, late=True)
            self.settle(entry)

    # -- both are the same -----------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        found = dict(walk(self.tree))
        assert set(found) == set(self.known)
        pairs = [(node, self.known[prefix]) for prefix, node in found.items()]
        for user in self.users:
            pairs += zip(list(path(user.node))[::-1][1:], user.chain, strict=True)
        for node, entry in pairs:
            assert node.linked is not entry.forgotten
            assert node.page == (NO_PAGE if entry.page is None else entry.page)
            assert node.host == (NO_PAGE if entry.host is None else entry.host)
            assert (node.ready, node.saving) == (entry.ready, entry.saving)
            assert node.ahead == entry.ahead
            assert (node in self.tree._host._spare) == (entry.spare is not None)
            double = node.host != NO_PAGE and node.page != NO_PAGE and node.ready
            assert (entry.spare is not None) == (double and not (node.ahead or node.saving))
            assert node.locks == entry.users + entry.saving
            assert node.tick == entry.used
            pin = node.pin if node.pin is not None and node.pin.num_pages else None
            assert entry.pinned == (None if pin is None else (pin.until, pin.tenant))
        pins = [entry.pinned for entry in self.known.values() if entry.pinned is not None]
        assert self.tree.pins.num_pages == len(pins) <= 2 * self.most_pinned
        for tenant in "ab":
            held = self.tree.pins.held_by(tenant)
            assert held == sum(owner == tenant for _, owner in pins) <= self.most_pinned
        assert self.tree.num_cached == sum(entry.cached() for entry in self.known.values())
        entries = [*self.known.values(), *self.forgotten]
        for allocator, used in (
            (self.pages, [e.page for e in entries if e.page is not None]),
            (self.hosts, [e.host for e in entries if e.host is not None]),
        ):
            assert sorted([*allocator._free, *used]) == list(range(allocator.num_pages))
        salts = {salt for salt, _ in self.known} | {user.salt for user in self.users}
        assert set(self.tree._roots) == salts, "a root is there as long as it is needed"
        host = self.tree._host
        assert all(node.page != NO_PAGE for node in (*host._queue, *host._spare))
        assert len(host._spare) == len(self.spares())
        assert host.num_ahead == self.num_ahead()
        saved = [e for e in entries if e.ahead and not e.saving]
        ready = [e for e in saved if not any(below.saving for below in self.below(e.prefix))]
        expendable = self.tree.num_expendable() - self.pages.num_free
        assert len(ready) <= expendable <= len(saved)
        assert len(host._pinned_ahead) == sum(e.ahead and e.last_ahead for e in entries)
        assert self.tree.num_dropped == self.num_dropped

    def teardown(self) -> None:
        """Whatever happened, everything can be had back."""
        if not hasattr(self, "tree"):
            return
        while self.loads:
            self.loaded(0)
        while self.saves:
            self.backed_up(0)
        while self.users:
            self.leave(0, trusted=True)
        self.evict(self.tree.num_cached)
        assert self.pages.num_free == self.pages.num_pages
        self.same()
        for root in list(self.tree._roots.values()):
            for node in list(root.children.values()):
                self.tree.forget(node)
        assert self.hosts.num_free == self.hosts.num_pages
        assert not self.tree._roots
        assert not self.tree._host._queue
        assert not self.tree._host._spare
        assert self.tree._host.num_ahead == len(self.tree._host._pinned_ahead) == 0


def walk(tree: PrefixTree) -> Iterator[tuple[Prefix, Node]]:
    unseen: list[tuple[Node, bytes, tuple[int, ...]]]
    unseen = [(node, salt, ()) for salt, node in tree._roots.items()]
    while unseen:
        parent, salt, tokens = unseen.pop()
        for key, node in parent.children.items():
            longer = (*tokens, *array("i", key))
            yield (salt, longer), node
            unseen.append((node, salt, longer))
