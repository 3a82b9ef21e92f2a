"""Which attention backend is taken, and which of FlashInfer's libraries it needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncllm.attention import choose
from asyncllm.attention.choose import choose_backend
from asyncllm.attention.flashinfer import unsupported
from asyncllm.attention.flashinfer_library import Library, libraries_for
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.errors import KernelError, ModelError
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.kernels.gpu import Gpu
from asyncllm.kernels.types import AttentionSpec
from asyncllm.startup import flashinfer_prebuild as prebuild

if TYPE_CHECKING:
    from pathlib import Path

    from asyncllm.attention.base import AttentionBackend
    from asyncllm.config import AttentionName

BF16 = torch.bfloat16
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AMPERE, HOPPER = Gpu((8, 0), "A100", 108), Gpu((9, 0), "H200", 132)


def spec(
    layer: int = 0, group: int = 4, head_dim: int = 64, window: int | None = None
) -> AttentionSpec:
    return AttentionSpec(layer, 2 * group, 2, head_dim, head_dim**-0.5, window)


def chosen(name: AttentionName, device: torch.device) -> AttentionBackend:
    pool = KVPool(1, 2, 16, 2, 64, BF16, CPU)
    return choose_backend(name, pool, [spec()], BF16, device, torch.from_numpy)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with FlashInfer, as far as it is looked at before kernels are loaded."""
    monkeypatch.setattr(choose, "installed", lambda: True)
    monkeypatch.setattr(choose, "obstacle", lambda device: None)
    monkeypatch.setattr(choose, "gpu_of", lambda device: HOPPER)
    monkeypatch.setattr(PagedBackend, "warm_up", lambda *args: None)


def test_the_cpu_takes_torch_kernels_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(chosen("auto", CPU), SdpaBackend)
    assert isinstance(chosen("sdpa", CPU), SdpaBackend)
    assert not caplog.records


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_asking_for_kernels_where_they_cannot_be_is_an_error(name: AttentionName) -> None:
    with pytest.raises(ModelError, match=f"{name}: .* CUDA device") as raised:
        chosen(name, CPU)
    assert raised.value.param == "attention"


@pytest.mark.usefixtures("gpu")
def test_a_gpu_takes_our_own_kernels(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(chosen("auto", CUDA), PagedBackend)
    assert isinstance(chosen("triton", CUDA), PagedBackend)
    assert isinstance(chosen("sdpa", CUDA), SdpaBackend)
    assert not caplog.records


@pytest.mark.usefixtures("gpu")
def test_where_triton_does_not_run_auto_takes_torch_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "obstacle", lambda device: "Triton is not installed")
    assert isinstance(chosen("auto", CUDA), SdpaBackend)
    assert not caplog.records  # ``say_what_runs`` has said so
    with pytest.raises(ModelError, match="triton: Triton is not installed"):
        chosen("triton", CUDA)
    with pytest.raises(ModelError, match="flashinfer: Triton is not installed"):
        chosen("flashinfer", CUDA)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("gpu_here", "has_flashinfer", "first"),
    [(HOPPER, True, "own"), (AMPERE, True, "flashinfer"), (AMPERE, False, "own")],
)
def test_before_hopper_flashinfer_comes_first(
    gpu_here: Gpu, has_flashinfer: bool, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose, "gpu_of", lambda device: gpu_here)
    monkeypatch.setattr(choose, "installed", lambda: has_flashinfer)
    monkeypatch.setattr(Library, "is_built", lambda self: True)
    prompts = object()
    monkeypatch.setattr(choose, "FlashInferPrompts", lambda *args: prompts)
    backend = chosen("auto", CUDA)
    assert isinstance(backend, PagedBackend)
    assert (backend._prompts is prompts) == (first == "flashinfer")


