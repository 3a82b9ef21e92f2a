"""What attention takes on this GPU: our own kernels and FlashInfer's, printed as a table.

    python examples/bench_attention.py [--heads 32] [--kv-heads 8] [--head-dim 128] [--device cpu]

For each step: microseconds of a layer, as the mean over the layers of a CUDA graph, in which every
layer has K and V of its own; and microseconds that the host takes to prepare a replay. "fa2" and
"fa3" are FlashInfer with these kernels for prompts. Kernels that are not built are compiled first.
On a CPU there are no graphs, and PyTorch's kernels only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from asyncllm.attention.base import AttentionBackend, ForwardBatch, GraphBackend, GraphRows
from asyncllm.attention.flashinfer import backend as flashinfer
from asyncllm.attention.flashinfer.library import HOPPER, Template, unsupported
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.executor.device import CpuDevice, CudaDevice, Device
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.kernels.gpu import gpu_of
from asyncllm.kernels.tokens import locate_tokens
from asyncllm.kernels.types import AttentionSpec, HeadEncoding, PrefillRows

DTYPE = torch.bfloat16
PAGE_SIZE = 16
LAYERS = 12
ROUNDS = 20
#: Decode rows, their length; prompt rows, their new tokens, and where these start.
STEPS = [
    *((rows, 768, 0, 0, 0) for rows in (1, 8, 32, 64, 128, 256)),
    (1, 32_000, 0, 0, 0),
    (32, 4_000, 0, 0, 0),
    *((0, 0, 1, tokens, 0) for tokens in (128, 512, 2048, 8192)),
    (0, 0, 1, 2048, 8192),
    (0, 0, 16, 128, 0),
    (130, 650, 1, 155, 500),
    (64, 1_000, 1, 400, 4_000),
    (200, 500, 4, 64, 0),
]


#: For a look at whether it runs.
QUICK = [(4, 30, 0, 0, 0), (2, 30, 1, 20, 10)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--window", type=int)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="two small steps")
    options = parser.parse_args()
    sizes = options.heads, options.kv_heads, options.head_dim, options.head_dim**-0.5
    specs = [AttentionSpec(layer, *sizes, options.window) for layer in range(LAYERS)]
    device: Device = CpuDevice() if options.device == "cpu" else CudaDevice()
    names = ["sdpa"]
    if options.device == "cuda":
        gpu = gpu_of(device.torch_device)
        problem = unsupported(specs, DTYPE)
        if problem is not None:
            parser.error(f"FlashInfer: {problem}")
        names = ["triton", "fa2", *(["fa3"] if gpu.capability == HOPPER else [])]
        print(gpu)
    with torch.inference_mode():
        print("microseconds of a layer / of the host")
        print(f"{'step':44}" + "".join(f"{name:>18}" for name in names))
        for step in QUICK if options.quick else STEPS:
            cells = [measured(name, step, specs, device) for name in names]
            print(f"{described(step):44}" + "".join(f"{cell:>18}" for cell in cells), flush=True)


def described(step: tuple[int, int, int, int, int]) -> str:
    decodes, length, prompts, tokens, start = step
    parts = [f"{decodes} x 1 @ {length}"] if decodes else []
    parts += [f"{prompts} x {tokens} @ {start}"] if prompts else []
    return " + ".join(parts)


def measured(
    name: str, step: tuple[int, int, int, int, int], specs: list[AttentionSpec], device: Device
) -> str:
    decodes, length, prompts, tokens, start = step
    rows = [(i, length - 1, 1) for i in range(decodes)]
    rows += [(decodes + i, start, tokens) for i in range(prompts)]
    world = World(np.array(rows, dtype=np.int32), specs, device)
    backend = make_backend(name, world.pool, specs, device)
    run, prepare = world.captured(backend) if name != "sdpa" else world.launched(backend)
    prepare()
    run()
    device.check()
    host, layer = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        prepare()
        host.append(1e6 * (time.perf_counter() - started))
        begin = device.event()
        run()
        end = device.event()
        device.check()
        layer.append(1e3 * begin.elapsed_time(end) / len(specs))
    return f"{statistics.median(layer):.1f} / {statistics.median(host):.0f}"


def make_backend(name: str, pool: KVPool, specs: list[AttentionSpec], device: Device) -> Any:
    if name == "sdpa":
        return SdpaBackend(pool)
    if name == "triton":
        return PagedBackend(pool, device.upload)
    template: Template = "fa3" if name == "fa3" else "fa2"
    place = device.torch_device
    gpu = gpu_of(place)
    where = place, gpu.capability, gpu.multiprocessors
    with patch.object(flashinfer, "prompt_template", lambda *_: template):
        return flashinfer.FlashInferBackend(pool, specs, DTYPE, *where, device.upload)


class World:
    """A step over random K and V."""

    def __init__(self, rows: np.ndarray, specs: list[AttentionSpec], device: Device) -> None:
        self._rows = rows
        self._specs = specs
        slots, starts, q_lens = rows.T
        pages = -(-(starts + q_lens) // PAGE_SIZE)
        place = device.torch_device
        self.pool = KVPool(specs, int(pages.sum()), PAGE_SIZE, DTYPE, place)
        self.pool.storage.normal_()
        shuffled = torch.randperm(int(pages.sum()), device=place).int()
        self._table = torch.zeros(len(rows), int(pages.max()), dtype=torch.int32, device=place)
        for slot, part in enumerate(shuffled.split(pages.tolist())):
            self._table[slot, : len(part)] = part
        positions = np.concatenate([a + np.arange(n) for a, n in zip(starts, q_lens, strict=True)])
        entries = np.stack([np.zeros_like(positions), slots.repeat(q_lens), positions])
        last = torch.zeros(len(rows), dtype=torch.int64, device=place)
        self._tokens = locate_tokens(
            device.upload(entries.astype(np.int32)), last, self._table, PAGE_SIZE
        )
        size = specs[0].projected_size
        self._qkv = torch.randn(len(positions), size, dtype=DTYPE, device=place)
        decodes = int((q_lens == 1).cumprod().sum())
        lengths = np.where(np.arange(len(rows)) < decodes, starts + 1, 0)
        offsets = np.concatenate([[0], q_lens.cumsum()]).clip(min=decodes)
        arrays = (slots, lengths, starts, offsets)
        a, b, c, d = (device.upload(array.astype(np.int32)) for array in arrays)
        prefill = PrefillRows(a, c, d) if decodes < len(rows) else None
        self._graph_rows = GraphRows(len(positions), a, b, prefill)

    def captured(self, backend: GraphBackend) -> tuple[Callable[[], None], Callable[[], None]]:
        """What replays the step, and what has to be called before."""
        plan = backend.graph_plan(self._graph_rows, self._table)

        def prepare() -> None:
            backend.before_replay(plan, self._rows)

        prepare()
        self._forward(backend, plan)  # loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._forward(backend, plan)
        return graph.replay, prepare

    def launched(self, backend: AttentionBackend) -> tuple[Callable[[], None], Callable[[], None]]:
        """A run that launches kernel by kernel, and what prepares it."""
        plan: Any = None

        def prepare() -> None:
            nonlocal plan
            plan = backend.plan(self._rows, self._table)

        return lambda: self._forward(backend, plan), prepare

    def _forward(self, backend: AttentionBackend, plan: Any) -> None:
        batch = ForwardBatch(*self._tokens, None, backend, plan)
        for spec in self._specs:
            backend.forward(self._qkv, spec, HeadEncoding(None, None, None), batch)


if __name__ == "__main__":
    main()
