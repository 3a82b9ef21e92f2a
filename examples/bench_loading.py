"""How fast weights load, beside how fast their files can be read.

    python examples/bench_loading.py --folder /on/the/disk [--gigabytes 2] [--sample 1] [--keep]

Writes a checkpoint of random weights of Qwen3-8B's shapes, with as many layers as make that size.
Then, with the page cache dropped before each run that is called cold:

1. raw: threads read a sample of the files, with several numbers of threads and sizes of blocks,
   through the page cache and past it;
2. stream: the same with asyncllm's loader, to the GPU if there is one;
3. whole: all files, read and loaded as a model, cold and warm, and with other loaders.

The checkpoint is removed unless ``--keep`` is given; a kept one of the same size is used again.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from asyncllm.models.loading.checkpoint import DTYPES, read_headers
from asyncllm.models.loading.loader import load_model
from asyncllm.models.loading.weight_stream import READING, Reading, WeightStream
from asyncllm.models.spec import read_spec

GB = 10**9
MIB = 1 << 20
SHARD_BYTES = 5 * GB
HEAD_DIM, VOCAB = 128, 32_768

#: Readers, and MiB of a block. More in flight only takes memory.
SWEEP = [
    (readers, mib) for readers in (4, 8, 16, 32) for mib in (4, 8, 16, 32) if readers * mib <= 256
]
QUICK = SWEEP[:2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("bench-loading"))
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint")
    parser.add_argument("--sample", type=float, default=1.0, help="gigabytes of runs 1 and 2")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoint there")
    parser.add_argument("--quick", action="store_true", help="a small checkpoint, read in two ways")
    args = parser.parse_args()
    files = make_checkpoint(args.folder, *((0.05, 512) if args.quick else (args.gigabytes, 4096)))
    ways = QUICK if args.quick else SWEEP
    try:
        measure(args.folder, files, int(args.sample * GB), torch.device(args.device), ways)
    finally:
        if not args.keep:
            shutil.rmtree(args.folder)


#: Numbers of readers and MiB of a block.
Ways = list[tuple[int, int]]


def measure(
    folder: Path, files: list[Path], sample_bytes: int, device: torch.device, ways: Ways
) -> None:
    sample = take(files, sample_bytes)
    size = sum(end for _, end in sample)
    print(f"\nraw, {size / GB:.1f} GB, cold, GB/s")
    raw = sweep(sample, size, ways, lambda reading: read_raw(sample, reading))
    print("\nraw, warm, GB/s")
    repeat(sample, size, (False,), lambda reading: read_raw(sample, reading))
    measure_stream(sample, device, ways)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    whole(folder, files, device, max(raw, key=lambda reading: raw[reading]))


def measure_stream(sample: Sequence[tuple[Path, int]], device: torch.device, ways: Ways) -> None:
    targets = [(file, places(file, device, end)) for file, end in sample]
    size = sum(place.nbytes for _, tensors in targets for place in tensors.values())
    print(f"\nstream to {device}, cold, GB/s")
    sweep(sample, size, ways, lambda reading: stream(targets, device, reading))
    print(f"\nstream to {device}, warm, GB/s")
    repeat(sample, size, (False, True), lambda reading: stream(targets, device, reading))


def whole(folder: Path, files: list[Path], device: torch.device, best: Reading) -> None:
    """All files: read in the best way, and loaded as a model and with other loaders."""
    everything = take(files, sum(file.stat().st_size for file in files))
    size = sum(end for _, end in everything)
    spec = read_spec(folder)

    def load(dtype: torch.dtype) -> None:
        load_model(folder, spec, dtype, device, max_length=1024)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def mapped() -> None:
        for file in files:  # one at a time, which leaves room for the next
            load_file(file, device=str(device))

    def load_advised() -> None:
        advice = threading.Thread(target=read_ahead, args=(everything,))
        advice.start()
        load(torch.bfloat16)
        advice.join()

    runs: list[tuple[str, Callable[[], object]]] = [
        (f"raw, {label(best)}", lambda: read_raw(everything, best)),
        (f"raw, {label(READING)}", lambda: read_raw(everything, READING)),
        ("load_model, bfloat16", lambda: load(torch.bfloat16)),
        ("load_model, the system told to read ahead", load_advised),
        ("load_model, to float16", lambda: load(torch.float16)),
        ("safetensors.load_file", mapped),
        ("fastsafetensors", lambda: load_fast(files, device)),
    ]
    print(f"\nwhole checkpoint, {size / GB:.1f} GB: GB/s cold (part of raw), warm")
    reference = 0.0
    for name, run in runs:
        with suppress(ImportError):
            drop(everything)
            cold = size / GB / timed(run)
            reference = reference or cold
            warm(everything)
            fast = size / GB / timed(run)
            print(f"  {name:42} {cold:6.2f} ({cold / reference:4.0%}) {fast:6.2f}", flush=True)


def sweep(
    sample: Sequence[tuple[Path, int]],
    size: int,
    ways: Ways,
    run: Callable[[Reading], object],
) -> dict[Reading, float]:
    """Cold rates of all ways of reading; the first comes again at the end, to show a drift."""
    readings = [Reading(n, mib * MIB, direct) for direct in (False, True) for n, mib in ways]
    rates: dict[Reading, float] = {}
    for reading in [*readings, readings[0]]:
        drop(sample)
        started = time.perf_counter()
        run(reading)
        rate = size / GB / (time.perf_counter() - started)
        rates.setdefault(reading, rate)
        print(f"  {label(reading)}: {rate:6.2f}", flush=True)
    return rates


def repeat(
    sample: Sequence[tuple[Path, int]],
    size: int,
    past: tuple[bool, ...],
    run: Callable[[Reading], object],
) -> None:
    """Warm rates of a few ways of reading, past the page cache or not."""
    for direct in past:
        for readers, mib in ((8, 4), (16, 4), (8, 8), (16, 8)):
            warm(sample)
            started = time.perf_counter()
            run(reading := Reading(readers, mib * MIB, direct))
            print(f"  {label(reading)}: {size / GB / (time.perf_counter() - started):6.2f}")


def label(reading: Reading) -> str:
    readers, block_bytes, direct = reading
    how = "direct" if direct else "cached"
    return f"{readers:2} readers of {block_bytes >> 20:2} MiB, {how}"


def timed(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def stream(
    targets: list[tuple[Path, dict[str, Tensor]]], device: torch.device, reading: Reading
) -> None:
    """Stream tensors of files to their places, buffers and all."""
    with WeightStream(device, reading) as copying:
        for file, tensors in targets:
            for _ in copying.copy(file, tensors):
                pass
        if device.type == "cuda":
            torch.cuda.synchronize()


def load_fast(files: list[Path], device: torch.device) -> None:
    """With IBM's fastsafetensors, if it is installed."""
    fast = importlib.import_module("fastsafetensors")
    for file in files:
        loader = fast.SafeTensorsFileLoader(fast.SingleGroup(), device=device, nogds=True)
        loader.add_filenames({0: [str(file)]})
        buffers = loader.copy_files_to_device()
        if device.type == "cuda":
            torch.cuda.synchronize()
        buffers.close()
        loader.close()


