"""Engines that share a GPU, each of which must count as if it were alone.

As a program, ``python -m tests.support.gpu.sharing MODE FOLDER DEVICE``, where MODE is

    once      start an engine, decode a full batch, and stop
    serve     decode until standard input ends, after a line "ready"
    beside    decode, while another engine of this process starts, decodes and stops three times

``once`` and ``beside`` print the number of programs that may wait for each other.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch

from asyncllm import AsyncLLM, SamplingParams
from tests.support.models.successor import VOCAB, successors

#: From here to 256 rows, projections of Qwen3-8B have programs that wait for each other.
ROWS = 48
OPTIONS: dict[str, Any] = {"gpu_memory_utilization": 0.3, "max_model_len": 2048, "max_num_seqs": 64}


class WrongTokens(Exception):
    """A kernel has computed something else."""


async def decode(llm: AsyncLLM, rng: random.Random) -> None:
    """One sequence, sampled in one of several ways."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 30, 200, 700]))]
    params = SamplingParams(
        max_tokens=rng.randrange(50, 150),
        temperature=rng.choice([0.0, 0.3]),
        top_p=rng.choice([1.0, 0.9]),
        seed=1,
        ignore_eos=True,
    )
    found = list((await llm.generate(prompt, params)).token_ids)
    expected = successors(prompt, params.max_tokens or 0)
    if found != expected:
        raise WrongTokens(f"{prompt[-1]} of {len(prompt)} was followed by {found}")


async def decode_batch(llm: AsyncLLM) -> None:
    """A full batch, and as much again while it ends."""
    await asyncio.gather(*(decode(llm, random.Random(i)) for i in range(2 * ROWS)))


@asynccontextmanager
async def decoding(llm: AsyncLLM) -> AsyncIterator[asyncio.Queue[None]]:
    """Keeps ``ROWS`` sequences running; yields a queue that each completed one enters."""
    done: asyncio.Queue[None] = asyncio.Queue()
    ending = False

    async def one(number: int) -> None:
        rng = random.Random(number)
        while not ending:
            await decode(llm, rng)
            done.put_nowait(None)

    async with asyncio.TaskGroup() as tasks:
        for number in range(ROWS):
            tasks.create_task(one(number))
        yield done
        ending = True


async def once(folder: str, device: str) -> None:
    async with AsyncLLM(folder, device=device, **OPTIONS) as llm:
        await decode_batch(llm)
    print_waiting(device)


async def serve(folder: str, device: str) -> None:
    async with AsyncLLM(folder, device=device, **OPTIONS) as llm, decoding(llm) as done:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    print(done.qsize(), "sequences")


async def beside(folder: str, device: str) -> None:
    async with AsyncLLM(folder, device=device, **OPTIONS) as llm, decoding(llm) as done:
        for _ in range(3):
            await once(folder, device)
            for _ in range(done.qsize() + ROWS):  # it goes on, or the timeout of the test ends it
                await done.get()


def print_waiting(device: str) -> None:
    if device == "cpu":
        print("waiting: 0")
        return
    from asyncllm.kernels.triton.waiting import max_waiting_programs

    print("waiting:", max_waiting_programs(torch.device("cuda", 0)), flush=True)


if __name__ == "__main__":
    asyncio.run({"once": once, "serve": serve, "beside": beside}[sys.argv[1]](*sys.argv[2:]))
