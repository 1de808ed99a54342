"""What foreign clients call: one suite on the demo model, and one model double; no test may disturb them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.suites.clients.double import Double, served_double
from tests.suites.clients.served import Served, served_suite


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
