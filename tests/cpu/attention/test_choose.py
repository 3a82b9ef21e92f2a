"""Which attention backend is taken, and which of FlashInfer's libraries it needs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncllm.attention import choose
from asyncllm.attention.choose import choose_backend
from asyncllm.attention.flashinfer import library
from asyncllm.attention.flashinfer.library import (
    Library,
    libraries_by_size,
    libraries_for,
    unsupported,
)
from asyncllm.attention.paged import PagedBackend
from asyncllm.attention.sdpa import SdpaBackend
from asyncllm.errors import KernelError, ModelError
from asyncllm.executor.memory.kv_pool import KVPool
from asyncllm.executor.startup import flashinfer_prebuild as prebuild
from asyncllm.kernels.gpu import Gpu
from asyncllm.kernels.types import AttentionSpec

if TYPE_CHECKING:
    from pathlib import Path

    from asyncllm.config import AttentionName

BF16 = torch.bfloat16
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
AMPERE, HOPPER = Gpu((8, 0), "A100", 108), Gpu((9, 0), "H200", 132)
TURING = Gpu((7, 5), "T4", 40)


def spec(
    layer: int = 0, group: int = 4, head_dim: int = 64, window: int | None = None
) -> AttentionSpec:
    return AttentionSpec(layer, 2 * group, 2, head_dim, head_dim**-0.5, window)


def chosen(name: AttentionName, device: torch.device) -> Any:
    pool = KVPool([spec()], 2, 16, BF16, CPU)
    return choose_backend(name, pool, [spec()], BF16, device, torch.from_numpy)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU with FlashInfer, as far as it is looked at before kernels are loaded."""
    monkeypatch.setattr(library, "installed", lambda: True)
    monkeypatch.setattr(Library, "is_built", lambda self: True)
    monkeypatch.setattr(choose, "obstacle", lambda device: None)
    monkeypatch.setattr(choose, "gpu_of", lambda device: HOPPER)
    monkeypatch.setattr(choose, "warm_up", lambda *args: None)


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
def test_flashinfer_needs_no_triton_and_an_ampere_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "obstacle", lambda device: "Triton is not installed")
    monkeypatch.setattr(choose, "gpu_of", lambda device: AMPERE)
    monkeypatch.setattr(choose, "FlashInferBackend", lambda *args: args)
    _, specs, dtype, device, capability, multiprocessors, _ = chosen("flashinfer", CUDA)
    assert (specs, dtype, device) == ([spec()], BF16, CUDA)
    assert (capability, multiprocessors) == ((8, 0), 108)
    monkeypatch.setattr(choose, "gpu_of", lambda device: TURING)
    with pytest.raises(ModelError, match=r"compute capability 8\.0, and this GPU has 7\.5"):
        chosen("flashinfer", CUDA)


@pytest.mark.usefixtures("gpu")
def test_where_triton_does_not_run_auto_takes_torch_kernels(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choose, "obstacle", lambda device: "Triton is not installed")
    assert isinstance(chosen("auto", CUDA), SdpaBackend)
    assert not caplog.records  # ``say_what_runs`` has said so
    with pytest.raises(ModelError, match="triton: Triton is not installed"):
        chosen("triton", CUDA)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("gpu_here", "has_flashinfer", "first"),
    [(HOPPER, True, "own"), (AMPERE, True, "flashinfer"), (AMPERE, False, "own")],
)
def test_before_hopper_flashinfer_comes_first(
    gpu_here: Gpu,
    has_flashinfer: bool,
    first: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(choose, "gpu_of", lambda device: gpu_here)
    monkeypatch.setattr(library, "installed", lambda: has_flashinfer)
    made = object()
    monkeypatch.setattr(choose, "FlashInferBackend", lambda *args: made)
    assert (chosen("auto", CUDA) is made) == (first == "flashinfer")
    assert not caplog.records


@pytest.mark.usefixtures("gpu")
def test_our_own_kernels_come_after_flashinfer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("no such library")

    monkeypatch.setattr(choose, "gpu_of", lambda device: AMPERE)
    monkeypatch.setattr(choose, "FlashInferBackend", fail)
    assert isinstance(chosen("auto", CUDA), PagedBackend)
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

    monkeypatch.setattr(choose, "warm_up", fail)
    assert isinstance(chosen("auto", CUDA), SdpaBackend)
    [record] = caplog.records
    assert record.getMessage().endswith("no kernel image is available for execution on the device")
    with pytest.raises(ModelError, match="no kernel image") as raised:
        chosen("triton", CUDA)
    assert isinstance(raised.value.__cause__, RuntimeError)


@pytest.mark.usefixtures("gpu")
def test_flashinfer_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "installed", lambda: False)
    with pytest.raises(ModelError, match="not installed"):
        chosen("flashinfer", CUDA)


