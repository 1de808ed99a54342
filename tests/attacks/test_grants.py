"""A manager that grants blocks that there are not: the worker refuses the whole batch, and its sequences go on."""

from __future__ import annotations

import pytest

from common.contracts.lease import Admit, Attached, AttachOk, Connected, Copy, GrantBatch, Granted
from common.contracts.types import BlockId, FinishReason, SequenceId
from gpuworker.scheduling.outcomes import AgentConfig
from tests.support.gpuworker.engine_harness import EngineDriver
from tests.support.gpuworker.fake_engine_ports import InstantRunner, ScriptedChannel

BLOCKS, BLOCK_SIZE = 8, 4
INNOCENT, VICTIM = SequenceId(1), SequenceId(2)


def blocks(*ids: int) -> tuple[BlockId, ...]:
    return tuple(map(BlockId, ids))


def granted(*table: int, shared: int = 0) -> Admit:
    return Admit(VICTIM, blocks(*table), shared)


HOSTILE = {
    "a lease of block -1": GrantBatch(1, lease=blocks(-1)),
    "a lease of a block beyond the pool": GrantBatch(1, lease=blocks(BLOCKS)),
    "a lease of a block far beyond the pool": GrantBatch(1, lease=blocks(2**31 - 1)),
    "block -1 in a block table": GrantBatch(0, admit=(granted(4, -1),)),
    "block -1 among the shared ones": GrantBatch(0, admit=(granted(-1, 4, shared=1),)),
    "a block beyond the pool in a block table": GrantBatch(0, admit=(granted(4, BLOCKS),)),
    "a shared block beyond the pool": GrantBatch(0, admit=(granted(BLOCKS, 4, shared=1),)),
    "more shared blocks than blocks": GrantBatch(0, admit=(granted(4, shared=2),)),
    "a block table longer than its sequence": GrantBatch(0, admit=(granted(4, 5, 6, 7),)),
    "a copy from block -1": GrantBatch(0, copy=(Copy(BlockId(-1), BlockId(4), 3),), admit=(granted(4, 5),)),
    "a copy to block -1": GrantBatch(0, copy=(Copy(BlockId(0), BlockId(-1), 3),), admit=(granted(4, 5),)),
    "a copy from beyond the pool": GrantBatch(0, copy=(Copy(BlockId(BLOCKS), BlockId(4), 3),), admit=(granted(4, 5),)),
    "a copy to beyond the pool": GrantBatch(0, copy=(Copy(BlockId(0), BlockId(BLOCKS), 3),), admit=(granted(4, 5),)),
    "a copy over another sequence's block": GrantBatch(
        0, copy=(Copy(BlockId(4), BlockId(0), 3),), admit=(granted(4, 5),)
    ),
}


def attach(channel: ScriptedChannel, driver: EngineDriver) -> int:
    """Let the engine attach; return the number of its session."""
    channel.events.append(Connected())
    driver.engine.turn()
    session = channel.attached[-1][0].session
    channel.events.append(Attached(session, AttachOk(1, 0)))
    driver.engine.turn()
    return session


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_grant_ends_a_session_and_no_sequence(what: str) -> None:
    """The unmended worker took block -1 and copied from and to it; a block beyond the pool ended the engine."""
    channel = ScriptedChannel()
    driver = EngineDriver(InstantRunner(), AgentConfig(BLOCKS, BLOCK_SIZE, 64), channel)
    for _ in range(2):
        driver.submit(range(6), 4)
    session = attach(channel, driver)
    channel.events.append(Granted(session, GrantBatch(0, admit=(Admit(INNOCENT, blocks(0, 1, 2), 0),))))
    channel.events.append(Granted(session, HOSTILE[what]))
    driver.engine.turn()
    assert channel.reconnects == 1, "the worker has accepted the grant"
    later = attach(channel, driver)
    assert later > session
    channel.events.append(Granted(later, GrantBatch(0, admit=(Admit(VICTIM, blocks(4, 5, 6), 0),))))
    while driver.engine.turn():
        pass
    driver.finish()
    assert [result.reason for result in driver.results.values()] == [FinishReason.LENGTH] * 2
    assert [len(result.tokens) for result in driver.results.values()] == [4, 4]
