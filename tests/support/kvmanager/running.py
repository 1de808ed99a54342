"""A manager in the process of a test."""

from __future__ import annotations

from common.contracts.errors import StaleEpoch
from kvmanager.config import KvManagerSettings
from kvmanager.main import ManagerProcess


class Running:
    """A manager that serves, and what a test needs of it."""

    def __init__(self, settings: KvManagerSettings) -> None:
        self.stale: list[StaleEpoch] = []
        self.process = ManagerProcess(settings, self.stale.append)
        self.attachments = self.process.attachments

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.process.server.port}"

    async def flushed(self) -> None:
        """Return once the index holds everything."""
        assert await self.process.index.flush(10.0)
