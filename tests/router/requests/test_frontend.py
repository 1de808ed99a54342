"""A request from admission to its last token, with fake workers at the other end of real sockets."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from common.contracts.hashing import block_digests, block_hash_of, narrowed_domain, root_digest
from common.contracts.types import FinishReason, MissReason
from quire.types.v1 import types_pb2
from router.contracts.events import Admitted, Finished, Tokens
from router.requests.run import RequestRun
from tests.support.router.fake_worker import IDENTITY, FakeWorker
from tests.support.router.frontend_harness import (
    FixedIndex,
    ends_of,
    frontend_over,
    in_background,
    request,
    text_of,
    tokens_of,
    until_nothing_left,
)

# ------------------------------------------------------------ the plain way


async def test_a_request_is_admitted_streamed_and_finished() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        events = await harness.events(request(request_id="r1", seed=5))
        admitted, *middle, finished = events
        assert isinstance(admitted, Admitted)
        assert (admitted.request_id, admitted.worker_id, admitted.prompt_tokens, admitted.seed) == ("r1", "w0", 10, 5)
        assert (admitted.cached_tokens, admitted.miss_reason) == (0, MissReason.NEVER_SEEN)
        assert [event.token_ids for event in middle if isinstance(event, Tokens)] == [(100,), (101,), (102,), ()]
        assert text_of(events) == "<100><101><102>."
        assert isinstance(finished, Finished)
        assert finished.reason is FinishReason.LENGTH
        assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (10, 3)
        await until_nothing_left(harness)


@contextmanager
def without_collector() -> Iterator[None]:
    """Free by reference counts alone, as a service does between its rare collections."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def runs() -> set[int]:
    return {id(each) for each in gc.get_objects() if type(each) is RequestRun}


async def test_a_finished_request_is_freed_without_the_collector_of_cycles() -> None:
    with without_collector():
        of_other_tests = runs()
        async with frontend_over(FakeWorker(automatic=True)) as harness:
            for _ in range(3):
                await harness.events(request())
            assert runs() <= of_other_tests


async def test_times_are_in_order() -> None:
    async with frontend_over(FakeWorker(automatic=True)) as harness:
        (end,) = ends_of(await harness.events(request())).values()
        times = end.timings
        assert 0 < times.queue_seconds <= times.time_to_first_token <= times.total_seconds
        assert times.time_per_output_token * 2 <= times.total_seconds


async def test_the_worker_gets_the_hash_chain_of_the_prompt() -> None:
    worker = FakeWorker(automatic=True)
    async with frontend_over(worker) as harness:
        await harness.events(request(prompt=10, cache_domain=b"tenant", salt="s"))
        domain = narrowed_domain(b"tenant", "s")
        root = root_digest(IDENTITY.model_fingerprint, IDENTITY.tokenizer_fingerprint, 4, domain)
        digests = block_digests(root, list(range(1, 11)), 4)
        (submit,) = worker.submits
        assert submit.block_hashes == b"".join(map(block_hash_of, digests))
        assert (submit.parent_digest, submit.cache_domain) == (digests[-1], domain)
        assert harness.index.asked == [tuple(map(block_hash_of, digests))]


async def test_a_prompt_below_a_block_goes_on_from_the_root() -> None:
    worker = FakeWorker(automatic=True)
    async with frontend_over(worker) as harness:
        await harness.events(request(prompt=3))
        root = root_digest(IDENTITY.model_fingerprint, IDENTITY.tokenizer_fingerprint, 4)
        assert (worker.submits[0].block_hashes, worker.submits[0].parent_digest) == (b"", root)
        assert harness.index.asked == []


async def test_a_request_without_cache_is_neither_looked_up_nor_hashed() -> None:
    worker = FakeWorker(automatic=True)
    async with frontend_over(worker) as harness:
        await harness.events(request(prompt=10, no_cache=True))
        assert (worker.submits[0].no_cache, worker.submits[0].block_hashes) == (True, b"")
        assert harness.index.asked == []


