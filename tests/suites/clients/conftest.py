"""What clients call, and no test may disturb: a suite on the demo model, and a model double. And Quire's own client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.suites.clients.double import Double, served_double
from tests.suites.clients.served import ROOT, Served, missing, served_suite


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A running suite of one worker with 1024 blocks, float32: `served.address`, `served.http_url`, `served.model`."""
    with served_suite(tmp_path_factory.mktemp("clients")) as running:
        yield running


@pytest.fixture(scope="session")
def double() -> Iterator[Double]:
    """A router over a worker that plays a script."""
    with served_double() as running:
        yield running


@pytest.fixture(scope="session")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of Quire's Python client, built from protos/."""
    folder = tmp_path_factory.mktemp("client")
    pip = (sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--quiet", "--no-deps")
    done = subprocess.run([*pip, "-w", folder, ROOT / "protos"], capture_output=True, text=True, check=False, cwd="/")
    if done.returncode:
        missing("Quire's client", f"pip cannot build it\n{done.stderr[-2000:]}")
    (wheel,) = folder.glob("quire_llm_client-*.whl")
    return wheel
