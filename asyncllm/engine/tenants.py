"""What each tenant used, under labels that stay few whatever clients do."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

#: Tenants with a label of their own; all others share OTHER.
MOST_LABELS: Final = 20
OTHER: Final = "other"
#: The label of requests without a tenant.
NOBODY: Final = "none"
#: How often labels are given to the tenants with most tokens since.
RANK_SECONDS: Final = 600.0
#: Tenants whose tokens are remembered until then.
MOST_REMEMBERED: Final = 4096


def tenant_label(tenant: str) -> str:
    """Stands for a tenant in metrics and logs: its name hashed; short, and always printable."""
    return hashlib.sha256(tenant.encode("utf-8", "replace")).hexdigest()[:8] if tenant else NOBODY


@dataclass(slots=True)
class TenantCounts:
    """Of requests that have ended."""

    requests: int = 0
    prompt: int = 0
    generated: int = 0

    def add(self, prompt: int, generated: int) -> None:
        self.requests += 1
        self.prompt += prompt
        self.generated += generated


class Tenants:
    """Counts by tenant. The busiest have a label of their own.

    A tenant that loses its label counts on under OTHER, which therefore never falls; one that gets
    a label begins at 0. Both are what Prometheus' ``rate`` expects.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._counts: dict[str, TenantCounts] = {}
        self._other = TenantCounts()
        self._tokens: Counter[str] = Counter()
        self._ranked_at = clock()

    def ended(self, tenant: str, prompt: int, generated: int) -> None:
        """A request of this tenant has ended; its tokens."""
        if self._clock() - self._ranked_at >= RANK_SECONDS:
            self._rank()
        if tenant in self._tokens or len(self._tokens) < MOST_REMEMBERED:
            self._tokens[tenant] += prompt + generated
        counts = self._counts.get(tenant)
        if counts is None and len(self._counts) < MOST_LABELS:
            counts = self._counts[tenant] = TenantCounts()
        (counts or self._other).add(prompt, generated)

    def labelled(self) -> Iterator[tuple[str, TenantCounts]]:
        """At most MOST_LABELS tenants by label, and the others."""
        for tenant, counts in self._counts.items():
            yield tenant_label(tenant), counts
        yield OTHER, self._other

    def _rank(self) -> None:
        busiest = [tenant for tenant, _ in self._tokens.most_common(MOST_LABELS)]
        # Who was quiet keeps the label, as long as there is room.
        kept = [tenant for tenant in self._counts if tenant not in self._tokens]
        for tenant in [*self._counts]:
            if tenant not in busiest and tenant not in kept[: MOST_LABELS - len(busiest)]:
                del self._counts[tenant]
        for tenant in busiest:
            self._counts.setdefault(tenant, TenantCounts())
        self._tokens.clear()
        self._ranked_at = self._clock()
