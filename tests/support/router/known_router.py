"""What a test says of a router's pool, its Redis, its managers and its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.contracts.types import PoolIdentity
from common.group.leader_watch import ManagerState


@dataclass
class KnownRouter:
    """Implements KnownPool, RedisState, KnownManagers and Leaving with fixed answers."""

    identity: PoolIdentity
    workers: int = 0
    connected: bool = False
    problem: str = ""
    states: tuple[ManagerState, ...] = ()
    leaving: bool = False
    draining: bool = False

    def models(self) -> Sequence[Any]:
        return range(self.workers)

    def managers(self) -> tuple[ManagerState, ...]:
        return self.states