@pytest.mark.usefixtures("gpu")
def test_our_own_kernels_come_after_flashinfer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such library")

    monkeypatch.setattr(choose, "gpu_of", lambda device: AMPERE)
    monkeypatch.setattr(Library, "is_built", lambda self: True)
    monkeypatch.setattr(choose, "FlashInferPrompts", fail)
    backend = chosen("auto", CUDA)
    assert isinstance(backend, PagedBackend)
    assert backend._prompts is None
    [record] = caplog.records
    assert record.getMessage() == (
        "attention does not run on flashinfer: RuntimeError: no such library"
    )


@pytest.mark.usefixtures("gpu")
def test_kernels_that_fail_leave_torch_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no kernel image is available for execution on the device\nmore")

    monkeypatch.setattr(PagedBackend, "warm_up", fail)
    assert isinstance(chosen("auto", CUDA), SdpaBackend)
    [record] = caplog.records
    assert record.getMessage().endswith("no kernel image is available for execution on the device")
    with pytest.raises(ModelError, match="no kernel image") as raised:
        chosen("triton", CUDA)
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.usefixtures("gpu")
def test_flashinfer_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "installed", lambda: False)
    with pytest.raises(ModelError, match="not installed"):
        chosen("flashinfer", CUDA)


@pytest.mark.usefixtures("gpu")
def test_kernels_are_not_compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "is_built", lambda self: False)
    monkeypatch.setattr(choose, "find_nvcc", lambda: None)
    with pytest.raises(ModelError, match="asyncllm kernels build"):
        chosen("flashinfer", CUDA)


@pytest.mark.parametrize(
    ("layers", "dtype", "reason"),
    [
        ([spec(), spec(head_dim=256, window=64)], BF16, None),
        ([spec()], torch.float16, None),
        ([spec()], torch.float32, "float32"),
        ([spec(), spec(head_dim=80)], BF16, "not 80"),
    ],
)
def test_what_flashinfer_supports(
    layers: list[AttentionSpec], dtype: torch.dtype, reason: str | None
) -> None:
    problem = unsupported(layers, dtype)
    assert (problem is None) == (reason is None)
    assert reason is None or reason in (problem or "")


def test_layers_of_one_kind_share_libraries() -> None:
    layers = [spec(layer, group=4, window=None if layer % 2 else 64) for layer in range(6)]
    assert libraries_for(layers, BF16) == [
        Library(BF16, 64, window=True),
        Library(BF16, 64),
    ]


def test_a_library_is_compiled_once_and_again_if_forced(tmp_path: Path) -> None:
    compiled: list[bytes] = []

    def compile_it(verbose: bool) -> None:
        compiled.append(b"library %d" % len(compiled))
        (tmp_path / "cache.so").write_bytes(compiled[-1])

    class FakeLibrary(Library):
        def jit_spec(self) -> Any:
            return SimpleNamespace(
                name="name",
                aot_path=tmp_path / "aot" / "name.so",
                jit_library_path=tmp_path / "cache.so",
                build=compile_it,
            )

    library = FakeLibrary(BF16, 64)
    first = prebuild.build(library)
    assert first.seconds is not None
    assert prebuild.build(library).seconds is None
    assert first.path.read_bytes() == b"library 0"
    prebuild.build(library, force=True)
    assert first.path.read_bytes() == b"library 1"
    assert len(compiled) == 2
    assert list(first.path.parent.iterdir()) == [first.path]


def test_what_building_needs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(prebuild, "installed", lambda: False)
    with pytest.raises(KernelError, match="FlashInfer is not installed"):
        prebuild.prepare(["9.0a"])
    monkeypatch.setattr(prebuild, "installed", lambda: True)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(KernelError, match="nvcc is missing"):
        prebuild.prepare(["9.0a"])
    monkeypatch.setattr(prebuild, "find_nvcc", lambda: tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path))
    with pytest.raises(KernelError, match="'hopper' is no compute capability"):
        prebuild.prepare(["hopper"])
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="no GPU here"):
        prebuild.prepare([])
