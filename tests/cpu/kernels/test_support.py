"""Without a Triton that compiles and launches, every operation runs in plain torch."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from asyncllm.executor.compile_watch import CompileWatch
from asyncllm.kernels import support
from asyncllm.kernels.activation import gated
from asyncllm.kernels.gpu import Gpu, pretended
from asyncllm.kernels.linear import linear
from asyncllm.kernels.norm import rms_norm
from asyncllm.kernels.sampling import sample_tokens
from asyncllm.kernels.scores import mask_scores, mask_width, penalise
from asyncllm.kernels.support import has_triton_kernels, obstacle, say_what_runs
from asyncllm.kernels.tokens import enter_pages, locate_tokens
from asyncllm.kernels.types import Norm

CPU = torch.device("cpu")
T4, A100 = Gpu((7, 5), "Tesla T4", 40), Gpu((8, 0), "NVIDIA A100-SXM4-80GB", 108)
H100, H200 = Gpu((9, 0), "NVIDIA H100", 132), Gpu((9, 0), "NVIDIA H200", 132)
B200 = Gpu((10, 0), "NVIDIA B200", 148)


class OnGpu(Tensor):
    """A tensor that passes for one on a GPU, where the interpreter takes the GPU's place."""

    is_cuda = True


def on_gpu(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(OnGpu)


@pytest.fixture(autouse=True)
def undecided() -> Iterator[None]:
    support._obstacle.cache_clear()
    yield
    support._obstacle.cache_clear()


@pytest.fixture(params=["absent", "moved", "no compiler", "another launcher"])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A Triton that does not work; returns why, as the log says."""
    if request.param == "absent":
        monkeypatch.setitem(sys.modules, "triton", None)
        return "Triton is not installed"
    pytest.importorskip("triton")
    if request.param == "moved":
        monkeypatch.delitem(sys.modules, "asyncllm.kernels.triton.probe", raising=False)
        monkeypatch.setitem(sys.modules, "asyncllm.kernels.triton.launch", None)
        return "ModuleNotFoundError: import of asyncllm.kernels.triton.launch halted"
    from asyncllm.kernels.triton.launch import Launcher

    error: Exception
    if request.param == "no compiler":
        error = RuntimeError("Failed to find C compiler.\nPlease specify one")
    else:
        error = TypeError("function takes exactly 12 arguments (11 given)")

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(Launcher, "__call__", fail)
    return f"{type(error).__name__}: {error}".splitlines()[0]


def test_a_triton_that_works_is_used() -> None:
    pytest.importorskip("triton")
    with pretended(A100):
        assert obstacle(CPU) is None  # a kernel has run in the interpreter
        assert has_triton_kernels(on_gpu(torch.zeros(1)))
        assert not has_triton_kernels(torch.zeros(1))


def test_a_kernel_that_computes_nothing_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from asyncllm.kernels.triton.launch import Launcher

    monkeypatch.setattr(Launcher, "__call__", lambda *args, **kwargs: None)
    with pretended(H200):
        assert "wrong result" in (obstacle(CPU) or "")


def test_gpus_before_ampere_are_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "asyncllm.kernels.triton.probe", None)
    with pretended(T4):
        assert obstacle(CPU) == "they need compute capability 8.0, and this GPU has 7.5"


def test_every_operation_falls_back(broken: str) -> None:
    """And none raises, or launches a kernel."""
    x, w = torch.randn(3, 64), torch.randn(128, 64)
    norm = Norm(torch.rand(64), 1e-6)
    record = torch.zeros(4, 3, dtype=torch.int64)
    rows = torch.arange(3)
    masks = torch.full((4, mask_width(64)), -1, dtype=torch.int32)

    def enter(new: Tensor) -> Tensor:
        table = torch.zeros(2, 5, dtype=torch.int32)
        enter_pages(new, table)
        return table

    def masked(logits: Tensor) -> Tensor:
        return mask_scores(logits, rows, rows, masks)

    def penalised(logits: Tensor) -> Tensor:
        counts, in_prompt = masks.new_ones(4, 64), torch.ones(4, 64, dtype=torch.uint8)
        return penalise(logits, rows, rows, torch.full((4, 3), 0.5), counts, in_prompt)

    def located(entries: Tensor) -> Tensor:
        last = torch.tensor([5, 6], dtype=torch.int64)
        return torch.stack(locate_tokens(entries, last, entries.new_ones(2, 4), 16))

    def sampled(logits: Tensor) -> Tensor:
        return sample_tokens(logits, record, rows, rows, draws=False, filters=False)

    operations: list[tuple[Callable[[Tensor], Tensor], Tensor]] = [
        (lambda x: rms_norm(x, norm), x),
        (lambda x: linear(x, w, norm=norm, act="silu"), x),
        (lambda x: gated(x, "silu"), x),
        (sampled, x),
        (masked, x),
        (penalised, x),
        (located, torch.tensor([[-1, 9], [0, 1], [3, 20]], dtype=torch.int32)),
        (enter, torch.tensor([[1, 2, 7]], dtype=torch.int32)),
    ]
    with pretended(H200):
        assert (obstacle(CPU) or "").startswith(broken)
        for operation, argument in operations:
            expected = operation(argument.clone())
            assert torch.equal(operation(on_gpu(argument.clone())), expected)


def test_one_line_says_why(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    with pretended(H200):
        say_what_runs(CPU)
        rms_norm(on_gpu(torch.randn(3, 64)), Norm(torch.rand(64), 1e-6))
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith(
        "NVIDIA H200 (compute capability 9.0): all steps run on PyTorch's kernels, which is slow: "
        f"Triton's do not run here: {broken}"
    )


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (A100, "(compute capability 8.0): runs on the kernels for every GPU since Ampere"),
        (B200, "(compute capability 10.0): runs on the kernels for every GPU since Ampere"),
        (H100, "(compute capability 9.0): runs on the kernels for Hopper, which were tuned on an"),
        (H200, None),
    ],
    ids=lambda value: value.name if isinstance(value, Gpu) else "",
)
def test_what_is_not_tuned_is_said(
    gpu: Gpu, words: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    caplog.set_level(logging.INFO)
    with pretended(gpu):
        say_what_runs(CPU)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (words is not None)
    assert all(f"{gpu.name} {words}" in message for message in messages)


def test_compiling_is_not_watched_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    watch = CompileWatch()
    watch.install("folder")
    watch.start_serving()
    assert not watch.compiled
