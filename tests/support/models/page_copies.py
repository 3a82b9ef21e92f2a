"""A KV pool with random contents, its host tier, and plans that copy between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncllm.config import EngineConfig, EngineLimits
from asyncllm.executor.build import build_worker
from asyncllm.executor.device import CpuDevice, Device, Event, Span
from asyncllm.executor.memory.copies import STAGING_BYTES, PageCopier
from asyncllm.executor.memory.kv_pool import HostPool, KVPool
from asyncllm.executor.runner import ModelRunner
from asyncllm.executor.sampling.sampler import Sampler
from asyncllm.executor.step.eager import EagerForward
from asyncllm.executor.step.slots import SlotTable
from asyncllm.executor.step.state_pool import StatePool
from asyncllm.executor.worker import Worker
from asyncllm.kernels.types import AttentionSpec
from asyncllm.models.spec import read_spec
from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import (
    TO_DEVICE,
    TO_HOST,
    Admit,
    RowParams,
    StepPlan,
    StepResult,
    encode,
    pack,
)

GREEDY = RowParams(temperature=0.0, logprobs=0)
VOCAB = 16


@dataclass(frozen=True)
class Shape:
    """Of a KV pool."""

    num_layers: int = 3
    page_size: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    last_layer: tuple[int, int] | None = None  # heads and their elements, if others

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        last = f"-last{self.last_layer}" if self.last_layer else ""
        sizes = f"{self.num_layers}x{self.page_size}x{self.num_kv_heads}x{self.head_dim}"
        return f"{name}-{sizes}{last}"

    def specs(self) -> list[AttentionSpec]:
        sizes = [(self.num_kv_heads, self.head_dim)] * self.num_layers
        if self.last_layer is not None:
            sizes[-1] = self.last_layer
        return [
            AttentionSpec(layer, heads, heads, dim, 1.0) for layer, (heads, dim) in enumerate(sizes)
        ]


#: Some have pages that are no whole number of 8 or even 2 bytes, one a layer of another shape.
SHAPES = [
    Shape(),
    Shape(page_size=16, dtype=torch.bfloat16),
    Shape(page_size=1, dtype=torch.float16),
    Shape(num_layers=1, page_size=3, num_kv_heads=1, head_dim=5, dtype=torch.bfloat16),
    Shape(page_size=1, num_kv_heads=1, head_dim=5, dtype=torch.float8_e4m3fn),
    Shape(dtype=torch.bfloat16, last_layer=(1, 24)),
]


class Tiers:
    """Both tiers, every bit of the pool at random: NaN of all kinds are among the values."""

    def __init__(
        self,
        device: Device,
        shape: Shape = SHAPES[0],
        num_pages: int = 20,
        host_pages: int = 24,
        staging_pages: int | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.device = device
        where = shape.dtype, device.torch_device
        self.pool = KVPool(shape.specs(), num_pages, shape.page_size, *where)
        raw = self.pool.storage.view(torch.uint8)
        generator = torch.Generator().manual_seed(0)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))
        self.host = HostPool(self.pool, host_pages, device)
        staging = None if staging_pages is None else staging_pages * self.pool.page_bytes
        self.copier = PageCopier(self.pool, self.host, device, staging or STAGING_BYTES, states)

    def bits(self) -> Tensor:
        """What the pages hold: uint8 [num_pages, bytes] on the CPU."""
        return torch.cat([part.flatten(1) for part in self._parts()], dim=1).cpu()

    def host_bits(self) -> Tensor:
        """All bits of the host tier's pages; only once its copies are done."""
        return self.host.storage.view(torch.uint8).clone()

    def wait_for_copies(self) -> None:
        for end in self.copier.ends():
            end.synchronize()

    def clobber(self, pages: Iterable[int]) -> None:
        for part in self._parts():
            part[list(pages)] = 0xA5

    def _parts(self) -> list[Tensor]:
        layers = range(len(self.pool.parts) // 2)
        return [part.view(torch.uint8) for layer in layers for part in self.pool.layer(layer)]


def shuffled(count: int, seed: int) -> list[int]:
    """The numbers below ``count`` in some order."""
    return [int(number) for number in np.random.default_rng(seed).permutation(count)]


def store(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Copies of (device page, host page) to the host; int32 [k, 3]."""
    return np.array([(TO_HOST, *pair) for pair in pairs], dtype=np.int32)


def load(pairs: Iterable[tuple[int, int]]) -> np.ndarray:
    """Copies of (device page, host page) to the device; int32 [k, 3]."""
    return np.array([(TO_DEVICE, *pair) for pair in pairs], dtype=np.int32)


def plan(
    step: int,
    *copies: np.ndarray,
    rows: Iterable[tuple[int, int, int]] = (),
    new_pages: Iterable[tuple[int, int, int]] = (),
    admits: dict[int, list[int]] | None = None,
) -> StepPlan:
    """A plan with these copies; ``admits`` are prompts by slot."""
    return StepPlan(
        step,
        pack(number for row in rows for number in row),
        pack(number for entry in new_pages for number in entry),
        tuple(
            Admit(slot, pack(tokens), len(tokens), GREEDY)
            for slot, tokens in (admits or {}).items()
        ),
        b"".join(part.tobytes() for part in copies),
    )


def state_copies(way: int, pages: dict[int, list[int]]) -> np.ndarray:
    """Copies of states in one direction: the host pages of each state slot; int32 [k, 3]."""
    entries = [(way, slot, host) for slot, hosts in pages.items() for host in hosts]
    return np.array(entries, dtype=np.int32)


class Script:
    """A worker's channel: hands out plans, calls functions in between, and keeps the results."""

    def __init__(self, messages: Iterable[StepPlan | bytes | Callable[[], None]]) -> None:
        self.heartbeat = Heartbeat()
        self._messages = deque(messages)
        self.results: list[StepResult] = []

    def receive(self, timeout: float | None = None) -> bytes | None:
        while self._messages:
            message = self._messages.popleft()
            if isinstance(message, StepPlan):
                return encode(message)
            if isinstance(message, bytes):
                return message
            message()
        return None

    def launched(self) -> None:
        pass

    def post(self, result: StepResult) -> None:
        self.results.append(result)

    @property
    def copied(self) -> list[list[int]]:
        """Steps whose copies each result tells of."""
        return [[step for step, _ in result.copied] for result in self.results]


class OneToken:
    """A model that always says 7, and the attention it does not need; fails when told to."""

    def __init__(self, device: torch.device) -> None:
        self.failing = False
        self.head = None
        self._device = device

    def __call__(self, batch: Any) -> Tensor:
        if self.failing:
            raise RuntimeError("planted")
        hidden: Tensor = batch.sampling(torch.zeros(len(batch.input_ids), 1, device=self._device))
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        logits = torch.zeros(len(hidden), VOCAB, device=self._device)
        logits[:, 7] = 1.0
        return logits

    def plan(self, rows: np.ndarray, block_table: Tensor) -> None:
        return None


def runner_of(tiers: Tiers) -> tuple[ModelRunner, OneToken]:
    """A runner of rows without K and V."""
    device = tiers.device
    model: Any = OneToken(device.torch_device)
    table = SlotTable(4, 8, device)
    sampler = Sampler(4, VOCAB, device)
    states = StatePool({}, 0, torch.float32, device.torch_device)
    forward = EagerForward(model, model, states, sampler, table, tiers.pool.page_size, device)
    return ModelRunner(forward, sampler, table, tiers.copier, states, device), model


def build(folder: Path, **options: Any) -> Worker:
    """A worker with 64 pages of 4 tokens, on the CPU unless ``options`` say otherwise."""
    options = {"device": "cpu", "cpu_threads": 1, **options}
    config = EngineConfig(model=str(folder), page_size=4, kv_cache_tokens=256, **options)
    return build_worker(config, folder, read_spec(folder))


def worker_of(tiers: Tiers, runner: ModelRunner, depth: int = 2) -> Worker:
    """A worker over that runner, with ``depth`` steps in flight."""
    limits = EngineLimits(
        device=tiers.device.torch_device.type,
        dtype="float32",
        num_pages=tiers.pool.num_pages,
        page_size=tiers.pool.page_size,
        max_model_len=32,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        prefill_chunk=32,
        itl_target=0.01,
        prefix_caching=True,
        host_pages=tiers.host.num_pages,
        page_copy_seconds=1e-6,
        max_waiting=100,
        max_waiting_tokens=10_000,
        steps_in_flight=depth,
        vocab_size=VOCAB,
        eos_token_ids=(),
    )
    return Worker(runner, limits, tiers.device)


class HeldCopies(CpuDevice):
    """A CPU whose copies run when the test says so, or when someone waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[HeldEvent] = []

    def copy_stream(self) -> HeldStream:
        return HeldStream(self)


class HeldStream:
    def __init__(self, device: HeldCopies) -> None:
        self._device = device

    def run(self, work: Callable[[], None], after: Event | None = None) -> Span:
        end = HeldEvent(work)
        self._device.held.append(end)
        return Span(end, end)


class HeldEvent:
    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def query(self) -> bool:
        return self._work is None

    def synchronize(self) -> None:
        """Run now."""
        if self._work is not None:
            self._work()
            self._work = None

    def elapsed_time(self, end: HeldEvent) -> float:
        assert end.query()
        return 250.0
