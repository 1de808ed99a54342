"""The prompt's cached tokens in usage and metrics: those that the worker counted, not those that it hoped for."""

from __future__ import annotations

import pytest

from common.contracts.types import FinishReason
from quire.gpuworker.v1 import gpuworker_pb2 as pb
from quire.types.v1 import types_pb2
from router.contracts.events import Admitted
from tests.support.router.fake_worker import FakeWorker
from tests.support.router.frontend_harness import Harness, ends_of, frontend_over, in_background, request


def counted(harness: Harness) -> float:
    return harness.registry.get_sample_value("quire:prompt_tokens_cached_total") or 0.0


@pytest.mark.parametrize("stop", [(), ("<100>",)], ids=["to its length", "to a stop string"])
async def test_a_request_pays_for_what_it_computed_for_another_one(stop: tuple[str, ...]) -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(max_tokens=1, stop=stop)) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step(admitted={1: 8})
        await harness.until(lambda: any(isinstance(event, Admitted) for event in harness.seen))
        assert counted(harness) == 0, "the worker may still correct the number"
        worker.step({1: [100]}, recounted={1: 2}, finished={1: FinishReason.LENGTH})
        events = await task
        assert ends_of(events)[0].usage.cached_tokens == 2
        assert counted(harness) == 2


async def test_what_a_lost_worker_corrected_stays_and_the_next_one_corrects_what_is_computed_again() -> None:
    dying, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(dying) as harness, in_background(harness, request(max_tokens=2)) as task:
        await dying.until(lambda: bool(dying.submits))
        dying.step({1: [100]}, admitted={1: 8}, recounted={1: 4})
        await other.start()
        harness.pool.add_worker(other.address)
        await harness.connected(2)
        await dying.kill()
        await other.until(lambda: bool(other.submits))
        other.step(admitted={1: 8})
        other.step({1: [101]}, recounted={1: 5}, finished={1: FinishReason.LENGTH})
        usage = ends_of(await task)[0].usage
        assert usage.cached_tokens == 4
        assert usage.recomputed_tokens == 11 - 5
        assert counted(harness) == 4
        await other.kill()


@pytest.mark.parametrize(
    ("first", "second", "recounted", "cached"),
    [(8, 0, None, 0), (8, 4, None, 4), (8, 8, None, 8), (0, 8, None, 0), (8, 8, 5, 5), (8, 5, 8, 8)],
)
async def test_hits_that_were_lost_with_a_worker_before_the_first_token_are_computed_and_so_not_cached(
    first: int, second: int, recounted: int | None, cached: int
) -> None:
    """Of 10 tokens, those behind both hits count as computed twice: nobody knows how far the lost run was."""
    dying, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(dying) as harness, in_background(harness, request(max_tokens=1)) as task:
        await dying.until(lambda: bool(dying.submits))
        dying.step(admitted={1: first})
        await harness.until(lambda: any(isinstance(event, Admitted) for event in harness.seen))
        await other.start()
        harness.pool.add_worker(other.address)
        await harness.connected(2)
        await dying.kill()
        await other.until(lambda: bool(other.submits))
        other.step(admitted={1: second})
        corrections = {} if recounted is None else {1: recounted}
        other.step({1: [100]}, recounted=corrections, finished={1: FinishReason.LENGTH})
        usage = ends_of(await task)[0].usage
        hits = second if recounted is None else recounted
        assert (usage.cached_tokens, usage.recomputed_tokens) == (cached, 10 - max(first, hits))
        assert counted(harness) == cached
        await other.kill()


async def started_with_loads(harness: Harness, worker: FakeWorker, blocks: int, handle: int = 1) -> None:
    """Let a sequence start whose blocks were loaded, and wait until the router knows that."""
    await worker.until(lambda: bool(worker.submits))
    worker.step(admitted={handle: 40})
    worker.step(started=[pb.SequenceStarted(handle=handle, loaded_blocks=blocks)])


@pytest.mark.parametrize(("blocks", "hosted"), [(2, 8), (11, 40)], ids=["two of the blocks", "no more than is cached"])
async def test_a_stop_text_ends_a_request_that_was_loaded_as_its_start_said(blocks: int, hosted: int) -> None:
    worker = FakeWorker()
    stopping = request(prompt=48, max_tokens=8, stop=("<100>",))
    async with frontend_over(worker) as harness, in_background(harness, stopping) as task:
        await started_with_loads(harness, worker, blocks)
        worker.step({1: [100]})
        usage = ends_of(await task)[0].usage
        assert (usage.cached_tokens, usage.host_cached_tokens) == (40, hosted)


@pytest.mark.parametrize(
    ("source", "sources"), [("disk", (8, 20, 0)), ("worker-1", (8, 0, 20))], ids=["disk", "another worker"]
)
async def test_what_was_fetched_is_not_what_was_in_host_memory(source: str, sources: tuple[int, int, int]) -> None:
    """Of ten cached blocks five were fetched and loaded, two were loaded, and three were in the pool."""
    worker = FakeWorker()
    stopping = request(prompt=48, max_tokens=8, stop=("<100>",))
    async with frontend_over(worker) as harness, in_background(harness, stopping) as task:
        await worker.until(lambda: bool(worker.submits))
        fetched = pb.Fetched(blocks=5, asked=6, seconds=0.5, source=source)
        worker.step(admissions=[pb.SequenceAdmitted(handle=1, cached_tokens=40, fetched=fetched)])
        worker.step(started=[pb.SequenceStarted(handle=1, loaded_blocks=7)])
        worker.step({1: [100]})
        usage = ends_of(await task)[0].usage
        assert (usage.host_cached_tokens, usage.disk_cached_tokens, usage.peer_cached_tokens) == sources


async def test_the_worker_that_ends_a_request_says_what_of_it_was_loaded() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(prompt=48, max_tokens=1)) as task:
        await started_with_loads(harness, worker, 2)
        parts = {"host_cached_tokens": 16, "disk_cached_tokens": 8, "peer_cached_tokens": 4}
        said = types_pb2.Usage(prompt_tokens=48, cached_tokens=40, output_tokens=1, **parts)
        end = pb.SequenceFinished(handle=1, reason=types_pb2.FINISH_REASON_LENGTH, usage=said)
        worker.step({1: [100]}, ended=[end])
        usage = ends_of(await task)[0].usage
        assert (usage.cached_tokens, usage.host_cached_tokens) == (40, 16)
        assert (usage.disk_cached_tokens, usage.peer_cached_tokens) == (8, 4)


async def test_another_worker_does_not_change_what_was_loaded_for_the_first_run() -> None:
    dying, other = FakeWorker("w0"), FakeWorker("w1")
    async with frontend_over(dying) as harness, in_background(harness, request(prompt=48, max_tokens=2)) as task:
        await started_with_loads(harness, dying, 1)
        dying.step({1: [100]})
        await other.start()
        harness.pool.add_worker(other.address)
        await harness.connected(2)
        await dying.kill()
        await started_with_loads(harness, other, 2)
        other.step({1: [101]}, finished={1: FinishReason.LENGTH})
        assert ends_of(await task)[0].usage.host_cached_tokens == 4
        await other.kill()
