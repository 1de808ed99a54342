"""Stations whose agents have the library, or the double that stands in for it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from gpuworker.peers.nixl import NixlStation
from tests.support.gpuworker.peers import STAGING_BYTES

DOUBLE: Final = Path(__file__).parent / "nixl_double"
IS_INSTALLED: Final = importlib.util.find_spec("nixl_cu12") is not None


def use_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let agent processes, and those of processes that are started from here on, find the double."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(DOUBLE), os.getcwd(), os.environ.get("PYTHONPATH", "")]))


@contextmanager
def station(staging_bytes: int = STAGING_BYTES) -> Iterator[NixlStation]:
    """Yield a station; its process has ended afterwards."""
    made = NixlStation(staging_bytes)
    try:
        yield made
    finally:
        made.close()
        assert not Path(f"/proc/{made.process_id}").exists()
