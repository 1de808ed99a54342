"""The worker's end of a session against a manager scripted message by message on a real server."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator

import pytest
from grpc import aio

from common.contracts.errors import Mismatch
from common.contracts.lease import (
    Attached,
    AttachOk,
    AttachRejected,
    CachedBlock,
    Confirmed,
    Connected,
    Detached,
    GrantBatch,
    Granted,
    Inventory,
    LeaseEvent,
    Report,
)
from common.contracts.types import BlockHash, BlockId
from common.wire.lease_codec import attach_from_proto, attach_ok_to_proto, batch_to_proto, rejected_to_proto
from gpuworker.engine import lease_client
from gpuworker.engine.lease_client import Connection, LeaseClient
from quire.kvmanager.v1 import kvmanager_pb2, kvmanager_pb2_grpc
from tests.support.gpuworker.lease_harness import TIMEOUT_S, Rig, Stream, attach, soon

SILENCE = 6 * TIMEOUT_S  # a worker's own pulses would come after TIMEOUT_S


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.server.start()
    await rig.client.start()
    yield rig
    await rig.client.close()
    await rig.server.stop(0)


async def test_open_stream_asks_the_engine_to_attach(rig: Rig) -> None:
    await rig.event(Connected)
    stream = await rig.stream()
    await rig.attach(3, epoch_seen=2)
    request = await stream.next()
    assert (request.session, request.seq, request.ack) == (3, 1, 0)
    assert attach_from_proto(request.attach, 3) == attach(3, 2)
    request = await stream.next()
    assert (request.session, request.seq, request.inventory.last) == (3, 2, True)


async def test_accepted_session_carries_grants_and_reports(rig: Rig) -> None:
    stream = await rig.session(1)
    batch = GrantBatch(4, lease=(BlockId(1), BlockId(2)))
    stream.say(1, batch=batch_to_proto(batch))
    assert await rig.event(Granted) == Granted(1, batch)
    await rig.send(1, Report(step=5))
    request = await stream.next()
    assert (request.session, request.seq, request.ack, request.report.step) == (1, 3, 2, 5)


async def test_a_grant_that_answers_a_report_shows_the_round_trip_once(rig: Rig) -> None:
    stream, batch = await rig.session(1), batch_to_proto(GrantBatch(4, lease=(BlockId(1),)))
    stream.say(1, batch=batch, ack=2)
    await rig.event(Granted)
    assert len(rig.round_trips) == 1  # of the inventory
    for step in (5, 6):
        await rig.send(1, Report(step=step))
        await stream.next()
    for _ in range(2):
        stream.say(1, batch=batch, ack=4)
        await rig.event(Granted)
    assert len(rig.round_trips) == 2
    assert 0 < rig.round_trips[1] < TIMEOUT_S


async def test_the_engine_hears_once_that_its_reports_were_applied(rig: Rig) -> None:
    stream = await rig.session(1, SILENCE)
    await rig.send(1, Report(step=5))
    await asyncio.to_thread(rig.client.confirm, 1)
    requests = [await stream.next() for _ in range(2)]
    assert [(each.seq, each.WhichOneof("message")) for each in requests] == [(4, "report"), (5, "pulse")]
    batch = batch_to_proto(GrantBatch(4, lease=(BlockId(1),)))
    for ack in (4, 5, 5):
        stream.say(1, batch=batch, ack=ack)
    for kind in (Granted, Granted, Confirmed, Granted):
        await rig.event(kind)


async def test_the_answer_of_a_pulse_confirms_all_before_it(rig: Rig) -> None:
    stream = await rig.session(1, SILENCE)
    for _ in range(2):
        await asyncio.to_thread(rig.client.confirm, 1)
        await stream.next()
    stream.say(1, pulse=kvmanager_pb2.Pulse(), ack=5)
    assert [await rig.event(Confirmed) for _ in range(2)] == [Confirmed(1)] * 2


async def test_a_manager_that_answers_no_pulse_is_not_waited_for(rig: Rig) -> None:
    await rig.session(1)
    await asyncio.to_thread(rig.client.confirm, 1)
    assert await rig.event(Confirmed) == Confirmed(1)


async def test_nothing_is_confirmed_of_a_session_that_is_gone(rig: Rig) -> None:
    stream = await rig.session(1)
    await asyncio.to_thread(rig.client.confirm, 2)
    await rig.send(1, Report(step=5))
    assert (await stream.next()).WhichOneof("message") == "report"


async def test_reports_keep_their_order(rig: Rig) -> None:
    stream = await rig.session(1)

    def engine() -> None:
        for step in range(200):
            rig.client.send_report(1, Report(step=step))

    await asyncio.to_thread(engine)
    requests = [await stream.next() for _ in range(200)]
    assert [request.report.step for request in requests] == list(range(200))
    assert [request.seq for request in requests] == list(range(3, 203))


async def test_large_inventory_travels_in_chunks(rig: Rig) -> None:
    await rig.event(Connected)
    stream = await rig.stream()
    cached_blocks = tuple(
        CachedBlock(BlockId(index), BlockHash(index.to_bytes(16, "little")), -1, 0) for index in range(20_000)
    )
    await rig.attach(1, Inventory(cached_blocks=cached_blocks))
    await stream.next()
    chunks = [(await stream.next()).inventory for _ in range(3)]
    assert [chunk.last for chunk in chunks] == [False, False, True]
    assert max(chunk.ByteSize() for chunk in chunks) <= 256 * 1024
    assert sum(len(chunk.cached_blocks) for chunk in chunks) == 80_000


async def test_broken_stream_detaches_and_connects_again(rig: Rig) -> None:
    stream = await rig.session(1)
    stream.end()
    assert await rig.event(Detached) == Detached(1)
    await rig.session(2)


async def test_report_of_a_session_that_is_gone_is_dropped(rig: Rig) -> None:
    first = await rig.session(1)
    first.end()
    await rig.event(Detached)
    second = await rig.session(2)
    await rig.send(1, Report(step=1))
    await rig.send(2, Report(step=2))
    assert (await second.next()).report.step == 2


async def test_message_of_another_session_is_dropped(rig: Rig) -> None:
    stream = await rig.session(2)
    stream.sent -= 1
    stream.say(1, batch=batch_to_proto(GrantBatch(1)))
    stream.say(2, batch=batch_to_proto(GrantBatch(7)))
    stream.sent -= 1
    stream.say(2, batch=batch_to_proto(GrantBatch(8)))
    assert [(await rig.event(Granted)).batch.lease_target for _ in range(1)] == [7]


async def test_connected_voids_what_was_not_polled_before_it(rig: Rig) -> None:
    stream = await rig.session(1)
    stream.say(1, batch=batch_to_proto(GrantBatch(7)))
    stream.end()
    await rig.stream()
    while not isinstance((await polled(rig))[-1], Connected):
        rig.events.clear()
    assert rig.events == [Connected()]


async def polled(rig: Rig) -> list[LeaseEvent]:
    """Wait for the client to be connected a second time, and poll only then."""
    async with asyncio.timeout(TIMEOUT_S):
        while rig.client._connections < 2:
            rig.arrived.clear()
            await rig.arrived.wait()
    rig.events += await asyncio.to_thread(rig.client.poll)
    return rig.events


async def test_attach_that_answers_a_lost_connection_is_detached(rig: Rig) -> None:
    await rig.event(Connected)
    (await rig.stream()).end()
    second = await rig.stream()
    await soon(rig.arrived.wait())  # its Connected, which the engine has not polled yet
    await rig.attach(1)
    await rig.event(Connected)
    assert await rig.event(Detached) == Detached(1)
    await rig.attach(2)
    assert (await second.next()).session == 2


async def test_second_attach_on_one_stream_opens_another(rig: Rig) -> None:
    stream = await rig.session(1)
    await rig.attach(2)
    assert [await rig.event(Detached), await rig.event(Detached)] == [Detached(2), Detached(1)]
    await soon(stream.closed.wait())
    await rig.session(3)


async def test_reconnect_opens_another_stream(rig: Rig) -> None:
    stream = await rig.session(1)
    await asyncio.to_thread(rig.client.reconnect)
    assert await rig.event(Detached) == Detached(1)
    await soon(stream.closed.wait())
    await rig.session(2)


async def test_manager_of_a_lower_epoch_is_refused(rig: Rig) -> None:
    await rig.event(Connected)
    stream = await rig.stream()
    await rig.attach(1, epoch_seen=5)
    await stream.accept(epoch=4)
    assert await rig.event(Detached) == Detached(1)
    await soon(stream.closed.wait())
    await rig.event(Connected)


async def test_manager_of_an_absurd_epoch_is_refused(rig: Rig) -> None:
    await rig.event(Connected)
    stream = await rig.stream()
    await rig.attach(1, epoch_seen=5)
    await stream.accept(epoch=2**64 - 1)
    assert await rig.event(Detached) == Detached(1)
    await soon(stream.closed.wait())
    await rig.event(Connected)


async def test_refusal_for_good_is_reported_with_both_values_as_the_worker_sees_them(rig: Rig) -> None:
    await rig.event(Connected)
    stream = await rig.stream()
    await rig.attach(1)
    await stream.next()
    rejected = AttachRejected("identity", (Mismatch("block_size", "16", "32", "--block-size"),))
    stream.say(1, attach_rejected=rejected_to_proto(rejected))
    assert await rig.event(Detached) == Detached(1)
    (refusal,) = rig.refused
    assert str(refusal.mismatches[0]) == "block_size: here 32, there 16 (change it with --block-size)"


async def test_refusal_for_now_is_tried_again(rig: Rig) -> None:
    await rig.event(Connected)
    stream = await rig.stream()
    await rig.attach(1)
    await stream.next()
    stream.say(1, attach_rejected=rejected_to_proto(AttachRejected("the first stream lives", retry=True)))
    assert await rig.event(Detached) == Detached(1)
    await rig.session(2)
    assert rig.refused == []


async def test_drain_detaches_and_connects_again(rig: Rig) -> None:
    stream = await rig.session(1)
    stream.say(1, drain=kvmanager_pb2.Drain())
    assert await rig.event(Detached) == Detached(1)
    await soon(stream.closed.wait())
    await rig.session(2)


@pytest.mark.parametrize("gap", [True, False], ids=["gap in the numbers", "batch before the answer"])
async def test_violation_by_the_manager_ends_the_session(rig: Rig, gap: bool) -> None:
    await rig.event(Connected)
    stream = await rig.stream()
    await rig.attach(1)
    await stream.next()
    if gap:
        stream.sent += 1
        stream.say(1, attach_ok=attach_ok_to_proto(AttachOk(1, 0)))
    else:
        stream.say(1, batch=batch_to_proto(GrantBatch(1)))
    assert await rig.event(Detached) == Detached(1)
    await rig.event(Connected)


async def test_manager_that_does_not_answer_is_left(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_client, "ANSWER_TIMEOUT_S", 0.05)
    await rig.event(Connected)
    stream = await rig.stream()
    await rig.attach(1)
    assert await rig.event(Detached) == Detached(1)
    await soon(stream.closed.wait())


async def test_client_connects_when_the_manager_comes_later() -> None:
    rig = Rig()
    await rig.server.stop(0)
    await rig.client.start()
    server = aio.server()
    kvmanager_pb2_grpc.add_KvManagerServiceServicer_to_server(rig.manager, server)
    server.add_insecure_port(f"127.0.0.1:{rig.port}")
    await server.start()
    await rig.event(Connected)
    await rig.client.close()
    await server.stop(0)


async def test_a_writer_that_fails_ends_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream stayed, and no report left the worker any more."""
    sound, bugs = Connection.write, iter(["a bug"])

    async def write(self: Connection) -> None:
        for bug in bugs:
            raise ZeroDivisionError(bug)
        await sound(self)

    monkeypatch.setattr(Connection, "write", write)
    rig = Rig()
    await rig.server.start()
    await rig.client.start()
    first = await rig.stream()
    await soon(first.closed.wait())
    await rig.stream()
    await rig.client.close()
    await rig.server.stop(0)


