"""A Hopper GPU that is treated as an older one launches what the older one would."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncllm.kernels.gpu import PRETEND
from tests.support.kernels.device import on_hopper
from tests.support.models import tiny_models

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400), on_hopper]

#: Serves prompts of many lengths. Prints the number of graphs, the modules of the kernels that were
#: launched, and whether any launch, and whether all, were programmatic.
SERVE = """
import asyncio, gc, json, sys
from asyncllm import AsyncLLM, SamplingParams
from asyncllm.executor.step.graphs import GraphedForward
from asyncllm.kernels.triton.launch import Launcher

async def main():
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [[(7 * i + n) % 380 + 4 for i in range(n)] for n in range(1, 200, 4)]
    options = dict(device="cuda", dtype="bfloat16", attention="triton")
    sizes = dict(max_model_len=512, max_num_seqs=64, gpu_memory_utilization=0.3)
    async with AsyncLLM(sys.argv[1], **options, **sizes) as llm:
        answers = await asyncio.gather(*(llm.generate(prompt, params) for prompt in prompts))
        assert all(len(answer.token_ids) == 8 for answer in answers)
        gc.unfreeze()  # a loaded engine freezes all objects, which hides them
        return sum(o.count for o in gc.get_objects() if type(o) is GraphedForward)

graphs = asyncio.run(main())
launchers = [o for o in gc.get_objects() if type(o) is Launcher and o._variants]
overlap = [found[3] for o in launchers for found in o._variants.values()]
modules = sorted({o._kernel.__module__.rpartition(".")[2] for o in launchers})
print(json.dumps([graphs, modules, any(overlap), all(overlap)]))
"""
FOR_HOPPER = {"decode_hopper", "prefill_hopper", "smem_resident", "tma", "tma_split"}
SIZES: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "head_dim": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


@pytest.mark.parametrize("pretended", ["8.0", "8.9", None])
def test_what_is_launched(
    pretended: str | None, tmp_path: Path, folder_of: Callable[[str], Path]
) -> None:
    folder = tiny_models.make("qwen3", tmp_path, **SIZES)
    tokenizer = folder_of("qwen3") / "tokenizer.json"
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    env = {key: value for key, value in os.environ.items() if key != PRETEND}
    if pretended is not None:
        env[PRETEND] = pretended
    run = subprocess.run(
        [sys.executable, "-c", SERVE, str(folder)],
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    graphs, modules, some_overlap, all_overlap = json.loads(run.stdout.splitlines()[-1])
    assert graphs > 5
    assert {"norm", "sampling", "tokens"} <= set(modules)
    if pretended is None:
        assert {"decode_hopper", "prefill_hopper"} < FOR_HOPPER & set(modules)
        assert all_overlap
    else:
        assert {"prefill", "decode"} <= set(modules)
        assert not FOR_HOPPER & set(modules)
        assert not some_overlap
