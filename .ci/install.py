"""Installs as ``pip install`` does, with uv, which takes a tenth of the time.

    python .ci/install.py ARGUMENTS OF pip install

uv does not read pip's settings, so they are passed on to it. What uv cannot install, pip does.
"""

import ast
import os
import subprocess
import sys

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
#: Settings of pip, and the variables in which uv looks for the same.
SETTINGS = {
    "cert": "SSL_CERT_FILE",
    "constraint": "UV_CONSTRAINT",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "index-url": "UV_DEFAULT_INDEX",
    "no-index": "UV_NO_INDEX",
    "trusted-host": "UV_INSECURE_HOST",
}
#: The sections of pip's settings; later ones win.
SECTIONS = ["global", "install", ":env:"]


def uv_environment(listed: str) -> dict[str, str]:
    """What ``pip config list`` has printed, as uv reads it."""
    found = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        section, _, setting = name.rpartition(".")
        if section in SECTIONS and setting in SETTINGS:
            found[SECTIONS.index(section), setting] = ast.literal_eval(value)
    variables = {}
    for (_, setting), value in sorted(found.items()):
        separator = "," if setting == "find-links" else " "
        variables[SETTINGS[setting]] = separator.join(value.split())
    return variables


def main(arguments: list[str]) -> int:
    listed = subprocess.run([*PIP, "config", "list"], check=True, capture_output=True, text=True)
    environment = {**uv_environment(listed.stdout), **os.environ}
    uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable]
    uv += ["--index-strategy", "unsafe-best-match"]  # of all indexes, as pip takes it
    got_uv = subprocess.run([*PIP, "install", "--quiet", "uv"], stderr=subprocess.DEVNULL)
    done = got_uv.returncode or subprocess.run([*uv, *arguments], env=environment).returncode
    return done and subprocess.run([*PIP, "install", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
