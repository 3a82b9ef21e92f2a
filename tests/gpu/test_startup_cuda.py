"""Start-up on a GPU: streaming weights, measuring a step, and what is left for the KV cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from asyncllm import AsyncLLM, SamplingParams, demo
from asyncllm.attention.base import AttentionBackend
from asyncllm.attention.choose import choose_backend
from asyncllm.config import EngineConfig
from asyncllm.errors import ModelError
from asyncllm.executor.device import CudaDevice
from asyncllm.executor.memory import profile
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.executor.memory.profile import StepSize, measure_step
from asyncllm.executor.startup.kernel_compiler import job_of
from asyncllm.models.loading.loader import load_model
from asyncllm.models.loading.weight_stream import Reading, WeightStream
from asyncllm.models.spec import read_spec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("direct", [False, True])
def test_a_stream_copies_more_than_its_blocks_hold(direct: bool, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    reading = Reading(readers=4, block_bytes=1 << 20, direct=direct)
    count = reading.block_bytes // 4
    tensors = {f"large{i}": torch.randn(count + i) for i in range(6 * reading.readers)}
    tensors |= {f"small{i}": torch.randn(i + 1).to(torch.float16) for i in range(50)}
    save_file(tensors, file)
    places = {
        name: torch.full(t.shape, torch.nan, dtype=torch.float32, device="cuda")
        for name, t in tensors.items()
    }
    places["large1"] = places["large1"].to(torch.bfloat16)
    with WeightStream(torch.device("cuda", 0), reading) as stream:
        done = sum(stream.copy(file, places))
    assert done == sum(tensor.nbytes for tensor in tensors.values())
    for name, place in places.items():
        assert torch.equal(place.cpu(), tensors[name].to(place.dtype)), name


def test_measuring_a_step_gives_the_same_each_time_and_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(demo.path())
    spec, device, dtype = read_spec(folder), CudaDevice(), torch.bfloat16
    size = StepSize(rows=64, tokens=4096, row_tokens=2048, captured_tokens=512, page_size=16)
    with torch.inference_mode():
        model = load_model(folder, spec, dtype, "cuda")
        torch.cuda.empty_cache()
        # Blocks of the weights have room, which a step takes first: it reserves less than it uses.
        room = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()

        def make_backend(pool: KVPool) -> AttentionBackend:
            specs = model.attention_specs
            on_device = device.torch_device, device.upload
            return choose_backend("auto", pool, specs, dtype, *on_device)

        larger = size.__class__(256, 8192, 2048, 1024, 16)
        # Kernels keep their scratch from their first launches on.
        more = measure_step(model, spec, make_backend, larger, dtype, device)
        before = torch.cuda.memory_allocated()
        found = [measure_step(model, spec, make_backend, size, dtype, device) for _ in range(2)]
        monkeypatch.setattr(profile, "first_layers", lambda model: model)
        with_all_layers = measure_step(model, spec, make_backend, size, dtype, device)
        assert torch.cuda.memory_allocated() == before
    assert found[0] == found[1] == with_all_layers
    assert 0 < found[0].captured <= found[0].step + room
    assert more.captured > found[0].captured


async def test_the_cache_leaves_what_the_share_leaves() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    async with AsyncLLM(device="cuda", gpu_memory_utilization=0.5, kv_cache_tokens=None) as llm:
        names = [item.name for item in llm.startup.items]
        assert names == [
            "import", "device", "weights", "kernels", "profile", "KV cache", "attention", "graphs",
        ]  # fmt: skip
        now, _ = torch.cuda.mem_get_info()
        assert free - now <= 0.5 * total


async def test_kernels_are_compiled_by_other_processes_and_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = tmp_path / "kernels"
    config = EngineConfig(
        device="cuda",
        kernel_cache=str(cache),
        max_num_seqs=3,
        max_num_batched_tokens=96,
        max_model_len=160,
    )
    with caplog.at_level("INFO", logger="asyncllm"):
        async with AsyncLLM(config=config) as llm:
            await llm.generate("Once upon a time", SamplingParams(max_tokens=3))
        # This process compiled nothing but the probe, or a line of the log would name it.
        compiled = [r.getMessage() for r in caplog.records if " compiled" in r.getMessage()]
        assert all(message.startswith("1 _probe compiled") for message in compiled)
    assert job_of(config, Path(demo.path())) is None  # nothing is left to do


async def test_too_small_a_share_is_refused_with_the_numbers() -> None:
    with pytest.raises(ModelError, match="gpu_memory_utilization") as caught:
        await AsyncLLM(device="cuda", gpu_memory_utilization=0.001).start()
    assert "weights take" in caught.value.message
