"""Every counter of a worker at the end of the type that once held it: sequences, steps, sessions, handles, usage.

The engine, its agent and the manager's ledger are real; every message between the two passes through its wire form.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest

from cli.suite.embedded import EmbeddedChannel
from common.contracts.clock import SystemClock
from common.contracts.lease import Attach, Connected, Granted, Inventory, LeaseEvent, Report
from common.contracts.types import SequenceId, Usage
from common.wire.inventory_codec import InventoryAssembler, inventory_chunks
from common.wire.lease_codec import (
    attach_from_proto,
    attach_to_proto,
    batch_from_proto,
    batch_to_proto,
    report_from_proto,
    report_to_proto,
)
from common.wire.output_codec import usage_from_proto, usage_to_proto
from quire.kvmanager.v1 import kvmanager_pb2
from tests.support.gpuworker.fake_engine_ports import InstantRunner, ManualRunner
from tests.support.gpuworker.worker_harness import served, submit

PROMPT = list(range(20, 31))
ENDS = [2**31, 2**32]


class WireChannel(EmbeddedChannel):
    """A manager in the process whose messages are packed and unpacked, each in an envelope of the session."""

    def attach(self, attach: Attach, inventory: Inventory) -> None:
        packed = self._enveloped(attach.session, kvmanager_pb2.SessionRequest(attach=attach_to_proto(attach)))
        assembler = InventoryAssembler()
        *_, whole = map(assembler.add, inventory_chunks(inventory))
        assert whole is not None
        super().attach(attach_from_proto(packed.attach, packed.session), whole)

    def send_report(self, session: int, report: Report) -> None:
        packed = self._enveloped(session, kvmanager_pb2.SessionRequest(report=report_to_proto(report)))
        super().send_report(packed.session, report_from_proto(packed.report))

    def poll(self) -> list[LeaseEvent]:
        return [self._over_the_wire(event) for event in super().poll()]

    def _over_the_wire(self, event: LeaseEvent) -> LeaseEvent:
        if not isinstance(event, Granted):
            return event
        return Granted(event.session, batch_from_proto(batch_to_proto(event.batch)))

    def _enveloped(self, session: int, message: kvmanager_pb2.SessionRequest) -> kvmanager_pb2.SessionRequest:
        message.session = message.seq = message.ack = session
        return kvmanager_pb2.SessionRequest.FromString(message.SerializeToString())

    def lose(self) -> None:
        """Break the session: the engine attaches anew, with an inventory."""
        self._events.append(Connected())


@pytest.mark.parametrize("end", ENDS)
async def test_requests_pass_the_end_of_every_counter_of_a_worker(end: int) -> None:
    """The fourth request of a stream whose handles began at 2^31 - 4, and all after it, once waited for ever."""
    channel, runner = WireChannel(SystemClock()), InstantRunner()
    async with served(runner, channel) as worker:
        engine, begin = worker.engine, end - 4
        # Another thread attaches with the session that stands there.
        await worker.until(lambda: engine._lease.open)
        worker.servicer._ids = itertools.count(begin)
        engine._agent._next_step = engine._steps = engine._lease.session = begin
        engine._agent._arrivals, engine._agent._last_sequence = begin, SequenceId(begin - 1)
        async with worker.router() as router:
            for handle in range(begin, begin + 8):
                wrapped = handle % 2**32
                await router.send(submit(wrapped, [*PROMPT, wrapped % 64], 6))
                async with asyncio.timeout(60):
                    await router.until_finished(wrapped)
                assert router.tokens[wrapped] == [7] * 6
                channel.lose()
                engine.wake()
            assert channel.ledger is not None
        assert engine.load().steps > end


@pytest.mark.parametrize("end", ENDS)
async def test_a_sequence_that_lives_over_the_end_is_in_the_inventory(end: int) -> None:
    channel, runner = WireChannel(SystemClock()), ManualRunner()
    async with served(runner, channel) as worker:
        engine = worker.engine
        worker.servicer._ids = itertools.count(end - 1)
        engine._agent._next_step = engine._agent._arrivals = end - 1
        async with worker.router() as router:
            await router.send(submit(1, PROMPT, 8), submit(2, PROMPT[:4], 8))
            done = asyncio.create_task(router.until_finished(1, 2))
            await worker.step_until(runner, lambda: router.tokens.keys() == {1, 2})
            channel.lose()
            engine.wake()
            await worker.step_until(runner, done.done)
            await done
        assert router.tokens == {1: [7] * 8, 2: [7] * 8}


def test_usage_that_no_u32_holds_stays_at_the_most() -> None:
    usage = usage_from_proto(usage_to_proto(Usage(1, 2, 3, recomputed_tokens=2**40, preemptions=2**33)))
    assert usage == Usage(1, 2, 3, recomputed_tokens=2**32 - 1, preemptions=2**32 - 1)