async def test_close_detaches(rig: Rig) -> None:
    await rig.session(1)
    await rig.client.close()
    assert await rig.event(Detached) == Detached(1)


def test_delays_double_up_to_a_bound_with_jitter() -> None:
    client = LeaseClient(["127.0.0.1:1"], rng=random.Random(3))
    delays = [client._next_delay(longest=False) for _ in range(8)]
    bounds = [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
    assert all(bound / 2 <= delay <= bound for delay, bound in zip(delays, bounds, strict=True))
    assert len(set(delays)) == 8


async def test_calls_after_the_loop_is_gone_are_harmless() -> None:
    """The engine's last report may come when the process is already closing its loop."""
    client = LeaseClient(["127.0.0.1:1"])

    def run() -> None:
        async def body() -> None:
            await client.start()
            await client.close()

        asyncio.run(body())

    thread = threading.Thread(target=run)
    thread.start()
    await asyncio.to_thread(thread.join)
    client.send_report(1, Report())
    assert client.poll() == []


# ------------------------------------------------------------ silence


async def test_a_manager_that_stands_still_is_left_although_its_connection_is_open(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    stream, began = await silent_session(rig, 1, 0.2), time.monotonic()
    assert await rig.event(Detached) == Detached(1)
    assert rig.client.away_seconds(began, time.monotonic()) > 0.1, "it was away since its last message"
    assert "nothing came from it for 0.2 s" in caplog.text
    await soon(stream.closed.wait())
    await rig.session(2)


async def test_a_manager_that_answers_pulses_is_kept(rig: Rig) -> None:
    stream = await silent_session(rig, 1, 3600.0)
    request = await stream.next()
    assert (request.session, request.seq, request.WhichOneof("message")) == (1, 3, "pulse")
    stream.say(1, pulse=kvmanager_pb2.Pulse(), ack=3)
    stream.say(1, batch=batch_to_proto(GrantBatch(7)), ack=3)
    assert (await rig.event(Granted)).batch.lease_target == 7
    assert not rig.round_trips, "a pulse asks for no grants"


@pytest.mark.parametrize("silence", [0.0, -1.0, float("nan"), float("inf")])
async def test_a_manager_that_bounds_no_silence_gets_no_pulse(rig: Rig, silence: float) -> None:
    stream = await silent_session(rig, 1, silence)
    await rig.send(1, Report(step=5))
    assert (await stream.next()).report.step == 5


async def silent_session(rig: Rig, session: int, silence: float) -> Stream:
    """Let the engine attach to a manager that says how much silence a worker is to bear, and then nothing more."""
    await rig.event(Connected)
    stream = await rig.stream()
    await rig.attach(session)
    assert (await stream.next()).HasField("attach")
    assert (await stream.next()).inventory.last
    stream.say(session, attach_ok=kvmanager_pb2.AttachOk(epoch=1, lease_target=4, silence_seconds=silence))
    await rig.event(Attached)
    return stream
