"""One stack for all tests of this folder, which run in the order of their file; it is taken down whatever happens."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.deployment.docker.engine.events import Events
from tests.suites.deployment.docker.engine.stack import PROJECT, Stack, Transcript


@pytest.fixture(scope="session", autouse=True)
def engine() -> None:
    """Fail at once, with a short message, when there is no engine or no Compose."""
    for command in (["docker", "version"], ["docker", "compose", "version"]):
        try:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
            wrong = (done.stderr.strip() or f"status {done.returncode}") if done.returncode else ""
        except FileNotFoundError as error:
            wrong = str(error)
        if wrong:
            pytest.exit(f"`{' '.join(command)}` fails; expected a Docker engine that runs, and Compose: {wrong}", 1)


@pytest.fixture(scope="session")
def transcript() -> Iterator[Transcript]:
    """A transcript; the file that TRANSCRIPT names gets it too."""
    with Path(os.environ.get("TRANSCRIPT", os.devnull)).open("w") as file:
        yield Transcript(file)


@pytest.fixture(scope="session")
def events() -> Iterator[Events]:
    with Events.watch(PROJECT) as watched:
        yield watched


@pytest.fixture(scope="session")
def stack(transcript: Transcript) -> Iterator[Stack]:
    running = Stack(transcript)
    running.take_down()  # the remains of an interrupted run
    try:
        yield running
    finally:
        running.take_down()
