"""The size of the KV cache, and the limits that follow from it."""

from __future__ import annotations

import logging
from typing import NamedTuple

import msgspec

from asyncllm.config import EngineConfig, EngineLimits, most_drafted, speculation_of
from asyncllm.errors import ModelError
from asyncllm.models.spec import ModelSpec

log = logging.getLogger(__name__)

#: Default token budget of a step: enough to keep the device busy, but decode rows wait little.
CPU_BATCHED_TOKENS = 1024
#: Default size of the KV cache on a CPU, where memory is shared, unless a sequence may be longer.
CPU_CACHE_TOKENS = 65536
GPU_BATCHED_TOKENS = 8192
#: Default of ``max_decode_steps`` where several decode steps are one graph.
GRAPH_DECODE_STEPS = 4
#: First guess of bytes per second between the tiers: memory to memory, and PCIe 5.0 with 16 lanes.
CPU_COPY_SPEED = 5e9
GPU_COPY_SPEED = 50e9
#: GPU memory for what is not measured: kernels that libraries load, and gaps between blocks.
SPARE_BYTES = 256 << 20
#: The driver's memory for all captured graphs, for each layer of the model. Measured: 7 to 8 MiB
#: for 96 graphs; a small model has up to 30 more graphs.
GRAPHS_LAYER_BYTES = 12 << 20
#: Hits grow slowly with the size of a cache, so a host tier that adds a smaller share hardly
#: matters: 14 % more raise them from 4.9 to 5.1 % on the Mooncake conversation trace.
SMALL_HOST_SHARE = 0.25
#: The most of the memory for caches that recurrent states take; pages have the rest.
STATES_SHARE = 0.5
#: States that the prefix cache keeps for each sequence that can run: a chat needs two or three.
CHECKPOINTS = 4
#: At least: few sequences at a time may be of many chats.
LEAST_CHECKPOINTS = 64
#: The most rows of a step that verify drafts in models with recurrent layers; each has one state
#: more.
DRAFT_ROWS = 32


class GpuMemory(NamedTuple):
    """A GPU's memory in bytes, after loading weights and measuring the largest steps.

    Attributes:
        before: free memory when this process had only made its CUDA context.
        free: free memory now.
        weights: the weights' part of ``before - free``.
        step: additional memory of the largest step.
        graphs: additional memory of captured graphs.
    """

    total: int
    before: int
    free: int
    weights: int
    step: int
    graphs: int

    def cache_bytes(self, share: float) -> int:
        """Memory left for the KV cache if this process may use ``share`` of all memory."""
        left = min(int(share * self.total) - (self.before - self.free), self.free)
        return max(left - self.step - self.graphs - SPARE_BYTES, 0)

    def account(self, share: float) -> str:
        """How ``cache_bytes`` is computed, for an error message."""
        libraries = max(self.before - self.free - self.weights, 0)
        return (
            f"gpu_memory_utilization {share:g} of {gib(self.total)} is {gib(share * self.total)}, "
            f"{gib(self.before)} were free; weights take {gib(self.weights)}, libraries "
            f"{gib(libraries)}, graphs {gib(self.graphs)}, a step {gib(self.step)}, which a lower "
            "max_num_batched_tokens or max_num_seqs makes less"
        )


def graph_bytes(captured: int, num_layers: int) -> int:
    """Memory of all captured graphs, given the activations of the largest captured step."""
    # That step keeps its activations, and so does the same step run once on the capturing stream.
    return 2 * captured + num_layers * GRAPHS_LAYER_BYTES


def step_tokens(config: EngineConfig, device: str) -> int:
    """The token budget of a step."""
    default = CPU_BATCHED_TOKENS if device == "cpu" else GPU_BATCHED_TOKENS
    return config.max_num_batched_tokens or max(default, config.max_num_seqs)


