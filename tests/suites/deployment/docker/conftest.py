"""The compose file as Compose itself reads it, and the Dockerfiles; no Docker engine is needed for either."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

REPOSITORY = Path(__file__).resolve().parents[4]
COMPOSE = Path(sys.executable).with_name("docker-compose")


class Config(Protocol):
    """Returns the project that Compose makes of compose.yaml with these variables, every profile included."""

    def __call__(self, **environment: str) -> dict[str, Any]: ...


def compose(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Compose on compose.yaml; words may begin with `-f` and further files."""
    return compose_alone("-f", str(REPOSITORY / "compose.yaml"), *words, **environment)


def compose_alone(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Compose with an environment of our own; neither the caller's nor a file .env counts."""
    command = [str(COMPOSE), "--env-file", os.devnull, *words]
    return subprocess.run(
        command, env={"PATH": os.environ["PATH"], **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def config() -> Config:
    def read(**environment: str) -> dict[str, Any]:
        done = compose("--profile", "*", "config", "--format", "json", **environment)
        assert done.returncode == 0, done.stderr
        project: dict[str, Any] = json.loads(done.stdout)
        return project

    return read


@pytest.fixture(scope="session")
def project(config: Config) -> dict[str, Any]:
    """The project with nothing set."""
    return config()
