"""Runs clients in environments of their own below .clients: a script reads the calls to make, and prints the answers.

environments/NAME.txt pins what .clients/NAME has. Some clients contradict each other, or Quire.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.suites.clients.served import ROOT, missing

LIGHT = "light"
ENVIRONMENTS = ROOT / ".clients"
LIMIT_S = 120.0


def program(environment: str, name: str = "python") -> Path:
    """Return a program of an environment."""
    return ENVIRONMENTS / environment / "bin" / name


def need_clients(environment: str = LIGHT) -> None:
    """Skip, or fail, where the environment is missing."""
    if not (ENVIRONMENTS / environment / ".installed").exists():
        missing(f".clients/{environment}", "make clients" if environment == LIGHT else "make test-clients")


def answers_of(script: str, given: Mapping[str, Any], environment: str = LIGHT) -> Any:
    """Return what a script of this folder prints last; fail with its last words when it fails."""
    command = [str(program(environment)), "-I", str(Path(__file__).with_name(script))]
    # LiteLLM prints advice before it.
    return json.loads(output_of(command, json.dumps(given)).splitlines()[-1])


def output_of(command: Sequence[str], given: str = "", more: Mapping[str, str] | None = None) -> str:
    """Return what a client's program prints; fail with its last words when it fails."""
    ours = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    environment = {**ours, **(more or {})}
    done = subprocess.run(
        command, input=given, capture_output=True, text=True, timeout=LIMIT_S, env=environment, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
