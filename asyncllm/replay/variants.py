"""Variants: what could have been different."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from asyncllm.config import EngineLimits
from asyncllm.engine.policy import POLICIES
from asyncllm.errors import BadRequest

if TYPE_CHECKING:
    from asyncllm.replay.workload import Workload


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("it must be at least 1")
    return number


def _tokens(text: str) -> int:
    return 0 if text == "0" else _count(text)


def _milliseconds(text: str) -> float:
    number = float(text)
    if not 0 <= number < float("inf"):
        raise ValueError("it must not be negative")
    return number


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError("it is true or false")
    return text == "true"


def _policy(text: str) -> str:
    if text not in POLICIES:
        raise ValueError(f"it is one of {', '.join(POLICIES)}")
    return text


def _in_flight(text: str) -> int:
    if text not in ("1", "2"):
        raise ValueError("it is 1 or 2")
    return int(text)


#: What can be varied, and how it is read.
KEYS: dict[str, Callable[[str], Any]] = {
    "budget": _count,
    "itl_target_ms": _milliseconds,
    "policy": _policy,
    "max_num_seqs": _count,
    "prefill_chunk": _count,
    "prefix_caching": _flag,
    "kv_cache_tokens": _count,
    "host_kv_tokens": _tokens,
    "page_size": _count,
    "steps_in_flight": _in_flight,
}


@dataclass(frozen=True)
class Variant:
    """Changes to how a trace was recorded; ``name`` is how they were written."""

    name: str
    changes: dict[str, Any]

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Read ``key=value,key=value``.

        Raises:
            ValueError: the message says what is wrong.
        """
        changes = {}
        for part in text.split(","):
            key, _, value = part.strip().partition("=")
            if key not in KEYS:
                raise ValueError(f"unknown key {key!r}: known are {', '.join(KEYS)}")
            try:
                changes[key] = KEYS[key](value)
            except ValueError as error:
                raise ValueError(f"{key}={value}: {error}") from None
        return cls(text, changes)

    def policy(self, recorded: str) -> str:
        """The policy's name."""
        name: str = self.changes.get("policy", recorded)
        return name

    def limits(self, recorded: EngineLimits, workload: Workload) -> EngineLimits:
        """The limits to simulate with.

        Raises:
            BadRequest: they contradict each other, or do not suit the requests.
        """
        changed = self.changes
        size = changed.get("page_size", recorded.page_size)
        tokens = changed.get("kv_cache_tokens", recorded.num_pages * recorded.page_size)
        host = changed.get("host_kv_tokens", recorded.host_pages * recorded.page_size)
        caching = changed.get("prefix_caching", recorded.prefix_caching)
        budget = changed.get("budget", recorded.max_num_batched_tokens)
        # Where nothing limits the chunks the budget does.
        unlimited = recorded.prefill_chunk >= recorded.max_num_batched_tokens
        chunk = budget if unlimited else recorded.prefill_chunk
        seqs = changed.get("max_num_seqs", recorded.max_num_seqs)
        if budget < seqs:
            raise BadRequest(
                f"what-if {self.name}: the budget of {budget} tokens must leave every one of "
                f"{seqs} sequences its decode token"
            )
        longest = max((r.max_length for r in workload.requests.values()), default=0)
        num_pages = -(-tokens // size)
        if num_pages * size < longest:
            raise BadRequest(
                f"what-if {self.name}: a request may come to {longest} tokens, and the KV cache "
                f"would hold {num_pages * size}"
            )
        return msgspec.structs.replace(
            recorded,
            page_size=size,
            num_pages=num_pages,
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            prefill_chunk=changed.get("prefill_chunk", chunk),
            itl_target=changed.get("itl_target_ms", recorded.itl_target * 1e3) / 1e3,
            prefix_caching=caching,
            host_pages=host // size if caching else 0,
            page_copy_seconds=recorded.page_copy_seconds * size / recorded.page_size,
            steps_in_flight=changed.get("steps_in_flight", recorded.steps_in_flight),
        )


#: The trace as it was recorded.
BASELINE = Variant("baseline", {})