async def test_several_sequences_share_one_prompt_at_one_worker() -> None:
    first, second = FakeWorker("w0", automatic=True), FakeWorker("w1", automatic=True)
    async with frontend_over(first, second) as harness:
        events = await harness.events(request(n=3))
        assert sum(isinstance(event, Admitted) for event in events) == 1
        assert {index: tokens_of(events, index) for index in range(3)} == {index: [100, 101, 102] for index in range(3)}
        assert sorted(ends_of(events)) == [0, 1, 2]
        submits = [*first.submits, *second.submits]
        assert not (first.submits and second.submits)
        assert [submit.index for submit in submits] == [0, 1, 2]
        assert [submit.fork_of if submit.HasField("fork_of") else None for submit in submits] == [
            None,
            submits[0].handle,
            submits[0].handle,
        ]
        await until_nothing_left(harness)


async def test_the_index_leads_to_the_worker_that_has_the_prefix() -> None:
    workers = [FakeWorker(f"w{number}", automatic=True) for number in range(4)]
    async with frontend_over(*workers, index=FixedIndex({"w2": 5})) as harness:
        events = await harness.events(request(prompt=40))
        assert isinstance(events[0], Admitted)
        assert events[0].worker_id == "w2"
        (decision,) = harness.decisions.find(kind="routing")
        assert decision.decision_id == events[0].decision_id
        assert {each.name: dict(each.figures)["hit_blocks"] for each in decision.candidates} == {
            "w0": 0,
            "w1": 0,
            "w2": 5,
            "w3": 0,
        }


async def test_without_an_index_like_prompts_follow_each_other() -> None:
    workers = [FakeWorker(f"w{number}", automatic=True) for number in range(4)]
    async with frontend_over(*workers) as harness:
        for _ in range(8):
            await harness.events(request(prompt=200, max_tokens=1))
        assert sorted(len(worker.submits) for worker in workers) == [0, 0, 0, 8]


# ------------------------------------------------------------ stops


async def test_a_stop_string_ends_the_output_and_cancels_at_the_worker() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(stop=("<11>",))) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [10, 11, 12]}, admitted={1: 0})
        events = await task
        assert (tokens_of(events), text_of(events)) == ([10, 11], "<10>")
        end = ends_of(events)[0]
        assert (end.reason, end.stop_string, end.usage.output_tokens) == (FinishReason.STOP, "<11>", 2)
        await worker.until(lambda: bool(worker.cancels))
        assert worker.cancels[0].reason == types_pb2.FinishReason.FINISH_REASON_STOP
        await until_nothing_left(harness)


async def test_one_sequence_stops_and_the_other_goes_on() -> None:
    worker = FakeWorker()
    async with frontend_over(worker) as harness, in_background(harness, request(n=2, stop=("<11>",))) as task:
        await worker.until(lambda: len(worker.submits) == 2)
        worker.step({1: [11], 2: [20]}, admitted={1: 0, 2: 0})
        worker.step({2: [21]}, finished={2: FinishReason.LENGTH})
        events = await task
        assert tokens_of(events, 1) == [20, 21]
        assert {index: end.reason for index, end in ends_of(events).items()} == {
            0: FinishReason.STOP,
            1: FinishReason.LENGTH,
        }


@pytest.mark.parametrize(("include", "text"), [(False, "<10>."), (True, "<10><7>.")])
async def test_a_stop_token_is_told_but_not_written(include: bool, text: str) -> None:
    worker = FakeWorker()
    wanted = request(stop_token_ids=(7,), include_stop=include)
    async with frontend_over(worker) as harness, in_background(harness, wanted) as task:
        await worker.until(lambda: bool(worker.submits))
        worker.step({1: [10]}, admitted={1: 0})
        worker.step({1: [7]}, finished={1: FinishReason.STOP})
        events = await task
        assert (tokens_of(events), text_of(events)) == ([10, 7], text)
        assert ends_of(events)[0].reason is FinishReason.STOP


@pytest.mark.parametrize(("ignore_eos", "text"), [(False, "."), (True, "<9>.")])
async def test_an_end_of_sequence_is_written_only_where_it_is_ignored(ignore_eos: bool, text: str) -> None:
    worker = FakeWorker()
    wanted = request(max_tokens=1, ignore_eos=ignore_eos)
    async with frontend_over(worker, eos=(9,)) as harness, in_background(harness, wanted) as task:
        await worker.until(lambda: bool(worker.submits))
        assert list(worker.submits[0].eos_token_ids) == [9]
        worker.step({1: [9]}, admitted={1: 0}, finished={1: FinishReason.STOP})
        assert text_of(await task) == text
