"""A router that stands still on a host that runs: its worker gives its requests to others, and convicts none."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc import aio

from gpuworker.server.orphans import OrphanEnd
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from tests.support.gpuworker.fake_engine_ports import ManualRunner
from tests.support.gpuworker.lost_routers import FIRST, LONG, SECOND, adopt, found, resumable, router_of
from tests.support.gpuworker.worker_harness import RouterEnd, served, submit

PULSE = pb.StreamRequest(pulse=pb.Pulse())
SHORT = 0.2  # seconds; every test waits until they are over


async def test_what_a_silent_router_holds_goes_on_elsewhere_while_its_stream_is_open() -> None:
    runner = ManualRunner(lambda plan: plan.step % 50)
    async with served(runner, orphan_grace=LONG, silence=SHORT) as worker, router_of(worker, FIRST) as silent:
        await silent.send(resumable(1, 6))
        await worker.until(lambda: len(runner.num_tokens) == 1)
        await asyncio.to_thread(runner.step)
        await silent.until_sampled(1)
        await silent.send(PULSE)
        await worker.until(lambda: len(worker.servicer.orphans) == 1)
        assert not silent.call.done(), "the connection is open"
        async with router_of(worker, SECOND) as router:
            (orphan,) = (await found(router)).orphans
            await adopt(router, 9, orphan.sequence)
            runner.release()
            await router.until_finished(9)
            assert len(set(router.tokens[9])) == 6
        assert worker.servicer.orphans.outcomes == {OrphanEnd.KEPT: 1, OrphanEnd.RESUMED: 1}


async def test_what_a_silent_router_left_stays_when_it_is_here_again() -> None:
    """Its clients may have left it, and another router comes to ask for them a moment later."""
    runner = ManualRunner(lambda plan: plan.step % 50)
    async with served(runner, orphan_grace=LONG, silence=SHORT) as worker, router_of(worker, FIRST) as silent:
        await silent.send(resumable(1, 6))
        await worker.until(lambda: len(runner.num_tokens) == 1)
        await silent.send(PULSE)
        await worker.until(lambda: len(worker.servicer.orphans) == 1)
        async with router_of(worker, FIRST), router_of(worker, SECOND) as router:
            (orphan,) = (await found(router)).orphans
            await adopt(router, 9, orphan.sequence)
            runner.release()
            await router.until_finished(9)
        assert worker.servicer.orphans.outcomes == {OrphanEnd.KEPT: 1, OrphanEnd.RESUMED: 1}


@pytest.mark.parametrize("open_still", [False, True], ids=["the connection broke", "the break is not known"])
async def test_what_a_router_left_stays_when_it_says_that_it_stood_still(open_still: bool) -> None:
    """gRPC gives up the connection to a process that answers no ping, before or after the silence is noticed."""
    runner = ManualRunner(lambda plan: plan.step % 50)
    async with served(runner, orphan_grace=LONG) as worker:
        async with router_of(worker, FIRST, connection=7) as stopped:
            await stopped.send(resumable(1, 6))
            await worker.until(lambda: len(runner.num_tokens) == 1)
            if not open_still:
                stopped.call.cancel()
                await worker.until(lambda: len(worker.servicer.orphans) == 1)
            again = router_of(worker, FIRST, connection=7, stood_still=True)
            async with again, router_of(worker, SECOND) as router:
                (orphan,) = (await found(router)).orphans
                await adopt(router, 9, orphan.sequence)
                runner.release()
                await router.until_finished(9)
        assert worker.servicer.orphans.outcomes == {OrphanEnd.KEPT: 1, OrphanEnd.RESUMED: 1}


async def test_a_silent_router_that_runs_again_reads_why_its_stream_ended() -> None:
    async with served(ManualRunner(), orphan_grace=LONG, silence=SHORT) as worker, router_of(worker, FIRST) as silent:
        await silent.send(PULSE)
        with pytest.raises(aio.AioRpcError) as ended:
            await until_end(silent)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert ended.value.details() == "no message of the router came for 0.2 s; a router that runs sends pulses"
        await worker.until(lambda: not worker.servicer._streams)


async def until_end(router: RouterEnd) -> None:
    while await router.read() is not None:
        pass


async def test_a_silent_router_that_wants_no_orphans_leaves_none() -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG, silence=SHORT) as worker, router_of(worker, b"") as silent:
        await silent.send(submit(1, [1, 2, 3], 40))
        await worker.until(lambda: len(runner.num_tokens) == 1)
        await silent.send(PULSE)
        await worker.step_until(runner, lambda: not runner.num_tokens and not worker.servicer.live_sequences)
        assert not worker.servicer.orphans.outcomes


async def test_a_router_of_before_there_were_pulses_is_not_watched() -> None:
    async with served(ManualRunner(), silence=SHORT) as worker, router_of(worker, FIRST) as old:
        async with router_of(worker, SECOND) as silent:
            await silent.send(PULSE)
            await worker.until(lambda: len(worker.servicer._streams) == 1)
        assert not old.call.done()


async def test_the_worker_says_how_long_it_bears_silence() -> None:
    async with served(ManualRunner(), silence=3.0) as worker, worker.stub() as stub:
        router = RouterEnd(stub.Stream())
        await router.send(pb.StreamRequest(hello=pb.Hello(router_id="r")))
        assert (await router.until("hello")).hello.silence_seconds == 3.0
