"""Runs clients in .clients, an environment of their own: a script reads the calls to make, and prints the answers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.suites.clients.served import ROOT, missing

PYTHON = ROOT / ".clients" / "bin" / "python"
LIMIT_S = 120.0


def need_clients() -> None:
    """Skip, or fail, where the environment is missing."""
    if not PYTHON.exists():
        missing(".clients", "make clients")


def answers_of(script: str, told: dict[str, Any]) -> Any:
    """Return what a script of this folder prints; fail with its last words when it fails."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    command = [str(PYTHON), "-I", str(Path(__file__).with_name(script))]
    done = subprocess.run(
        command, input=json.dumps(told), capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
