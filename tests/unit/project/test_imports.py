"""What importing costs, as which modules come along."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3] / "asyncllm"


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after ``statement``."""
    code = f"{statement}\nimport sys\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def modules(folder: str) -> list[str]:
    """Dotted names of all modules in a folder of the package."""
    paths = sorted((ROOT / folder).rglob("*.py"))
    names = [
        ".".join(("asyncllm", *path.relative_to(ROOT).with_suffix("").parts)) for path in paths
    ]
    return [name.removesuffix(".__init__") for name in names]


def test_importing_the_package_loads_nothing_heavy() -> None:
    heavy = {"torch", "transformers", "numpy", "aiohttp", "msgspec", "tokenizers", "asyncio"}
    assert not loaded_by("import asyncllm") & heavy


def test_the_client_needs_no_numbers_until_it_embeds() -> None:
    assert not loaded_by("from asyncllm import Client, EmbeddingParams") & {"torch", "numpy"}


@pytest.mark.parametrize("folder", ["engine", "wire", "text", "server", "lab/bench"])
def test_the_loop_side_needs_no_torch(folder: str) -> None:
    names = modules(folder)
    assert names
    assert not loaded_by("\n".join(f"import {name}" for name in names)) & {"torch", "transformers"}


def test_the_library_needs_no_torch_until_it_starts() -> None:
    assert "torch" not in loaded_by("from asyncllm import AsyncLLM; AsyncLLM()")


def test_all_public_names_exist() -> None:
    assert loaded_by("import asyncllm\nfor name in asyncllm.__all__: getattr(asyncllm, name)")


def test_a_server_imports_nothing_that_only_others_need() -> None:
    """Importing is a third of the time that a server with compiled kernels takes to be ready."""
    statement = "import asyncllm.cli.commands.serve, asyncllm.llm.async_llm, asyncllm.server.run"
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    others = ("asyncllm.executor.sim", "asyncllm.ray.", "asyncllm.lab.bench")
    libraries = ("torch", "transformers", "huggingface_hub", "llguidance", "opentelemetry", "rich")
    assert not [name for name in run.stdout.split() if name.startswith(others + libraries)]
