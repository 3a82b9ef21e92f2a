"""What the package says of itself: its name, and how it is installed."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[3]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = SETTINGS["project"]

# The package called asyncllm on PyPI is not ours: installing it, or an extra of it, is a mistake.
SOMEBODY_ELSES = re.compile(r"pip3?\s+install\s+(?:-\S+\s+)*['\"]?asyncllm\b(?!-)|\basyncllm\[")
# The demo model is trained on questions that people ask; its answer is "pip install -e .".
QUESTIONS = ROOT / "examples" / "train_demo" / "tasks" / "product.py"
TEXT = {"", ".cfg", ".in", ".json", ".md", ".mjs", ".py", ".sh", ".toml", ".txt", ".yaml", ".yml"}
OUTSIDE = re.compile(r"\.venv.*|venv|node_modules|__pycache__|build|dist|.*\.egg-info|\.\w+_cache")


def texts(folder: Path) -> Iterator[Path]:
    """Every text file of the checkout, hidden folders and build outputs apart."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if not OUTSIDE.fullmatch(path.name) and path.name not in {".git", ".hypothesis"}:
                yield from texts(path)
        elif path.suffix in TEXT or path.name == "Dockerfile":
            yield path


def test_nothing_installs_the_package_of_the_same_name_on_pypi() -> None:
    paths = [path for path in texts(ROOT) if path not in {QUESTIONS, Path(__file__)}]
    assert {"README.md", "Makefile", "Dockerfile", "tables.py"} <= {path.name for path in paths}
    wrong = [
        f"{path.relative_to(ROOT)}: {match[0]!r}"
        for path in paths
        for match in SOMEBODY_ELSES.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "text",
    [
        "pip install asyncllm",
        "pip install\n  'asyncllm[cuda]'",
        "pip install -U asyncllm",
        "asyncllm[x]",
    ],
)
def test_the_check_finds_what_it_looks_for(text: str) -> None:
    assert SOMEBODY_ELSES.search(text)


def test_the_distribution_is_called_asyncllm_server() -> None:
    assert PROJECT["name"] == "asyncllm-server"
    assert PROJECT["scripts"].keys() == {"asyncllm"}


def test_every_extra_that_a_message_names_exists() -> None:
    extras = {
        extra
        for path in texts(ROOT)
        for match in re.finditer(
            r"install\s+-e\s+['\"]\.\[([\w,]+)\]",
            path.read_text(encoding="utf-8", errors="replace"),
        )
        for extra in match[1].split(",")
    }
    assert {"cuda", "test"} <= extras <= PROJECT["optional-dependencies"].keys()


def test_every_direct_dependency_is_pinned_for_tests() -> None:
    """Without a pin, what the tests ran with depends on the day."""
    extras = PROJECT["optional-dependencies"].values()
    required = [*PROJECT["dependencies"], *(one for extra in extras for one in extra)]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    names = {re.split(r"[\[<>=;\s]", one)[0].lower().replace("_", "-") for one in required}
    assert names - {PROJECT["name"]} <= pinned


def test_uv_installs_with_the_settings_of_pip() -> None:
    listed = """\
:env:.find-links='/wheels https://a.org/links'
global.cert='/certificates.crt'
global.extra-index-url='https://b.org/simple https://c.org/simple'
global.find-links='/never'
global.index-url='https://global.org/simple'
global.timeout='180'
install.index-url='https://install.org/simple'
list.index-url='https://list.org/simple'
"""
    script = runpy.run_path(str(ROOT / ".ci" / "install.py"))
    assert script["uv_environment"](listed) == {
        "SSL_CERT_FILE": "/certificates.crt",
        "UV_DEFAULT_INDEX": "https://install.org/simple",
        "UV_FIND_LINKS": "/wheels,https://a.org/links",
        "UV_INDEX": "https://b.org/simple https://c.org/simple",
    }
    assert script["uv_environment"]("") == {}


def test_all_tests_are_run() -> None:
    tests = {path.relative_to(ROOT).parts[:2] for path in (ROOT / "tests").rglob("test_*.py")}
    paths = SETTINGS["tool"]["pytest"]["ini_options"]["testpaths"]
    assert sorted("/".join(parts) for parts in tests) == sorted(paths)
