"""Train the demo model that ships in ``asyncllm/demo/model``, from nothing but this folder.

    python examples/train_demo/train.py --out asyncllm/demo/model --preset gpu
    python examples/train_demo/train.py --out my_demo --preset cpu [--quick]

Worker processes make the text while the model trains on what there is so far; ``--seconds`` is the
time for training, and the learning rate follows it. The preset for a CPU takes about two minutes,
most of them for text and tokenizer. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import data
import tokenizer as tokenizers_of_demo
import torch
from model import Qwen3, Shape
from safetensors.torch import save_file
from tqdm import tqdm

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

TEMPLATE = Path(__file__).with_name("chat_template.jinja")
# Every padded length divides it, so that all batches have the same shape.
SEGMENT = 6144


@dataclass(frozen=True)
class Preset:
    """What differs between a GPU and a CPU."""

    shape: Shape
    seconds: float
    workers: int
    segments: int
    segment_tokens: int
    max_tokens: int
    learning_rate: float
    tokenizer_samples: int
    words: int


PRESETS = {
    "gpu": Preset(
        shape=Shape(vocab_size=0), seconds=325, workers=12, segments=3,
        segment_tokens=4 * SEGMENT, max_tokens=2_000_000_000, learning_rate=2e-3,
        tokenizer_samples=60_000, words=700,
    ),
    "cpu": Preset(
        shape=Shape(vocab_size=0, hidden_size=128, intermediate_size=256, num_layers=3,
                    num_heads=2, num_kv_heads=1),
        seconds=60, workers=0, segments=1, segment_tokens=2048, max_tokens=1_000_000,
        learning_rate=4e-3, tokenizer_samples=10_000, words=500,
    ),
}  # fmt: skip


class Pool:
    """All rows made so far, on the device, by padded length."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self.device = device
        self.rows: dict[int, Tensor] = {}
        self.used: dict[int, int] = {}
        self.rng = random.Random(seed)

    @property
    def tokens(self) -> int:
        """How many tokens there are, padding included."""
        return sum(length * count for length, count in self.used.items())

    def add(self, shard: dict[int, NDArray[np.uint16]]) -> None:
        """Take over the rows of ``shard``."""
        for length, group in shard.items():
            # PyTorch computes with signed numbers: the target bit becomes the sign.
            new = torch.from_numpy(group.view("int16")).to(self.device)
            used = self.used.get(length, 0)
            if length not in self.rows or used + len(new) > len(self.rows[length]):
                room = torch.empty(
                    (2 * (used + len(new)), length), dtype=torch.int16, device=self.device
                )
                if used:
                    room[:used] = self.rows[length][:used]
                self.rows[length] = room
            self.rows[length][used : used + len(new)] = new
            self.used[length] = used + len(new)

    def draw(self, segments: int, tokens: int) -> tuple[Tensor, Tensor, list[tuple[int, int]]]:
        """Draw ids, targets and their rows: ``segments`` groups of rows of one length each."""
        lengths = list(self.used)
        weights = [length * self.used[length] for length in lengths]
        parts, shapes = [], []
        for length in self.rng.choices(lengths, weights, k=segments):
            count = tokens // length
            rows = torch.randint(self.used[length], (count,), device=self.device)
            parts.append(self.rows[length][rows])
            shapes.append((count, length))
        ids = torch.cat([(part.int() & ~data.TARGET & 0xFFFF).flatten() for part in parts])
        targets = torch.cat([
            torch.nn.functional.pad(
                torch.where(part < 0, part.long() & (data.TARGET - 1), -100)[:, 1:], (0, 1),
                value=-100
            ).flatten()
            for part in parts
        ])  # fmt: skip
        return ids, targets, shapes


def feed(queue: Queue[Any], preset: Preset, path: str, seed: int, stop: Event) -> None:
    """Put shards into ``queue`` until there are enough of them or ``stop`` is set."""
    made, tokens = 0, min(1_000_000, preset.max_tokens)
    try:
        for shard in data.stream_rows(path, preset.workers, tokens, seed):
            queue.put(shard)
            made += tokens
            if made >= preset.max_tokens or stop.is_set():
                return
    except BaseException as error:
        queue.put(error)


def rate_at(progress: float) -> float:
    """Return the learning rate's factor: a short rise, a plateau, a long fall to zero."""
    return max(0.0, min(1.0, progress / 0.02, (1.0 - progress) / 0.6))


