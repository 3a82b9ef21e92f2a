"""From free memory to limits: the host tier, and what EngineLimits takes from EngineConfig."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from asyncllm import demo
from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.errors import ModelError
from asyncllm.executor.memory.limits import (
    SPARE_BYTES,
    GpuMemory,
    graph_bytes,
    resolve_limits,
    wanted_states,
)
from asyncllm.models.spec import read_spec

GIB = 2**30
BYTES_PER_TOKEN = 2**16  # so a page of 16 tokens takes 1 MiB


def limits(
    device: str = "cuda",
    host_bytes: int = 64 * GIB,
    cache_bytes: int = 4 * GIB,
    account: str = "",
    state_bytes: int = 0,
    **options: Any,
) -> EngineLimits:
    return resolve_limits(
        EngineConfig(**options),
        read_spec(demo.path()),
        device=device,
        dtype="bfloat16",
        cache_bytes=cache_bytes,
        host_bytes=host_bytes,
        bytes_per_token=BYTES_PER_TOKEN,
        account=account,
        state_bytes=state_bytes,
    )


def test_there_is_no_host_tier_by_default() -> None:
    assert limits().host_pages == 0
    assert limits(host_bytes=0).host_pages == 0


def test_the_host_tier_is_as_large_as_asked() -> None:
    assert limits(host_kv_gib=1.5).host_pages == 1536
    assert limits(host_kv_gib=64).host_pages == 65536


@pytest.mark.parametrize(("gib", "level"), [(0.5, "WARNING"), (4, "INFO")])
def test_what_the_host_tier_adds_is_said_at_the_start(
    caplog: pytest.LogCaptureFixture, gib: float, level: str
) -> None:
    caplog.set_level(logging.INFO, "asyncllm")
    limits(kv_cache_tokens=3 * 16 * 1024)  # 3 GiB
    assert not caplog.records
    limits(kv_cache_tokens=3 * 16 * 1024, host_kv_gib=gib)
    [record] = caplog.records
    assert record.levelname == level
    said = record.getMessage()
    share, tokens = (17, 8192) if gib == 0.5 else (133, 65536)
    assert f"host_kv_gib {gib:g} adds {share} % to the prefix cache: {tokens} tokens" in said
    assert "to the 49152 of the device" in said
    assert ("hardly" in said) == (level == "WARNING")


def test_without_prefix_caching_there_is_no_host_tier() -> None:
    without = limits(host_kv_gib=1, prefix_caching=False, host_bytes=0)
    assert without.host_pages == 0
    assert not without.prefix_caching


def test_host_memory_that_is_not_there_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match=r"host_kv_gib 8 is more than the 7\.50 GiB") as caught:
        limits(host_kv_gib=8, host_bytes=int(7.5 * GIB))
    assert caught.value.param == "host_kv_gib"


def test_on_a_cpu_the_kv_cache_is_in_host_memory_too() -> None:
    options: Any = {"device": "cpu", "host_kv_gib": 2, "kv_cache_tokens": 16 * 1024}  # 1 GiB
    assert limits(**options, host_bytes=3 * GIB).host_pages == 2048
    with pytest.raises(ModelError, match=r"more than the 1\.50 GiB"):
        limits(**options, host_bytes=int(2.5 * GIB))


def test_a_host_tier_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ModelError, match="holds no page: one takes 1048576 bytes"):
        limits(host_kv_gib=0.0005)


def test_limits_carry_what_the_scheduler_needs() -> None:
    found = limits(itl_target_ms=25.0, max_waiting_tokens=1234)
    assert found.itl_target == pytest.approx(0.025)
    assert found.max_waiting_tokens == 1234
    assert found.prefix_caching
    assert found.page_copy_seconds == pytest.approx(2**20 / 50e9)
    assert limits(device="cpu").page_copy_seconds == pytest.approx(2**20 / 5e9)


def gpu(total: int = 24, before: int = 23, free: int = 13, **other: int) -> GpuMemory:
    """Of a GPU with so many GiB, of which 8 went to weights and 2 to libraries."""
    sizes = {"weights": 8 * GIB, "step": GIB, "graphs": GIB // 2} | other
    return GpuMemory(total=total * GIB, before=before * GIB, free=free * GIB, **sizes)


def test_the_cache_gets_what_the_share_leaves() -> None:
    assert gpu().cache_bytes(0.75) == (18 - 10 - 1) * GIB - GIB // 2 - SPARE_BYTES


def test_captures_keep_the_activations_of_the_largest_step_twice() -> None:
    """Those of the graph, and those of the run before the capture."""
    assert graph_bytes(GIB, 3) - graph_bytes(0, 3) == 2 * GIB
    assert graph_bytes(0, 3) == 3 * graph_bytes(0, 1) > 0


def test_memory_of_other_processes_is_not_ours() -> None:
    """Half of the GPU is for this process, whether another one has the other half or nobody."""
    alone, beside = gpu(before=23, free=15), gpu(before=13, free=5)
    assert alone.cache_bytes(0.5) == beside.cache_bytes(0.5)
    assert alone.cache_bytes(0.9) > beside.cache_bytes(0.9)


def test_no_more_than_what_is_free_is_handed_out() -> None:
    assert gpu(before=13, free=3).cache_bytes(1.0) == 3 * GIB - GIB * 3 // 2 - SPARE_BYTES
    assert gpu(free=1).cache_bytes(0.9) == 0


def test_a_model_that_does_not_fit_is_refused_with_the_account() -> None:
    memory = gpu(total=10, before=10, free=1, weights=9 * GIB)
    with pytest.raises(ModelError) as caught:
        limits(cache_bytes=memory.cache_bytes(0.9), account=memory.account(0.9))
    assert caught.value.param == "gpu_memory_utilization"
    for part in (
        "0.00 GiB are free for the KV cache",
        "gpu_memory_utilization 0.9 of 10.00 GiB is 9.00 GiB",
        "weights take 9.00 GiB",
        "a step 1.00 GiB",
        "max_num_batched_tokens",
    ):
        assert part in caught.value.message


def test_a_context_that_does_not_fit_names_the_option_that_helps() -> None:
    wanted: Any = {"max_model_len": 512, "cache_bytes": 256 * BYTES_PER_TOKEN}
    with pytest.raises(ModelError, match=r"it holds 256: .*raise gpu_memory_utilization") as caught:
        limits(**wanted)
    assert caught.value.param == "max_model_len"
    with pytest.raises(ModelError, match=r"it holds 256: .*raise kv_cache_tokens"):
        limits(**wanted, kv_cache_tokens=256)


def test_the_limits_of_pins_are_those_configured() -> None:
    found = limits(max_cache_ttl_s=60.0, max_pinned_share=0.1)
    assert (found.max_cache_ttl, found.max_pinned_share) == (60.0, 0.1)


# -- recurrent states ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "caching", "sequences", "states"),
    [
        (4, True, 4, 63),
        (16, True, 16, 63),
        (40, True, 31, 63),
        (40, False, 40, 40),
        (100, False, 63, 63),
    ],
)
def test_states_take_half_of_the_memory_at_most_and_the_prefix_cache_has_half_of_them(
    wanted: int, caching: bool, sequences: int, states: int
) -> None:
    found = limits(state_bytes=2**25, max_num_seqs=wanted, prefix_caching=caching)
    assert (found.max_num_seqs, found.num_states) == (sequences, states)
    assert found.state_bytes == 2**25
    assert found.num_pages <= 4096 - 32 * (states + 1)


def test_few_sequences_have_as_many_states_in_the_prefix_cache_as_chats_may_need() -> None:
    assert [wanted_states(n, True) for n in (1, 16, 17, 100)] == [65, 80, 85, 500]
    assert wanted_states(16, False) == 16


def test_a_model_whose_state_does_not_fit_is_refused() -> None:
    assert limits(state_bytes=GIB).num_states == 1
    with pytest.raises(ModelError, match=r"one takes 1\.10 GiB: no sequence fits"):
        limits(state_bytes=int(1.1 * GIB))


def test_a_host_tier_has_room_for_a_state() -> None:
    with_states = limits(state_bytes=50 * 2**20 + 1, host_kv_gib=1)
    assert (with_states.host_pages, with_states.state_pages) == (1024, 51)
    with pytest.raises(
        ModelError, match=r"holds no recurrent state, .* takes 512\.00 MiB"
    ) as caught:
        limits(state_bytes=2**29, host_kv_gib=0.4)
    assert caught.value.param == "host_kv_gib"
