"""What a router that died leaves at a worker: who may go on with it, for how long, and how much of it is kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from common.contracts.limits import ORPHANS_ALONE
from common.contracts.types import SequenceId
from gpuworker.engine.ports import EngineOutputs
from gpuworker.scheduling.sequence import NewSequence
from gpuworker.server import orphans as orphans_module
from gpuworker.server.live_sequence import LiveSequence
from gpuworker.server.orphans import OrphanEnd, Orphans
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.support.gpuworker.fake_engine_ports import ManualRunner, ScriptedChannel
from tests.support.gpuworker.lost_routers import FIRST, LONG, SECOND, adopt, found, lost, refusal, resumable, router_of
from tests.support.gpuworker.worker_harness import RouterEnd, Served, served, submit


async def test_the_next_router_gets_all_tokens_of_an_orphan_once_and_then_the_others() -> None:
    runner = ManualRunner(lambda plan: plan.step % 50)
    async with served(runner, orphan_grace=LONG) as worker:
        await lost(worker, runner, resumable(1, 6))
        await asyncio.to_thread(runner.step)  # while there is no router
        async with router_of(worker, SECOND) as router:
            (orphan,) = (await found(router)).orphans
            assert (orphan.submit.index, orphan.submit.tenant, orphan.ended) == (0, "t1", False)
            assert orphan.HasField("first_token_seconds")
            await adopt(router, 9, orphan.sequence)
            await router.until_sampled(9)
            assert router.admitted[9].cached_tokens == 0
            runner.release()
            await router.until_finished(9)
        assert len(router.tokens[9]) == 6
        assert len(set(router.tokens[9])) == 6, "a token came twice"
        assert router.finished[9].usage.output_tokens == 6
        assert (
            worker.servicer.orphans.outcomes[OrphanEnd.KEPT],
            worker.servicer.orphans.outcomes[OrphanEnd.RESUMED],
        ) == (
            1,
            1,
        )


async def test_a_token_is_kept_that_comes_while_a_write_to_the_dead_router_holds_the_writer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = ManualRunner(lambda plan: plan.step % 50)
    requests = asyncio.Queue[pb.StreamRequest | None]()

    async def sent() -> AsyncIterator[pb.StreamRequest]:
        while (message := await requests.get()) is not None:
            yield message

    async with served(runner, orphan_grace=LONG) as worker:
        delivered: list[object] = []
        deliver = worker.servicer._deliver

        def noted(outputs: EngineOutputs) -> None:
            deliver(outputs)
            delivered.extend(outputs.tokens)

        monkeypatch.setattr(worker.servicer, "_deliver", noted)
        requests.put_nowait(pb.StreamRequest(hello=pb.Hello(router_id="r", incarnation=FIRST)))
        writer = worker.servicer.Stream(sent(), cast("Any", None))
        await anext(writer)  # gRPC writes the first message, and asks for no other one
        requests.put_nowait(resumable(1, 6))
        await worker.until(lambda: bool(runner.num_tokens))
        await asyncio.to_thread(runner.step)
        await worker.until(lambda: len(delivered) == 1)
        (stream,) = worker.servicer._streams
        requests.put_nowait(None)
        await worker.until(lambda: stream.closed)
        await asyncio.to_thread(runner.step)
        await worker.until(lambda: len(delivered) == 2)
        await cast("AsyncGenerator[object]", writer).aclose()
        async with router_of(worker, SECOND) as router:
            (orphan,) = (await found(router)).orphans
            await adopt(router, 9, orphan.sequence)
            runner.release()
            await router.until_finished(9)
            assert len(router.tokens[9]) == 6


async def test_an_orphan_that_ends_keeps_its_end() -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        await lost(worker, runner, resumable(1, 4))
        runner.release()
        await worker.until(lambda: worker.servicer.live_sequences == 0)
        async with router_of(worker, SECOND) as router:
            (orphan,) = (await found(router)).orphans
            assert (orphan.ended, orphan.output_tokens) == (True, 4)
            await adopt(router, 3, orphan.sequence)
            await router.until_finished(3)
            assert router.tokens == {3: [7] * 4}


async def test_what_ended_before_its_router_died_is_kept_until_that_router_has_passed_it_on() -> None:
    runner = ManualRunner()
    runner.release()
    async with served(runner, orphan_grace=LONG) as worker:
        async with router_of(worker, FIRST) as router:
            await router.send(resumable(1, 2), submit(2, [4, 5], 2))
            await router.until_finished(1, 2)
            other = resumable(3, 2)
            other.submit.request_id = "r2"
            await router.send(other)
            await router.until_finished(3)
            await router.send(pb.StreamRequest(ack=pb.Ack(handles=(3).to_bytes(4, "little"))))
            await router.send(resumable(4, 2, index=1))
            await router.until_finished(4)
            router.call.cancel()
        await worker.until(lambda: len(worker.servicer.orphans) == 2)
        async with router_of(worker, SECOND) as router:
            assert not (await found(router, "r2")).orphans, "it was acknowledged"
            assert [orphan.submit.index for orphan in (await found(router)).orphans] == [0, 1]


async def test_another_tenant_finds_nothing_and_a_lost_router_is_named_only_when_it_is_lost() -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker, router_of(worker, SECOND) as second:
        async with router_of(worker, FIRST) as first:
            await first.send(resumable(1, 40))
            await worker.until(lambda: len(runner.num_tokens) == 1)
            answer = await found(second)
            assert (list(answer.orphans), answer.held) == ([], True)
            stranger = await found(second, tenant="t2")
            assert (list(stranger.orphans), stranger.held) == ([], False)
            first.call.cancel()
            await worker.until(lambda: len(worker.servicer.orphans) == 1)
        stranger = await found(second, tenant="t2")
        assert (list(stranger.orphans), stranger.held) == ([], False)
        (orphan,) = (await found(second)).orphans
        await adopt(second, 1, orphan.sequence)
        await second.send(pb.StreamRequest(cancel=pb.Cancel(handle=1)))
        await worker.step_until(runner, lambda: not runner.num_tokens)


async def test_only_one_of_two_routers_gets_an_orphan() -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        await lost(worker, runner, resumable(1, 4))
        async with router_of(worker, SECOND) as one, router_of(worker, b"c" * 16) as other:
            (orphan,) = (await found(one)).orphans
            assert [each.sequence for each in (await found(other)).orphans] == [orphan.sequence]
            await adopt(one, 1, orphan.sequence)
            await one.until_sampled(1)
            await adopt(other, 5, orphan.sequence)
            assert await refusal(other) == (5, grpc.StatusCode.ALREADY_EXISTS.value[0])
            assert (await found(other)).held
            runner.release()
            await one.until_finished(1)
            assert one.tokens == {1: [7] * 4}


@pytest.mark.parametrize("acknowledged", [False, True])
async def test_an_orphan_that_another_router_has_had_is_its_until_it_acknowledges_the_end(acknowledged: bool) -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        await lost(worker, runner, resumable(1, 4))
        async with router_of(worker, SECOND) as one, router_of(worker, b"c" * 16) as other:
            (orphan,) = (await found(one)).orphans
            await adopt(one, 1, orphan.sequence)
            runner.release()
            await one.until_finished(1)
            if acknowledged:
                await one.send(pb.StreamRequest(ack=pb.Ack(handles=(1).to_bytes(4, "little"))))
                await found(one)
            await adopt(other, 5, orphan.sequence)
            expected = grpc.StatusCode.NOT_FOUND if acknowledged else grpc.StatusCode.ALREADY_EXISTS
            assert await refusal(other) == (5, expected.value[0])


async def test_an_orphan_whose_time_was_over_is_not_found() -> None:
    """It does not belong to another router: the client must send the request again, and not wait for another stream."""
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        await lost(worker, runner, resumable(1, 40))
        async with router_of(worker, SECOND) as router:
            (orphan,) = (await found(router)).orphans
            worker.servicer.orphans.close()
            await adopt(router, 5, orphan.sequence)
            assert await refusal(router) == (5, grpc.StatusCode.NOT_FOUND.value[0])
            await worker.step_until(runner, lambda: not runner.num_tokens)


async def test_a_second_death_leaves_orphans_again() -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        await lost(worker, runner, resumable(1, 5))
        async with router_of(worker, SECOND) as second:
            (orphan,) = (await found(second)).orphans
            await adopt(second, 1, orphan.sequence)
            await second.until_sampled(1)
            second.call.cancel()
            await worker.until(lambda: len(worker.servicer.orphans) == 1)
        async with router_of(worker, b"c" * 16) as third:
            (orphan,) = (await found(third)).orphans
            await adopt(third, 1, orphan.sequence)
            runner.release()
            await third.until_finished(1)
            assert third.tokens == {1: [7] * 5}


@pytest.mark.parametrize("router_remains", [True, False])
async def test_orphans_end_when_their_time_is_over_and_free_everything(router_remains: bool) -> None:
    """With another router this is their grace, without any a multiple of it."""
    runner = ManualRunner()
    async with served(runner, orphan_grace=0.01) as worker, AsyncExitStack() as stack:
        if router_remains:
            await stack.enter_async_context(router_of(worker, SECOND))
        async with router_of(worker, FIRST) as router:
            await router.send(resumable(1, 40), resumable(2, 40, index=1))
            await worker.until(lambda: len(runner.num_tokens) == 2)
            router.call.cancel()
        await worker.step_until(runner, lambda: not runner.num_tokens and not worker.servicer.live_sequences)
        await worker.until(lambda: worker.servicer.orphans.outcomes[OrphanEnd.EXPIRED] == 2)
        assert (len(worker.servicer.orphans), worker.servicer.orphans.size) == (0, 0)
        assert not worker.servicer.orphans.waits
        assert len(worker.servicer._streams) == router_remains


GRACE = 25.0


class Timers:
    """The clock and the timers of orphans: time passes when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now, self._timers = 1000.0, list[tuple[float, Callable[[], object]]]()
        monkeypatch.setattr(orphans_module, "time", SimpleNamespace(monotonic=lambda: self._now))
        monkeypatch.setattr(orphans_module, "asyncio", SimpleNamespace(get_running_loop=lambda: self))

    def call_later(self, seconds: float, callback: Callable[..., object], *args: object) -> None:
        self._timers.append((self._now + seconds, partial(callback, *args)))

    def pass_seconds(self, seconds: float) -> None:
        until = self._now + seconds
        while due := sorted((each for each in self._timers if each[0] <= until), key=lambda each: each[0]):
            self._timers.remove(due[0])
            self._now, callback = due[0]
            callback()
        self._now = until


