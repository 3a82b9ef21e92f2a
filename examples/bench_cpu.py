"""Where a token's CPU time goes, and throughput against transformers, on this machine's CPU.

    python examples/bench_cpu.py [--model FOLDER] [--threads 1] [--quick]

Part 1 runs the loop side over an executor that answers at once, so that only scheduling, applying,
detokenizing and delivery are measured. Part 2 generates greedily with transformers' batch
``generate`` and with asyncllm, in turns in one process: requests of uneven prompt and output
length, 1, 16 and 64 at once. It takes a minute or two. Only the tokens that were asked for count.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch; see executor/build.py

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from asyncllm import AsyncLLM, SamplingParams, demo
from asyncllm.config import EngineLimits
from asyncllm.engine.engine import Engine
from asyncllm.engine.policy import Fair
from asyncllm.engine.requests.mailbox import Collector
from asyncllm.engine.scheduling.scheduler import Scheduler
from asyncllm.server.chat.conversation import Conversation
from asyncllm.server.chat.requests import ChatRequest
from asyncllm.server.http.middleware import request_id
from asyncllm.server.openai.chat_reply import ChatReply
from asyncllm.text import Tokenizer
from asyncllm.text.chat_reader import ChatReader
from asyncllm.text.parsing import Formats
from asyncllm.types import TokenDelta
from asyncllm.wire.executor import ResultHandler
from asyncllm.wire.heartbeat import Heartbeat
from asyncllm.wire.messages import NO_TOKEN, StepResult, decode_plan, encode, pack, unpack

CONCURRENCY = (1, 16, 64)
ROUNDS = 3
LONGEST = 256


class InstantExecutor:
    """Answers every plan at once with ordinary tokens; no model, no thread."""

    def __init__(self, tokens: list[int]):
        self.heartbeat = Heartbeat()
        self._tokens = tokens
        self._known: dict[int, int] = {}

    async def start(self) -> EngineLimits:
        raise RuntimeError("the benchmark gives the engine its limits")

    def on_death(self, tell: Callable[[str], None]) -> None: ...
    def submit(self, plan: bytes, on_result: ResultHandler) -> None:
        decoded = decode_plan(plan)
        for admit in decoded.admits:
            self._known[admit.slot] = len(unpack(admit.tokens))
        sampled = [
            self._tokens[(slot + start) % len(self._tokens)]
            if start + q_len >= self._known[slot]
            else NO_TOKEN
            for slot, start, q_len in unpack(decoded.rows, 3).tolist()
        ]
        result = encode(StepResult(decoded.step, pack(sampled), (), None, 0.0, 0.0))
        asyncio.get_running_loop().call_soon(on_result, result)

    def abandon(self) -> None: ...
    def flush(self) -> None:
        pass

    async def close(self) -> None:
        pass


async def loop_costs(tokenizer: Tokenizer, rows: int, num_tokens: int) -> dict[str, float]:
    """Microseconds of CPU per token of each stage, with ``rows`` sequences running."""
    words = tokenizer.encode("Counting: one, two, three, four, five and so on.", False)
    limits = EngineLimits(
        device="cpu",
        dtype="float32",
        num_pages=rows * 64,
        page_size=16,
        max_model_len=1024,
        max_num_seqs=rows,
        max_num_batched_tokens=8192,
        prefill_chunk=8192,
        itl_target=1.0,
        prefix_caching=True,
        host_pages=0,
        page_copy_seconds=0.0,
        max_waiting=rows,
        max_waiting_tokens=2**20,
        steps_in_flight=2,
        vocab_size=tokenizer.vocab_size,
        eos_token_ids=(),
    )
    scheduler = Scheduler.create(limits, Fair())
    engine = Engine(limits, InstantExecutor(words), scheduler, tokenizer.detokenizer)
    engine.start()
    collectors = [Collector() for _ in range(rows)]
    for collector in collectors:
        engine.add(words, SamplingParams(max_tokens=num_tokens), collector)
    await asyncio.gather(*(collector.whole() for collector in collectors))
    await engine.aclose()
    stats = engine.stats
    micros = 1e6 / stats.generation_tokens
    return {
        "schedule": stats.cpu_plan * micros,
        "apply": stats.cpu_apply * micros,
        "detokenize": detokenize_cost(tokenizer, words),
        "deliver (with detokenizing)": stats.cpu_deliver * micros,
        "SSE frame": frame_cost(tokenizer, words),
    }


def detokenize_cost(tokenizer: Tokenizer, ids: list[int], repeats: int = 5000) -> float:
    detokenizer = tokenizer.detokenizer(True)
    started = time.process_time()
    for _ in range(repeats):
        for token in ids:
            detokenizer.push(token)
    return (time.process_time() - started) / (repeats * len(ids)) * 1e6


def frame_cost(tokenizer: Tokenizer, ids: list[int], repeats: int = 20000) -> float:
    """One chat chunk: JSON, SSE and chunked framing; without the socket's own write."""
    request_id.set("bench")
    asked = ChatRequest(messages=[], stream=True)
    reader = ChatReader(Formats(), tokenizer)
    conversation = Conversation(ids, SamplingParams(), reader, tools=(), continued="")
    reply = ChatReply(asked, "model", conversation, tokenizer)
    deltas = [TokenDelta(text=" word", token_ids=[token]) for token in ids]
    started = time.process_time()
    for i in range(repeats):
        payload = reply.frames(0, deltas[i % len(deltas)])
        b"%x\r\n%b\r\n" % (len(payload), payload)
    return (time.process_time() - started) / repeats * 1e6