def fit(model: Qwen3, preset: Preset, path: str, device: torch.device, seed: int) -> None:
    """Train ``model`` for ``preset.seconds``."""
    matrices = [p for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim == 1 or "embed" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=preset.learning_rate, betas=(0.9, 0.98), fused=True)
    pool = Pool(device, seed)
    queue: Queue[Any] = Queue(maxsize=64)
    stop = Event()
    Thread(target=feed, args=(queue, preset, path, 1000 + seed, stop), daemon=True).start()
    # Enough rows of every length before the first step.
    first = min(20_000_000, preset.max_tokens)
    with tqdm(total=first, desc="text", unit="token", unit_scale=True, disable=None) as bar:
        while pool.tokens < first:
            pool.add(_checked(queue.get()))
            bar.update(pool.tokens - bar.n)
    if device.type == "cuda":
        _warm_up(model, pool, preset)
    begin = time.monotonic()
    step, seen, reported = 0, 0, begin
    while (progress := (time.monotonic() - begin) / preset.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = preset.learning_rate * rate_at(progress)
        ids, targets, shapes = pool.draw(preset.segments, preset.segment_tokens)
        loss = model(ids, targets, shapes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        seen += len(ids)
        # A little more than is used: making text that nobody reads would only slow training down.
        while not queue.empty() and pool.tokens < 1.1 * seen + 20_000_000:
            pool.add(_checked(queue.get()))
        # Reading the loss waits for the device; without it the queue of kernels would grow and the
        # clock would not tell how far training is.
        if step % 10 == 0:
            value, now = loss.item(), time.monotonic()
            if now - reported > preset.seconds / 25:
                reported = now
                print(
                    f"{now - begin:5.0f} s  step {step:6d}  loss {value:.4f}  "
                    f"{seen / (now - begin) / 1e6:.3f}M tokens/s  pool {pool.tokens / 1e6:.0f}M",
                    flush=True,
                )
    stop.set()
    print(f"{step} steps, {seen / 1e6:.0f}M tokens, {pool.tokens / 1e6:.0f}M of them different")


def _checked(shard: Any) -> dict[int, NDArray[np.uint16]]:
    if isinstance(shard, BaseException):
        raise shard
    rows: dict[int, NDArray[np.uint16]] = shard
    return rows


def _warm_up(model: Qwen3, pool: Pool, preset: Preset) -> None:
    """Compile before the clock starts, or go on without a compiler."""
    begin = time.monotonic()
    try:
        model.compile_blocks()
        for _ in range(3):
            model(*pool.draw(preset.segments, preset.segment_tokens)).backward()
    except Exception as error:
        print(f"torch.compile failed, training without it: {type(error).__name__}: {error}"[:800])
        fresh = Qwen3(model.shape, model.dtype)
        model._before, model._after, model._loss = fresh._before, fresh._after, fresh._loss
    model.zero_grad(set_to_none=True)
    print(f"warm-up {time.monotonic() - begin:.0f} s", flush=True)


def save(model: Qwen3, tokenizer: Any, out: Path) -> None:
    """Write a Hugging Face model folder. The tokenizer's file is already there."""
    eos = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    files: dict[str, Any] = {
        "config.json": model.shape.config(eos, pad=eos[1]),
        "generation_config.json": {"eos_token_id": eos, "pad_token_id": eos[1], "do_sample": False},
        "tokenizer_config.json": tokenizers_of_demo.settings(
            TEMPLATE.read_text(), model.shape.max_length
        ),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    save_file(model.checkpoint(), out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors writes it for its owner alone


def check(model: Qwen3, out: Path) -> None:
    """Compare the folder with the training code: same prompts, same ids, same logits."""
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    theirs = AutoTokenizer.from_pretrained(out)
    ours = data.load_tokenizer(str(out / "tokenizer.json"))
    rng = random.Random(5)
    for _ in range(200):
        messages, tools = data.dialogue(rng)
        written = data.render(messages, tools)
        rendered = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
        assert rendered == written, f"{rendered!r} is not {written!r}"
        assert theirs(written)["input_ids"] == ours.encode(written).ids, written
    loaded = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    copy = Qwen3(model.shape)
    weights = {key.replace(".", "/"): value.float() for key, value in model.checkpoint().items()}
    copy.weights.load_state_dict(weights)
    ids = torch.tensor(ours.encode(data.text(rng)).ids[:256])
    with torch.no_grad():
        difference = (copy.logits(ids, [(1, len(ids))]) - loaded(ids[None]).logits[0]).abs().max()
    assert difference < 1e-2, f"logits differ by {difference}"
    print(f"transformers agrees with the training code (logits within {difference:.1e})")


def main() -> None:
    """Build the tokenizer, train, write the folder and check it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--seconds", type=float, help="time for training itself")
    parser.add_argument("--workers", type=int, help="processes that make text")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="seconds, to see that it works; the model knows nothing",
    )
    arguments = parser.parse_args()
    preset = PRESETS[arguments.preset]
    if arguments.quick:
        preset = replace(preset, seconds=2, max_tokens=50_000, tokenizer_samples=500, words=100)
    if arguments.seconds is not None:
        preset = replace(preset, seconds=arguments.seconds)
    if arguments.workers is not None:
        preset = replace(preset, workers=arguments.workers)
    torch.manual_seed(arguments.seed)
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)

    print("building the tokenizer", file=sys.stderr)
    tokenizer = tokenizers_of_demo.build(preset.tokenizer_samples, preset.words)
    path = str(out / "tokenizer.json")
    tokenizer.save(path, pretty=False)
    # A multiple of 64 can be shared among GPUs; the ids above the last token never win.
    vocabulary = -(-tokenizer.get_vocab_size() // 64) * 64
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = Qwen3(replace(preset.shape, vocab_size=vocabulary), dtype).to(device)
    size = sum(p.numel() for p in model.parameters())
    print(f"vocabulary {tokenizer.get_vocab_size()}, {size / 1e6:.2f}M weights, on {device}")
    fit(model, preset, path, device, arguments.seed)
    save(model, tokenizer, out)
    check(model, out)


if __name__ == "__main__":
    main()
