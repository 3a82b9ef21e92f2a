"""Print what pyproject.toml asks for, with the extras named: ``requirements.py [EXTRA ...]``.

The image installs dependencies before the code, so that a change of code does not install them
again, and pip has no way to install a project's dependencies alone.
"""

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
requirements = list(project["dependencies"])
for extra in sys.argv[1:]:
    requirements += project["optional-dependencies"][extra]
print("\n".join(requirements))
