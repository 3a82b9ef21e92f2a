"""A launch of every kernel, of the shapes that models have.

As a program, it compiles the kernels for GPUs that need not be here. Each line of stdin is JSON: a
compute capability, hashes of known variants, and names of launches to sample. Each line of stdout
is what ``compile_modules`` returns.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from asyncllm.executor.startup.triton_prebuild import Variant, gpus_of, recorded_launches
from asyncllm.kernels.gpu import Gpu
from asyncllm.kernels.tuning import (
    GemvTile,
    RegisterSkinnyTile,
    SmemResidentTile,
    TmaSplitTile,
    TmaTile,
)
from asyncllm.kernels.types import (
    AttentionSpec,
    DecodeRows,
    Fp8Matrix,
    Gated,
    GatedExperts,
    HeadEncoding,
    Norm,
)

if TYPE_CHECKING:
    from asyncllm.kernels.triton.gemm.projection import Projection

BF16 = torch.bfloat16
EXPERTS, INNER = 32, 256
HIDDEN, INTERMEDIATE, MAX_LENGTH, PAGE_SIZE = 1024, 3072, 4096, 16
SPEC = AttentionSpec(0, num_heads=16, num_kv_heads=8, head_dim=128, scale=0.1)
#: Its kinds of layers: with a window, with values that are keys, and with those of another layer.
GEMMA4 = (
    replace(SPEC, head_dim=256, window=1024),
    replace(SPEC, head_dim=512, values_are_keys=True, pair_distance=256),
    replace(SPEC, head_dim=512, shares=4),
)


def half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=BF16)


def int32(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int32)


def int64(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def norm(size: int, *, offset: float | None = None) -> Norm:
    return Norm(half(size), 1e-6, offset)


def encoding(spec: AttentionSpec = SPEC) -> HeadEncoding:
    """Of plain layers, or of those in GEMMA4."""
    size, gemma = spec.head_dim, spec in GEMMA4
    one = norm(size, offset=0.0 if gemma else None)
    k_norm = one if spec.shares is None else None
    rope = torch.empty(MAX_LENGTH, size if spec.pair_distance is None else size // 4)
    return HeadEncoding(one, k_norm, rope, normalizes_values=gemma)


def pages(head_dim: int = SPEC.head_dim) -> Tensor:
    return half(64, PAGE_SIZE, SPEC.num_kv_heads, head_dim)


def qkv(tokens: int) -> Tensor:
    return half(tokens, SPEC.projected_size)


def launch_probe() -> None:
    from asyncllm.kernels.triton.probe import probe

    probe(torch.device("meta"))


def launch_norm() -> None:
    from asyncllm.kernels.triton.norm import rms_norm

    rms_norm(half(1, HIDDEN), norm(HIDDEN))
    rms_norm(half(4096, HIDDEN), norm(HIDDEN, offset=1.0))
    rms_norm(half(3, 8, HIDDEN), Norm(half(8, HIDDEN), 1e-5))


def launch_activation() -> None:
    from asyncllm.kernels.activation import ACTIVATIONS
    from asyncllm.kernels.triton.activation import gated, sigmoid_gated

    for act in ACTIVATIONS:
        gated(half(3, 2 * INTERMEDIATE), act)
    sigmoid_gated(half(3, HIDDEN), half(3, HIDDEN))


def launch_heads() -> None:
    from asyncllm.kernels.triton.qk_norm_rope import encode_heads

    encode_heads(qkv(3), SPEC, encoding(), int64(3), pages(), pages(), int64(3))


def launch_tokens() -> None:
    from asyncllm.kernels.triton.tokens import (
        enter_pages,
        fill_pages,
        locate_tokens,
        settle_input,
        verify_drafts,
    )

    locate_tokens(int32(3, 50), int64(9), int32(9, 256), PAGE_SIZE)
    fill_pages(int32(9, 256), int32(5), int32(6), int32(100))
    enter_pages(int32(50, 3), int32(9, 256))
    settle_input(int32(200), int32(20, 4), int64(9), int64(9, 8))
    verify_drafts(int64(50), int32(5, 12), int64(9), int64(9), int64(9, 8))


def launch_extend() -> None:
    from asyncllm.kernels.triton.attention.prefill import choose_blocks, prefill_attention
    from asyncllm.kernels.types import PrefillRows

    sizes = *((size, BF16) for size in (64, 128, 256, 512)), (128, torch.float32)
    for head_dim, dtype in (*sizes, (512, torch.float32)):
        spec = replace(SPEC, head_dim=head_dim)
        q = torch.empty(100, SPEC.num_heads, head_dim, dtype=dtype)
        cache = torch.empty(64, PAGE_SIZE, SPEC.num_kv_heads, head_dim, dtype=dtype)
        rows = PrefillRows(int32(3), int32(3), int32(4))
        blocks = choose_blocks(q)
        prefill_attention(q, cache, cache, int32(9, 256), rows, spec, blocks=blocks)


def launch_extend_hopper() -> None:
    from asyncllm.kernels.triton.attention.prefill import prefill_attention
    from asyncllm.kernels.types import PrefillRows

    q = qkv(100).view(100, -1, SPEC.head_dim)[:, : SPEC.num_heads]
    rows = PrefillRows(int32(3), int32(3), int32(4))
    for sinks in (None, half(SPEC.num_heads)):
        prefill_attention(q, pages(), pages(), int32(9, 256), rows, SPEC, sinks=sinks)


def launch_decode() -> None:
    from asyncllm.kernels.triton.attention.decode import decode_attention

    q = half(2, SPEC.num_heads, SPEC.head_dim)
    for overlaps in (False, True):
        rows = DecodeRows(pages(), pages(), int32(3, 256), int32(2), int32(2))
        decode_attention(q, rows, SPEC, overlaps_previous=overlaps)


def launch_decode_hopper() -> None:
    from asyncllm.kernels.triton.attention.decode import decode_attention, decode_heads

    rows = DecodeRows(pages(), pages(), int32(71, 256), int32(70), int32(70))
    q = half(70, SPEC.num_heads, SPEC.head_dim)
    decode_attention(q, rows, SPEC, overlaps_previous=True)
    for num_heads in (16, 64, 128):
        spec = replace(SPEC, num_heads=num_heads)
        decode_attention(half(70, num_heads, SPEC.head_dim), rows, spec)
        qkv = half(70, (num_heads + 2 * SPEC.num_kv_heads) * SPEC.head_dim)
        decode_heads(qkv, encoding(), int64(70), int64(70), rows, spec)
    spec, sinks = replace(SPEC, num_heads=64), half(64)
    decode_attention(half(70, 64, SPEC.head_dim), rows, spec, sinks=sinks)
    with_sinks = encoding()._replace(sinks=sinks)
    qkv = half(70, (64 + 2 * SPEC.num_kv_heads) * SPEC.head_dim)
    decode_heads(qkv, with_sinks, int64(70), int64(70), rows, spec)


def launch_decode_heads() -> None:
    from asyncllm.kernels.triton.attention.decode import decode_heads

    rows = DecodeRows(pages(), pages(), int32(3, 256), int32(2), int32(2))
    decode_heads(qkv(2), encoding(), int64(2), int64(2), rows, SPEC, fused=True)


def launch_gemma4() -> None:
    from asyncllm.kernels.triton.attention.decode import decode_attention, decode_heads

    table = int32(3, 256), int32(2), int32(2)
    for spec in GEMMA4:
        rows = DecodeRows(pages(spec.head_dim), pages(spec.head_dim), *table)
        decode_attention(half(2, spec.num_heads, spec.head_dim), rows, spec)
        for fused in (False, True):
            heads = half(2, spec.projected_size), encoding(spec), int64(2), int64(2)
            decode_heads(*heads, rows, spec, fused=fused)


def launch_sinks() -> None:
    from asyncllm.kernels.triton.attention.sinks import apply_sinks

    for num_heads, head_dim in ((64, 64), (20, 128)):
        apply_sinks(half(3, num_heads, head_dim), torch.empty(3, num_heads), half(num_heads))


def launch_linear() -> None:
    from asyncllm.kernels.triton.gemm.linear import project
    from asyncllm.kernels.triton.gemm.projection import Projection

    for rows, tile in (
        (1, GemvTile(block_n=4, block_k=1024, warps=4)),
        (8, RegisterSkinnyTile(block_n=16, block_k=512, preloads=True, warps=4)),
    ):
        project(tile, gated(rows))
        project(tile, added(rows))
        routed = half(rows, HIDDEN), half(128, HIDDEN)
        project(tile, Projection(*routed, dtype=torch.float32))


def launch_linear_hopper() -> None:
    from asyncllm.kernels.triton.gemm.linear import project

    for rows, tile in (
        (32, SmemResidentTile(fold=2, block_k=256, splits=1, warps=4)),
        (64, TmaTile(parts=2, fold=1, block_k=64, splits=2, stages=4, x_stages=3)),
    ):
        project(tile, gated(rows))
        project(tile, added(rows))
    project(TmaSplitTile(3, 1, 4), gated(250))
    project(TmaSplitTile(2, 2, 4), added(200))


def launch_ordered() -> None:
    from asyncllm.kernels.triton.attention.ordered import (
        ordered_decode_attention,
        ordered_prefill_attention,
    )
    from asyncllm.kernels.triton.gemm.ordered import ordered_linear
    from asyncllm.kernels.types import PrefillRows

    for head_dim in (64, 128, 256, 512):
        spec = replace(SPEC, head_dim=head_dim, window=1024 if head_dim == 256 else None)
        q, cache = half(3, SPEC.num_heads, head_dim), pages(head_dim)
        at = cache, cache, int32(9, 256)
        ordered_decode_attention(q, DecodeRows(*at, int32(3), int32(3)), spec)
        ordered_prefill_attention(q, *at, PrefillRows(int32(2), int32(2), int32(3)), spec)
    for rows in (1, 300):
        ordered_linear(half(rows, HIDDEN), half(INTERMEDIATE + 4, HIDDEN), act="silu")


def launch_ordered_hopper() -> None:
    from asyncllm.kernels.triton.gemm.ordered import ordered_linear

    for rows in (1, 64, 200, 3000):
        up, out = half(2 * INTERMEDIATE, HIDDEN), half(rows, HIDDEN)
        ordered_linear(half(rows, HIDDEN), up, norm=norm(HIDDEN), act="silu")
        ordered_linear(half(rows, INTERMEDIATE), half(HIDDEN, INTERMEDIATE), residual=out)


def gated(rows: int) -> Projection[Tensor]:
    from asyncllm.kernels.triton.gemm.projection import Projection

    weight = half(INTERMEDIATE, HIDDEN)
    return Projection(half(rows, HIDDEN), weight, norm=norm(HIDDEN), act="silu")


def added(rows: int) -> Projection[Tensor]:
    from asyncllm.kernels.triton.gemm.projection import Projection

    weight = half(INTERMEDIATE, HIDDEN)
    return Projection(half(rows, HIDDEN), weight, residual=half(rows, INTERMEDIATE))


def launch_recurrent() -> None:
    from asyncllm.kernels.triton.recurrent.delta import gated_delta_net
    from asyncllm.kernels.triton.recurrent.mamba import mamba
    from asyncllm.kernels.triton.recurrent.states import copy_states
    from asyncllm.kernels.types.recurrent import DeltaNet, LayerState, Mamba, StateRows

    numbers = torch.empty(32)
    net = DeltaNet(16, 32, 128, 128, half(8192, 4), numbers, numbers, half(128), 1e-6)
    state = LayerState(half(9, 4, 8192), torch.empty(9, 32, 128, 128))
    rows = StateRows(int32(8), int32(8), int32(9), one_token=False)
    gated_delta_net(half(100, 12288), half(100, 64), net, state, rows)
    one_token = StateRows(int32(8), int32(8), int32(9), one_token=True)
    gated_delta_net(half(8, 12288), half(8, 64), net, state, one_token)
    gated_delta_net(
        *(half(1, 12288), half(1, 64), net, state._replace(matrices=half(9, 32, 128, 128))),
        StateRows(int32(1), int32(1), int32(2), one_token=True),
    )
    copy_states(half(9, 4 * 8192), torch.empty(9, 32 * 128 * 128), int32(3, 2))
    sizes, of_heads = (48, 1, 128, 64), (numbers, numbers, numbers)
    mamba_net = Mamba(*sizes, half(3328, 4), half(3328), *of_heads, (0.0, float("inf")))
    state = LayerState(half(9, 4, 3328), torch.empty(9, 48, 128, 64))
    mamba(half(100, 6448), mamba_net, state, rows)


def launch_ordered_recurrent() -> None:
    from asyncllm.kernels.triton.recurrent.ordered import ordered_delta_net, ordered_mamba
    from asyncllm.kernels.types.recurrent import DeltaNet, LayerState, Mamba, StateRows

    numbers = torch.empty(32)
    net = DeltaNet(16, 32, 128, 128, half(8192, 4), numbers, numbers, half(128), 1e-6)
    state = LayerState(half(9, 4, 8192), torch.empty(9, 32, 128, 128))
    rows = StateRows(int32(8), int32(8), int32(9), one_token=False)
    ordered_delta_net(half(100, 12288), half(100, 64), net, state, rows)
    sizes, of_heads = (48, 1, 128, 64), (numbers, numbers, numbers)
    mamba_net = Mamba(*sizes, half(3328, 4), half(3328), *of_heads, (0.0, float("inf")))
    state = LayerState(half(9, 4, 3328), torch.empty(9, 48, 128, 64))
    ordered_mamba(half(100, 6448), mamba_net, state, rows)


def launch_sampling() -> None:
    from asyncllm.kernels.triton.sampling.sampling import sample_tokens

    logits = half(8, 151_936)
    sample_tokens(logits, int64(9, 3), int64(8), int64(8), draws=True, filters=True)
    sample_tokens(logits, int64(9, 3), int64(8), int64(8), draws=False, filters=False)


def launch_penalties() -> None:
    from asyncllm.kernels.triton.sampling.scores import penalise

    vocab, slots = 151_936, 9
    counts, in_prompt = int32(slots, vocab), torch.empty(slots, vocab, dtype=torch.bool)
    penalise(half(8, vocab), int64(8), int64(8), torch.empty(slots, 3), counts, in_prompt)


def launch_masks() -> None:
    from asyncllm.kernels.scores import mask_width
    from asyncllm.kernels.triton.sampling.scores import mask_scores

    vocab, slots = 151_936, 9
    mask_scores(half(8, vocab), int64(8), int64(8), int32(slots, mask_width(vocab)))


def launch_all_reduce() -> None:
    from asyncllm.kernels.triton.collectives.all_reduce import sum_in_one_shot, sum_in_two_shots
    from asyncllm.kernels.triton.collectives.push import Channel

    channel = Channel(int64(4), int32(64), int32(1), rank=1)
    for push in (sum_in_one_shot, sum_in_two_shots):
        push(half(3, HIDDEN), half(3, HIDDEN), channel)
        push(torch.empty(3, 1), None, channel)


def launch_all_gather() -> None:
    from asyncllm.kernels.triton.collectives.all_gather import rows_of_all
    from asyncllm.kernels.triton.collectives.push import Channel

    rows_of_all(half(3, HIDDEN), Channel(int64(4), int32(64), int32(1), rank=1))


def launch_fp8() -> None:
    from asyncllm.kernels.triton.gemm.fp8_rows import quantize_rows
    from asyncllm.kernels.triton.gemm.linear import linear, linear_with_rest

    by_row = fp8_matrix(INTERMEDIATE, HIDDEN, blocked=False)
    blocks = fp8_matrix(INTERMEDIATE, HIDDEN, blocked=True)
    linear(half(1, HIDDEN), by_row, norm=norm(HIDDEN), act="silu")
    linear(half(1, HIDDEN), blocks, residual=half(1, INTERMEDIATE))
    linear_with_rest(half(1, HIDDEN), blocks, half(64, HIDDEN), norm=norm(HIDDEN))
    linear(half(4, HIDDEN), by_row, norm=norm(HIDDEN), act="silu")
    linear(half(4, HIDDEN), blocks, residual=half(4, INTERMEDIATE))
    quantize_rows(half(300, HIDDEN), norm=norm(HIDDEN), blocked=True)

    for blocked in (True, False):
        gate_up = fp8_matrix(EXPERTS * 2 * INNER, HIDDEN, blocked=blocked)
        down = fp8_matrix(EXPERTS * HIDDEN, INNER, blocked=blocked)
        mix(GatedExperts(EXPERTS, gate_up, down), (1, 16, 2048) if blocked else (16,))
    _attend_fp8(2, SPEC)


def launch_fp8_hopper() -> None:
    from asyncllm.kernels.triton.gemm.linear import gated_linear, linear

    wide = fp8_matrix(24 * HIDDEN, HIDDEN, blocked=True)
    linear(half(8, HIDDEN), wide, norm=norm(HIDDEN), act="silu")
    linear(half(64, HIDDEN), wide, norm=norm(HIDDEN), act="silu")
    narrow = fp8_matrix(4 * HIDDEN, 4 * HIDDEN, blocked=True)
    linear(half(100, 4 * HIDDEN), narrow, residual=half(100, 4 * HIDDEN))
    linear(half(40, 4 * HIDDEN), narrow)
    then = fp8_matrix(HIDDEN, 12 * HIDDEN, blocked=True)
    gated_linear(half(100, HIDDEN), wide, None, "silu", then, norm=norm(HIDDEN))
    by_row = fp8_matrix(HIDDEN, HIDDEN, blocked=False)
    linear(half(30, HIDDEN), by_row, half(HIDDEN))
    _attend_fp8(70, replace(SPEC, num_heads=32))
    _attend_fp8(70, replace(SPEC, num_heads=64, head_dim=64))


def _attend_fp8(rows: int, spec: AttentionSpec) -> None:
    """Decode rows, their heads, and a prompt, over 8-bit pages."""
    from asyncllm.kernels.triton.attention.decode import decode_attention, decode_heads
    from asyncllm.kernels.triton.attention.prefill import prefill_attention
    from asyncllm.kernels.triton.qk_norm_rope import encode_heads
    from asyncllm.kernels.types import PrefillRows

    keys, scales = pages(spec.head_dim).to(torch.float8_e4m3fn), torch.empty(2, SPEC.num_kv_heads)
    table = int32(rows + 1, 256), int32(rows), int32(rows)
    cache = DecodeRows(keys, keys, *table, scales)
    heads = half(rows, spec.projected_size)
    decode_attention(half(rows, spec.num_heads, spec.head_dim), cache, spec)
    decode_heads(heads, encoding(spec), int64(rows), int64(rows), cache, spec)
    q = encode_heads(heads, spec, encoding(spec), int64(rows), keys, keys, int64(rows), scales)
    longer = PrefillRows(int32(3), int32(3), int32(4))
    prefill_attention(q, keys, keys, table[0], longer, spec, scales=scales)


def fp8_matrix(rows: int, columns: int, *, blocked: bool) -> Fp8Matrix:
    data = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    scales = (rows // 128, columns // 128) if blocked else (rows, 1)
    return Fp8Matrix(data, torch.empty(scales))


def launch_int4() -> None:
    from asyncllm.kernels.triton.gemm.int4 import dequantize
    from asyncllm.kernels.triton.gemm.linear import linear
    from asyncllm.kernels.types import Int4Matrix

    groups = HIDDEN // 128
    weight = Int4Matrix(
        torch.empty(INTERMEDIATE, HIDDEN // 2, dtype=torch.uint8),
        torch.empty(groups, INTERMEDIATE, dtype=torch.float16),
        torch.empty(groups, INTERMEDIATE, dtype=torch.uint8),
    )
    linear(half(4, HIDDEN), weight, norm=norm(HIDDEN), act="silu")
    linear(half(40, HIDDEN), weight, residual=half(40, INTERMEDIATE))
    dequantize(weight, torch.bfloat16)


#: By module of ``kernels.triton``.
def launch_experts() -> None:
    from asyncllm.kernels.triton.experts.routing import choose_experts
    from asyncllm.kernels.types import Int4Matrix, Mxfp4Matrix, Routing

    def codes(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, dtype=torch.uint8)

    def int4(rows: int, columns: int) -> Int4Matrix:
        zero = codes(columns // 128, rows)
        return Int4Matrix(codes(rows, columns // 2), zero.half(), zero)

    def mxfp4(rows: int, columns: int) -> Mxfp4Matrix:
        return Mxfp4Matrix(codes(rows, columns // 2), codes(rows, columns // 32))

    gate_up, down = EXPERTS * 2 * INNER, EXPERTS * HIDDEN
    dense = half(EXPERTS, 2 * INNER, HIDDEN), half(EXPERTS, HIDDEN, INNER)
    mix(GatedExperts(EXPERTS, *dense), (1, 16, 2048))
    mix(GatedExperts(EXPERTS, int4(gate_up, HIDDEN), int4(down, INNER)), (16,))
    packed = mxfp4(gate_up, HIDDEN), mxfp4(down, INNER)
    biases = half(EXPERTS, 2 * INNER), half(EXPERTS, HIDDEN)
    mix(GatedExperts(EXPERTS, *packed, *biases, "clamped", True, 1.7, 7.0), (1, 16, 2048))
    choose_experts(half(3, 128), Routing(8, "softmax", True), BF16)
    choose_experts(half(3, 128), Routing(8, "softmax", True), BF16, factors=half(128))
    choose_experts(half(3, 61), Routing(4, "softmax", True, shared=2, has_gate=True), BF16)
    balanced = Routing(8, "sigmoid", True, 2.5, groups=8, top_groups=4, shared=1)
    choose_experts(torch.empty(3, 160), balanced, BF16, torch.empty(160))


def mix(experts: GatedExperts, numbers: Iterable[int]) -> None:
    """Mixtures of so many tokens."""
    from asyncllm.kernels.triton.experts.mixing import mix_experts

    for tokens in numbers:
        chosen = half(tokens, 4), int32(tokens, 4)
        x = half(tokens, HIDDEN)
        mix_experts(x, *chosen, experts, half(tokens, HIDDEN))
        mix_experts(x, *chosen, experts, half(tokens, HIDDEN), Gated(x, half(tokens, 1)))


LAUNCHES: dict[str, Callable[[], None]] = {
    name.removeprefix("launch_"): value
    for name, value in list(globals().items())
    if name.startswith("launch_")
}


def launches_of(gpu: Gpu) -> list[str]:
    """Those whose kernels run on this GPU."""
    return [
        name
        for name in LAUNCHES
        if (gpu.is_hopper or not name.endswith("_hopper")) and (gpu.has_fp8 or name != "fp8")
    ]


def compiled(variant: Variant, target: Any) -> tuple[str, int]:
    """PTX, and bytes of shared memory."""
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel
    from triton.experimental.gluon._runtime import GluonASTSource

    kind = GluonASTSource if variant.function.is_gluon() else ASTSource
    source = kind(variant.function, variant.signature, variant.constants, variant.attributes)
    kernel = compile_kernel(source, target=target, options=variant.options)
    return kernel.asm["ptx"], kernel.metadata.shared


def name_of(variant: Variant) -> str:
    return f"{variant.function.__module__}.{variant.function.__name__}"


def hash_of(variant: Variant) -> str:
    """All that Triton compiles, except the GPU for which it does."""
    of_gpus = {"arch", "supported_fp8_dtypes"}
    options = {key: value for key, value in variant.options.items() if key not in of_gpus}
    parts = variant.signature, variant.constants, variant.attributes, options
    said = "\n".join([name_of(variant), *(repr(sorted(map(repr, part.items()))) for part in parts)])
    return hashlib.sha256(said.encode()).hexdigest()


def compile_modules(
    gpu: Gpu, names: Iterable[str], known: Container[str] = (), sampled: Container[str] = ()
) -> dict[str, Any]:
    """Of each, [kernel, hash, options of its compilation, PTX, bytes of shared memory] of what it
    launches; or an error.

    The last two are None for known hashes, and where a launch is sampled and a kernel has had these
    types before.
    """
    seen: set[tuple[str, str]] = set()

    def described(variant: Variant, is_sampled: bool) -> tuple[Any, ...]:
        typed = name_of(variant), repr(variant.signature)
        left_out = hash_of(variant) in known or (is_sampled and typed in seen)
        seen.add(typed)
        made = (None, None) if left_out else compiled(variant, gpu.target)
        return name_of(variant), hash_of(variant), variant.options, *made

    launched: dict[str, Any] = {}
    with recorded_launches(gpu) as variants, torch.device("meta"):
        for name in names:
            before = len(variants)
            try:
                LAUNCHES[name]()
            except Exception:
                launched[name] = traceback.format_exc()
            else:
                launched[name] = variants[before:]
    for name, found in launched.items():
        if isinstance(found, str):
            continue
        try:
            launched[name] = [described(variant, name in sampled) for variant in found]
        except Exception:
            launched[name] = traceback.format_exc()
    return launched


if __name__ == "__main__":
    import_module("triton.compiler")  # once, before the forks
    for line in sys.stdin:
        arch, known, sampled = json.loads(line)
        if os.fork() == 0:  # Triton remembers the GPU
            [gpu] = gpus_of([arch])
            print(json.dumps(compile_modules(gpu, launches_of(gpu), known, sampled)), flush=True)
            os._exit(0)
        os.wait()