def live(number: int) -> LiveSequence:
    message = pb.Submit(tenant="t1", request_id="r1")
    message.continuation.SetInParent()
    sequence = cast("NewSequence", SimpleNamespace(sequence=SequenceId(number)))
    return LiveSequence(handle=number, new=sequence, submitted=0.0, message=message, size=100)


async def test_orphans_wait_for_the_first_router_that_comes_whatever_it_took_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The grace is for clients that can find a router."""
    timers, ended, connected = Timers(monkeypatch), list[SequenceId](), list[str]()
    orphans = Orphans(GRACE, lambda name, _: ended.append(name), lambda: bool(connected))
    orphans.take_sequence(FIRST, [live(1)])
    timers.pass_seconds(ORPHANS_ALONE * GRACE - 1.0)
    assert not ended, "no router was there that could have taken it"
    connected.append("the router that took so long to start")
    orphans.router_came()
    timers.pass_seconds(GRACE - 1.0)
    assert not ended, "its clients are on their way"
    timers.pass_seconds(1.0)
    assert ended == [SequenceId(1)]


async def test_orphans_end_though_no_router_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    timers, ended = Timers(monkeypatch), list[SequenceId]()
    orphans = Orphans(GRACE, lambda name, _: ended.append(name), lambda: False)
    orphans.take_sequence(FIRST, [live(1)])
    timers.pass_seconds(ORPHANS_ALONE * GRACE - 1.0)
    assert not ended
    timers.pass_seconds(1.0)
    assert ended == [SequenceId(1)]
    assert orphans.outcomes[OrphanEnd.EXPIRED] == 1


async def test_a_worker_that_drains_gives_orphans_their_grace_alone() -> None:
    """It takes no stream any more, so no router will come."""
    runner = ManualRunner()
    async with served(runner, orphan_grace=0.01) as worker:
        worker.servicer.drain()
        assert worker.servicer._has_router()


async def test_a_request_that_waits_for_blocks_is_an_orphan_too() -> None:
    runner = ManualRunner()
    async with served(runner, ScriptedChannel(), orphan_grace=LONG) as worker:
        await lost_waiting(worker)
        async with router_of(worker, SECOND) as router:
            (orphan,) = (await found(router)).orphans
            assert not orphan.HasField("admitted_seconds")
            await adopt(router, 1, orphan.sequence, timeout_seconds=0.0)
            await router.until_finished(1)
            assert router.finished[1].reason == types.FINISH_REASON_DEADLINE, "the new deadline counts"


async def lost_waiting(worker: Served) -> None:
    """Let a router die whose sequence has no blocks."""
    async with router_of(worker, FIRST) as router:
        await router.send(resumable(1, 4))
        await worker.until(lambda: worker.servicer.live_sequences == 1)
        router.call.cancel()
        await worker.until(lambda: len(worker.servicer.orphans) == 1)


@pytest.mark.parametrize("who", ["nameless", "not resumable"])
async def test_a_stream_that_breaks_leaves_nothing_unless_it_said_so(who: str) -> None:
    """A stranger who opens streams and breaks them holds blocks no longer than before there were orphans."""
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        async with router_of(worker, b"" if who == "nameless" else FIRST) as router:
            await router.send(resumable(1, 40) if who == "nameless" else submit(1, [1, 2, 3], 40))
            await worker.until(lambda: len(runner.num_tokens) == 1)
            router.call.cancel()
        await worker.step_until(runner, lambda: not runner.num_tokens and not worker.servicer.live_sequences)
        assert not worker.servicer.orphans.outcomes


async def test_a_client_that_hangs_up_leaves_no_orphan() -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        async with router_of(worker, FIRST) as router:
            await router.send(resumable(1, 40))
            await worker.until(lambda: len(runner.num_tokens) == 1)
            cancel = pb.Cancel(handle=1, reason=types.FINISH_REASON_CANCELLED)
            await router.send(pb.StreamRequest(cancel=cancel))
            await worker.step_until(runner, lambda: not runner.num_tokens)
            router.call.cancel()
        await worker.until(lambda: not worker.servicer._streams)
        assert len(worker.servicer.orphans) == 0


@pytest.mark.parametrize("bound", ["MAX_ORPHANS", "MAX_ORPHANS_A_TENANT"])
async def test_over_a_bound_the_oldest_orphan_ends(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans_module, bound, 1)
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        async with router_of(worker, FIRST) as router:
            await router.send(resumable(1, 40), resumable(2, 40, index=1))
            await worker.until(lambda: len(runner.num_tokens) == 2)
            router.call.cancel()
        await worker.step_until(runner, lambda: len(runner.num_tokens) == 1)
        assert worker.servicer.orphans.outcomes[OrphanEnd.DROPPED] == 1
        async with router_of(worker, SECOND) as router:
            (left,) = (await found(router)).orphans
            assert left.submit.index == 1
        worker.servicer.close()
        await worker.step_until(runner, lambda: not worker.servicer.live_sequences)


@pytest.mark.parametrize("bound", ["MAX_ORPHAN_BYTES", "MAX_ORPHAN_BYTES_A_TENANT"])
async def test_bytes_are_bounded_while_orphans_run_on(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        await lost(worker, runner, resumable(1, 40))
        monkeypatch.setattr(orphans_module, bound, worker.servicer.orphans.size)
        await worker.step_until(runner, lambda: not runner.num_tokens)
        assert worker.servicer.orphans.outcomes[OrphanEnd.DROPPED] == 1


async def test_a_router_that_comes_back_and_a_client_that_begins_anew_end_their_orphans() -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        await lost(worker, runner, resumable(1, 40))
        async with router_of(worker, FIRST):
            await worker.step_until(runner, lambda: not runner.num_tokens)
        await lost(worker, runner, resumable(1, 40))
        async with router_of(worker, SECOND) as router:
            await router.send(resumable(1, 1))
            await worker.until(lambda: len(worker.servicer.orphans) == 0)
            await worker.step_until(runner, lambda: not runner.num_tokens)
            await router.until_finished(1)
        assert worker.servicer.orphans.outcomes[OrphanEnd.REPLACED] == 2


async def test_a_worker_that_drains_waits_for_orphans_and_closing_ends_them() -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        await lost(worker, runner, resumable(1, 40))
        worker.servicer.drain()
        assert worker.servicer.live_sequences == 1
        worker.servicer.close()
        await worker.step_until(runner, lambda: not worker.servicer.live_sequences)


@asynccontextmanager
async def connection_of(worker: Served, number: int) -> AsyncIterator[RouterEnd]:
    async with worker.stub() as stub:
        router = RouterEnd(stub.Stream())
        hello = pb.Hello(router_id="r", incarnation=FIRST, connection=number)
        await router.send(pb.StreamRequest(hello=hello))
        await router.until("hello")
        yield router


async def test_a_router_that_is_back_before_its_old_stream_died_leaves_no_orphans() -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker, connection_of(worker, 5) as old:
        await old.send(resumable(1, 40))
        await worker.until(lambda: len(runner.num_tokens) == 1)
        async with connection_of(worker, 5):
            await worker.step_until(runner, lambda: not runner.num_tokens and not worker.servicer.live_sequences)
            old.call.cancel()
        await worker.until(lambda: not worker.servicer._streams)
        assert not worker.servicer.orphans.outcomes
        assert not worker.servicer._connections


async def test_another_connection_of_the_same_router_leaves_the_first_one_alone() -> None:
    """A worker may have two addresses: the router uses one of them, and ends the stream to the other one."""
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker, connection_of(worker, 5) as first:
        await first.send(resumable(1, 4))
        async with connection_of(worker, 6) as second:
            second.call.cancel()
        runner.release()
        await first.until_finished(1)
        assert first.tokens == {1: [7] * 4}
