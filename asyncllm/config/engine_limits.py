"""EngineLimits: the limits that follow from the options and the model."""

from __future__ import annotations

import msgspec


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's limits, once device and model are known.

    Attributes:
        device: "cpu", "cuda" or "sim".
        dtype: of the computation.
        max_model_len: never more than the KV cache holds, so every sequence can finish alone.
        itl_target: seconds; 0 for none.
        host_pages: size of the host tier; 0 for none.
        page_copy_seconds: a first guess of the time to move one page between the tiers.
        max_decode_steps: the most tokens that one plan may decode of each row.
        multi_step_rows: the most rows for which it decodes more than one: with few rows, launching
            a step and returning its result take long compared with the step itself.
        step_sizes: the numbers of tokens, rising, that steps with prompts are padded to, where
            padding costs time.
        max_cache_ttl: seconds, of ``SchedulingParams.cache_ttl_s``.
        max_pinned_share: the share of the pages that one tenant may pin.
        embedding_size: of a final hidden state, and so of an embedding.
        num_states: slots for recurrent states, numbered from 1; 0 for models without recurrent
            layers.
        state_bytes: of one such slot, on one rank.
        state_pages: as many pages take as much memory as one such slot.
        max_draft_tokens: the most tokens that a row may verify beyond its own; 0: none is drafted.
        max_draft_rows: how many rows of a step may verify drafts; 0: any number.
    """

    device: str
    dtype: str
    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk: int
    itl_target: float
    prefix_caching: bool
    host_pages: int
    page_copy_seconds: float
    max_waiting: int
    max_waiting_tokens: int
    steps_in_flight: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    max_decode_steps: int = 1
    multi_step_rows: int = 8
    step_sizes: tuple[int, ...] = ()
    embedding_size: int = 0
    max_cache_ttl: float = 3600.0
    max_pinned_share: float = 0.25
    num_states: int = 0
    state_bytes: int = 0
    state_pages: int = 0
    max_draft_tokens: int = 0
    max_draft_rows: int = 0