def wanted_length(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest sequence to be served, if the cache can hold it.

    Raises:
        ModelError: the model has fewer positions.
    """
    wanted = config.max_model_len or spec.max_position_embeddings
    if wanted > spec.max_position_embeddings:
        raise ModelError(
            f"max_model_len {wanted} is more than the {spec.max_position_embeddings} positions "
            "the model has",
            param="max_model_len",
        )
    return wanted


def resolve_limits(
    config: EngineConfig,
    spec: ModelSpec,
    *,
    device: str,
    dtype: str,
    cache_bytes: int,
    host_bytes: int,
    bytes_per_token: int,
    state_bytes: int = 0,
    account: str = "",
    step_sizes: tuple[int, ...] = (),
) -> EngineLimits:
    """Compute the scheduler's limits from the configuration and the memory.

    Args:
        cache_bytes: memory for the KV cache and recurrent states.
        host_bytes: free memory of the host; on a CPU, before the KV cache is made.
        bytes_per_token: K and V of one position in all layers.
        state_bytes: the recurrent state of one sequence in all layers; 0: it has none.
        account: how ``cache_bytes`` was computed, for error messages.

    Raises:
        ModelError: the cache or its host tier is too small for the configuration; the message gives
            the numbers and the option that helps.
    """
    wanted_len = wanted_length(config, spec)
    because = f" ({account})" if account else ""
    num_states = scratch = 0
    if state_bytes:
        scratch = _scratch_states(config) if device == "cpu" else 0
        cache_bytes -= scratch * state_bytes
        config, num_states = _with_states(config, cache_bytes, state_bytes, because)
        cache_bytes -= (num_states + 1) * state_bytes
    num_pages = _num_pages(config, wanted_len, device, cache_bytes, bytes_per_token, because)
    capacity = num_pages * config.page_size
    if capacity < wanted_len and config.max_model_len is not None:
        raise ModelError(
            f"max_model_len {wanted_len} needs a KV cache of as many tokens, but it holds "
            f"{capacity}{_remedy(config, device)}{because}",
            param="max_model_len",
        )
    max_model_len = min(wanted_len, capacity)
    if max_model_len < 2:
        raise ModelError(
            f"{gib(cache_bytes)} are free for the KV cache, and one token takes "
            f"{bytes_per_token} bytes: no sequence fits{because}",
            param="kv_cache_tokens" if device == "cpu" else "gpu_memory_utilization",
        )
    on_cpu = device == "cpu"
    speculation = speculation_of(config)
    # A head follows each token.
    has_head = speculation is not None and speculation.has_head
    budget = step_tokens(config, device)
    page_bytes = bytes_per_token * config.page_size
    host_bytes -= num_pages * page_bytes if on_cpu else 0
    host_pages = _host_pages(config, host_bytes, page_bytes)
    state_pages = -(-state_bytes // page_bytes)
    if 0 < host_pages < state_pages:
        raise ModelError(
            f"host_kv_gib {config.host_kv_gib:g} holds no recurrent state, of which one takes "
            f"{state_bytes / 2**20:.2f} MiB, and pages without states are of no use",
            param="host_kv_gib",
        )
    if host_pages:
        _say_what_the_host_adds(config, num_pages, host_pages)
    return EngineLimits(
        device=device,
        dtype=dtype,
        num_pages=num_pages,
        page_size=config.page_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        prefill_chunk=config.prefill_chunk or budget,
        itl_target=config.itl_target_ms / 1e3,
        prefix_caching=config.prefix_caching,
        host_pages=host_pages,
        page_copy_seconds=page_bytes / (CPU_COPY_SPEED if on_cpu else GPU_COPY_SPEED),
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        steps_in_flight=config.steps_in_flight,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        max_decode_steps=1
        if has_head or scratch
        else config.max_decode_steps
        or (GRAPH_DECODE_STEPS if device == "cuda" and config.cuda_graphs else 1),
        step_sizes=step_sizes,
        embedding_size=spec.config.output_size,
        max_cache_ttl=config.max_cache_ttl_s,
        max_pinned_share=config.max_pinned_share,
        num_states=num_states,
        state_bytes=state_bytes,
        state_pages=state_pages,
        max_draft_tokens=0
        if state_bytes and not scratch
        else most_drafted(config.speculative_config, config.max_num_seqs),
        max_draft_rows=scratch,
    )


def _with_states(
    config: EngineConfig, cache_bytes: int, state_bytes: int, because: str
) -> tuple[EngineConfig, int]:
    """The configuration for a model with recurrent layers, and the number of state slots.

    Every running sequence has a slot. The prefix cache has the others, which are at least as many.
    """
    room = int(STATES_SHARE * cache_bytes) // state_bytes - 1  # slot 0 is nobody's
    if room < 1:
        raise ModelError(
            f"{gib(cache_bytes)} are free for the KV cache and recurrent states, of which one "
            f"takes {gib(state_bytes)}: no sequence fits{because}",
            param="gpu_memory_utilization",
        )
    kept = config.prefix_caching
    num_seqs = min(config.max_num_seqs, max(1, room // 2) if kept else room)
    if num_seqs < config.max_num_seqs:
        log.warning(
            "max_num_seqs is %d: that many recurrent states of %s fit beside the KV cache%s",
            num_seqs,
            gib(state_bytes),
            " and as many for the prefix cache" if kept else "",
        )
    num_states = min(room, wanted_states(num_seqs, kept))
    return msgspec.structs.replace(config, max_num_seqs=num_seqs), num_states


def _scratch_states(config: EngineConfig) -> int:
    """State slots for rows that verify drafts, in models with recurrent layers.

    On CPUs only: on a GPU, such rows have not been run.
    """
    drafts = config.speculative_config is not None
    return min(DRAFT_ROWS, config.max_num_seqs) if drafts else 0


def wanted_states(num_seqs: int, prefix_caching: bool) -> int:
    """State slots for ``num_seqs`` sequences, where memory is no limit."""
    return num_seqs + max(CHECKPOINTS * num_seqs, LEAST_CHECKPOINTS) * prefix_caching


def _remedy(config: EngineConfig, device: str) -> str:
    """The end of a message: which option makes room for longer sequences."""
    if config.kv_cache_tokens is not None or device == "cpu":
        return ": lower max_model_len or raise kv_cache_tokens"
    return ": lower max_model_len or raise gpu_memory_utilization"


def _num_pages(
    config: EngineConfig,
    wanted_len: int,
    device: str,
    cache_bytes: int,
    bytes_per_token: int,
    because: str,
) -> int:
    """Pages of the KV cache: as configured, or as many as fit and can be used."""
    fitting_pages = cache_bytes // (bytes_per_token * config.page_size)
    tokens = config.kv_cache_tokens
    if tokens is None:
        useful = config.max_num_seqs * wanted_len
        if device == "cpu":
            useful = min(useful, max(CPU_CACHE_TOKENS, wanted_len))
        return min(fitting_pages, -(-useful // config.page_size))
    num_pages = -(-tokens // config.page_size)
    if num_pages > fitting_pages:
        raise ModelError(
            f"a KV cache of {tokens} tokens takes {gib(tokens * bytes_per_token)}, but "
            f"{gib(cache_bytes)} are free for it: at most "
            f"kv_cache_tokens={fitting_pages * config.page_size}{because}",
            param="kv_cache_tokens",
        )
    return num_pages


def _host_pages(config: EngineConfig, host_bytes: int, page_bytes: int) -> int:
    """Pages of the host tier, which holds pages that the prefix cache evicts."""
    if not config.prefix_caching or config.host_kv_gib == 0:
        return 0
    wanted = int(config.host_kv_gib * 2**30)
    if wanted > host_bytes:
        raise ModelError(
            f"host_kv_gib {config.host_kv_gib:g} is more than the {gib(max(host_bytes, 0))} of "
            "host memory that are free for it",
            param="host_kv_gib",
        )
    if wanted < page_bytes:
        raise ModelError(
            f"host_kv_gib {config.host_kv_gib:g} holds no page: one takes {page_bytes} bytes",
            param="host_kv_gib",
        )
    return wanted // page_bytes


def _say_what_the_host_adds(config: EngineConfig, num_pages: int, host_pages: int) -> None:
    share, size = host_pages / num_pages, config.page_size
    small = share < SMALL_HOST_SHARE
    log.log(
        logging.WARNING if small else logging.INFO,
        "host_kv_gib %g adds %.0f %% to the prefix cache: %d tokens to the %d of the device%s",
        config.host_kv_gib,
        100 * share,
        host_pages * size,
        num_pages * size,
        "; so little hardly changes what is found in it" if small else "",
    )


def gib(num_bytes: float) -> str:
    """A size for messages."""
    return f"{num_bytes / 2**30:.2f} GiB"