@pytest.mark.usefixtures("gpu")
def test_kernels_are_not_compiled_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Library, "is_built", lambda self: False)
    monkeypatch.setattr(library, "find_nvcc", lambda: None)
    with pytest.raises(ModelError, match="asyncllm kernels build"):
        chosen("flashinfer", CUDA)


@pytest.mark.parametrize(
    ("layers", "dtype", "reason"),
    [
        ([spec(), spec(head_dim=256, window=64)], BF16, None),
        ([spec()], torch.float16, None),
        ([spec()], torch.float32, "float32"),
        ([spec(), spec(head_dim=80)], BF16, "not 80"),
        ([spec(), replace(spec(), has_sinks=True)], BF16, None),
    ],
)
def test_what_flashinfer_supports(
    layers: list[AttentionSpec], dtype: torch.dtype, reason: str | None
) -> None:
    problem = unsupported(layers, dtype)
    assert (problem is None) == (reason is None)
    assert reason is None or reason in (problem or "")


@pytest.mark.parametrize("has_sinks", [False, True])
def test_layers_of_one_kind_share_libraries(has_sinks: bool) -> None:
    layers = [spec(layer, group=4, window=None if layer % 2 else 64) for layer in range(6)]
    layers = [replace(layer, has_sinks=has_sinks) for layer in layers]
    assert libraries_for(layers, BF16, (8, 0)) == [
        Library("fa2", BF16, 64, window=True),
        Library("fa2", BF16, 64),
    ]


@pytest.mark.parametrize(
    ("layer", "capability", "templates"),
    [
        (spec(group=2), (8, 0), ["decode", "fa2"]),
        (spec(group=2, window=64), (8, 0), ["fa2"]),  # CUDA cores would read beyond the window
        (spec(group=4, head_dim=128), (8, 9), ["fa2"]),
        (spec(group=4, head_dim=128), (9, 0), ["fa2", "fa3"]),
        (spec(group=1, head_dim=128), (9, 0), ["decode", "fa2", "fa3"]),
        (spec(group=4, head_dim=64), (9, 0), ["fa2"]),
        (spec(group=4, head_dim=128), (10, 0), ["fa2"]),
    ],
)
def test_the_kernels_of_a_layer(
    layer: AttentionSpec, capability: tuple[int, int], templates: list[str]
) -> None:
    assert [one.template for one in libraries_for([layer], BF16, capability)] == templates
    softcap, window = layer.softcap is not None, layer.window is not None
    for one in libraries_for([layer], BF16, capability):
        assert (one.head_dim, one.window, one.softcap) == (layer.head_dim, window, softcap)
        # A build without a model has every library that such a layer can need.
        gpus = (8, 0), capability
        assert one in libraries_by_size(BF16, layer.head_dim, window, softcap, gpus)


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

    decode = FakeLibrary("decode", BF16, 64)
    first = prebuild.build(decode)
    assert first.seconds is not None
    assert prebuild.build(decode).seconds is None
    assert first.path.read_bytes() == b"library 0"
    prebuild.build(decode, force=True)
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
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "8.0 9.0a")
    assert prebuild.prepare([]) == [(8, 0), (9, 0)]
    assert prebuild.prepare(["12.0f"]) == [(12, 0)]
    monkeypatch.delenv("FLASHINFER_CUDA_ARCH_LIST")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(KernelError, match="no GPU here"):
        prebuild.prepare([])