def requests(count: int, longest: int, vocab_size: int) -> list[tuple[list[int], int]]:
    """Prompts of 8 to 128 tokens that want up to ``longest`` tokens; the same for both engines."""
    draw = random.Random(count)
    return [
        (
            [draw.randrange(vocab_size) for _ in range(draw.randint(8, 128))],
            draw.randint(longest // 16, longest),
        )
        for _ in range(count)
    ]


def with_transformers(model: Any, work: list[tuple[list[int], int]]) -> float:
    """Seconds for one left-padded batch; it runs until its longest request is done."""
    width = max(len(prompt) for prompt, _ in work)
    ids = torch.zeros(len(work), width, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, (prompt, _) in enumerate(work):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    longest = max(wanted for _, wanted in work)
    started = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=longest,
            max_new_tokens=longest,
            pad_token_id=0,
        )
    assert out.shape[1] == width + longest
    return time.perf_counter() - started


async def with_asyncllm(llm: AsyncLLM, work: list[tuple[list[int], int]]) -> float:
    started = time.perf_counter()
    outs = await asyncio.gather(
        *(
            llm.generate(
                prompt, SamplingParams(temperature=0.0, max_tokens=wanted, ignore_eos=True)
            )
            for prompt, wanted in work
        )
    )
    elapsed = time.perf_counter() - started
    assert [len(out.token_ids) for out in outs] == [wanted for _, wanted in work]
    return elapsed


async def throughput(
    folder: Path, threads: int, concurrency: tuple[int, ...], rounds: int, longest: int
) -> None:
    torch.set_num_threads(threads)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "cpu_threads": threads}
    # The rounds ask for the same again: no prefix cache, or only the first would be a comparison.
    async with AsyncLLM(folder, **options, prefix_caching=False) as llm:
        print(f"\ntokens/s, float32, {threads} thread(s), best of {rounds} rounds in turns")
        print(f"{'at once':>8} {'transformers':>13} {'asyncllm':>10} {'ratio':>6} {'median':>7}")
        bar = tqdm(total=2 * rounds * len(concurrency), unit="run", disable=None)
        for count in concurrency:
            work = requests(count, longest, llm.limits.vocab_size)
            asked = sum(wanted for _, wanted in work)
            theirs, ours = [], []
            for _ in range(rounds):
                theirs.append(with_transformers(reference, work))
                bar.update()
                ours.append(await with_asyncllm(llm, work))
                bar.update()
            median = statistics.median(t / o for t, o in zip(theirs, ours, strict=True))
            tqdm.write(
                f"{count:>8} {asked / min(theirs):>13.0f} {asked / min(ours):>10.0f} "
                f"{min(theirs) / min(ours):>6.2f} {median:>7.2f}"
            )
        bar.close()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo.path())
    parser.add_argument("--threads", type=int, default=1, help="of CPU kernels, for both")
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it works")
    options = parser.parse_args()
    concurrency: tuple[int, ...] = (1, 4) if options.quick else CONCURRENCY
    rounds, longest = (1, 16) if options.quick else (ROUNDS, LONGEST)
    tokenizer = Tokenizer.from_folder(options.model)
    print("CPU time on the event loop, microseconds per token")
    costs = {rows: await loop_costs(tokenizer, rows, longest) for rows in concurrency}
    print(f"{'rows':>28}" + "".join(f"{rows:>9}" for rows in concurrency))
    for stage in costs[concurrency[0]]:
        print(f"{stage:>28}" + "".join(f"{costs[rows][stage]:>9.2f}" for rows in concurrency))
    tokenizer.close()
    await throughput(options.model, options.threads, concurrency, rounds, longest)


if __name__ == "__main__":
    asyncio.run(main())
