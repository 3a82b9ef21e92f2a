"""What tests of Ray share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """PYTHONPATH for Ray's processes.

    jsonschema, which all of them import, would import what the tests of grammars need, and that
    takes it seconds.
    """
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "rfc3987_syntax.py").write_text("raise ImportError('it takes long')")
    return os.pathsep.join(filter(None, (str(hidden), os.environ.get("PYTHONPATH"))))