def read_raw(parts: Sequence[tuple[Path, int]], reading: Reading) -> None:
    """Threads read the beginnings of files, block by block, each into memory of its own."""
    flags = os.O_RDONLY | (os.O_DIRECT if reading.direct else 0)
    opened = [(os.open(file, flags), end) for file, end in parts]
    blocks = (
        (descriptor, offset)
        for descriptor, end in opened
        for offset in range(0, end, reading.block_bytes)
    )
    taking = threading.Lock()
    failed: list[OSError] = []

    def work() -> None:
        with mmap.mmap(-1, reading.block_bytes) as memory:
            while True:
                with taking:
                    descriptor, offset = next(blocks, (None, 0))
                if descriptor is None:
                    return
                try:
                    os.preadv(descriptor, [memory], offset)
                except OSError as error:
                    failed.append(error)
                    return

    threads = [threading.Thread(target=work) for _ in range(reading.readers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for descriptor, _ in opened:
        os.close(descriptor)
    if failed:
        raise failed[0]


def read_ahead(parts: Sequence[tuple[Path, int]]) -> None:
    """Have the system read files into the page cache."""
    for file, end in parts:
        descriptor = os.open(file, os.O_RDONLY)
        for offset in range(0, end, 64 * MIB):
            os.posix_fadvise(descriptor, offset, 64 * MIB, os.POSIX_FADV_WILLNEED)
        os.close(descriptor)


def take(files: Sequence[Path], num_bytes: int) -> list[tuple[Path, int]]:
    """The beginnings of files, of so many bytes in all: files and the ends of what to read."""
    parts = []
    for file in files:
        end = min(file.stat().st_size, num_bytes)
        if end > 0:
            parts.append((file, end))
        num_bytes -= end
    return parts


def places(file: Path, device: torch.device, end: int) -> dict[str, Tensor]:
    """Places for the first tensors of a file, of at most ``end`` bytes in all."""
    found: dict[str, Tensor] = {}
    for header in read_headers([file]):
        place = torch.empty(header.shape, dtype=DTYPES[header.dtype], device=device)
        end -= place.nbytes
        if end < 0 and found:
            break
        found[header.name] = place
    return found


def drop(parts: Sequence[tuple[Path, int]]) -> None:
    """Drop files from the page cache, and say so if it keeps some."""
    for file, end in parts:
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
        if (kept := cached_share(file, end)) > 0.02:
            print(f"  ({kept:.0%} of {file.name} stays in the page cache)")


def warm(parts: Sequence[tuple[Path, int]]) -> None:
    """Read files into the page cache."""
    read_raw(parts, Reading(8, 8 * MIB))


def cached_share(file: Path, end: int) -> float:
    """The share of a file's beginning that is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(file, "rb") as raw, mmap.mmap(raw.fileno(), end, access=mmap.ACCESS_READ) as mapped:
        pages = np.zeros(-(-end // mmap.PAGESIZE), dtype=np.uint8)
        view = np.frombuffer(mapped, dtype=np.uint8)
        address, vector = ctypes.c_void_p(view.ctypes.data), ctypes.c_void_p(pages.ctypes.data)
        status = libc.mincore(address, ctypes.c_size_t(end), vector)
        del view  # which keeps the file mapped
        return float((pages & 1).mean()) if status == 0 else 0.0


def layer_shapes(hidden: int) -> dict[str, tuple[int, ...]]:
    """Weights of a layer of Qwen3 with as many heads as 8B has for its size."""
    return {
        "input_layernorm": (hidden,),
        "mlp.down_proj": (hidden, 3 * hidden),
        "mlp.gate_proj": (3 * hidden, hidden),
        "mlp.up_proj": (3 * hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "self_attn.k_norm": (HEAD_DIM,),
        "self_attn.k_proj": (hidden // 4, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (hidden // 4, hidden),
    }


def make_checkpoint(folder: Path, gigabytes: float, hidden: int) -> list[Path]:
    """Write config.json and shards, if they are not there yet; returns the shards."""
    outside = {"model.embed_tokens": (VOCAB, hidden), "model.norm": (hidden,)}
    layer = layer_shapes(hidden)
    layer_bytes = sum(2 * int(np.prod(shape)) for shape in layer.values())
    outside_bytes = sum(2 * int(np.prod(shape)) for shape in outside.values())
    layers = max(round((gigabytes * GB - outside_bytes) / layer_bytes), 1)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": hidden // HEAD_DIM,
        "num_key_value_heads": hidden // HEAD_DIM // 4,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    }
    described = folder / "config.json"
    if described.exists() and json.loads(described.read_text()) == config:
        return sorted(folder.glob("*.safetensors"))
    if folder.exists():
        raise SystemExit(f"{folder} exists, and is not a checkpoint of {gigabytes} GB of this kind")
    folder.mkdir(parents=True)
    tensors = [*outside.items()]
    tensors += [(f"model.layers.{i}.{n}", s) for i in range(layers) for n, s in layer.items()]
    shards = list(split(tensors))
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    # One random block for all: disks may compress, but hardly find the same gigabytes again.
    block = np.random.default_rng(0).normal(size=32 * MIB).astype(np.float32) * 0.02
    data = torch.from_numpy(block).to(torch.bfloat16).view(torch.uint8).numpy()
    started = time.perf_counter()
    for name, shard in zip(names, shards, strict=True):
        write(folder / name, shard, data)
    seconds = time.perf_counter() - started
    weight_map = {f"{n}.weight": f for f, s in zip(names, shards, strict=True) for n, _ in s}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    described.write_text(json.dumps(config))
    size = sum((folder / name).stat().st_size for name in names)
    print(f"wrote {size / GB:.1f} GB in {len(names)} files at {size / GB / seconds:.2f} GB/s")
    return [folder / name for name in names]


Shard = list[tuple[str, tuple[int, ...]]]


def split(tensors: Shard) -> Iterator[Shard]:
    """Shards of at most ``SHARD_BYTES``."""
    shard: Shard = []
    size = 0
    for name, shape in tensors:
        num_bytes = 2 * int(np.prod(shape))
        if shard and size + num_bytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append((name, shape))
        size += num_bytes
    yield shard


def write(file: Path, shard: Shard, data: np.ndarray) -> None:
    """Write a safetensors file of bfloat16 tensors, whose values are ``data`` again and again."""
    header: dict[str, object] = {}
    end = 0
    for name, shape in shard:
        begin, end = end, end + 2 * int(np.prod(shape))
        offsets = [begin, end]
        header[f"{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": offsets}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with open(file, "wb") as raw:
        raw.write(len(encoded).to_bytes(8, "little") + encoded)
        for begin in range(0, end, len(data)):
            raw.write(data[: min(len(data), end - begin)].data)
        raw.flush()
        os.fsync(raw.fileno())


if __name__ == "__main__":
    main()
