"""What the documents name exists: files, headings, options, classes; and their lines are short."""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from pathlib import Path

import msgspec
import pytest

from asyncllm.__main__ import main
from asyncllm.config import EngineConfig
from asyncllm.config.ray_config import RayConfig
from asyncllm.config.server_config import ServerConfig

ROOT = Path(__file__).parents[3]
#: Without CHANGELOG.md, which also names what is no more.
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
MAX_COLUMNS = 120

#: What begins like a path of this repository: a folder of it, then a file or a folder.
PATH = re.compile(r"(?<![\w./-])(?:asyncllm|tests|examples|tools|docs|docker)/[\w./-]*[\w/]")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+?)$", re.MULTILINE)
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
#: In backticks, what is written like a class, perhaps with one of its members.
NAME = re.compile(r"`_?[A-Z][A-Za-z]*[a-z][A-Za-z]*(?:\.\w+)?`")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)

#: An option's default: in parentheses after its name, or beside it in a table of defaults.
DEFAULT = re.compile(r"`--([a-z-]+)` \((\d[\d,.]*(?: [KM]iB)?)")
DEFAULTS = re.compile(r"^\| option \| default \|.*\n\|.*\n((?:\|.*\n)+)", re.MULTILINE)
IN_TABLE = re.compile(r"^\| `--([a-z-]+)` \| (\d[\d,.]*(?: [KM]iB)?)", re.MULTILINE)
UNITS = {"": 1, "KiB": 2**10, "MiB": 2**20}

COMMANDS = (
    *("serve", "chat", "generate", "batch", "replay", "doctor", "models"),
    *("bench offline", "bench serve", "bench fleet", "kernels build"),
)
#: Options of other programs that appear in the documents.
OTHER_PROGRAMS = {
    "--ask",
    "--auth-type",
    "--build",
    "--build-arg",
    "--cores",
    "--count",
    "--extra-index-url",
    "--folder",
    "--gigabytes",
    "--gpus",
    "--hostile",
    "--index-url",
    "--limit",
    "--policies",
    "--profile",
    "--quick",
    "--rounds",
    "--speed",
    "--strict",
    "--suite",
    "--target",
    "--tokens",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def options() -> set[str]:
    """All that ``--help`` of the commands lists."""
    text = StringIO()
    for command in COMMANDS:
        with redirect_stdout(text), pytest.raises(SystemExit):
            main([*command.split(), "--help"])
    return set(OPTION.findall(text.getvalue()))


def anchors_of(path: Path) -> set[str]:
    """Where links into a document can point, as GitHub names headings."""
    text = FENCE.sub("", path.read_text(encoding="utf-8"))
    kept = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in kept}


@cache
def words_of_sources() -> set[str]:
    """Every word of the package's code."""
    files = (ROOT / "asyncllm").rglob("*.py")
    return {word for path in files for word in re.findall(r"\w+", path.read_text("utf-8"))}


def broken_links(document: Path, text: str) -> list[str]:
    broken = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (document.parent / name).resolve() if name else document
        if not target.exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(link)
    return broken


@cache
def defaults() -> dict[str, msgspec.structs.FieldInfo]:
    structs = (EngineConfig, ServerConfig, RayConfig)
    return {f.name: f for struct in structs for f in msgspec.structs.fields(struct)}


def wrong_defaults(text: str) -> list[str]:
    """Those of options without a fixed default are looked for in its description."""
    wrong = []
    for option, said in DEFAULT.findall(text) + IN_TABLE.findall("".join(DEFAULTS.findall(text))):
        number, _, unit = said.rstrip(",.").replace(",", "").partition(" ")
        field = defaults()[option.replace("-", "_")]
        if field.default is None:
            fits = re.search(rf"\b{number}\b", str(field.type)) is not None
        else:
            fits = field.default == float(number) * UNITS.get(unit, 1)
        if not fits:
            wrong.append(f"--{option} ({said})")
    return wrong


@pytest.fixture(params=DOCUMENTS, ids=name_of)
def document(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_every_path_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert [name for name in PATH.findall(text) if not (ROOT / name).exists()] == []


def test_every_link_leads_somewhere(document: Path) -> None:
    assert broken_links(document, document.read_text(encoding="utf-8")) == []


def test_every_option_exists(document: Path) -> None:
    named = set(OPTION.findall(document.read_text(encoding="utf-8")))
    assert sorted(named - options() - OTHER_PROGRAMS) == []


def test_every_default_is_the_options_own(document: Path) -> None:
    assert wrong_defaults(document.read_text(encoding="utf-8")) == []


def test_every_class_and_member_exists(document: Path) -> None:
    named = set(NAME.findall(document.read_text(encoding="utf-8")))
    known = words_of_sources()
    assert sorted(name for name in named if not {*re.findall(r"\w+", name)} <= known) == []


def test_lines_are_short(document: Path) -> None:
    """Tables apart: a row cannot be broken."""
    lines = document.read_text(encoding="utf-8").splitlines()
    wide = [i for i, line in enumerate(lines, 1) if len(line) > MAX_COLUMNS and line[0] != "|"]
    assert wide == []


def test_the_readme_leads_to_every_document() -> None:
    """Directly or by way of other documents."""
    found, waiting = set(), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        found.add(page)
        links = LINK.findall(page.read_text(encoding="utf-8"))
        pages = {
            (page.parent / link.partition("#")[0]).resolve() for link in links if ":" not in link
        }
        waiting += [link for link in pages - found if link.suffix == ".md" and link.exists()]
    assert [name_of(path) for path in DOCUMENTS if path not in found] == []


def test_the_checks_find_what_they_look_for(tmp_path: Path) -> None:
    text = "# A b, c!\n[x](#a-b-c) [y](#nowhere) [z](gone.md)\n"
    text += "`asyncllm/gone.py` `Gone.at` --no-such-option"
    page = tmp_path / "page.md"
    page.write_text(text)
    assert PATH.findall(text) == ["asyncllm/gone.py"]
    assert broken_links(page, text) == ["#nowhere", "gone.md"]
    assert NAME.findall(text) == ["`Gone.at`"]
    assert OPTION.findall(text) == ["--no-such-option"]
    text = "`--max-waiting` (4,096), `--stall-seconds` (30; 300 on a CPU)\n"
    text += "| option | default |\n|--|--|\n| `--max-body-bytes` | 8 MiB |\n"
    assert wrong_defaults(text) == []
    assert len(wrong_defaults(text.replace("0", "1").replace("8", "9"))) == 3


def test_a_sampling_parameter_has_five_places() -> None:
    """``min_p`` is in the files that the table names, and in those that the text allows."""
    text = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    section = text.partition("## A sampling parameter")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(asyncllm/[\w/.]+)` \|", section, re.MULTILINE)
    [others] = re.findall(r"^Other lists .*?\n\n", section, re.MULTILINE | re.DOTALL)
    places = [ROOT / place for place in (*rows, *PATH.findall(others))]
    found = {
        next((place for place in places if path == place or place in path.parents), path)
        for path in (ROOT / "asyncllm").rglob("*.py")
        if re.search(r"\bmin_p\b", path.read_text(encoding="utf-8"))
    }
    assert (len(rows), found) == (5, set(places))
