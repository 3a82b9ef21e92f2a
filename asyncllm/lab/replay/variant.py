"""Variant: what is to be different in a simulation of a trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Final, TypeAlias

import msgspec
from msgspec import Meta

from asyncllm.config import EngineLimits, PolicyName
from asyncllm.config.speculative_config import MOST_DRAFT_TOKENS
from asyncllm.engine.policy import POLICIES
from asyncllm.errors import BadRequest
from asyncllm.executor.memory.limits import wanted_states
from asyncllm.lab.replay.acceptance import Acceptance
from asyncllm.lab.replay.figures import Record
from asyncllm.lab.replay.workload import Workload

_Count: TypeAlias = Annotated[int, Meta(ge=1)]

#: What can be changed, and its type.
KEYS: Final[dict[str, Any]] = {
    "budget": _Count,
    "itl_target_ms": Annotated[float, Meta(ge=0, le=1e9)],
    "policy": PolicyName,
    "max_num_seqs": _Count,
    "prefill_chunk": _Count,
    "prefix_caching": bool,
    "kv_cache_tokens": _Count,
    "host_kv_tokens": Annotated[int, Meta(ge=0)],
    "page_size": _Count,
    "steps_in_flight": Annotated[int, Meta(ge=1, le=2)],
    "draft_tokens": Annotated[int, Meta(ge=0, le=MOST_DRAFT_TOKENS)],
    "draft_acceptance": Annotated[float, Meta(ge=0, le=1)],
}


class Variant(msgspec.Struct, frozen=True):
    """Changes by key, and the text they were read from."""

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
                changes[key] = msgspec.convert(value, KEYS[key], strict=False)
            except msgspec.ValidationError as error:
                names = f": it is one of {', '.join(POLICIES)}" if key == "policy" else ""
                raise ValueError(f"{key}={value}: {error}{names}") from None
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
        # Chunks that only the old budget limited follow the new one.
        unlimited = recorded.prefill_chunk >= recorded.max_num_batched_tokens
        chunk = budget if unlimited else recorded.prefill_chunk
        seqs = changed.get("max_num_seqs", recorded.max_num_seqs)
        if budget < seqs:
            raise BadRequest(
                f"what-if {self.name}: the budget of {budget} tokens must leave every one of "
                f"{seqs} sequences its decode token"
            )
        longest = max((r.event.max_length for r in workload.requests.values()), default=0)
        num_pages = -(-tokens // size)
        if num_pages * size < longest:
            raise BadRequest(
                f"what-if {self.name}: a request may come to {longest} tokens, and the KV cache "
                f"would hold {num_pages * size}"
            )
        num_states = _num_states(recorded, seqs, caching)
        if num_states and num_states < seqs:
            raise BadRequest(
                f"what-if {self.name}: each of {seqs} sequences has a recurrent state, and the "
                f"recording's memory held {num_states}"
            )
        if num_states and host and not recorded.state_pages:
            raise BadRequest(
                f"what-if {self.name}: the recording does not say how many pages of the host a "
                "recurrent state takes; it is of an older version"
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
            num_states=num_states,
            max_draft_tokens=changed.get("draft_tokens", recorded.max_draft_tokens),
            state_pages=-(-recorded.state_pages * recorded.page_size // size),
        )

    def acceptance(self, recorded: Iterable[Record]) -> dict[int, Acceptance]:
        """Of the requests for which something is drafted."""
        rate = self.changes.get("draft_acceptance")
        given = None if rate is None else Acceptance(1.0, rate)
        found = {record.id: given or Acceptance.of(record) for record in recorded}
        return {id: each for id, each in found.items() if each is not None}


def _num_states(recorded: EngineLimits, seqs: int, caching: bool) -> int:
    """State slots for other sequences: all that fitted, where memory was the recording's limit."""
    if recorded.num_states == 0:
        return 0
    wanted = wanted_states(seqs, caching)
    if recorded.num_states < wanted_states(recorded.max_num_seqs, recorded.prefix_caching):
        return min(wanted, recorded.num_states)
    return wanted


#: The limits and the policy of the recording.
BASELINE = Variant("baseline", {})
