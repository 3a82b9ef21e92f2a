"""What tests of Ray share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def ray_env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of Ray's processes: without the Ray that somebody else may run here.

    jsonschema, which all of them import, would import what the tests of grammars need, and that
    takes it seconds. A busy machine takes longer than the 5 s in which Ray's proxy has to be ready.
    """
    hidden = tmp_path_factory.mktemp("hidden")
    (hidden / "rfc3987_syntax.py").write_text("raise ImportError('it takes long')")
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(hidden), env.get("PYTHONPATH"))))
    env["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"
    return env
