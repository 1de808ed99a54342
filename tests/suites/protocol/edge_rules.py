"""Simpler rules of what connects the cores: links, sessions, the index."""

from __future__ import annotations

from tests.suites.protocol.state import Link, ModelManager
from tests.suites.protocol.world import World

_connect = World.connect


def break_without_loss_of_session(_world: World, link: Link) -> None:
    link.up, link.to_manager, link.to_worker = False, (), ()


def resume(world: World, manager: int) -> bool:
    """Go on with the old session where both sides still have it; what was in the queues is lost."""
    old = world.links[-1] if world.links else None
    if old is None or old.served is None or old.manager != manager or not world.worker.open:
        return _connect(world, manager)
    old.up = True
    return True


def keep_the_generation(_world: World, manager: ModelManager) -> None:
    session = manager.session()
    if session is not None and session.ready:
        manager.publisher.restart(1, session.ledger.index_snapshot())


def no_jump(_world: World) -> int:
    return 0
