"""Jobs, their keys and their manifests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from asyncllm.config import EngineConfig
from asyncllm.executor.startup import compile_job
from asyncllm.executor.startup.compile_job import CompileJob, cache_folder, is_new
from asyncllm.kernels.cuda_driver import find_gpu
from asyncllm.kernels.gpu import Gpu

GPU = Gpu((9, 0), "NVIDIA H200", 132)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"hidden_size": 64}')
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    for entry in ("one", "two"):
        (folder / entry).mkdir(parents=True)
    return folder


def job(model: Path, cache: Path, gpu: Gpu = GPU, **options: object) -> CompileJob:
    return CompileJob.of(EngineConfig(kernel_cache=str(cache), **options), model, gpu)  # type: ignore[arg-type]


def test_a_recorded_job_is_done_until_an_entry_is_gone(model: Path, cache: Path) -> None:
    assert not job(model, cache).is_done()
    job(model, cache).record(["one", "two"])
    assert job(model, cache).is_done()
    (cache / "two").rmdir()
    assert not job(model, cache).is_done()


def test_a_job_is_new_until_it_is_done_on_some_gpu(model: Path, cache: Path) -> None:
    config = EngineConfig(kernel_cache=str(cache))
    assert is_new(config, model)
    job(model, cache).record(["one"])
    assert not is_new(config, model)
    assert is_new(EngineConfig(kernel_cache=str(cache), max_num_seqs=7), model)


def test_options_that_change_no_kernel_change_no_key(model: Path, cache: Path) -> None:
    job(model, cache).record(["one"])
    assert job(model, cache, max_waiting=7, dtype="bfloat16", policy="fcfs").is_done()


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m, c: job(m, c, max_num_seqs=7), id="option"),
        pytest.param(lambda m, c: job(m, c, dtype="float16"), id="dtype"),
        pytest.param(lambda m, c: job(m, c, Gpu((9, 0), "NVIDIA H100", 132)), id="name"),
        pytest.param(lambda m, c: job(m, c, Gpu((9, 0), "NVIDIA H200", 66)), id="size"),
    ],
)
def test_what_changes_kernels_changes_the_key(
    change: Callable[[Path, Path], CompileJob], model: Path, cache: Path
) -> None:
    job(model, cache).record(["one"])
    assert not change(model, cache).is_done()


def test_the_model_its_environment_and_our_sources_are_part_of_the_key(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = job(model, cache).key
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_DISABLE_LINE_INFO", "1")
        assert job(model, cache).key != first
    with monkeypatch.context() as patch:
        patch.setattr(compile_job, "_digest_of_sources", lambda: "edited")
        assert job(model, cache).key != first
    with monkeypatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", "/elsewhere")
        assert job(model, cache).key == first
    assert job(model, cache).key == first
    (model / "config.json").write_text('{"hidden_size": 128}')
    assert job(model, cache).key != first


def test_a_tuned_table_is_part_of_the_key(
    model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = job(model, cache).key
    table = tmp_path / "asyncllm" / "tuned" / "NVIDIA_H200.json"
    table.parent.mkdir(parents=True)
    table.write_text("{}")
    assert job(model, cache).key != first


@pytest.mark.parametrize("text", ["", "{", "[1"])
def test_a_broken_manifest_is_none(text: str, model: Path, cache: Path) -> None:
    job(model, cache).record(["one"])
    [manifest] = (cache / "asyncllm").iterdir()
    manifest.write_text(text)
    assert not job(model, cache).is_done()


def test_a_manifest_appears_at_once(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server that looks for it while it is written finds none, or all of it."""
    seen = []
    replace = os.replace

    def look(*paths: Path) -> None:
        seen.append(job(model, cache).is_done())
        replace(*paths)

    monkeypatch.setattr(os, "replace", look)
    monkeypatch.setattr(Path, "replace", lambda self, target: look(self, target))
    job(model, cache).record(["one"])
    assert seen == [False]
    assert job(model, cache).is_done()
    [manifest] = (cache / "asyncllm").iterdir()
    assert json.loads(manifest.read_text()) == ["one"]


def test_a_job_survives_the_way_to_its_process(model: Path, cache: Path) -> None:
    sent = job(model, cache)
    assert msgspec.json.decode(msgspec.json.encode(sent), type=CompileJob) == sent


def test_the_cache_is_where_triton_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    for name, value in (("TRITON_CACHE_DIR", "/some/where"), ("TRITON_HOME", "/other")):
        with monkeypatch.context() as patch:
            for other in ("TRITON_CACHE_DIR", "TRITON_HOME"):
                patch.delenv(other, raising=False)
            patch.setenv(name, value)
            assert cache_folder(EngineConfig()) == Path(type(knobs.cache)().dir)
            assert str(cache_folder(EngineConfig())).startswith(value)


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", absent)
    assert find_gpu(0) is None
