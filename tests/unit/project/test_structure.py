"""The package's structure: sizes of files and folders, and no circles (with `lint-imports`)."""

from __future__ import annotations

import runpy
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "asyncllm"
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})

#: Whoever looks for something first reads this list.
MAX_ENTRIES = 26

#: A file does one thing, and a folder is read at one glance.
MAX_LINES = 350
MAX_FILES = 17  # sixteen and __init__.py


def test_no_circles_between_files() -> None:
    graph = grimp.build_graph("asyncllm", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the circle


def test_folders_and_layers() -> None:
    """The contracts of pyproject.toml: no circles between folders, and who may import whom."""
    # In a process of its own: it disables the loggers that exist.
    lint = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()"]
    done = subprocess.run([*lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_top_of_the_package_is_one_short_list() -> None:
    runpy.run_path(str(ROOT / ".ci" / "sizes.py"))["main"](PACKAGE)  # shown if this fails
    paths = [path for path in PACKAGE.rglob("*") if path.is_file()]
    kept = [path.relative_to(PACKAGE) for path in paths if "__pycache__" not in path.parts]
    assert len({path.parts[0] for path in kept}) <= MAX_ENTRIES


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_folders_and_files_are_small(folder: Path) -> None:
    files = sorted(folder.glob("*.py"))
    assert len(files) <= MAX_FILES
    long = {path.name: path.read_text(encoding="utf-8").count("\n") for path in files}
    assert {name: count for name, count in long.items() if count > MAX_LINES} == {}
