"""A router takes a sequence back to let it go on elsewhere: the worker keeps its output until that is so."""

from __future__ import annotations

import asyncio

import pytest

from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2 as types
from tests.support.gpuworker.fake_engine_ports import ManualRunner
from tests.support.gpuworker.lost_routers import FIRST, LONG, SECOND, found, resumable, router_of
from tests.support.gpuworker.worker_harness import RouterEnd, Served, served

HANDS_OVER = pb.StreamRequest(cancel=pb.Cancel(handle=1, reason=types.FINISH_REASON_CANCELLED, hands_over=True))


async def handed_over(worker: Served, runner: ManualRunner, router: RouterEnd) -> None:
    """Let a router take a sequence with two tokens or more back, to let it go on elsewhere."""
    await router.send(resumable(1, 40))
    await worker.step_until(runner, lambda: bool(router.tokens.get(1)))
    await router.send(HANDS_OVER)
    await worker.step_until(runner, lambda: 1 in router.finished)


@pytest.mark.parametrize("acknowledged", [True, False])
async def test_a_sequence_that_goes_on_elsewhere_is_kept_until_its_router_says_that_it_does(acknowledged: bool) -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker:
        async with router_of(worker, FIRST) as router:
            reading = asyncio.create_task(_read(router))
            await handed_over(worker, runner, router)
            assert worker.servicer.live_sequences == 1
            if acknowledged:
                await router.send(pb.StreamRequest(ack=pb.Ack(handles=(1).to_bytes(4, "little"))))
                await worker.until(lambda: not worker.servicer.live_sequences)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            router.call.cancel()
        await worker.until(lambda: not worker.servicer._streams)
        assert len(worker.servicer.orphans) == worker.servicer.live_sequences == (not acknowledged)
        worker.servicer.orphans.close()
        assert not worker.servicer.live_sequences


async def test_a_cancel_that_hands_over_and_crosses_the_end_leaves_the_output_to_the_next_router() -> None:
    runner = ManualRunner()
    runner.release()
    async with served(runner, orphan_grace=LONG) as worker:
        async with router_of(worker, FIRST) as router:
            await router.send(resumable(1, 4))
            await router.until_finished(1)
            assert router.finished[1].reason == types.FINISH_REASON_LENGTH
            await router.send(HANDS_OVER)
            await found(router)  # the stream is read in order: the worker has the cancel
            assert not worker.servicer.live_sequences
            router.call.cancel()
        await worker.until(lambda: not worker.servicer._streams)
        async with router_of(worker, SECOND) as router:
            (orphan,) = (await found(router)).orphans
            assert (orphan.ended, orphan.output_tokens) == (True, 4)


async def test_a_sequence_that_ends_by_itself_is_not_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = ManualRunner()
    async with served(runner, orphan_grace=LONG) as worker, router_of(worker, FIRST) as router:
        await router.send(resumable(1, 2))
        await worker.until(lambda: len(runner.num_tokens) == 1)
        (stream,) = worker.servicer._streams
        # The last step is already planned when the engine gets the cancel, which therefore ends nothing.
        monkeypatch.setattr(stream._engine, "hand_over", lambda _: None)
        await router.send(HANDS_OVER)
        await found(router)
        runner.release()
        await router.until_finished(1)
        assert router.finished[1].reason == types.FINISH_REASON_LENGTH
        await worker.until(lambda: not worker.servicer.live_sequences)


async def _read(router: RouterEnd) -> None:
    await router.until_finished(2)  # there is none: it reads until it is cancelled
